"""What corrupt pieces may cost a line: their own transfers, and nobody's patience."""

from __future__ import annotations

from paceline.plan import origin_cap_bytes, origin_shares
from paceline.schemas import Topology
from paceline.simulation import Scenario, Simulation

GB = 10**9


def test_one_corrupt_transfer_in_a_hundred_costs_repairs_and_no_replan() -> None:
    """This seed took a second plan, and 10 % instead of 3, while spares sent the repairs and the
    head's share of the fuse was what it needs on average.
    """
    line = Scenario(
        workers=30,
        size_bytes=50 * GB,
        link_mbit=1e4,
        topology=Topology.CHAIN,
        corrupt=0.01,
        seed=2,
        coalesce_pieces=512,
        step_s=0.05,
    )
    simulation = Simulation(line)
    report = simulation.run()
    assert report.violations == ()
    assert report.corrupt_pieces > 3_000
    assert report.seconds < 1.04 * line.bound_s
    assert simulation.control.deployment.epoch == 1, "nobody waited for a new plan"


def test_a_head_can_pay_for_its_repairs() -> None:
    size = 500 * GB
    for workers in (2, 8, 1_000, 10_000):
        head, *others = origin_shares(size, 0, [size] + [0] * (workers - 1))
        assert head >= 1.015 * size
        assert head + sum(others) <= origin_cap_bytes(size)
        assert min(others) > 0
