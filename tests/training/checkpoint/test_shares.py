"""Who writes what: every box once, by a rank that holds it, the work spread."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from paceline.errors import TrainingFailed
from paceline.training.checkpoint import (
    Chunk,
    Staging,
    assign_writes,
    chunks_of,
    from_bytes,
    index_of,
    reads_for,
    to_bytes,
)


def rows_of(name: str, rows: int, parts: int, part: int) -> list[Chunk]:
    """Return the box of ``part`` when ``rows`` × 4 numbers are cut into ``parts``, as FSDP cuts."""
    size = -(-rows // parts)
    first, last = min(rows, part * size), min(rows, (part + 1) * size)
    if first == last:
        return []
    return [Chunk(name, "F32", (rows, 4), (first, 0), (last - first, 4))]


def layout(rows: list[int], replicas: int, shards: int) -> list[list[Chunk]]:
    """Return what each rank of ``replicas`` × ``shards`` holds, and a norm that all hold."""
    return [
        [each for n, count in enumerate(rows) for each in rows_of(f"w{n}", count, shards, shard)]
        + [Chunk("norm", "F32", (4,), (0,), (4,))]
        for _ in range(replicas)
        for shard in range(shards)
    ]


layouts = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 5)
)


@given(layouts)
def test_every_box_is_written_once_by_a_rank_that_holds_it(
    of: tuple[list[int], int, int],
) -> None:
    held = layout(*of)
    written = assign_writes(held)
    flat = [chunk for chunks in written for chunk in chunks]
    assert len(flat) == len(set(flat))
    assert set(flat) == {chunk for chunks in held for chunk in chunks}
    assert all(set(mine) <= set(had) for mine, had in zip(written, held, strict=True))


@given(layouts)
def test_replicas_share_the_work(of: tuple[list[int], int, int]) -> None:
    shards = of[2]
    written = assign_writes(layout(*of))
    loads = [sum(chunk.bytes for chunk in mine) for mine in written]
    for shard in range(shards):
        those = loads[shard::shards]
        largest = max((c.bytes for mine in written[shard::shards] for c in mine), default=0)
        assert max(those) - min(those) <= largest, "no rank could give a box away to even it out"


def test_a_thousand_replicas_are_planned_as_one_list() -> None:
    chunks = [Chunk(f"w{n}", "F32", (64, 64), (0, 0), (64, 64)) for n in range(3000)]
    written = assign_writes([chunks] * 1000)
    assert {len(mine) for mine in written} == {3}


@given(layouts)
def test_whatever_the_cut_all_of_a_tensor_is_read_once(of: tuple[list[int], int, int]) -> None:
    rows, _, _ = of
    index = index_of(assign_writes(layout(*of)))
    for number, count in enumerate(rows):
        stored = index.tensors[f"w{number}"]
        wanted = torch.zeros(count, 4)
        for read in reads_for(f"w{number}", stored, wanted):
            (at, _), (length, _) = read.target, read.lengths
            wanted[at : at + length] += 1
        assert bool((wanted == 1).all())


def test_boxes_that_do_not_make_up_a_tensor_are_refused() -> None:
    half = [Chunk("w", "F32", (4, 4), (0, 0), (2, 4))]
    with pytest.raises(TrainingFailed, match="do not make it up"):
        index_of(assign_writes([half]))
    other = [Chunk("w", "F64", (4, 4), (2, 0), (2, 4))]
    with pytest.raises(TrainingFailed, match="disagree"):
        index_of(assign_writes([half, other]))


def test_boxes_travel_as_bytes() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.tensor(1.0), "empty": torch.zeros(0, 3)}
    chunks = chunks_of(tensors)
    assert [chunk.tensor for chunk in chunks] == ["a", "b"]
    assert list(from_bytes(to_bytes(chunks))) == chunks
    assert [chunk.bytes for chunk in chunks] == [24, 4]
    assert math.prod(chunks[1].sizes) == 1


def test_a_kind_of_number_that_has_no_name_is_refused() -> None:
    with pytest.raises(TrainingFailed, match="cannot be saved"):
        chunks_of({"z": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 299_999])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(
    dtype: torch.dtype, bad: float, at: int
) -> None:
    tensor = torch.full((300_000,), torch.finfo(dtype).max, dtype=dtype)  # any sum overflows
    staging = Staging(chunks_of({"w": tensor}))
    staging.fill({"w": tensor})
    staging.require_finite(1)
    tensor[at] = bad
    staging.fill({"w": tensor})
    with pytest.raises(TrainingFailed, match="not finite"):
        staging.require_finite(1)
    staging.fill({"w": torch.ones_like(tensor)})
    staging.require_finite(1)


def test_infinities_that_cancel_are_found() -> None:
    tensor = torch.zeros(1000)
    tensor[3], tensor[900] = math.inf, -math.inf
    staging = Staging(chunks_of({"w": tensor}))
    staging.fill({"w": tensor})
    with pytest.raises(TrainingFailed, match="not finite"):
        staging.require_finite(1)
