"""Extents behave like a set of integers."""

from __future__ import annotations

from hypothesis import given, strategies as st

from paceline.relay.protocol import Extent, Extents

runs = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda t: Extent(t[0], t[0] + t[1]))


@given(st.lists(st.tuples(st.booleans(), runs), max_size=30), runs)
def test_extents_are_a_set_of_pieces(steps: list[tuple[bool, Extent]], probe: Extent) -> None:
    extents, model = Extents(), set()
    for add, run in steps:
        pieces = set(range(*run))
        if add:
            assert extents.add(run) == len(pieces - model)
            model |= pieces
        else:
            assert extents.remove(run) == len(pieces & model)
            model -= pieces
        assert extents.count == len(model)
        assert list(extents.pieces()) == sorted(model)
        for left, right in zip(list(extents), list(extents)[1:], strict=False):
            assert left.stop < right.first  # runs neither touch nor overlap
    wanted = set(range(*probe))
    assert {p for run in extents.gaps(probe) for p in range(*run)} == wanted - model
    assert {p for run in extents.common(probe) for p in range(*run)} == wanted & model
    assert extents.covers(probe) == (wanted <= model)
    assert all((piece in extents) == (piece in model) for piece in range(60))
    assert Extents.of(model) == extents == extents.copy()
