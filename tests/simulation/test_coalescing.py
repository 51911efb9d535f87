"""Gathering pieces changes what is written down, not what happens."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.schemas import Topology
from paceline.simulation import Fault, Scenario, Simulation, simulate
from tests.simulation.kit import scenario, seconds

PIECES = 200


def both(**options: Any) -> tuple[float, float]:
    """Return the seconds of the per-piece run and of the coalesced one."""
    reports = [
        simulate(scenario(6, PIECES, coalesce_pieces=coalesce, **options)) for coalesce in (1, 16)
    ]
    for report in reports:
        assert report.violations == ()
        assert report.survivors_complete
    assert len({report.survivors for report in reports}) == 1
    assert reports[1].events < reports[0].events
    return reports[0].seconds, reports[1].seconds


@pytest.mark.parametrize("topology", [Topology.CHAIN, Topology.MESH])
def test_gathered_pieces_take_as_long_as_single_ones(topology: Topology) -> None:
    single, gathered = both(topology=topology)
    assert gathered == pytest.approx(single, rel=0.005)


@pytest.mark.parametrize(
    ("kind", "who", "rel"), [("silence", "node-2", 0.02), ("kill", "node-0", 0.03)]
)
def test_gathered_pieces_lose_as_much_to_a_death(kind: Any, who: str, rel: float) -> None:
    fault = Fault(at_s=0.5 * seconds(PIECES), worker=who, kind=kind)
    single, gathered = both(topology=Topology.CHAIN, faults=(fault,))
    assert gathered == pytest.approx(single, rel=rel)


def test_gathered_corruption_costs_what_single_pieces_cost() -> None:
    single, gathered = both(topology=Topology.CHAIN, corrupt=0.02)
    assert gathered == pytest.approx(single, rel=0.05)


@pytest.mark.parametrize(
    ("corrupt", "most"), [pytest.param(0.0, 1.005, marks=pytest.mark.nightly), (0.01, 1.018)]
)
def test_a_large_fleets_extents_cost_a_small_one_nothing(corrupt: float, most: float) -> None:
    """As coarse as for 10,000 workers. Seeds waited for word of what they had asked for (4 %);
    repairs in lumps added up (4 %); senders were left for runs of corrupt pieces among repairs of
    one or two, and as a spare's reader had asked far ahead, nobody ever went back.
    """
    fleet = Scenario(
        workers=16,
        size_bytes=500 * 10**9,
        piece_bytes=16 << 20,
        link_mbit=1e4,
        topology=Topology.TREE_OF_CHAINS,
        corrupt=corrupt,
        seed=7,
        coalesce_pieces=2048,
        step_s=0.24,
    )
    simulation = Simulation(fleet)
    left: list[str] = []
    simulation.streams.on_change = lambda host: left.append(host.name)
    report = simulation.run()
    assert report.violations == ()
    assert report.survivors_complete
    assert report.seconds < most * report.predicted_seconds
    assert left == [], "they gave up a source that lives"
