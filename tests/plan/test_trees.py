"""The shapes: trees without cycles whose interiors are disjoint, racks entered once a stripe."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from paceline.plan import ORIGIN, PlanWorker, Trees, build_trees, rack_of
from paceline.schemas import Topology
from tests.plan.kit import RELAYED, STRIPED, racks_of, worker

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=9)  # workers of each rack


def fleet_of(racks: list[int], zones: int = 1) -> list[PlanWorker]:
    """Return racks of these sizes, in zones."""
    return [
        worker(100 * rack + number, rack=f"r{rack}", zone=f"z{rack * zones // len(racks)}")
        for rack, size in enumerate(racks)
        for number in range(size)
    ]


def trees_of(topology: Topology, fleet: list[PlanWorker], stripes: int = 4) -> Trees:
    count = min(stripes, len(fleet)) if topology in STRIPED else 1
    return build_trees(topology, fleet, range(len(fleet)), count)


@settings(deadline=None, max_examples=25)
@given(racks=SIZES, zones=st.integers(1, 3), topology=st.sampled_from(RELAYED))
def test_each_rack_is_entered_once_a_stripe(
    racks: list[int], zones: int, topology: Topology
) -> None:
    fleet = fleet_of(racks, zones)
    home = {rack_of(each) for each in fleet}
    for up in trees_of(topology, fleet).up:
        entries = Counter(
            rack_of(fleet[place])
            for place, source in enumerate(up)
            if source == ORIGIN or rack_of(fleet[source]) != rack_of(fleet[place])
        )
        if topology is Topology.TREE:  # cuts racks where that keeps it shallow
            assert len(entries) == len(home)
        else:
            assert entries == dict.fromkeys(home, 1)


@settings(deadline=None, max_examples=25)
@given(racks=SIZES, zones=st.integers(1, 3), topology=st.sampled_from(STRIPED))
def test_nobody_sends_more_copies_than_there_are_stripes(
    racks: list[int], zones: int, topology: Topology
) -> None:
    trees = trees_of(topology, fleet_of(racks, zones))
    feeds = Counter(source for up in trees.up for source in up if source >= 0)
    assert max(feeds.values(), default=0) <= len(trees.up)


@settings(deadline=None, max_examples=25)
@given(racks=SIZES, topology=st.sampled_from(STRIPED))
def test_stripes_begin_in_different_racks_as_far_as_there_are_any(
    racks: list[int], topology: Topology
) -> None:
    fleet = fleet_of(racks)
    trees = trees_of(topology, fleet)
    begin = {rack_of(fleet[up.index(ORIGIN)]) for up in trees.up}
    assert len(begin) == min(len(racks), len(trees.up))


@pytest.mark.parametrize(("count", "mesh", "chains"), [(100, 14, 50), (1000, 24, 110)])
def test_stripes_are_shallow(count: int, mesh: int, chains: int) -> None:
    fleet = racks_of(count, 32)
    assert depth(trees_of(Topology.MESH, fleet)) <= mesh
    assert depth(trees_of(Topology.TREE_OF_CHAINS, fleet)) <= chains
    without_racks = racks_of(count, count)
    assert depth(trees_of(Topology.TREE_OF_CHAINS, without_racks)) <= chains


def depth(trees: Trees) -> int:
    """Return the longest path, in hops."""
    deepest = 0
    for stripe, up in enumerate(trees.up):
        hops: dict[int, int] = {ORIGIN: 0}
        for place in trees.top_down(stripe):
            hops[place] = hops[up[place]] + 1
        deepest = max(deepest, *hops.values())
    return deepest
