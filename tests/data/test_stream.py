"""The stream: each sample once an epoch, the same batches for any number of ranks, exact resume."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from paceline.data import PlannedStream
from paceline.data.batching import WindowPlan
from paceline.data.loading import group_shards
from paceline.errors import InvalidInput
from tests.data.memory import MemoryCache, made, stream_by

CONTENTS = [[bytes([number]) * (40 + 13 * number)] for number in range(7)]


def stream(seed: int = 5, broken: dict[int, Exception] | None = None, **changes) -> PlannedStream:
    cache = MemoryCache(CONTENTS, broken)
    return stream_by(cache, "windows", 8, 6, seed, **changes)


def windows(plan: WindowPlan, epoch: int) -> list[tuple[int, int]]:
    """Shard and number of each window of an epoch, in order."""
    found = []
    for group in range(plan.groups):
        rows = plan.rows(epoch, group)
        numbers = rows.start_P // plan.context
        found += list(zip(rows.shard_P.tolist(), numbers.tolist(), strict=True))
    return found


def test_targets_are_the_next_bytes_and_every_byte_is_predicted_once() -> None:
    whole = stream()
    predicted: Counter[int] = Counter()
    for batch in made(whole, whole.plan.samples // 6):
        assert np.array_equal(batch.inputs_BT[:, 1:], batch.targets_BT[:, :-1])
        predicted.update(batch.targets_BT.ravel().tolist())
    for number, (text,) in enumerate(CONTENTS):
        assert predicted[number] <= len(text)


def test_epochs_differ_and_seeds_differ() -> None:
    plan = WindowPlan([200] * 5, 8, 4, seed=1)
    other = WindowPlan([200] * 5, 8, 4, seed=2)
    assert windows(plan, 0) != windows(plan, 1)
    assert windows(plan, 0) != windows(other, 0)
    assert sorted(windows(plan, 0)) == sorted(windows(plan, 1))


def test_the_order_is_the_same_on_every_machine() -> None:
    assert windows(WindowPlan([100, 200, 300], 16, 4, seed=7), 0)[:6] == GOLDEN


GOLDEN = [(0, 1), (2, 3), (2, 13), (1, 8), (2, 4), (2, 12)]


def test_an_error_of_the_reader_reaches_the_trainer() -> None:
    with stream(broken=dict.fromkeys(range(7), OSError("disk on fire"))) as broken:
        for _ in range(2):  # asked again, it does not wait for a thread that is gone
            with pytest.raises(OSError, match="disk on fire"):
                broken.next()


def test_a_group_has_enough_rows_and_never_too_many_tokens() -> None:
    tiny, usual, huge = 1 << 10, 1 << 22, 1 << 30
    assert group_shards([tiny] * 5000, 256, 16) == 256, "1,024 rows of 256 tokens"
    assert group_shards([tiny] * 5000, 1024, 512) == 1024, "16 batches would be more: a bound"
    assert group_shards([usual] * 50, 1024, 16) == 16
    assert group_shards([huge] * 50, 1024, 16) == 2


def test_bad_positions_are_refused() -> None:
    kept = stream().position
    for wrong in ({}, kept | {"item": -1}, kept | {"batch": "3"}, {**kept, "more": 1}):
        with pytest.raises(InvalidInput, match="not a position"):
            stream(position=wrong)
    for name, value in (("global_batch", 7), ("context", 9), ("batching", "packed"), ("seed", 6)):
        with pytest.raises(InvalidInput, match=f"another {name}"):
            stream(position=kept | {name: value})
    with pytest.raises(InvalidInput, match="beyond"):
        made(stream(position=kept | {"item": 10**6}), 1)
    with pytest.raises(InvalidInput, match="more ranks"):
        stream(world_size=7)


def test_a_batch_is_split_by_rows_into_as_many_parts_as_asked() -> None:
    batch = made(stream(world_size=2), 1)[0]
    parts = batch.split(2)
    assert [each.rows for each in parts] == [range(1), range(1, 3)]
    assert np.array_equal(np.concatenate([each.inputs_BT for each in parts]), batch.inputs_BT)
    parts = batch.split(5)
    assert [len(each.inputs_BT) for each in parts] == [1] * 5
    assert [float(each.weights_BT.sum()) for each in parts] == [8, 8, 8, 0, 0]
    with pytest.raises(InvalidInput, match="no parts"):
        batch.split(0)
