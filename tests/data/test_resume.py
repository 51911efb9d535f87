"""Any position, any number of ranks: the same global batches as the run that never stopped."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paceline.data import Batch, PlannedStream
from paceline.data.loading import Position
from paceline.errors import CorruptData
from tests.data.memory import MemoryCache, made, stream_by

KINDS = ["windows", "packed", "bucketed", "carried"]
_random = np.random.default_rng(11)
CONTENTS = [
    [
        _random.integers(0, 255, size, dtype=np.uint8).tobytes()
        for size in np.clip(_random.lognormal(3, 1, 9), 1, 150).astype(int)
    ]
    for _ in range(19)
]
CONTEXT, BATCH = 16, 12


def opened(kind: str, **changes) -> PlannedStream:
    cache = MemoryCache(CONTENTS, changes.pop("broken", None))
    return stream_by(cache, kind, CONTEXT, BATCH, **changes)


def union(parts: list[Batch]) -> list[object]:
    """The global batch that the ranks' shares make, as plain data."""

    def joined(name: str) -> object:
        arrays = [getattr(each, name) for each in parts]
        return None if arrays[0] is None else np.concatenate(arrays).tolist()

    assert [row for each in parts for row in each.rows] == list(range(BATCH))
    assert len({each.global_tokens for each in parts}) == 1
    names = ("inputs_BT", "targets_BT", "weights_BT", "documents_BT", "positions_BT", "carries_B")
    return [parts[0].step, parts[0].global_tokens, *(joined(name) for name in names)]


def union_of(batch: Batch) -> list[object]:
    """One share as plain data."""
    names = ("inputs_BT", "targets_BT", "weights_BT", "documents_BT", "positions_BT", "carries_B")
    arrays = [getattr(batch, name) for name in names]
    kinds = [None if each is None else (each.dtype.name, each.shape) for each in arrays]
    values = [None if each is None else each.tolist() for each in arrays]
    return [batch.step, batch.global_tokens, batch.rows, batch.skipped, *kinds, *values]


def run(kind: str, world: int, count: int, position=None, **changes) -> tuple[list, dict]:
    """``count`` global batches on ``world`` ranks, and where rank 0 stands then."""
    ranks = [
        opened(kind, rank=rank, world_size=world, position=position, **changes)
        for rank in range(world)
    ]
    shares = [made(each, count) for each in ranks]
    found = [union([share[n] for share in shares]) for n in range(count)]
    at = Position(**ranks[0].position)
    for _ in range(count):
        _, at = ranks[0].make(at)
    for each in ranks:
        each.close()
    return found, json.loads(json.dumps(at.to_json()))


@cache
def whole_run(kind: str, columns: int = 0) -> list:
    """Global batches of one rank, without a stop."""
    return run(kind, 1, 45 if columns else 60, columns=columns)[0]


@given(
    kind=st.sampled_from(KINDS),
    worlds=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    counts=st.lists(st.integers(0, 15), min_size=3, max_size=3),
    columns=st.sampled_from([0, 3, 12]),
)
@settings(max_examples=12, deadline=None)
def test_resumed_on_any_number_of_ranks_the_batches_are_those_of_one_run(
    kind, worlds, counts, columns
) -> None:
    whole = whole_run(kind, columns)
    found: list[object] = []
    position = None
    for world, count in zip(worlds, counts, strict=False):
        batches, position = run(kind, world, count, position, columns=columns)
        found += batches
    assert found == whole[: len(found)]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_made_several_at_once_are_those_made_one_by_one(kind) -> None:
    for skip, columns in (({}, 1), ({5, 6, 17}, 4)):
        with opened(kind, rank=1, world_size=3, skip=skip, columns=columns) as ahead:
            found = [ahead.next() for _ in range(55)]
            position = ahead.position
        with opened(kind, rank=1, world_size=3, skip=skip, columns=columns) as single:
            at = Position(**single.position)
            for batch in found:
                wanted, at = single.make(at)
                assert union_of(batch) == union_of(wanted)
        assert at.to_json() == position
        kept = union_of(found[1])
        found[0].inputs_BT[:] = 7
        found[0].weights_BT[:] = 7
        assert union_of(found[1]) == kept, "a batch has its arrays to itself"


@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_are_skipped_are_passed_over_and_listed(kind) -> None:
    whole = whole_run(kind)
    with opened(kind, skip={2, 3, 7}) as stream:
        found = made(stream, 6)
    assert [each.step for each in found] == [0, 1, 4, 5, 6, 8]
    for each in found:
        assert each.inputs_BT.tolist() == whole[each.step][2]
        assert each.global_tokens == whole[each.step][1]
    assert [len(each.skipped) for each in found] == [0, 0, 2, 0, 0, 1]
    assert found[2].skipped[0].startswith("batch 2: ")
    listed = sum(
        int(stop) - int(start)
        for part in found[2].skipped[1].split(": ")[1].split()
        for start, stop in (
            each.split(":") for each in part.partition("[")[2].rstrip("]").split(",")
        )
    )
    assert listed == whole[3][1], "every token of the batch is named"
    if kind == "carried":
        assert not found[2].carries_B.any(), "state does not go on over what was passed over"
        assert any(whole[4][-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_found_bad_by_one_rank_changes_nothing_for_the_others(kind) -> None:
    count, bad = 30, 4
    broken = {bad: CorruptData("data shard is corrupt")}
    with (
        opened(kind, rank=0, world_size=2, broken=broken) as hurt,
        opened(kind, rank=1, world_size=2) as sound,
    ):
        shares = [made(hurt, count), made(sound, count)]
        digest = hurt.shards[bad].sha256
    lost = 0
    for first, second, wanted in zip(*shares, whole_run(kind), strict=False):
        assert first.global_tokens == second.global_tokens == wanted[1]
        assert second.inputs_BT.tolist() == wanted[2][BATCH // 2 :]
        kept = first.weights_BT > 0
        assert first.inputs_BT[kept].tolist() == (np.array(wanted[2][: BATCH // 2])[kept].tolist())
        gone = int((np.array(wanted[4][: BATCH // 2]) > 0).sum() - kept.sum())
        assert first.skipped == ((digest,) if gone else ())
        assert second.skipped == ()
        lost += gone
    assert lost > 0
    assert list(hurt.quarantined) == [digest]
    assert sound.quarantined == {}


def test_shards_are_asked_for_ahead_and_let_go_when_their_group_is_over() -> None:
    contents = [[b"%03d" % n * 5] * 6 for n in range(120)]
    cache = MemoryCache(contents)
    seen: list[int] = []
    with stream_by(cache, "windows", 15, 8) as stream:
        groups = [
            [cache.shards[each].sha256 for each in stream.plan.shards(0, group)]
            for group in range(stream.plan.groups)
        ]
        made(stream, 1)
        assert set(cache.read) <= set(groups[0]), "a first batch waits for nothing else"
        made(stream, 1)
        position = Position(**stream.position)
        while position.epoch == 0:
            _, position = stream.make(position)
            seen.append(len(cache.read) - cache.closed)
        assert set(cache.read[:32]) == {*groups[0], *groups[1]}, "this group, then the next"
        assert max(seen) <= 3 * 16, "memory is bounded by groups, not by the snapshot"
    assert len(cache.read) == cache.closed, "nothing stays open"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_uneven_shares_add_up_to_those_of_the_whole_batch(kind) -> None:
    import torch
    import torch.nn.functional as F

    table = torch.nn.Embedding(256, 256, dtype=torch.float64)

    def gradient(batch: Batch) -> torch.Tensor:
        logits = table(torch.from_numpy(batch.inputs_BT.astype(np.int64)))
        targets = torch.from_numpy(batch.targets_BT.astype(np.int64))
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        weights = torch.from_numpy(batch.weights_BT).flatten()
        loss = (losses * weights).sum() / batch.global_tokens
        return torch.autograd.grad(loss, table.weight)[0]

    with opened(kind) as whole:
        wanted = [gradient(batch) for batch in made(whole, 2)]
    uneven = [opened(kind, rank=rank, world_size=5) for rank in range(5)]
    assert [len(each.rows) for each in uneven] == [2, 2, 3, 2, 3]
    shares = [made(each, 2) for each in uneven]
    for each in uneven:
        each.close()
    for number, expected in enumerate(wanted):
        parts = [part for share in shares for part in share[number].split(2)]
        found = torch.stack([gradient(part) for part in parts]).sum(dim=0)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-15)
