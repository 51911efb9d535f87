"""What holds for every plan: reach, order, shares of the origin, spares, errors."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from paceline.errors import InvalidPlan
from paceline.plan import PlanWorker, Standing, origin_cap_bytes, rack_of
from paceline.schemas import Labels, Lane, Plan, Topology
from tests.plan.kit import (
    MIB,
    RELAYED,
    STRIPED,
    P,
    S,
    check,
    fleets,
    manifest_of,
    plan,
    racks_of,
    shuffled,
    sources,
    worker,
)


@settings(deadline=None, max_examples=25)
@given(fleet=fleets(), topology=st.sampled_from(list(Topology)), seed=st.integers(0, 5))
def test_every_worker_reaches_every_chunk_without_a_cycle(
    fleet: list[PlanWorker], topology: Topology, seed: int
) -> None:
    made = plan(fleet, topology, seed=seed)
    check(made, fleet)
    assert plan(shuffled(fleet, seed), topology, seed=seed) == made, "whatever their order"


@settings(deadline=None, max_examples=25)
@given(fleet=fleets(chunks=False), seed=st.integers(0, 5))
def test_a_chain_enters_each_rack_once_and_only_the_complete_feed_two(
    fleet: list[PlanWorker], seed: int
) -> None:
    racks = {each.worker_id: rack_of(each) for each in fleet}
    above = sources(plan(fleet, seed=seed))
    into = Counter(
        racks[one] for one, other in above.items() if other and racks[other] != racks[one]
    )
    assert all(count == 1 for count in into.values())
    complete = {each.worker_id for each in fleet if each.complete}
    feeds = Counter(above.values())
    assert all(count == 1 for source, count in feeds.items() if source not in complete)


@settings(deadline=None, max_examples=25)
@given(fleet=fleets(least=2, chunks=False), topology=st.sampled_from(RELAYED))
def test_where_somebody_is_complete_nobody_begins_at_the_origin(
    fleet: list[PlanWorker], topology: Topology
) -> None:
    made = plan(fleet, topology)
    roots = [lane for part in made.workers for lane in part.lanes if lane.source.url]
    if any(each.complete for each in fleet):
        assert roots == []
        assert made.origin_bytes == 0
    else:
        assert 1 <= len(roots) <= (min(4, len(fleet)) if topology in STRIPED else 1)
        chunks = [n for lane in roots for n in range(lane.first_chunk, lane.last_chunk + 1)]
        assert sorted(chunks) == list(range(8)), "the origin is read once"


@settings(deadline=None, max_examples=25)
@given(
    fleet=fleets(chunks=False),
    topology=st.sampled_from(RELAYED),
    spent=st.integers(0, 2 * S + 64 * MIB),
)
def test_shares_of_the_origin_never_exceed_the_fuse(
    fleet: list[PlanWorker], topology: Topology, spent: int
) -> None:
    made = plan(fleet, topology, origin_spent_bytes=spent)
    shares = sum(part.origin_budget_bytes for part in made.workers)
    assert shares <= max(0, origin_cap_bytes(S) - spent)
    if spent == 0 and not any(each.complete for each in fleet):
        for part in made.workers:
            begun = sum(
                2 * P * (lane.last_chunk - lane.first_chunk + 1)
                for lane in part.lanes
                if lane.source.kind == "origin"
            )
            missing = S * (16 - fleet[int(part.worker_id[5:])].held_pieces) // 16
            assert part.origin_budget_bytes >= min(begun, missing), "enough for what it begins"


def test_the_fuse_is_two_percent_or_64_mib() -> None:
    assert origin_cap_bytes(S) == S + 64 * MIB
    assert origin_cap_bytes(500 * 10**9) == 510 * 10**9


def test_the_line_closes_up_behind_a_dead_worker() -> None:
    fleet = [worker(n, rack=f"r{n // 2}") for n in range(6)]
    assert list(sources(plan(fleet)).values()) == [None, *[f"node-{n}" for n in range(5)]]
    held = dict(zip(range(6), (15, 14, 12, 11, 9, 8), strict=True))
    rest = [worker(n, rack=f"r{n // 2}", held_pieces=held[n]) for n in (0, 1, 3, 4, 5)]
    made = plan(rest, epoch=2)
    assert sources(made) == {
        "node-0": None,
        "node-1": "node-0",
        "node-3": "node-1",
        "node-4": "node-3",
        "node-5": "node-4",
    }
    assert made.epoch == 2


def test_whoever_holds_most_becomes_the_head() -> None:
    fleet = [worker(0), worker(1, held_pieces=4), worker(2, rack="r1", held_pieces=12), worker(3)]
    made = plan(fleet)
    assert [part.worker_id for part in made.workers] == ["node-2", "node-1", "node-0", "node-3"]
    assert made.origin_bytes == 4 * P


def test_spares_are_ancestors_from_near_to_far_and_the_origin_last() -> None:
    made = plan([worker(n) for n in range(4)])
    lane = made.workers[3].lanes[0]
    assert [source.key for source in (lane.source, *lane.spares)] == [
        "node-2",
        "node-1",
        "node-0",
        "origin:s3://bucket/m/1",
    ]


def test_a_spare_is_never_somebody_who_only_has_what_one_gave_him() -> None:
    made = plan([worker(n) for n in range(4)])
    assert [source.key for source in made.workers[1].lanes[0].spares] == ["origin:s3://bucket/m/1"]
    returned = plan([worker(0), worker(1), worker(2, held_pieces=0), worker(3, held_pieces=0)])
    assert returned == made
    held = plan([worker(0, held_pieces=9), worker(1, held_pieces=8), worker(2, held_pieces=7)])
    assert held.workers[1].lanes[0].spares[0].key == "node-2"


def test_a_holder_in_the_rack_saves_the_crossing() -> None:
    fleet = [
        worker(0, rack="r0"),
        worker(1, rack="r1"),
        worker(2, rack="r0", complete=True),
        worker(3, rack="r1", complete=True),
        worker(4, rack="r2"),
    ]
    made = plan(fleet)
    above = sources(made)
    assert above["node-0"] == "node-2"
    assert above["node-1"] == "node-3"
    assert made.cross_rack_bytes == S


def test_direct_takes_everything_from_the_source() -> None:
    made = plan([worker(n) for n in range(3)], "direct", external_mbit=80.0)
    assert set(sources(made).values()) == {None}
    assert made.origin_bytes == 3 * S
    assert made.predicted_seconds == pytest.approx(3 * S / 10e6)
    assert all(part.origin_budget_bytes >= S for part in made.workers)


def test_one_worker_takes_the_model_at_the_bound() -> None:
    for topology in Topology:
        made = plan([worker(0)], topology)
        assert len(made.workers[0].lanes) == 1
        assert (made.depth, made.cross_rack_bytes, made.origin_bytes) == (1, 0, S)
        assert made.predicted_seconds == pytest.approx(made.bound_seconds) == S / 5e6


def test_a_fleet_that_is_complete_has_nothing_to_do() -> None:
    made = plan([worker(n, complete=True, held_pieces=16) for n in range(3)])
    assert all(part.lanes == () for part in made.workers)
    assert (made.predicted_seconds, made.origin_bytes, made.depth) == (0.0, 0, 1)


@pytest.mark.parametrize("topology", RELAYED)
def test_rack_order_saves_four_fifths_of_the_crossings(topology: Topology) -> None:
    fleet = [worker(n, rack=f"r{n % 4}") for n in range(100)]  # as an order by name would meet them
    ignoring = 99 * S
    made = plan(fleet, topology)
    racks = {each.worker_id: rack_of(each) for each in fleet}
    crossings = [
        lane
        for part in made.workers
        for lane in part.lanes
        if lane.source.worker_id and racks[lane.source.worker_id] != racks[part.worker_id]
    ]
    chunks = sum(lane.last_chunk - lane.first_chunk + 1 for lane in crossings)
    assert made.cross_rack_bytes == chunks * 2 * P <= 0.2 * ignoring


def test_a_tree_is_binary_and_shallow() -> None:
    fleet = [worker(n, rack=f"r{n // 20}") for n in range(200)]
    made = plan(fleet, "tree")
    feeds = Counter(sources(made).values())
    assert feeds[None] == 1
    assert max(feeds.values()) == 2
    assert made.depth <= 10


def test_another_seed_makes_another_head() -> None:
    fleet = [worker(n, rack=f"r{n // 4}") for n in range(16)]
    assert len({plan(fleet, seed=seed).workers[0].worker_id for seed in range(1, 9)}) > 2


def test_deadlines_follow_the_piece_and_have_a_floor() -> None:
    assert plan([worker(0)]).workers[0].piece_deadline_s == 1.0
    slow = PlanWorker("slow", Labels(), "127.0.0.1:1", 0.5)
    fast, tail = plan([worker(0), slow]).workers
    assert fast.piece_deadline_s == 1.0
    assert tail.piece_deadline_s == pytest.approx(20 * P * 8 / 0.5e6)


@pytest.mark.parametrize(
    ("workers", "topology", "says"),
    [
        ([], "chain", "no workers"),
        ([worker(0), worker(0)], "chain", "twice"),
        ([PlanWorker("w", Labels(), "a:1", 0.0)], "chain", "no speed"),
        ([worker(0)], "ring", "one of direct, chain, tree"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    workers: list[PlanWorker], topology: str, says: str
) -> None:
    with pytest.raises(InvalidPlan, match=says):
        plan(workers, topology)


@pytest.mark.parametrize("topology", RELAYED)
def test_hundreds_of_workers_are_planned_in_racks(topology: Topology) -> None:
    fleet = [worker(n, rack=f"r{n // 40}", zone=f"z{n // 120}") for n in range(300)]
    made = plan(fleet, topology)
    check(made, fleet)
    assert made.cross_rack_bytes == 7 * S
    assert made.origin_bytes == S
    assert made.depth == 300 or topology is not Topology.CHAIN


@settings(deadline=None, max_examples=25)
@given(
    chunks=st.integers(1, 9),
    workers=st.integers(1, 9),
    racks=st.integers(1, 12),
    topology=st.sampled_from(list(Topology)),
)
def test_few_chunks_few_workers_and_many_racks_are_no_special_case(
    chunks: int, workers: int, racks: int, topology: Topology
) -> None:
    fleet = [worker(n, rack=f"r{n % racks}") for n in range(workers)]
    manifest = manifest_of(chunks)
    check(plan(fleet, topology, manifest), fleet, manifest)


def test_stripes_begin_at_different_workers_and_share_the_fuse() -> None:
    for topology in STRIPED:
        made = plan(racks_of(32, 8), topology)
        begin = [part for part in made.workers for lane in part.lanes if lane.source.url]
        assert len({part.worker_id for part in begin}) == 4
        assert made.origin_bytes == S
        assert all(part.origin_budget_bytes >= S // 4 for part in begin)
        assert sum(part.origin_budget_bytes for part in made.workers) <= origin_cap_bytes(S)


def test_a_root_names_the_other_roots_as_spares() -> None:
    made = plan(racks_of(32, 8), "mesh")
    begin = {
        part.worker_id: lane for part in made.workers for lane in part.lanes if lane.source.url
    }
    for name, lane in begin.items():
        assert {source.key for source in lane.spares} == set(begin) - {name}


def test_auto_takes_the_cheapest_and_says_which() -> None:
    manifest = manifest_of(64, 100)
    for fleet, cheapest in ((racks_of(8, 8), Topology.CHAIN), (racks_of(800, 40), Topology.MESH)):
        made = plan(fleet, "auto", manifest)
        assert made.topology is cheapest
        each = [plan(fleet, topology, manifest).predicted_seconds for topology in STRIPED]
        assert made.predicted_seconds == min(each) or cheapest is Topology.CHAIN


def lanes_with_rates(made: Plan) -> list[Lane]:
    return [lane for part in made.workers for lane in part.lanes]


def test_lanes_say_the_rate_that_the_plan_counts_on() -> None:
    link = 5e6
    fleet = racks_of(32, 8)
    assert {lane.expected_bytes_s for lane in lanes_with_rates(plan(fleet))} == {link}
    for topology in STRIPED:
        rates = {lane.expected_bytes_s for lane in lanes_with_rates(plan(fleet, topology))}
        assert rates == {link / 4}
    slow_source = plan(fleet, external_mbit=4.0)
    assert {lane.expected_bytes_s for lane in lanes_with_rates(slow_source)} == {link / 10}
    straggler = plan([*racks_of(8, 8), worker(8, standing=Standing.TAIL)]).workers[-1]
    assert straggler.lanes[0].expected_bytes_s == link / 2


def test_deadlines_follow_the_lane_s_rate() -> None:
    manifest = manifest_of(8, 2, 4 * MIB)
    fleet = racks_of(16, 8)
    piece_s = 4 * MIB / 5e6
    assert plan(fleet, "chain", manifest).workers[3].piece_deadline_s == pytest.approx(20 * piece_s)
    assert plan(fleet, "mesh", manifest).workers[3].piece_deadline_s == pytest.approx(80 * piece_s)


def test_a_plan_reads_back_as_it_was_written() -> None:
    """Records are made without validation; what they say must pass it all the same."""
    fleet = [*racks_of(20, 5), worker(20, complete=True), worker(21, standing=Standing.TAIL)]
    for topology in RELAYED:
        made = plan(fleet, topology)
        assert Plan.model_validate_json(made.model_dump_json()) == made
