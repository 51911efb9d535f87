"""Replanning: who drops out, who is slow, who corrupts, and that nobody else notices."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from paceline.plan import (
    ORIGIN,
    PlanWorker,
    Standing,
    Trees,
    WorkerLine,
    build_line,
    build_trees,
    next_order,
    repair_trees,
)
from paceline.schemas import Plan, Topology
from tests.plan.kit import (
    RELAYED,
    STRIPED,
    S,
    above,
    check,
    fleets,
    kill,
    manifest_of,
    plan,
    racks_of,
    worker,
)


def lanes(made: Plan) -> dict[str, dict[tuple[int, int], str]]:
    """Return every worker's first sources by the chunks they are for."""
    return {
        part.worker_id: {
            (lane.first_chunk, lane.last_chunk): lane.source.key for lane in part.lanes
        }
        for part in made.workers
    }


def children(made: Plan, name: str) -> set[str]:
    """Return who takes anything from ``name``."""
    return {
        part.worker_id
        for part in made.workers
        if any(lane.source.key == name for lane in part.lanes)
    }


@settings(deadline=None, max_examples=25)
@given(
    count=st.integers(2, 70),
    per_rack=st.sampled_from([1, 3, 8, 20, 100]),
    topology=st.sampled_from(RELAYED),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_a_death_changes_the_source_of_its_orphans_only(
    count: int, per_rack: int, topology: Topology, seed: int, data: st.DataObject
) -> None:
    fleet = racks_of(count, per_rack)
    first = plan(fleet, topology, seed=seed)
    order = next_order((), first)
    dead = data.draw(st.integers(0, count - 1))
    second = plan(kill(fleet, dead), topology, seed=seed, epoch=2, order=order)
    check(second, kill(fleet, dead))
    before, after = lanes(first), lanes(second)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == children(first, f"node-{dead}")
    assert next_order(order, second) == order


@settings(deadline=None, max_examples=25)
@given(fleet=fleets(sick=True), topology=st.sampled_from(list(Topology)), seed=st.integers(0, 3))
def test_every_living_worker_reaches_every_chunk_in_any_fleet_state(
    fleet: list[PlanWorker], topology: Topology, seed: int
) -> None:
    if all(each.standing is Standing.GONE for each in fleet):
        fleet = [replace(fleet[0], standing=Standing.LINE), *fleet[1:]]
    made = plan(fleet, topology, seed=seed)
    check(made, fleet)
    order = next_order((), made)
    check(plan(fleet, topology, seed=seed, order=order), fleet)


@settings(deadline=None, max_examples=25)
@given(
    fleet=fleets(least=3, sick=True),
    topology=st.sampled_from(RELAYED),
    standing=st.sampled_from([Standing.TAIL, Standing.QUARANTINED]),
)
def test_no_worker_of_the_line_waits_behind_a_slow_or_corrupting_one(
    fleet: list[PlanWorker], topology: Topology, standing: Standing
) -> None:
    fleet = [replace(fleet[0], standing=Standing.LINE, link_mbit=40.0, complete=False), *fleet[1:]]
    fleet = [replace(each, link_mbit=40.0) for each in fleet]
    fleet[1] = replace(fleet[1], standing=standing)
    fleet = [
        replace(each, complete=each.complete and each.standing is not Standing.QUARANTINED)
        for each in fleet
    ]
    made = plan(fleet, topology)
    check(made, fleet)
    bad = {each.worker_id for each in fleet if each.standing is Standing.QUARANTINED}
    slow = {each.worker_id for each in fleet if each.standing is Standing.TAIL}
    for part in made.workers:
        for lane in part.lanes:
            named = {source.key for source in (lane.source, *lane.spares)}
            assert not named & bad, "the quarantined are nobody's source nor spare"
            if part.worker_id not in slow | bad:
                assert lane.source.key not in slow


@pytest.mark.parametrize("topology", RELAYED)
def test_a_slow_link_goes_to_the_tail_by_itself(topology: Topology) -> None:
    fleet = [replace(each, link_mbit=15.0) if each.worker_id == "node-4" else each
             for each in racks_of(20, 5)]  # fmt: skip
    made = plan(fleet, topology)
    assert children(made, "node-4") == set()
    assert made.workers[-1].worker_id == "node-4"
    order = next_order((), made)
    assert lanes(plan(fleet, topology, order=order)) == lanes(made)


def test_tails_follow_the_line_the_slowest_last() -> None:
    speeds = {3: 10.0, 5: 15.0, 7: 12.0}
    fleet = [replace(each, link_mbit=speeds.get(n, 40.0)) for n, each in enumerate(racks_of(10, 5))]
    made = plan(fleet)
    assert [part.worker_id for part in made.workers][-3:] == ["node-5", "node-7", "node-3"]
    assert {lane.source.key for part in made.workers[-3:-1] for lane in part.lanes} == {"node-9"}


@settings(deadline=None, max_examples=25)
@given(
    count=st.integers(8, 60),
    topology=st.sampled_from(RELAYED),
    data=st.data(),
)
def test_a_slowed_worker_gives_up_its_children_and_the_rest_stay_in_place(
    count: int, topology: Topology, data: st.DataObject
) -> None:
    fleet = racks_of(count, 8)
    first = plan(fleet, topology)
    number = data.draw(st.integers(0, count - 1))
    fleet[number] = replace(fleet[number], standing=Standing.TAIL)
    second = plan(fleet, topology, order=next_order((), first))
    check(second, fleet)
    name = f"node-{number}"
    before, after = lanes(first), lanes(second)
    assert {each for each in after if after[each] != before[each]} <= {
        name,
        *children(first, name),
    }
    assert children(second, name) == set()


@pytest.mark.parametrize(
    ("topology", "seed", "share"),
    [
        (Topology.MESH, 11, 5),  # every free slot is below the last orphan
        (Topology.MESH, 20, 3),
        (Topology.MESH, 30, 4),
        (Topology.TREE_OF_CHAINS, 1, 5),
    ],
)
def test_however_many_die_no_link_sends_more_than_it_receives(
    topology: Topology, seed: int, share: int
) -> None:
    count, chunks = 200, 16
    fleet = racks_of(count, 20)
    manifest = manifest_of(chunks)
    order = next_order((), plan(fleet, topology, manifest))
    dead = random.Random(seed).sample(range(count), count * share // 100)
    made = plan(kill(fleet, *dead), topology, manifest, order=order)
    check(made, kill(fleet, *dead), manifest)
    sent = Counter(source for source in above(made).values() if source)
    assert max(sent.values()) <= chunks
    assert made.origin_bytes == manifest.total_size, "the origin is still read once"


@pytest.mark.parametrize("topology", RELAYED)
def test_a_workers_own_fallback_matches_the_next_plan(topology: Topology) -> None:
    fleet = racks_of(32, 8)
    first = plan(fleet, topology)
    order, fed = next_order((), first), above(first)
    for dead in range(32):
        second = lanes(plan(kill(fleet, dead), topology, order=order))
        for part in first.workers:
            for lane in part.lanes:
                if lane.source.key == f"node-{dead}":
                    then = second[part.worker_id][lane.first_chunk, lane.last_chunk]
                    # The origin comes last for a worker: only a plan may name another head.
                    assert lane.spares[0].key == then or then.startswith("origin")
    for part in first.workers:
        for lane in part.lanes:
            for spare in lane.spares[:-1] if lane.source.worker_id else ():
                at = spare.worker_id
                while at is not None:
                    assert at != part.worker_id, "it only has what this worker gave it"
                    at = fed[at, lane.first_chunk]


def any_forest(chance: random.Random) -> tuple[WorkerLine, Trees]:
    """Return trees over up to 150 workers in racks of any sizes."""
    count = chance.choice([2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 33, 64, 100, 150])
    sizes = chance.choice([(1,), (2, 3), (4,), (8,), (20,), (150,), (1, 1, 2, 3, 5, 9, 17, 40)])
    zones = chance.choice([1, 1, 2, 3])
    racks: list[int] = []
    while len(racks) < count:
        racks += [len(racks)] * chance.choice(sizes)
    fleet = [
        worker(number, rack=f"r{rack}", zone=f"z{rack % zones}")
        for number, rack in enumerate(racks[:count])
    ]
    topology = chance.choice(RELAYED)
    stripes = min(chance.choice([1, 2, 3, 4, 4]), count) if topology in STRIPED else 1
    line = build_line(fleet, 0)
    return line, build_trees(topology, line.workers, line.core, stripes)


def fullest(trees: Trees) -> int:
    """Return the most children that one worker feeds, over all stripes."""
    return max(Counter(above for up in trees.up for above in up if above >= 0).values(), default=0)


def test_in_trees_of_any_shape_no_worker_feeds_more_than_its_slots() -> None:
    chance = random.Random(0)
    for number in range(250):
        line, trees = any_forest(chance)
        count = line.length
        assert fullest(trees) <= trees.slots, f"forest {number} as it is built"
        for share in (20, 5, 2):
            dead = set(chance.sample(range(count), chance.randint(1, max(1, count // share))))
            made = repair_trees(trees, [place in dead for place in range(count)])
            for stripe, up in enumerate(made.up):
                assert sorted(made.top_down(stripe)) == sorted(set(range(count)) - dead)
                assert up.count(ORIGIN) == 1
                moved = {at for at, (was, now) in enumerate(zip(trees.up[stripe], up, strict=True))
                         if was != now}  # fmt: skip
                assert moved - dead == {at for at in moved - dead if trees.up[stripe][at] in dead}
            assert fullest(made) <= made.slots, f"forest {number} without {sorted(dead)}"


def test_a_worker_that_comes_back_finds_its_old_place() -> None:
    fleet = racks_of(40, 10)
    for topology in RELAYED:
        first = plan(fleet, topology)
        order = next_order((), first)
        plan(kill(fleet, 7), topology, order=order)
        assert lanes(plan(fleet, topology, order=order)) == lanes(first)


@pytest.mark.parametrize("standing", [Standing.TAIL, Standing.QUARANTINED])
def test_if_only_slow_or_quarantined_workers_are_left_they_make_the_line(
    standing: Standing,
) -> None:
    fleet = [replace(each, standing=standing) for each in racks_of(4, 2)]
    made = plan(fleet)
    check(made, fleet)
    assert made.origin_bytes == S


@settings(deadline=None, max_examples=25)
@given(
    count=st.integers(8, 60),
    topology=st.sampled_from(RELAYED),
    slow=st.sets(st.integers(0, 59), max_size=4),
    data=st.data(),
)
def test_with_slow_workers_about_a_death_moves_only_orphans_and_the_slow(
    count: int, topology: Topology, slow: set[int], data: st.DataObject
) -> None:
    fleet = [
        replace(each, standing=Standing.TAIL if number in slow else Standing.LINE)
        for number, each in enumerate(racks_of(count, 8))
    ]
    order = next_order((), plan(racks_of(count, 8), topology))
    first = plan(fleet, topology, order=order)
    dead = data.draw(st.sampled_from([n for n in range(count) if n not in slow]))
    second = plan(kill(fleet, dead), topology, order=order)
    check(second, kill(fleet, dead))
    before, after = lanes(first), lanes(second)
    tails = {f"node-{number}" for number in slow}
    changed = {name for name in after if after[name] != before[name]} - tails
    assert len(changed) <= len(children(first, f"node-{dead}")) + 4 * len(slow)


@pytest.mark.parametrize("topology", RELAYED)
def test_who_completes_in_the_line_keeps_its_place_and_feeds_on(topology: Topology) -> None:
    fleet = racks_of(40, 10)
    first = plan(fleet, topology)
    order = next_order((), first)
    done = {2, 3, 11, 25, 39}
    later = [
        replace(each, complete=number in done, held_pieces=16 if number in done else 12)
        for number, each in enumerate(fleet)
    ]
    second = plan(later, topology, order=order)
    check(second, later)
    before, after = lanes(first), lanes(second)
    for number in set(range(40)) - done:
        old, new = before[f"node-{number}"], after[f"node-{number}"]
        assert {key: old[key] for key in old if not old[key].startswith("origin")} == {
            key: new[key] for key in old if not old[key].startswith("origin")
        }
