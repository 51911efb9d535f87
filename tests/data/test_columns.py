"""Rows read in columns: a rank opens its share of the shards, and every batch is as on one rank."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import DataSettings
from paceline.data import PlannedStream, Shard, ShardCache, Snapshot, open_stream
from paceline.data.batching import BucketedPlan, PackedPlan, StatefulPlan, WindowPlan
from paceline.data.batching import prefetch as outlines
from paceline.data.batching.plans import waste
from paceline.data.loading.batch import Position
from paceline.data.loading.columns import columns_by, columns_of, copies, reading
from paceline.data.loading.ordering import ShardOrder
from paceline.data.loading.stream import batching
from paceline.errors import CorruptData, DataRejected, InvalidInput, NotReady
from paceline.storage import ObjectStore
from tests.data.memory import MemoryCache, made, plan_by
from tests.data.test_packing import lognormal
from tests.data.test_resume import union

KINDS = ["windows", "packed", "bucketed", "carried"]
PLANS = {"packed": PackedPlan, "bucketed": BucketedPlan, "carried": StatefulPlan}
CONTEXT, BATCH = 16, 12
_random = np.random.default_rng(3)
# Shards of one size, of different texts: 8 documents of 8 to 71 bytes.
EQUAL = [
    [_random.integers(0, 255, 8 + 9 * n, dtype=np.uint8).tobytes() for n in range(8)]
    for _ in range(24)
]
UNEQUAL = [each[: 1 + number % 8] for number, each in enumerate(EQUAL)]


def opened(cache: MemoryCache, kind: str, columns: int, **changes) -> PlannedStream:
    return PlannedStream(plan_by(kind, CONTEXT, BATCH, 5, columns), cache.shards, cache, **changes)


def epoch_of(stream: PlannedStream, position: Position | None = None) -> list:
    """The batches that begin in the first epoch."""
    at = position or Position(**stream.position)
    found = []
    while at.epoch == 0:
        batch, at = stream.make(at)
        found.append(batch)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contents", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_each_rank_opens_its_share_of_the_shards_and_all_ranks_read_each_batch_once(
    kind, contents
) -> None:
    with opened(MemoryCache(contents), kind, 12) as stream:
        whole = [union([batch]) for batch in epoch_of(stream)]
    for world in (2, 3, 4, 12):
        caches = [MemoryCache(contents) for _ in range(world)]
        shares = []
        for rank, cache in enumerate(caches):
            with opened(cache, kind, 12, rank=rank, world_size=world) as stream:
                assert len(stream.columns) == 12 // world
                shares.append(epoch_of(stream))
        assert [union(list(each)) for each in zip(*shares, strict=True)] == whole
        counts = [len(each.read) for each in caches]
        if contents is EQUAL:
            assert max(counts) <= 24 // world + 1, counts
        assert sum(counts) <= 24 + 2 * world, "an edge falls inside of a shard now and then"
        assert set().union(*(each.read for each in caches)) == {
            each.sha256 for each in caches[0].shards
        }


class Shelf(dict[str, bytes]):
    """Where outlines are kept, in memory."""

    def get(self, name: str) -> bytes | None:
        return super().get(name)

    def put(self, name: str, content: bytes) -> None:
        self[name] = content

    def drop(self, name: str) -> None:
        del self[name]


class Away(Shelf):
    def put(self, name: str, content: bytes) -> None:
        raise NotReady("away")


class Damaged(Shelf):
    def put(self, name: str, content: bytes) -> None:
        self[name] = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]


@pytest.mark.parametrize("contents", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("shelf", [Shelf, Away, Damaged])
def test_readers_that_share_outlines_make_the_same_batches_from_their_own_lengths(
    contents, shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlines, "WAIT_S", 10.0 if shelf is Shelf else 0.0)
    with opened(MemoryCache(contents), "packed", 12) as stream:
        whole = [union([batch]) for batch in epoch_of(stream)]
        groups = stream.plan.groups
    world, kept = 6, shelf()
    caches = [MemoryCache(contents) for _ in range(world)]

    def read(rank: int) -> list:
        its = outlines.SharedPlans(kept, "data", rank, world)
        changes = {"rank": rank, "world_size": world, "outlines": its}
        with opened(caches[rank], "packed", 12, **changes) as stream:
            return epoch_of(stream)

    with ThreadPoolExecutor(world) as pool:
        shares = list(pool.map(read, range(world)))
    assert [union(list(each)) for each in zip(*shares, strict=True)] == whole
    tokens = [[batch.global_tokens for batch in each] for each in shares]
    assert all(each == tokens[0] for each in tokens)
    if shelf is not Shelf:
        return  # they planned from all lengths
    planned = range(groups + 1)  # the next epoch's first group, too
    publishers = {group % world for group in planned}
    for rank in set(range(world)) - publishers:
        assert caches[rank].measured <= caches[rank].read, "lengths of its own shards alone"
    assert len(caches[0].measured) == 24


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reads_the_same_shards_in_every_epoch(kind) -> None:
    cache = MemoryCache(EQUAL)
    with opened(cache, kind, 4, rank=1, world_size=4) as stream:
        epoch_of(stream)
        first, position = set(cache.read), Position(**stream.position)
        orders = []
        for epoch in range(4):
            orders.append(stream.plan.shards(epoch, 0, stream.columns).tolist())
            stream.make(Position(**{**position.to_json(), "epoch": epoch}))
    assert cache.read == first, "what a node has in its cache, it wants again"
    assert len({tuple(each) for each in orders}) > 1, "in another order"


@given(
    kind=st.sampled_from(KINDS),
    columns=st.sampled_from([2, 3, 4, 6, 12]),
    worlds=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    counts=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    uneven=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_resumed_on_any_number_of_ranks_the_batches_are_those_of_one_run(
    kind, columns, worlds, counts, uneven
) -> None:
    contents = UNEQUAL if uneven else EQUAL
    with opened(MemoryCache(contents), kind, columns) as stream:
        whole = [union([batch]) for batch in made(stream, sum(counts))]
    found: list = []
    position = None
    for world, count in zip(worlds, counts, strict=False):
        ranks = [
            opened(
                MemoryCache(contents), kind, columns, rank=rank, world_size=world, position=position
            )
            for rank in range(world)
        ]
        shares = [made(each, count) for each in ranks]
        found += [union([share[n] for share in shares]) for n in range(count)]
        at = Position(**ranks[0].position)
        for _ in range(count):
            _, at = ranks[0].make(at)
        position = json.loads(json.dumps(at.to_json()))
        for each in ranks:
            each.close()
    assert found == whole[: len(found)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_begun_on_2_ranks_and_ended_on_1_3_or_4_is_the_same_epoch(kind) -> None:
    with opened(MemoryCache(UNEQUAL), kind, 12) as stream:
        whole = epoch_of(stream)
    half = len(whole) // 2
    for world in (1, 3, 4):
        found, position = [], None
        for ranks_now, stop in ((2, half), (world, len(whole))):
            ranks = [
                opened(
                    MemoryCache(UNEQUAL),
                    kind,
                    12,
                    rank=rank,
                    world_size=ranks_now,
                    position=position,
                )
                for rank in range(ranks_now)
            ]
            shares = [made(each, stop - len(found)) for each in ranks]
            at = Position(**ranks[0].position)
            for _ in range(stop - len(found)):
                _, at = ranks[0].make(at)
            found += [union(list(each)) for each in zip(*shares, strict=True)]
            position = json.loads(json.dumps(at.to_json()))
            for each in ranks:
                each.close()
        assert found == [union([each]) for each in whole]
        assert position["epoch"] == 1


@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=12), min_size=1, max_size=9),
    context=st.integers(1, 40),
    deep=st.integers(1, 3),
    columns=st.integers(2, 5),
    epoch=st.integers(0, 2),
)
@settings(max_examples=100, deadline=None)
def test_every_token_comes_exactly_once_an_epoch_and_columns_are_even(
    kind, lengths, context, deep, columns, epoch
) -> None:
    sizes = [sum(each) + len(each) + 1 for each in lengths]
    batch = deep * columns
    if kind == "windows":
        if not any((size - 1) // context for size in sizes):
            return
        plan = WindowPlan(sizes, context, batch, 7, 3, columns=columns)
    else:
        plan = PLANS[kind](
            sizes,
            lambda indexes: [np.array(lengths[each], dtype=np.int32) for each in indexes],
            context,
            batch,
            7,
            3,
            columns=columns,
            documents=[len(each) for each in lengths],
        )
    seen: Counter[tuple[int, int]] = Counter()
    for group in range(plan.groups):
        rows = plan.rows(epoch, group)
        assert len(rows) % (columns if kind in {"windows", "packed"} else batch) == 0
        for shard, start, length in zip(rows.shard_P, rows.start_P, rows.length_P, strict=True):
            seen.update((int(shard), int(start) + n) for n in range(length))
        used = np.diff(rows.tokens_R1)
        assert (used <= (context if rows.width_R is None else rows.width_R)).all()
        # what each column holds lies in the shards that it is said to read
        of_row = np.repeat(np.arange(len(rows)), np.diff(rows.first_R1))
        if kind != "bucketed":
            for column in range(columns):
                read = plan.shards(epoch, group, range(column, column + 1))
                assert set(rows.shard_P[of_row % columns == column]) <= set(read)
    tails = {
        (shard, place)
        for shard, size in enumerate(sizes)
        for place in range((size - 1) // context * context, size - 1)
    }
    wanted = {(shard, place) for shard, size in enumerate(sizes) for place in range(size - 1)}
    assert set(seen) == (wanted - tails if kind == "windows" else wanted)
    assert set(seen.values()) <= {1}


def test_columns_cost_little_room() -> None:
    lengths = [lognormal(1000, seed).tolist() for seed in range(16)]
    sizes = [sum(each) + len(each) + 1 for each in lengths]
    found = {}
    for kind, plan in PLANS.items():
        for columns in (1, 8):
            rows = plan(
                sizes,
                lambda indexes: [np.array(lengths[each]) for each in indexes],
                1024,
                16,
                7,
                16,
                columns=columns,
                documents=[len(each) for each in lengths],
            ).rows(0, 0)
            found[kind, columns] = waste(rows, 1024)
    assert found["packed", 8] <= 0.005, found
    assert found["carried", 8] <= found["carried", 1] + 0.02, found
    # the n-th longest of 2,000 documents is not alike in all columns: only for whoever asks for it
    assert found["bucketed", 8] <= found["bucketed", 1] + 0.05, found
    shards = MemoryCache([[b"x" * 60_000] * 20] * 40).shards
    for kind, columns in (("packed", 12), ("windows", 12), ("bucketed", 1)):
        assert plan_by(kind, 64, 12)(shards, lambda _: []).columns == columns


def test_columns_are_a_matter_of_the_data_and_not_of_the_ranks() -> None:
    mib = 1 << 20
    assert columns_of(0, [mib] * 64, 1024, 16) == 16, "1,024 rows in each"
    assert columns_of(0, [mib] * 64, 2048, 48) == 16
    assert columns_of(0, [mib] * 64, 4096, 16) == 8, "512 rows in each, not fewer"
    assert columns_of(0, [mib] * 64, 1024, 7) == 7
    assert columns_of(0, [mib] * 64, 1024, 13 * 2) == 13
    assert columns_of(0, [mib] * 9, 1024, 16) == 4, "two shards an epoch in each"
    assert columns_of(0, [mib], 1024, 16) == 1
    assert columns_of(0, [1 << 30] * 500, 1024, 64) == 2, "of huge shards a group has two"
    assert columns_of(64, [mib] * 9, 1024, 64) == 64, "asked for"
    with pytest.raises(InvalidInput, match="do not divide") as caught:
        columns_of(3, [mib] * 9, 1024, 16)
    assert caught.value.where == "data.columns"


def shards_of(count: int, mib: int, documents: int, name: str = "0") -> list[Shard]:
    size = mib << 20
    one = {"split": "train", "bytes": size, "documents": documents, "text_bytes": size}
    return [
        Shard(sha256=f"{number:064x}", lengths_sha256=name * 64, **one) for number in range(count)
    ]


def test_more_nodes_than_columns_are_usual_get_columns_of_their_own() -> None:
    settings = DataSettings(batching="packed")
    shards = shards_of(4000, 2, 100)
    for readers, batch, columns in ((1, 960, 16), (16, 960, 16), (24, 960, 24), (1000, 1000, 1000)):
        found = reading(settings, shards, 2048, batch, readers)
        assert (found.columns, found.copies, found.advice) == (columns, 1.0, ""), readers
    assert reading(settings, shards, 2048, 1500, 1000).copies <= 1.4, "1,500 rows do not go round"
    huge = shards_of(4000, 64, 130_000)
    assert columns_by(settings, huge, 2048, 64, 1) == 16, "as many as of small shards"
    mine = settings.model_copy(update={"columns": 8})
    found = reading(mine, shards, 2048, 64, 32)
    assert (found.columns, found.copies) == (8, 4.0), "the profile overrules"
    assert "set data.columns to 0" in found.advice and "4.0 times" in str(found)


def test_twenty_ranks_that_nobody_told_of_columns_read_shards_of_their_own() -> None:
    contents = [[bytes([number]) * 2100] for number in range(40)]
    opened = Counter[int]()
    for rank in range(20):
        cache = MemoryCache(contents)
        how = batching(
            DataSettings(batching="packed"), context=4, global_batch=20, seed=5, readers=20
        )
        with PlannedStream(how, cache.shards, cache, rank=rank, world_size=20) as stream:
            assert stream.plan.columns == 20
            groups = range(stream.plan.groups)
            mine = [stream.plan.shards(0, each, stream.columns) for each in groups]
            opened.update(set(np.concatenate(mine).tolist()))
    assert sorted(opened) == list(range(40))
    assert sum(opened.values()) == 40, "shards are of one size: no edge falls inside of one"


def test_rows_of_many_columns_are_packed_as_well() -> None:
    # 40 columns of 512 rows of 256 tokens: as tight as a group can be
    lengths = [lognormal(1000, seed).tolist() for seed in range(80)]
    sizes = [sum(each) + len(each) + 1 for each in lengths]
    context = sum(sizes) // (40 * 512)
    documents = [len(each) for each in lengths]
    columns = columns_of(0, sizes, context, 40, 40, sum(documents))
    assert columns == 40
    plan = PackedPlan(
        sizes,
        lambda indexes: [np.array(lengths[each]) for each in indexes],
        context,
        40,
        7,
        columns=columns,
        documents=documents,
    )
    places = [plan.rows(0, group) for group in range(plan.groups)]
    lost = sum(waste(rows, context) * len(rows) for rows in places) / sum(map(len, places))
    assert lost <= 0.005, lost


def test_what_it_costs_and_what_to_set_is_known_before_ranks_start() -> None:
    def advice(shards: list[Shard], readers: int, batch: int = 1000, **changes: object) -> str:
        settings = DataSettings.model_validate({"batching": "packed", **changes})
        return reading(settings, shards, 2048, batch, readers).advice

    usual = shards_of(4000, 2, 100)
    assert advice(usual, 1000) == ""
    assert "at least 2000 shards" in advice(shards_of(500, 16, 32_000), 1000)
    assert "smaller shards" in advice(shards_of(4000, 64, 130_000), 1000)
    assert "fewer nodes" in advice(shards_of(1000, 1, 2_000), 2000, 2000)
    assert "multiple of the nodes" in advice(usual, 1000, 2999)
    assert "packed" in advice(usual, 1000, batching="bucketed")
    assert "lengths of all" in advice(shards_of(4000, 2, 4000), 1000, batching="carried")
    assert "lengths" not in advice(shards_of(4000, 2, 4000), 1000), "outlines are shared"
    assert advice(shards_of(4000, 2, 4000), 1000, batching="windows") == ""
    assert advice(shards_of(40, 1, 1000), 4) == "", "what is small may be read four times"


@given(
    st.integers(1, 48), st.integers(1, 300), st.integers(1, 64), st.integers(0, 200), st.integers(0)
)
def test_columns_divide_the_batch_and_more_of_them_never_cost_more(
    readers: int, shards: int, deep: int, kib: int, documents: int
) -> None:
    tokens, batch = [1 + kib * 1024] * shards, readers * deep
    found = columns_of(0, tokens, 256, batch, readers, documents)
    assert batch % found == 0 and found <= max(1, shards // 2)
    usual = columns_of(0, tokens, 256, batch, 1, documents)
    assert copies(found, batch, readers) <= copies(usual, batch, readers)
    if readers <= 16:
        assert found == usual, "no matter of how many read"


def test_groups_of_columns_are_no_larger_than_twice_the_usual_and_hold_each_shard_once() -> None:
    for shards in (1, 5, 16, 31, 40, 100):
        for columns in (1, 3, 16):
            order = ShardOrder([100 + n for n in range(shards)], 1, 16, columns)
            groups = [order.group(2, each).tolist() for each in range(order.groups)]
            assert sorted(n for each in groups for n in each) == list(range(shards))
            assert all(0 < len(each) < 32 for each in groups)


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_of_before_there_were_columns_goes_on_with_one(
    snapshot: Snapshot, store: ObjectStore, tmp_path: Path, kind: str
) -> None:
    shape = {"context": 32, "global_batch": 4, "seed": 2}
    with ShardCache(snapshot, store, tmp_path / "cache") as cache:

        def stream(columns: int, position: dict | None = None) -> PlannedStream:
            how = DataSettings.model_validate({"batching": kind, "columns": columns})
            return open_stream(snapshot, "train", cache, how, position=position, **shape)

        with stream(1) as first:
            made(first, 1)
            kept = first.position
            kept.pop("columns")
            wanted = first.next()
        with stream(0, kept) as second:
            assert second.plan.columns == 1
            assert second.next().inputs_BT.tolist() == wanted.inputs_BT.tolist()
        with stream(4) as third:
            kept = third.position
        with stream(0, kept) as fourth:
            assert fourth.plan.columns == 4, "what it was begun with"
        with pytest.raises(InvalidInput, match="another columns"):
            stream(2, kept)
        with pytest.raises(InvalidInput, match="not a position"):
            stream(0, {**kept, "columns": "4"})
        with pytest.raises(InvalidInput, match="do not divide"):
            stream(3)


def test_ranks_of_one_node_fetch_a_shard_once_and_nodes_fetch_their_own(
    snapshot: Snapshot, store: ObjectStore, tmp_path: Path
) -> None:
    how = DataSettings.model_validate({"batching": "packed", "columns": 4})
    shape = {"context": 32, "global_batch": 8, "seed": 2, "world_size": 4}
    fetched: dict[str, int] = {}
    for rank in range(4):
        node = f"node-{rank // 2}"
        with (
            ShardCache(snapshot, store, tmp_path / node) as cache,
            open_stream(snapshot, "train", cache, how, rank=rank, **shape) as stream,
        ):
            epoch_of(stream)
            fetched[node] = fetched.get(node, 0) + cache.fetched
    train = len(snapshot.of_split("train"))
    assert train == 7
    assert train <= sum(fetched.values()) <= train + 2, "an edge falls inside of a shard"
    assert max(fetched.values()) <= 5


def test_a_rank_whose_own_shards_are_mostly_bad_stops_and_one_with_a_single_bad_one_does_not() -> (
    None
):
    order = PlannedStream(
        plan_by("packed", CONTEXT, BATCH, 5, 12), MemoryCache(EQUAL).shards, MemoryCache(EQUAL)
    )
    mine = order.plan.shards(0, 0, range(2, 4)).tolist()
    order.close()
    for bad, refused in ((mine[:1], False), (mine, True)):
        broken = dict.fromkeys(bad, CorruptData("data shard is corrupt"))
        cache = MemoryCache(EQUAL, broken)
        with opened(cache, "packed", 12, rank=1, world_size=6) as stream:
            if refused:
                with pytest.raises(DataRejected, match="too many"):
                    epoch_of(stream)
            else:
                lost = sum(len(each.skipped) for each in epoch_of(stream))
                assert lost > 0
