from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidPlan
from paceline.manifest import Chunk, FileEntry, Manifest
from paceline.plan import (
    PlanWorker,
    cross_rack_bytes,
    make_plan,
    origin_cap_bytes,
    predict,
    rack_of,
)
from paceline.wire.plan import Labels, Plan, Topology

H = "0" * 64
P = 65_536
MIB = 1024 * 1024
MANIFEST = Manifest.of(
    model_id="m",
    version="1",
    piece_bytes=P,
    chunk_bytes=2 * P,
    files=(FileEntry("weights", 16 * P, H, (H,) * 16),),
    chunks=tuple(Chunk(n, 2 * n * P, 2 * P, H) for n in range(8)),
)
S = MANIFEST.total_size
RELAYED = [Topology.CHAIN, Topology.TREE, Topology.TREE_OF_CHAINS, Topology.MESH]


def worker(
    number: int, rack: str = "r0", zone: str = "", host: str = "", **more: object
) -> PlanWorker:
    return PlanWorker(
        worker_id=f"node-{number}",
        labels=Labels(host=host or f"host-{number}", rack=rack, zone=zone),
        address=f"127.0.0.1:{number + 1}",
        link_mbit=40.0,
        **more,  # type: ignore[arg-type]
    )


def plan(workers: Sequence[PlanWorker], topology: str = "chain", **more: object) -> Plan:
    given = {"deployment_id": "d", "epoch": 1, "source_url": "s3://bucket/m/1", "seed": 0, **more}
    return make_plan(topology, manifest=MANIFEST, workers=workers, **given)  # type: ignore[arg-type]


@st.composite
def fleets(draw: st.DrawFn, least: int = 1) -> list[PlanWorker]:
    fleet = []
    for number in range(draw(st.integers(least, 24))):
        held = draw(st.sampled_from([0, 0, 3, 10, 16]))
        fleet.append(
            worker(
                number,
                rack=draw(st.sampled_from(["", "r1", "r2", "r3"])),
                zone=draw(st.sampled_from(["", "a", "b"])),
                host=draw(st.sampled_from(["h1", "h2", "h3"])),
                held_pieces=held,
                complete=held == 16 and draw(st.booleans()),
            )
        )
    return fleet


def sources(made: Plan) -> dict[str, str | None]:
    """Return each worker's primary source; None is the origin."""
    return {part.worker_id: part.lanes[0].source.worker_id for part in made.workers if part.lanes}


def check(made: Plan, fleet: list[PlanWorker]) -> None:
    """Assert what holds for every plan, whatever the topology."""
    complete = {each.worker_id for each in fleet if each.complete}
    named = [part.worker_id for part in made.workers]
    assert sorted(named) == sorted(each.worker_id for each in fleet)
    above = sources(made)
    addresses = {each.worker_id: each.address for each in fleet}
    for part in made.workers:
        if part.worker_id in complete:
            assert part.lanes == ()
            assert part.origin_budget_bytes == 0
            continue
        covered = [
            chunk for lane in part.lanes for chunk in range(lane.first_chunk, lane.last_chunk + 1)
        ]
        assert sorted(covered) == list(range(len(MANIFEST.chunks))), "each chunk exactly once"
        for lane in part.lanes:
            keys = [source.key for source in (lane.source, *lane.spares)]
            assert len(set(keys)) == len(keys)
            assert part.worker_id not in keys
            kinds = [source.kind for source in (lane.source, *lane.spares)]
            if lane.source.kind == "worker":
                assert kinds.count("origin") == 1
                assert kinds[-1] == "origin", "the origin comes last"
            for source in (lane.source, *lane.spares):
                if source.worker_id:
                    assert source.address == addresses[source.worker_id]
        step: str | None = part.worker_id
        seen = set()
        while step is not None and step not in complete:
            assert step not in seen, "a cycle"
            seen.add(step)
            step = above[step]


@settings(deadline=None, max_examples=150)
@given(fleet=fleets(), topology=st.sampled_from(list(Topology)), seed=st.integers(0, 5))
def test_every_worker_reaches_every_chunk_without_a_cycle(
    fleet: list[PlanWorker], topology: Topology, seed: int
) -> None:
    check(plan(fleet, topology, seed=seed), fleet)


@settings(deadline=None, max_examples=100)
@given(fleet=fleets(), topology=st.sampled_from(list(Topology)), seed=st.integers(0, 5))
def test_a_plan_depends_on_the_set_of_workers_not_on_their_order(
    fleet: list[PlanWorker], topology: Topology, seed: int
) -> None:
    shuffled = fleet.copy()
    random.Random(seed).shuffle(shuffled)
    assert plan(shuffled, topology, seed=seed) == plan(fleet, topology, seed=seed)


@settings(deadline=None, max_examples=150)
@given(fleet=fleets(), seed=st.integers(0, 5))
def test_a_chain_crosses_into_each_rack_once(fleet: list[PlanWorker], seed: int) -> None:
    racks = {each.worker_id: rack_of(each) for each in fleet}
    above = sources(plan(fleet, seed=seed))
    into = Counter(
        racks[one] for one, other in above.items() if other and racks[other] != racks[one]
    )
    assert all(count == 1 for count in into.values())


@settings(deadline=None, max_examples=150)
@given(fleet=fleets(), seed=st.integers(0, 5))
def test_on_a_chain_nobody_feeds_two(fleet: list[PlanWorker], seed: int) -> None:
    feeds = Counter(sources(plan(fleet, seed=seed)).values())
    if not any(each.complete for each in fleet):
        assert max(feeds.values()) == 1
    else:
        complete = {each.worker_id for each in fleet if each.complete}
        assert all(count == 1 for source, count in feeds.items() if source not in complete)


@settings(deadline=None, max_examples=150)
@given(fleet=fleets(least=2), topology=st.sampled_from(RELAYED))
def test_where_somebody_is_complete_nobody_begins_at_the_origin(
    fleet: list[PlanWorker], topology: Topology
) -> None:
    made = plan(fleet, topology)
    roots = [one for one, source in sources(made).items() if source is None]
    if any(each.complete for each in fleet):
        assert roots == []
        assert made.origin_bytes == 0
    else:
        assert len(roots) == 1


@settings(deadline=None, max_examples=150)
@given(
    fleet=fleets(),
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
        head = next(part for part in made.workers if part.lanes[0].source.kind == "origin")
        assert head.origin_budget_bytes >= S, "whoever reads the origin may read all of it"


def test_the_fuse_is_two_percent_or_64_mib() -> None:
    assert origin_cap_bytes(S) == S + 64 * MIB
    assert origin_cap_bytes(500 * 10**9) == 510 * 10**9


@settings(deadline=None, max_examples=100)
@given(data=st.data(), topology=st.sampled_from(list(Topology)))
def test_any_survivors_can_go_on(data: st.DataObject, topology: Topology) -> None:
    fleet = data.draw(fleets(least=2))
    survivors = data.draw(st.lists(st.sampled_from(fleet), min_size=1, unique=True))
    check(plan(survivors, topology, epoch=2), survivors)


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
    assert made.cross_rack_bytes == S == cross_rack_bytes(made, fleet, MANIFEST)


def test_direct_takes_everything_from_the_source() -> None:
    made = plan([worker(n) for n in range(3)], "direct", external_mbit=80.0)
    assert set(sources(made).values()) == {None}
    assert made.origin_bytes == 3 * S
    assert made.predicted_seconds == pytest.approx(3 * S / 10e6)
    assert all(part.origin_budget_bytes >= S for part in made.workers)


def test_one_worker_takes_the_model_at_the_bound() -> None:
    for topology in Topology:
        made = plan([worker(0)], topology)
        assert (made.depth, made.cross_rack_bytes, made.origin_bytes) == (1, 0, S)
        assert made.predicted_seconds == pytest.approx(made.bound_seconds) == S / 5e6


def test_a_fleet_that_is_complete_has_nothing_to_do() -> None:
    made = plan([worker(n, complete=True, held_pieces=16) for n in range(3)])
    assert all(part.lanes == () for part in made.workers)
    assert (made.predicted_seconds, made.origin_bytes, made.depth) == (0.0, 0, 1)


def test_more_racks_than_workers_are_planned() -> None:
    fleet = [worker(n, rack=f"rack-{10 * n}") for n in range(5)]
    assert plan(fleet).cross_rack_bytes == 4 * S


def test_rack_order_saves_four_fifths_of_the_crossings() -> None:
    fleet = [worker(n, rack=f"r{n % 4}") for n in range(100)]  # as an order by name would meet them
    ignoring = 99 * S
    for topology in RELAYED:
        made = plan(fleet, topology)
        assert made.cross_rack_bytes == cross_rack_bytes(made, fleet, MANIFEST) <= 0.2 * ignoring


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
    assert plan([worker(0), slow]).workers[0].piece_deadline_s == pytest.approx(20 * P * 8 / 0.5e6)


def test_the_mission_s_figures_are_predicted() -> None:
    def seconds(topology: str, workers: int, piece: int = 4 * MIB) -> float:
        return predict(
            topology,
            total_bytes=500 * 10**9,
            workers=workers,
            piece_bytes=piece,
            link_mbit=10_000,
        ).seconds

    assert seconds("direct", 100) == 40_000
    assert seconds("chain", 100) == pytest.approx(400.3, abs=0.1)
    assert seconds("chain", 1000) == pytest.approx(403.4, abs=0.1)
    assert seconds("chain", 1000, piece=10**9) == pytest.approx(1199, abs=1)


@settings(deadline=None, max_examples=100)
@given(
    count=st.integers(1, 40),
    topology=st.sampled_from(RELAYED),
    external=st.sampled_from([None, 10.0, 400.0]),
)
def test_a_plan_predicts_what_predict_says(
    count: int, topology: Topology, external: float | None
) -> None:
    made = plan([worker(n) for n in range(count)], topology, external_mbit=external)
    told = predict(
        topology,
        total_bytes=S,
        workers=count,
        piece_bytes=P,
        link_mbit=40.0,
        external_mbit=external,
        chunk_bytes=2 * P,
    )
    assert made.predicted_seconds == pytest.approx(told.seconds)
    assert made.bound_seconds == told.bound_seconds <= made.predicted_seconds + 1e-9


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


def test_a_thousand_workers_are_planned_in_racks() -> None:
    fleet = [worker(n, rack=f"r{n // 40}", zone=f"z{n // 200}") for n in range(1000)]
    made = plan(fleet)
    check(made, fleet)
    assert made.cross_rack_bytes == 24 * S
    assert made.depth == 1000
