"""With software that takes no time the simulator gives what the closed formulas say."""

from __future__ import annotations

import pytest

from paceline.schemas import Topology
from paceline.simulation import simulate
from tests.simulation.kit import LINK, PIECE, assert_well, scenario, seconds, timeless


@pytest.mark.parametrize(("workers", "pieces"), [(1, 40), (8, 200)])
def test_a_chain_takes_the_model_and_one_piece_a_hop(workers: int, pieces: int) -> None:
    report = timeless(workers, pieces, Topology.CHAIN)
    assert report.seconds == pytest.approx(seconds(pieces + workers - 1), rel=0.005)
    assert_well(report)
    assert report.origin_bytes == pieces * PIECE


def test_direct_shares_the_source() -> None:
    report = timeless(6, 50, Topology.DIRECT)
    assert report.seconds == pytest.approx(seconds(6 * 50), rel=0.005)
    assert report.origin_ratio == pytest.approx(6.0)


def test_a_binary_tree_takes_the_model_twice() -> None:
    report = timeless(7, 200, Topology.TREE)
    # Each host sends two copies; a hop delays by one piece at half the rate.
    assert report.seconds == pytest.approx(seconds(2 * 200 + 2 * 2 - 1), rel=0.006)


def test_a_slow_source_is_the_bound() -> None:
    report = timeless(4, 100, Topology.CHAIN, external_mbit=LINK / 4)
    # The coordinator knows only the workers' links, and looks for who is slow: a little is lost.
    assert report.seconds == pytest.approx(seconds(4 * (100 + 3)), rel=0.01)
    assert report.bound_seconds == pytest.approx(seconds(400))


def test_an_oversubscribed_uplink_is_the_bound() -> None:
    # 4 hosts a rack behind an uplink for one of them at half its rate: a chain crosses it once.
    report = timeless(8, 200, Topology.CHAIN, racks=2, oversubscription=8.0)
    assert report.seconds == pytest.approx(seconds(2 * 200), rel=0.03)
    assert report.cross_rack_bytes == 200 * PIECE


def test_the_coordinator_s_plans_count_on_the_network_that_is_simulated() -> None:
    known = {"settings": None, "topology": Topology.CHAIN}
    slow = simulate(scenario(4, 100, external_mbit=LINK / 4, **known))
    assert slow.predicted_seconds == pytest.approx(seconds(400), rel=0.05)
    shared = simulate(scenario(8, 100, racks=2, oversubscription=16.0, **known))
    assert shared.predicted_seconds == pytest.approx(seconds(400), rel=0.05)


def test_a_slow_disk_is_the_bound() -> None:
    report = timeless(3, 100, Topology.CHAIN, disk_mbit=LINK / 2)
    assert report.seconds == pytest.approx(seconds(2 * (100 + 2)), rel=0.005)


@pytest.mark.parametrize("topology", [Topology.TREE_OF_CHAINS, Topology.MESH, Topology.AUTO])
def test_stripes_take_about_what_their_plan_says(topology: Topology) -> None:
    report = timeless(16, 200, topology, racks=4)
    assert report.seconds == pytest.approx(report.predicted_seconds, rel=0.03)
    assert report.violations == ()


def test_one_worker_and_one_byte() -> None:
    options = {"size_bytes": 1, "piece_bytes": 0, "chunk_bytes": 0}
    report = simulate(scenario(1, 1, **options))
    assert report.survivors_complete
    assert report.origin_bytes == 1
