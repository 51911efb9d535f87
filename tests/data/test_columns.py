"""Rows read in columns: a rank opens its share of the shards, and every batch is as on one rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paceline.config import DataSettings
from paceline.data import PlannedStream, Shard, ShardCache, Snapshot, open_stream
from paceline.data.batching import BucketedPlan, PackedPlan, StatefulPlan, WindowPlan
from paceline.data.loading import (
    Position,
    ShardOrder,
    choose_columns,
    columns_by,
    copies,
)
from paceline.errors import CorruptData, DataRejected, InvalidInput
from paceline.storage import ObjectStore
from tests.data.memory import MemoryCache, made, padding_share, stream_by
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
    return stream_by(cache, kind, CONTEXT, BATCH, 5, columns, **changes)


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
def test_ranks_open_their_own_shards_and_read_each_batch_once_together(kind, contents) -> None:
    with opened(MemoryCache(contents), kind, 12) as stream:
        whole = [union([batch]) for batch in epoch_of(stream)]
    for world in (3, 12):
        caches = [MemoryCache(contents) for _ in range(world)]
        shares = []
        for rank, cache in enumerate(caches):
            with opened(cache, kind, 12, rank=rank, world_size=world) as stream:
                assert len(stream.columns) == 12 // world
                shares.append(epoch_of(stream))
        assert [union(list(each)) for each in zip(*shares, strict=True)] == whole
        counts = [len(set(each.read)) for each in caches]
        if contents is EQUAL:
            assert max(counts) <= 24 // world + 1, counts
        assert sum(counts) <= 24 + 2 * world, "an edge falls inside of a shard now and then"
        assert set().union(*(each.read for each in caches)) == {
            each.sha256 for each in caches[0].shards
        }


@pytest.mark.parametrize("kind", ["windows", "packed"])
def test_a_rank_reads_the_same_shards_in_every_epoch(kind) -> None:
    cache = MemoryCache(EQUAL)
    with opened(cache, kind, 4, rank=1, world_size=4) as stream:
        epoch_of(stream)
        first, position = set(cache.read), Position(**stream.position)
        orders = []
        for epoch in range(4):
            orders.append(stream.plan.shards(epoch, 0, stream.columns).tolist())
            stream.make(Position(**{**position.to_json(), "epoch": epoch}))
    assert set(cache.read) == first, "what a node has in its cache, it wants again"
    assert len({tuple(each) for each in orders}) > 1, "in another order"


@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=12), min_size=1, max_size=9),
    context=st.integers(1, 40),
    deep=st.integers(1, 3),
    columns=st.integers(1, 5),
    epoch=st.integers(0, 2),
)
@settings(max_examples=30, deadline=None)
def test_every_token_comes_once_an_epoch_and_columns_are_even(
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
        if kind == "packed" and columns == 1:
            assert (used > 0).all(), "no empty row"
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
            found[kind, columns] = padding_share(rows, 1024)
    assert found["packed", 1] <= 0.005 and found["packed", 8] <= 0.005, found
    assert found["bucketed", 1] <= 0.1, found
    assert found["carried", 8] <= found["carried", 1] + 0.02, found
    # the n-th longest of 2,000 documents is not alike in all columns: only for whoever asks for it
    assert found["bucketed", 8] <= found["bucketed", 1] + 0.05, found
    shards = MemoryCache([[b"x" * 60_000] * 20] * 40).shards
    for kind, columns in (("packed", 12), ("windows", 12), ("bucketed", 1)):
        how = DataSettings.model_validate({"batching": kind})
        assert columns_by(how, shards, 64, 12) == columns


def test_columns_are_a_matter_of_the_data_and_not_of_the_ranks() -> None:
    mib = 1 << 20
    assert choose_columns(0, [mib] * 64, 1024, 16) == 16, "1,024 rows in each"
    assert choose_columns(0, [mib] * 64, 2048, 48) == 16
    assert choose_columns(0, [mib] * 64, 4096, 16) == 8, "512 rows in each, not fewer"
    assert choose_columns(0, [mib] * 64, 1024, 7) == 7
    assert choose_columns(0, [mib] * 64, 1024, 13 * 2) == 13
    assert choose_columns(0, [mib] * 9, 1024, 16) == 4, "two shards an epoch in each"
    assert choose_columns(0, [mib], 1024, 16) == 1
    assert choose_columns(0, [1 << 30] * 500, 1024, 64) == 2, "of huge shards a group has two"
    assert choose_columns(64, [mib] * 9, 1024, 64) == 64, "asked for"
    with pytest.raises(InvalidInput, match="do not divide") as caught:
        choose_columns(3, [mib] * 9, 1024, 16)
    assert caught.value.where == "data.columns"


def shards_of(count: int, mib: int, documents: int, name: str = "0") -> list[Shard]:
    size = mib << 20
    one = {"split": "train", "bytes": size, "documents": documents, "text_bytes": size}
    one |= {"token_count": size, "lengths_sha256": name * 64}
    return [Shard(sha256=f"{number:064x}", **one) for number in range(count)]


def test_more_nodes_than_columns_are_usual_get_columns_of_their_own() -> None:
    settings = DataSettings(batching="packed")
    shards = shards_of(4000, 2, 100)
    for readers, batch, columns in ((1, 960, 16), (16, 960, 16), (24, 960, 24), (1000, 1000, 1000)):
        assert columns_by(settings, shards, 2048, batch, readers) == columns
        assert copies(columns, batch, readers) == 1.0
    huge = shards_of(4000, 64, 130_000)
    assert columns_by(settings, huge, 2048, 64, 1) == 16, "as many as of small shards"
    mine = settings.model_copy(update={"columns": 8})
    assert columns_by(mine, shards, 2048, 64, 32) == 8, "the profile overrules"
    assert copies(8, 64, 32) == 4.0


def test_twenty_ranks_without_a_columns_setting_read_their_own_shards() -> None:
    contents = [[bytes([number]) * 2100] for number in range(40)]
    opened = Counter[int]()
    for rank in range(20):
        cache = MemoryCache(contents)
        with stream_by(cache, "packed", 4, 20, readers=20, rank=rank, world_size=20) as stream:
            assert stream.plan.columns == 20
            groups = range(stream.plan.groups)
            mine = [stream.plan.shards(0, each, stream.columns) for each in groups]
            opened.update(set(np.concatenate(mine).tolist()))
    assert sorted(opened) == list(range(40))
    assert sum(opened.values()) == 40, "shards are of one size: no edge falls inside of one"


@given(
    st.integers(1, 48), st.integers(1, 300), st.integers(1, 64), st.integers(0, 200), st.integers(0)
)
def test_columns_divide_the_batch_and_more_of_them_never_cost_more(
    readers: int, shards: int, deep: int, kib: int, documents: int
) -> None:
    tokens, batch = [1 + kib * 1024] * shards, readers * deep
    found = choose_columns(0, tokens, 256, batch, readers, documents)
    assert batch % found == 0 and found <= max(1, shards // 2)
    usual = choose_columns(0, tokens, 256, batch, 1, documents)
    assert copies(found, batch, readers) <= copies(usual, batch, readers)
    if readers <= 16:
        assert found == usual, "no matter of how many read"


def test_column_groups_hold_each_shard_once_and_at_most_twice_the_usual() -> None:
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


def test_a_rank_stops_on_mostly_bad_shards_but_not_on_a_single_one() -> None:
    order = opened(MemoryCache(EQUAL), "packed", 12)
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
