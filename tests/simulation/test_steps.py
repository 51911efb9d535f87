"""A large fleet is looked at in steps: what is lost by that, and what must not be."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.coordinator import CoordinatorSettings
from paceline.coordinator.state import Effect, EmitEvent, Event
from paceline.schemas import EventName, Topology
from paceline.simulation import Network, Scenario, Simulation, Timing, simulate
from tests.simulation.kit import scenario


def test_who_ends_within_a_step_leaves_the_rest_of_it_to_its_neighbours() -> None:
    network = Network()
    link = network.resource(100.0)
    short, long = (network.add((link,), lag=0.0) for _ in range(2))
    network.edge[:] = 1e9
    network.start(short, 0.0, 5.0, 1e9, -1)
    network.start(long, 0.0, 1e6, 1e9, -1)
    network.next_s()
    network.advance(1.0)  # shares of 50: the short one needs 5 of its
    assert network.pos[short] == 5.0
    assert network.pos[long] == pytest.approx(95.0)


def test_what_a_follower_leaves_is_not_carried_twice() -> None:
    network = Network()
    link = network.resource(100.0)
    short, long = (network.add((link,), lag=0.0) for _ in range(2))
    network.edge[:] = 1e9
    network.start(short, 0.0, 5.0, 1e9, -1)
    network.start(long, 0.0, 1e6, 1e9, -1)
    network.next_s()
    network.advance(1.0)
    network.start(short, 5.0, 1e6, 1e9, -1)  # goes on at once: the step is spent
    assert network.pos[short] + network.pos[long] == pytest.approx(100.0)


def test_a_hop_does_not_cost_a_step() -> None:
    """The last bytes pass a line of followers within the step, as the first do: 1,000 hops of steps
    of 50 ms took 47 s that no network takes.
    """
    fine, coarse = (
        simulate(
            Scenario(
                workers=60,
                size_bytes=20_000_000_000,
                link_mbit=10_000,
                topology=Topology.CHAIN,
                coalesce_pieces=256,
                step_s=step_s,
            )
        ).seconds
        for step_s in (0.001, 0.1)
    )
    assert coarse == pytest.approx(fine, abs=0.1)


def test_who_follows_one_that_ends_takes_the_rest_within_the_step() -> None:
    network = Network()
    network.edge[:] = 1e9
    line = []
    for _ in range(4):
        links = network.resource(100.0), network.resource(100.0)
        line.append(network.add(links, lag=10.0))
    network.start(line[0], 0.0, 50.0, 1e9, -1)
    for ahead, behind in pairwise(line):
        network.start(behind, 0.0, 50.0, 0.0, ahead)
    network.next_s()
    network.advance(0.6)  # the first needs 0.5 s, each of the others 0.1 s more
    assert list(network.pos[line]) == pytest.approx([50.0, 50.0, 40.0, 30.0])


@pytest.mark.parametrize("topology", [Topology.CHAIN, Topology.MESH])
def test_steps_cost_little_where_pieces_are_repaired(topology: Topology) -> None:
    exact, steps = (
        simulate(
            scenario(
                8, 400, topology=topology, corrupt=0.01, coalesce_pieces=16, step_s=step_s, seed=2
            )
        )
        for step_s in (0.0, 0.3)  # three pieces; half of it was lost with each repair
    )
    assert steps.violations == exact.violations == ()
    assert steps.seconds == pytest.approx(exact.seconds, rel=0.03)


def test_a_fleet_that_hears_of_its_plan_slowly_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand agents are told one after the other; nobody gives up a source that has not
    heard yet, and nobody counts as lost.
    """
    settings = CoordinatorSettings(beat_s=8.0, deadline_s=1e6)
    slow = replace(Timing(), calls_per_second=2.0)
    late = Simulation(
        Scenario(
            workers=24,
            size_bytes=1_000_000_000,
            link_mbit=10_000,
            topology=Topology.MESH,
            coalesce_pieces=32,
            timing=slow,
            settings=settings,
        )
    )
    lost: list[str] = []
    handle = late.control.state.handle

    def listening(event: Event, now_s: float) -> list[Effect]:
        effects = handle(event, now_s)
        reported = [each for each in effects if isinstance(each, EmitEvent)]
        lost.extend(str(each) for each in reported if each.name is EventName.SOURCE_LOST)
        return effects

    monkeypatch.setattr(late.control.state, "handle", listening)
    report = late.run()
    assert lost == []
    assert report.violations == ()
    assert late.control.deployment.epoch == 1
    assert report.seconds < report.bound_seconds + 24 / 2 + 1.0


def test_a_run_leaves_no_cycles_behind() -> None:
    """Collection is off while it runs: what only a collector frees stays until the end."""
    fleet = Scenario(
        workers=24,
        size_bytes=1_000_000_000,
        link_mbit=10_000,
        topology=Topology.MESH,
        fail=0.2,
        corrupt=0.01,
        coalesce_pieces=32,
        step_s=0.005,
    )
    simulation = Simulation(fleet)
    gc.collect()
    report = simulation.run()
    assert report.survivors_complete
    assert simulation.control.deployment.epoch > 1  # plans were made
    assert gc.collect() < 1000  # some hundred are this process's own
