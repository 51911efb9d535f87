"""Whole fleets of sessions under a virtual clock: what must hold whatever fails."""

from __future__ import annotations

from random import Random

import pytest

from paceline.errors import CorruptData, OriginBudgetExceeded
from paceline.relay.limits import SessionLimits
from paceline.relay.memory import Faults, MemoryFleet
from tests.relay.kit import paper_manifest, plan

MANIFEST = paper_manifest(96, chunk_pieces=8)
LINK = 96 * 1024 / 10  # bytes a second: the whole model in 10 virtual seconds
BOUND_S = 10.0
LIMITS = SessionLimits(window_bytes=8 * 1024, window_pieces=8)


def fleet(
    size: int, seed: int = 0, faults: Faults | None = None, topology: str = "chain"
) -> MemoryFleet:
    names = [f"w{number}" for number in range(size)]
    made = MemoryFleet(MANIFEST, names, seed=seed, link_bytes_s=LINK, faults=faults, limits=LIMITS)
    assign(made, topology=topology, seed=seed)
    return made


def assign(
    made: MemoryFleet, epoch: int = 1, topology: str = "chain", seed: int = 0, spent: int = 0
) -> None:
    living = {name: f"{name}:1" for name, node in made.nodes.items() if node.alive}
    for lanes in plan(
        MANIFEST,
        living,
        epoch=epoch,
        topology=topology,
        seed=seed,
        origin_spent_bytes=spent,
        link_mbit=LINK * 8 / 1e6,
    ).workers:
        made.assign(lanes)


def unfinished(made: MemoryFleet) -> list[str]:
    return [name for name, node in made.nodes.items() if node.alive and not node.complete]


def test_a_chain_takes_what_one_link_takes_and_reads_the_origin_once() -> None:
    made = fleet(8)
    made.run(until_s=BOUND_S * 1.15)
    assert unfinished(made) == []
    assert made.origin_pieces == MANIFEST.piece_count
    assert all(node.received_pieces == MANIFEST.piece_count for node in made.nodes.values())


@pytest.mark.parametrize("topology", ["tree", "direct"])
def test_other_topologies_run_on_the_same_sessions(topology: str) -> None:
    made = fleet(7, topology=topology)
    made.run(until_s=100)
    assert unfinished(made) == []


def test_the_line_closes_up_behind_a_dead_worker_without_the_coordinator() -> None:
    made = fleet(6)
    order = [each.worker_id for each in plan(MANIFEST, {n: f"{n}:1" for n in made.nodes}).workers]
    made.at(4.0, lambda: made.kill(order[2]))
    made.run(until_s=BOUND_S * 1.5)
    assert unfinished(made) == []
    assert made.origin_pieces == MANIFEST.piece_count
    for name in order[3:]:
        assert made.nodes[name].received_pieces <= MANIFEST.piece_count * 1.02 + 1


def test_the_head_may_die_and_its_neighbour_reads_on_from_the_origin() -> None:
    made = fleet(5)
    order = [each.worker_id for each in plan(MANIFEST, {n: f"{n}:1" for n in made.nodes}).workers]
    made.at(4.0, lambda: made.kill(order[0]))
    made.run(until_s=BOUND_S * 2)
    assert unfinished(made) == []
    assert made.origin_pieces <= MANIFEST.piece_count * 1.02 + LIMITS.window_pieces


def test_a_worker_that_returns_resumes_from_its_disk() -> None:
    made = fleet(4)
    order = [each.worker_id for each in plan(MANIFEST, {n: f"{n}:1" for n in made.nodes}).workers]
    node = made.nodes[order[2]]
    made.at(6.0, lambda: made.kill(order[2]))
    made.run(until_s=7.0)
    held = node.durable.count
    assert held > 20
    before = node.received_pieces
    made.restart(order[2])
    assign(made, epoch=2)
    made.run(until_s=40)
    assert unfinished(made) == []
    assert node.received_pieces - before == MANIFEST.piece_count - held


def test_a_corrupting_sender_is_named_and_its_bytes_go_no_further() -> None:
    names = {f"w{n}": f"w{n}:1" for n in range(4)}
    order = [each.worker_id for each in plan(MANIFEST, names).workers]
    made = fleet(4, faults=Faults(corrupt_from=frozenset({order[1]})))
    made.run(until_s=60)
    assert unfinished(made) == []
    assert set(made.nodes[order[2]].corrupt_seen) == {order[1]}
    assert made.nodes[order[3]].corrupt_seen == {}


def test_a_bad_origin_fails_the_head_with_the_piece_and_never_spreads() -> None:
    made = fleet(3, faults=Faults(corrupt_from=frozenset({"origin"})))
    made.run(until_s=30)
    errors = [node.error for node in made.nodes.values() if node.error]
    assert errors
    assert any(isinstance(error, CorruptData) for error in errors)
    assert all(not node.verified for node in made.nodes.values())


def test_the_origin_fuse_holds_when_nobody_else_is_left() -> None:
    made = MemoryFleet(MANIFEST, ["w0"], link_bytes_s=LINK, limits=LIMITS)
    mine = plan(MANIFEST, {"w0": "w0:1"}).workers[0]
    made.assign(mine.model_copy(update={"origin_budget_bytes": 40 * 1024}))
    made.run(until_s=30)
    progress = made.nodes["w0"].session.progress()  # type: ignore[union-attr]
    assert progress.failure is not None
    assert progress.failure.code == OriginBudgetExceeded.__name__
    assert made.origin_pieces == 40
    made.run(until_s=600)
    assert isinstance(made.nodes["w0"].error, OriginBudgetExceeded)  # it ends (I12)


def chaos(seed: int) -> MemoryFleet:
    """Play one seed: deaths, freezes, returns, corruption, duplicates, late events, new plans."""
    random = Random(seed)
    faults = Faults(
        corrupt=random.choice([0, 0, 0.01, 0.03]),
        duplicate=random.choice([0, 0.05]),
        delay_s=random.choice([0, 0.05, 0.3]),
    )
    size = random.randint(3, 9)
    made = fleet(size, seed=seed, faults=faults, topology=random.choice(["chain", "tree"]))
    names = list(made.nodes)
    victims = random.sample(names, random.randint(1, max(1, size // 2)))
    epoch = 1
    for victim in victims:
        at = random.uniform(0.2, 12)
        kind = random.choice(["kill", "kill", "freeze", "return"])
        if kind == "freeze":
            made.at(at, lambda v=victim: made.freeze(v))  # type: ignore[misc]
            made.at(at + random.uniform(0.5, 20), lambda v=victim: made.thaw(v))  # type: ignore[misc]
            continue
        made.at(at, lambda v=victim: made.kill(v))  # type: ignore[misc]
        if kind == "return":
            epoch += 1
            back = at + random.uniform(0.3, 5)
            made.at(back, lambda v=victim: made.restart(v))  # type: ignore[misc]
            made.at(back + 0.3, lambda e=epoch: assign(made, epoch=e, seed=seed))  # type: ignore[misc]
        elif random.random() < 0.5:  # the coordinator hears of it; else they help themselves
            epoch += 1
            made.at(at + 1.5, lambda e=epoch: assign(made, epoch=e, seed=seed))  # type: ignore[misc]
    made.at(25.0, lambda: assign(made, epoch=99, seed=seed))  # the last fault has healed
    made.run(until_s=120)
    return made


@pytest.mark.parametrize("batch", range(4))
def test_every_survivor_completes_in_every_seed(batch: int) -> None:
    for seed in range(batch * 50, batch * 50 + 50):
        made = chaos(seed)
        stuck = {n: made.nodes[n].session.progress() for n in unfinished(made)}  # type: ignore[union-attr]
        assert stuck == {}, f"seed {seed}"
        for node in made.nodes.values():
            assert not node.complete or node.durable.count == MANIFEST.piece_count


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("batch", range(20))
def test_every_survivor_completes_in_a_thousand_more_seeds(batch: int) -> None:
    for seed in range(1000 + batch * 50, 1050 + batch * 50):
        made = chaos(seed)
        stuck = {n: made.nodes[n].session.progress() for n in unfinished(made)}  # type: ignore[union-attr]
        assert stuck == {}, f"seed {seed}"


def test_a_failing_seed_replays_exactly() -> None:
    first, again = chaos(7), chaos(7)
    assert first.now_s == again.now_s
    assert {n: x.received_pieces for n, x in first.nodes.items()} == {
        n: x.received_pieces for n, x in again.nodes.items()
    }
