"""The stream: each sample once an epoch, the same batches for any number of ranks, exact resume."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import SampleOrder, SampleStream, Shard
from paceline.errors import CorruptData, DataRejected, InvalidInput, InvalidSnapshot


def shards_of(contents: list[bytes]) -> tuple[list[Shard], dict[str, bytes]]:
    """Shards of one document each, and their token streams by digest."""
    shards, streams = [], {}
    for number, text in enumerate(contents):
        digest = hashlib.sha256(b"%d" % number + text).hexdigest()
        shards.append(
            Shard(split="train", sha256=digest, bytes=len(text), documents=1, text_bytes=len(text))
        )
        streams[digest] = b"\xff" + text + b"\xff"
    return shards, streams


CONTENTS = [bytes([number]) * (40 + 13 * number) for number in range(7)]


def stream(**changes: object) -> SampleStream:
    shards, streams = shards_of(CONTENTS)
    values: dict[str, object] = {
        "shards": shards,
        "tokens": lambda shard: streams[shard.sha256],
        "context": 8,
        "global_batch": 6,
        "seed": 5,
    }
    return SampleStream(**(values | changes))  # type: ignore[arg-type]


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=30),
    context=st.integers(1, 20),
    seed=st.integers(-(2**40), 2**40),
    group=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_each_sample_comes_exactly_once_an_epoch(sizes, context, seed, group, epoch) -> None:
    if sum((max(0, size - 1)) // context for size in sizes) == 0:
        with pytest.raises(InvalidSnapshot):
            SampleOrder(sizes, context, seed, group)
        return
    order = SampleOrder(sizes, context, seed, group)
    first = epoch * order.samples
    seen = Counter(order.locate(first + n) for n in range(order.samples))
    assert set(seen.values()) == {1}
    assert {each.epoch for each in seen} == {epoch}
    by_shard = Counter(each.shard for each in seen)
    assert all(by_shard[n] == (max(0, size - 1)) // context for n, size in enumerate(sizes))
    covered = order.samples * context
    assert covered + order.tail_bytes == sum(sizes), "what is not a sample is counted"


@given(world=st.integers(1, 6), cursor=st.integers(0, 60), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(world, cursor, seed) -> None:
    whole = stream(seed=seed).batch_at(6 * cursor)
    parts = [
        stream(seed=seed, rank=rank, world_size=world).batch_at(6 * cursor) for rank in range(world)
    ]
    assert np.array_equal(np.concatenate([part.inputs_BT for part in parts]), whole.inputs_BT)
    assert np.array_equal(np.concatenate([part.targets_BT for part in parts]), whole.targets_BT)
    assert [row for part in parts for row in part.rows] == list(range(6))


@given(steps=st.integers(0, 25), world=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_a_resumed_stream_goes_on_exactly_where_it_stopped(steps, world) -> None:
    with stream(prefetch=2) as first:
        for _ in range(steps):
            first.next()
        cursor = first.cursor
        expected = [first.next() for _ in range(3)]
    with stream(cursor=cursor, world_size=world) as second:
        for wanted in expected:
            got = second.next()
            rows = slice(got.rows.start, got.rows.stop)
            assert np.array_equal(got.inputs_BT, wanted.inputs_BT[rows])
            assert got.cursor == wanted.cursor


def test_targets_are_the_next_bytes_and_every_byte_is_predicted_once() -> None:
    whole = stream()
    order = whole.order
    predicted = Counter()
    for cursor in range(0, order.samples - order.samples % 6, 6):
        batch = whole.batch_at(cursor)
        assert np.array_equal(batch.inputs_BT[:, 1:], batch.targets_BT[:, :-1])
        predicted.update(batch.targets_BT.ravel().tolist())
    for number, text in enumerate(CONTENTS):
        assert predicted[number] <= len(text)


def test_epochs_differ_and_seeds_differ() -> None:
    order = SampleOrder([200] * 5, 8, seed=1)
    other = SampleOrder([200] * 5, 8, seed=2)

    def positions(of: SampleOrder, epoch: int) -> list[tuple[int, int]]:
        found = [of.locate(epoch * of.samples + n) for n in range(of.samples)]
        return [(each.shard, each.window) for each in found]

    assert positions(order, 0) != positions(order, 1)
    assert positions(order, 0) != positions(other, 0)
    assert sorted(positions(order, 0)) == sorted(positions(order, 1))


def test_the_order_is_the_same_on_every_machine() -> None:
    order = SampleOrder([100, 200, 300], 16, seed=7)
    found = [(s.shard, s.window) for s in (order.locate(n) for n in range(6))]
    assert found == GOLDEN


GOLDEN = [(0, 1), (2, 3), (2, 13), (1, 8), (2, 4), (2, 12)]


def test_samples_of_a_bad_shard_are_passed_over_with_weight_zero_and_named() -> None:
    shards, streams = shards_of(CONTENTS)
    bad = shards[2].sha256

    def tokens(shard: Shard) -> bytes:
        if shard.sha256 == bad:
            raise CorruptData("data shard is corrupt")
        return streams[shard.sha256]

    damaged = stream(tokens=tokens)
    intact = stream()
    skipped = 0
    for cursor in range(0, damaged.order.samples - 5, 6):
        got, wanted = damaged.batch_at(cursor), intact.batch_at(cursor)
        kept = got.weights_B > 0
        assert np.array_equal(got.inputs_BT[kept], wanted.inputs_BT[kept])
        assert got.skipped == ((bad,) if not kept.all() else ())
        skipped += int((~kept).sum())
    assert 0 < skipped <= damaged.order.windows[2]
    assert set(damaged.quarantined) == {bad}


def test_mostly_bad_shards_stop_the_stream() -> None:
    def tokens(shard: Shard) -> bytes:
        raise CorruptData("data shard is corrupt")

    with stream(tokens=tokens) as damaged:
        with pytest.raises(DataRejected, match="too many"):
            for _ in range(20):
                damaged.next()


def test_an_error_of_the_reader_reaches_the_trainer() -> None:
    def tokens(shard: Shard) -> bytes:
        raise OSError("disk on fire")

    with stream(tokens=tokens) as broken, pytest.raises(OSError, match="disk on fire"):
        broken.next()


def test_bad_positions_are_refused() -> None:
    with pytest.raises(InvalidInput, match="edge"):
        stream(cursor=3)
    with pytest.raises(InvalidInput, match="more ranks"):
        stream(world_size=7)
