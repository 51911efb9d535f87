"""What somebody holds already need not come from the origin again, nor cross into that rack."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from paceline.plan import SHARING_OVERHEAD, PlanWorker, Standing, origin_cap_bytes
from paceline.schemas import Topology
from tests.plan.kit import (
    MANIFEST,
    RELAYED,
    STRIPED,
    S,
    check,
    feeders,
    fleets,
    manifest_of,
    plan,
    racks_of,
    worker,
)


@settings(deadline=None, max_examples=30)
@given(fleet=fleets(least=2), topology=st.sampled_from(RELAYED))
def test_origin_reads_cover_at_most_the_chunks_that_no_worker_has(
    fleet: list[PlanWorker], topology: Topology
) -> None:
    made = plan(fleet, topology)
    check(made, fleet)
    if any(each.complete for each in fleet):
        assert made.origin_bytes == 0
    held = set().union(*(each.held_chunks for each in fleet))
    assert made.origin_bytes <= S * (8 - len(held)) // 8


def test_rare_chunks_come_from_different_holders() -> None:
    """Eight workers hold a chunk each: nobody is asked for two while somebody is idle."""
    fleet = [
        worker(n, rack=f"r{n // 4}", held_chunks=frozenset({n}), held_pieces=2) for n in range(8)
    ]
    fleet += [worker(n, rack="r9") for n in range(8, 16)]
    made = plan(fleet, "mesh")
    check(made, fleet)
    assert made.origin_bytes == 0
    lanes = Counter(
        lane.source.key
        for part in made.workers
        for lane in part.lanes
        if lane.first_chunk == lane.last_chunk
    )
    assert max(lanes.values()) <= 3


def test_a_mesh_takes_from_the_own_rack_what_a_neighbour_holds() -> None:
    fleet = racks_of(24, 8)
    for rack in range(3):
        number = 8 * rack + 3
        fleet[number] = replace(fleet[number], held_chunks=frozenset({1, 2, 6}), held_pieces=6)
    assert plan(racks_of(24, 8), "mesh").cross_rack_bytes == 2 * S
    assert plan(fleet, "mesh").cross_rack_bytes == 2 * S * 5 // 8


@pytest.mark.parametrize("topology", RELAYED)
def test_a_complete_worker_feeds_from_beside_the_line(topology: Topology) -> None:
    fleet = [*racks_of(12, 4), worker(12, rack="r1", complete=True, held_pieces=16)]
    made = plan(fleet, topology)
    check(made, fleet)
    assert made.workers[0].worker_id == "node-12"
    assert made.origin_bytes == 0
    if topology is not Topology.TREE:
        assert feeders(made)["node-12"] <= 8, "one copy, however many begin there"


def test_the_rest_of_an_almost_complete_fleet_is_fed_within_its_racks() -> None:
    for topology in STRIPED:
        fleet = [
            replace(each, complete=number % 10 > 0) for number, each in enumerate(racks_of(100, 20))
        ]
        manifest = manifest_of(16, 100)
        fleet = [replace(each, held_pieces=1600 if each.complete else 0) for each in fleet]
        made = plan(fleet, topology, manifest)
        check(made, fleet, manifest)
        assert made.cross_rack_bytes == 0
        assert made.origin_bytes == 0
        assert made.predicted_seconds <= 1.1 * (1 + SHARING_OVERHEAD[topology]) * made.bound_seconds


@pytest.mark.parametrize("standing", [Standing.TAIL, Standing.QUARANTINED])
def test_with_the_fuse_spent_the_holder_of_a_chunk_is_asked(standing: Standing) -> None:
    fleet = [*racks_of(4, 4), worker(4, complete=True, held_pieces=16, standing=standing)]
    spent = origin_cap_bytes(S)
    for topology in RELAYED:
        assert plan(fleet, topology).origin_bytes == S, "not while the origin may give it"
        made = plan(fleet, topology, origin_spent_bytes=spent)
        check(made, fleet)
        assert made.origin_bytes == 0


def test_roots_name_slow_complete_workers_as_the_last_resort() -> None:
    fleet = [*racks_of(12, 4), worker(12, complete=True, standing=Standing.TAIL)]
    made = plan(fleet, "mesh")
    for part in made.workers:
        for lane in part.lanes:
            keys = [source.key for source in lane.spares]
            if lane.source.kind == "origin":
                assert keys[-1] == "node-12"
            else:
                assert "node-12" not in keys


def test_many_scattered_chunks_do_not_make_many_lanes() -> None:
    manifest = manifest_of(400)
    fleet = racks_of(8, 4)
    fleet[5] = replace(fleet[5], held_chunks=frozenset(range(0, 400, 2)), held_pieces=400)
    for topology in RELAYED:
        made = plan(fleet, topology, manifest)
        check(made, fleet, manifest)
        assert max(len(part.lanes) for part in made.workers) <= 4 * 17


def test_an_incomplete_holder_of_all_chunks_costs_no_origin_bytes() -> None:
    fleet = [worker(0, held_pieces=16), worker(1)]
    made = plan(fleet)
    assert made.origin_bytes == 0
    assert MANIFEST.total_size == S
