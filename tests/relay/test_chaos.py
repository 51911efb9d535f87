"""Whole fleets of sessions under a virtual clock, one fault at a time; tests/chaos mixes them."""

from __future__ import annotations

import pytest

from paceline.errors import CorruptData, OriginBudgetExceeded
from paceline.relay.protocol.limits import SessionLimits
from tests.relay.kit import paper_manifest, plan
from tests.support.memory_fleet import Faults, MemoryFleet

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


def test_a_slow_parent_does_not_hold_up_the_last_pieces() -> None:
    made = fleet(5)
    order = [each.worker_id for each in plan(MANIFEST, {n: f"{n}:1" for n in made.nodes}).workers]
    made.at(BOUND_S * 0.95, lambda: made.slow_down(order[1], 50))
    made.run(until_s=BOUND_S * 1.5)
    assert not set(order[2:]) & set(made.unfinished())  # hedged at the head
    extra = LIMITS.window_pieces  # at most what was in flight came twice
    assert all(made.nodes[n].received_pieces <= MANIFEST.piece_count + extra for n in order[2:])


def test_connections_that_break_cost_nothing_but_what_was_in_flight() -> None:
    made = fleet(6)
    order = [each.worker_id for each in plan(MANIFEST, {n: f"{n}:1" for n in made.nodes}).workers]
    for at_s in (2.0, 3.0, 4.0):
        made.at(at_s, lambda: made.reset(order[2]))
    made.run(until_s=BOUND_S * 1.6)
    assert unfinished(made) == []
    for name in order:
        assert made.nodes[name].received_pieces <= MANIFEST.piece_count + LIMITS.window_pieces


def test_a_piece_that_rots_on_a_disk_is_found_by_its_reader_and_mended_at_both() -> None:
    made = fleet(3)
    order = [each.worker_id for each in plan(MANIFEST, {n: f"{n}:1" for n in made.nodes}).workers]
    made.run(until_s=3.0)
    last = order[2]
    made.freeze(last)
    made.at(8.0, lambda: made.rot(order[1], 60))
    made.at(8.2, lambda: made.thaw(last))
    made.run(until_s=40)
    assert unfinished(made) == []
    assert made.nodes[last].corrupt_seen == {order[1]: 1}
