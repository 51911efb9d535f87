"""Each kind of fault, alone: survivors finish, and only what was decided in sessions and plans
follows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import InvalidInput
from paceline.plan import Standing
from paceline.schemas import Topology
from paceline.simulation import Fault, Simulation, read_faults, simulate
from paceline.simulation.control import DEPLOYMENT
from tests.simulation.kit import LINK, PATIENCE, assert_well, scenario, seconds

MIDDLE = seconds(60)


def after(*faults: Fault, topology: Topology = Topology.CHAIN, **options: object) -> float:
    """Return how long eight workers take for 120 pieces when ``faults`` happen."""
    report = simulate(scenario(8, 120, topology=topology, faults=faults, **options))
    assert_well(report)
    return report.seconds


@pytest.mark.parametrize("topology", [Topology.CHAIN, Topology.TREE_OF_CHAINS, Topology.MESH])
def test_a_reset_costs_little(topology: Topology) -> None:
    well = after(topology=topology)
    hurt = after(Fault(at_s=MIDDLE, worker="node-3", kind="kill"), topology=topology)
    assert hurt <= well + 3.0


def test_silence_costs_a_deadline_more_than_a_reset() -> None:
    reset = after(Fault(at_s=MIDDLE, worker="node-3", kind="kill"))
    silence = after(Fault(at_s=MIDDLE, worker="node-3", kind="silence"))
    assert reset < silence <= reset + 4.0


def test_the_head_of_the_line_may_die() -> None:
    report = simulate(scenario(8, 120, faults=(Fault(at_s=MIDDLE, worker="node-0", kind="kill"),)))
    assert_well(report)
    assert report.killed == ("node-0",)
    assert report.survivors == 7


def test_a_worker_that_comes_back_goes_on_from_its_disk() -> None:
    fault = Fault(at_s=MIDDLE, worker="node-4", kind="kill", restart_s=2.0)
    simulation = Simulation(scenario(8, 120, faults=(fault,)))
    report = simulation.run()
    assert_well(report)
    assert report.survivors == 8
    host = simulation.streams.hosts["node-4"]
    again = sum(tally.pieces for (_, reader), tally in host.edges.items() if reader == host.name)
    assert host.incarnation == 2
    assert again < 2 * 120 - 30  # both lives together


def test_a_frozen_worker_finishes_after_it_thaws() -> None:
    report = simulate(
        scenario(6, 80, faults=(Fault(at_s=3.0, worker="node-2", kind="freeze", for_s=6.0),))
    )
    assert_well(report)
    assert report.survivors == 6


def test_others_do_not_wait_for_a_slow_link() -> None:
    slow = Fault(at_s=0.0, worker="node-3", kind="rate", value=LINK / 5)
    simulation = Simulation(scenario(8, 160, topology=Topology.CHAIN, faults=(slow,)))
    simulation.run()
    others = [h.published_s for name, h in simulation.streams.hosts.items() if name != "node-3"]
    assert max(done for done in others if done is not None) <= 1.2 * seconds(160)


def test_corrupt_pieces_travel_one_hop() -> None:
    report = simulate(scenario(8, 120, corrupt=0.03))
    assert_well(report)
    assert report.corrupt_pieces > 0


def test_a_sender_that_corrupts_everything_is_left() -> None:
    fault = Fault(at_s=2.0, worker="node-2", kind="corrupt", value=1.0)
    simulation = Simulation(scenario(8, 120, faults=(fault,)))
    report = simulation.run()
    assert_well(report)
    health = simulation.control.state.deployment_state(DEPLOYMENT).standings
    assert health.demoted() == {"node-2": Standing.QUARANTINED}
    hosts = simulation.streams.hosts.values()
    assert all(host.published_s is not None for host in hosts), "its own copy is complete, too"
    found = {edge: tally.corrupt for host in hosts for edge, tally in host.edges.items()}
    assert {edge for edge, corrupt in found.items() if corrupt} == {("node-2", "node-3")}
    assert 0 < report.corrupt_pieces < 20, "it is left at once"


def test_a_schedule_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(json.dumps([{"at_s": 1.5, "worker": "node-1", "kind": "kill"}]))
    assert read_faults(path) == (Fault(at_s=1.5, worker="node-1", kind="kill"),)


@pytest.mark.parametrize(
    "text", ["", "{}", '[{"at_s": 1}]', '[{"at_s": -1, "worker": "a", "kind": "kill"}]',
             '[{"at_s": 1, "worker": "a", "kind": "explode"}]'],
)  # fmt: skip
def test_a_bad_schedule_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "faults.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="fault schedule") as refused:
        read_faults(path)
    assert "further information" not in str(refused.value)  # of a library's manual


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"size_bytes": 0},
        {"link_mbit": 0.0},
        {"fail": 1.5},
        {"corrupt": -0.1},
        {"oversubscription": 0.5},
        {"faults": (Fault(at_s=1.0, worker="nobody", kind="kill"),)},
    ],
)
def test_a_bad_scenario_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="got"):
        scenario(**{"workers": 4, "pieces": 10, **wrong})


def test_a_lost_source_is_told_of_before_the_next_beat_is_due() -> None:
    """As real agents do (``relay/share.news``); a large fleet's beats are seconds apart."""
    fault = Fault(at_s=seconds(100), worker="node-2", kind="kill")
    settings = replace(PATIENCE, beat_s=5.0)
    line = scenario(6, 200, topology=Topology.CHAIN, faults=(fault,), settings=settings)
    simulation = Simulation(line)
    suspected: list[bool] = []
    fleet = simulation.control.state.fleet
    simulation.streams.clock.at(
        fault.at_s + 0.1, lambda: suspected.append(fleet._members["node-2"].suspected)
    )
    assert_well(simulation.run())
    assert suspected == [True]
