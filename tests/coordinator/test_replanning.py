"""What a new plan is made from, who is told of it, and what the origin fuse makes of it."""

from __future__ import annotations

import pytest

from paceline.coordinator.state import CoordinatorSettings, CoordinatorState, Create
from paceline.plan import origin_cap_bytes
from paceline.schemas import EdgeTally, EventName, Topology
from tests.coordinator.conftest import World, creation
from tests.coordinator.stores.effects import expected
from tests.relay.kit import paper_manifest

PIECES = 400
ORIGIN = "origin:s3://b/m"


class Line(World):
    """A world with a model of 400 pieces in 100 chunks."""

    def begin(self, count: int, topology: str = "chain", **more: object) -> str:
        self.fleet = [f"n{number:02d}" for number in range(count)]
        self.register(*self.fleet)
        call = creation(*self.fleet, topology=topology, **more)
        manifest = paper_manifest(PIECES)
        self.give(Create(deployment_id="d", call=call, manifest=manifest, at=self.now_s))
        for name in self.fleet:
            self.lanes("d", name)
        self.tick()
        return "d"

    @property
    def run(self):
        return self.state.deployment_state("d")

    def hold(self, pieces: int, *names: str, **more: object) -> None:
        """Let workers report that they hold ``pieces``."""
        for name in names or self.fleet:
            if name not in self.silent:
                chunks = tuple(range(pieces // 4))
                self.receive("d", name, pieces, chunks_received=chunks, **more)

    def lose(self, *names: str) -> None:
        self.silent |= set(names)
        self.wait(4)

    def told_to_fetch(self) -> set[str]:
        """Who would be told to fetch lanes at its next beat."""
        return {name for name in self.fleet if self.run.behind(name)}

    def standing(self, name: str) -> str:
        return next(e.standing for e in self.state.progress("d") if e.worker_id == name)


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.mark.parametrize("topology", ["chain", "tree", "tree-of-chains", "mesh"])
def test_a_death_changes_few_lanes_and_only_their_workers_get_commands(
    line: Line, topology: str
) -> None:
    line.begin(40, topology)
    line.hold(40)
    before = dict(line.run.lanes)
    line.lose("n20")
    plan = line.state.plan("d")
    assert plan.epoch == 2
    changed = {each.worker_id for each in plan.workers if each.epoch == 2}
    assert 1 <= len(changed) <= 20
    assert line.told_to_fetch() == changed
    for each in plan.workers:
        assert all(lane.source.worker_id != "n20" for lane in each.lanes)
        if each.worker_id not in changed:
            assert each == before[each.worker_id], "kept whole: epoch, budget, spares"
    [told] = line.names(EventName.DEPLOYMENT_REPLANNED)
    assert told.data["changed"] == len(changed)


def test_a_worker_with_unchanged_lanes_counts_as_ready_in_the_old_epoch(line: Line) -> None:
    line.begin(12)
    line.lose("n06")
    kept = next(e.worker_id for e in line.state.plan("d").workers if e.epoch == 1)
    answer = line.receive("d", kept, 10, epoch=1)
    assert answer.commands == ()
    line.tick()
    assert line.run.parts[kept].pieces_held == 10
    assert line.status("d") == "downloading"


def test_a_burst_of_deaths_makes_one_more_plan_at_most(line: Line) -> None:
    line.settings = CoordinatorSettings(replan_s=2.0)
    line.state = CoordinatorState(line.settings)
    line.begin(40)
    line.silent |= {f"n{number:02d}" for number in range(3, 40, 6)}
    for _ in range(8):  # their silence is noticed one after the other
        line.wait(0.5)
    line.register("n10")
    line.wait(0.5)
    assert line.epoch("d") <= 3
    line.wait(2.5)
    assert not line.run.replan


def test_the_budget_that_the_head_has_left_stays_with_it(line: Line) -> None:
    line.begin(8)
    total = line.run.deployment.total_bytes
    head = line.state.plan("d").workers[0]
    line.hold(200, head.worker_id, origin_bytes=total // 2)
    line.lose("n04")
    assert line.run.lanes[head.worker_id] == head
    shares = [each.origin_budget_bytes for each in line.state.plan("d").workers]
    assert sum(shares) - total // 2 <= origin_cap_bytes(total) - total // 2


def test_a_new_head_gets_what_the_dead_one_has_not_read(line: Line) -> None:
    line.begin(8)
    total = line.run.deployment.total_bytes
    first = line.state.plan("d").workers[0].worker_id
    line.hold(100)
    line.hold(100, first, origin_bytes=total // 4)
    line.lose(first)
    head = next(each for each in line.state.plan("d").workers if each.lanes[0].source.key == ORIGIN)
    assert head.worker_id != first
    cap = origin_cap_bytes(total)
    assert total * 3 // 4 <= head.origin_budget_bytes <= cap - total // 4


def test_a_worker_that_returns_with_a_gap_is_fed_at_the_tail(line: Line) -> None:
    line.begin(12)
    line.hold(100)
    line.lose("n05")
    line.hold(200)
    line.register("n05")
    line.wait(1)
    assert line.standing("n05") == "tail"
    plan = line.state.plan("d")
    assert not any(lane.source.worker_id == "n05" for each in plan.workers for lane in each.lanes)
    assert plan.lanes_of("n05") is not None
    assert line.names(EventName.WORKER_SLOW) == []


def test_a_worker_that_returns_at_once_takes_its_old_place(line: Line) -> None:
    line.begin(12)
    line.hold(100)
    feeds = {e.worker_id: e.lanes[0].source.worker_id for e in line.state.plan("d").workers}
    line.register("n05")
    line.tick()
    assert line.standing("n05") == "line"
    after = {e.worker_id: e.lanes[0].source.worker_id for e in line.state.plan("d").workers}
    assert after == feeds


def test_a_restarted_worker_gets_no_lanes_before_the_next_plan(line: Line) -> None:
    line.begin(4)
    head = line.state.plan("d").workers[0].worker_id
    line.hold(300, head, origin_bytes=300 * 1024)
    line.wait(1)
    line.register(head)  # its new process would count its old budget from zero again
    assert line.beat(head).commands == ()
    assert line.run.lanes_of(head) is None
    line.tick()
    assert line.beat(head).commands[0].kind == "fetch_lanes"
    assert line.lanes("d", head).epoch == 2


def test_auto_is_decided_once_and_shown(line: Line) -> None:
    line.begin(40, "auto")
    chosen = line.state.plan("d").topology
    assert chosen not in (Topology.AUTO, Topology.DIRECT)
    assert line.state.view("d").deployment.topology is chosen
    assert line.run.persisted.auto
    line.hold(40)
    line.lose("n00")
    assert line.state.plan("d").topology is chosen
    [planned] = line.names(EventName.DEPLOYMENT_PLANNED)
    assert planned.data["topology"] == chosen.value


def test_the_places_of_the_dead_survive_a_restart_of_the_coordinator(line: Line) -> None:
    line.begin(20, "mesh")
    line.hold(40)
    line.lose("n07")
    kept = expected(line.kept)
    again = CoordinatorState.restore(kept, line.now_s, line.settings)
    assert again.deployment_state("d").order == line.run.order
    assert again.deployment_state("d").deployment == line.run.deployment
    assert again.deployment_state("d").persisted == line.run.persisted


def test_a_large_model_is_not_failed_at_a_small_models_deadline() -> None:
    settings = CoordinatorSettings(deadline_s=600, deadline_factor=3)
    assert settings.deadline_of(10) == 600
    assert settings.deadline_of(403) == 1209


def test_a_slow_worker_is_reported_moved_to_the_tail_and_remembered(line: Line) -> None:
    line.begin(12)
    slow = line.state.plan("d").workers[4].worker_id
    edges = {(e.lanes[0].source.key, e.worker_id): e.lanes[0] for e in line.state.plan("d").workers}
    for step in range(1, 7):
        line.now_s += 0.5
        for (source, reader), lane in edges.items():
            rate = lane.expected_bytes_s * (0.2 if slow in (source, reader) else 1.0)
            assert rate > 0
            tally = EdgeTally(
                source=source, reader=reader, bytes=int(rate * step / 2), busy_s=step / 2
            )
            line.receive("d", reader if source == ORIGIN else source, 10, edges=(tally,))
        line.tick()
    [told] = line.names(EventName.WORKER_SLOW)
    assert told.worker_id == slow
    assert told.data["got_bytes_s"] < told.data["wanted_bytes_s"] / 2
    assert line.standing(slow) == "tail"
    plan = line.state.plan("d")
    assert not any(lane.source.worker_id == slow for e in plan.workers for lane in e.lanes)
    again = CoordinatorState.restore(expected(line.kept), line.now_s, line.settings)
    assert again.deployment_state("d").standing_of(slow) == "tail"


def test_a_slow_origin_costs_one_plan(line: Line) -> None:
    """Its first reader is taken for slow; when the next one is as slow, it was the origin."""
    line.begin(12)
    first = line.state.plan("d").workers[0].worker_id
    counts: dict[tuple[str, str], tuple[float, float]] = {}
    for _ in range(60):
        line.now_s += 0.5
        for name in line.fleet:
            line.beat(name)
        for each in line.state.plan("d").workers:
            edge = (each.lanes[0].source.key, each.worker_id)
            carried, busy_s = counts.get(edge, (0.0, 0.0))
            carried += 0.2 * each.lanes[0].expected_bytes_s * 0.5
            busy_s += 0.5 if edge[0] == ORIGIN else 0.1  # the others wait for it
            counts[edge] = carried, busy_s
            tally = EdgeTally(source=edge[0], reader=edge[1], bytes=int(carried), busy_s=busy_s)
            teller = edge[1] if edge[0] == ORIGIN else edge[0]
            line.receive("d", teller, 10, edges=(tally,), epoch=line.run.lanes[teller].epoch)
        line.tick()
    assert line.epoch("d") == 2
    assert [told.worker_id for told in line.names(EventName.WORKER_SLOW)] == [first]
    assert line.standing(first) == "line", "and it is forgiven"
    line.lose("n07")
    assert line.epoch("d") == 3


def test_a_corrupting_sender_is_reported_and_gets_no_readers(line: Line) -> None:
    line.begin(12)
    bad, reader = (each.worker_id for each in line.state.plan("d").workers[4:6])
    good = [
        EdgeTally(source=other, reader=reader, pieces=30)
        for other in line.fleet
        if other not in (bad, reader)
    ]
    tally = EdgeTally(source=bad, reader=reader, pieces=40, corrupt=10)
    line.receive("d", reader, 10, edges=(*good, tally), corrupt_sources=(bad,))
    line.tick()
    [told] = line.names(EventName.WORKER_QUARANTINED)
    assert (told.worker_id, told.data["corrupt_pieces"]) == (bad, 10)
    assert line.standing(bad) == "quarantined"
    for each in line.state.plan("d").workers:
        for lane in each.lanes:
            assert bad not in [source.key for source in (lane.source, *lane.spares)]


def test_when_only_the_tail_is_left_it_is_planned_once_more(line: Line) -> None:
    line.begin(12)
    line.hold(100)
    line.lose("n03", "n04", "n05")
    line.hold(300)
    line.register("n03", "n04", "n05")
    line.wait(1)
    others = [name for name in line.fleet if name not in ("n03", "n04", "n05")]
    epoch = line.epoch("d")
    line.finish("d", *others)
    line.wait(1)
    assert line.epoch("d") == epoch + 1
    plan = line.state.plan("d")
    sources = [plan.lanes_of(name).lanes[0].source.worker_id for name in ("n03", "n04", "n05")]
    assert set(sources) <= set(others)
    line.wait(5)
    assert line.epoch("d") == epoch + 1
