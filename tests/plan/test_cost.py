"""What plans take: the mission's figures, what limits a fleet, and that one formula says it all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from paceline.errors import InvalidInput, InvalidPlan
from paceline.plan import (
    SHARING_OVERHEAD,
    FleetDescription,
    Prediction,
    death_cost_s,
    plan_table,
    predict,
)
from paceline.schemas import PlanRow, Topology
from tests.plan.kit import MIB, RELAYED, STRIPED, P, S, manifest_of, plan, racks_of, worker

MODEL = 500 * 10**9


def told(topology: str, workers: int, **more: object) -> Prediction:
    given = {
        "total_bytes": MODEL,
        "piece_bytes": 4 * MIB,
        "link_mbit": 10_000,
        "racks": -(-workers // 32),
        **more,
    }
    return predict(topology, workers=workers, **given)  # type: ignore[arg-type]


def rows(workers: int, **more: object) -> dict[str, PlanRow]:
    fleet = FleetDescription(size_bytes=MODEL, workers=workers, link_mbit=10_000, **more)  # type: ignore[arg-type]
    return {row.topology: row for row in plan_table(fleet).rows}


@pytest.mark.parametrize(
    ("workers", "naive", "tree", "chunks", "chain"),
    [(100, 40_000, 811, 479, 400.3), (1000, 400_000, 816, 1199, 403)],
)
def test_the_mission_s_table_comes_out(
    workers: int, naive: float, tree: float, chunks: float, chain: float
) -> None:
    table = rows(workers)
    assert table["naive"].predicted_seconds == naive
    assert round(table["binary-tree"].predicted_seconds) == tree
    assert round(table["chunk-chain"].predicted_seconds) == chunks
    assert table["chain"].predicted_seconds == pytest.approx(chain, abs=0.5)
    assert all(table[name].reference for name in ("naive", "binary-tree", "chunk-chain"))
    assert not any(table[topology].reference for topology in RELAYED)


@pytest.mark.parametrize(
    ("workers", "goal", "chosen"),
    [(100, 404, "chain"), (1000, 412, "chain"), (10_000, 440, "tree-of-chains")],
)
def test_a_chain_reaches_the_goal_until_depth_and_deaths_outweigh_it(
    workers: int, goal: float, chosen: str
) -> None:
    table = plan_table(FleetDescription(size_bytes=MODEL, workers=workers, link_mbit=10_000))
    assert table.chosen == chosen
    best = next(row for row in table.rows if row.topology == table.chosen)
    assert best.predicted_seconds <= goal
    assert best.expected_seconds == min(
        row.expected_seconds for row in table.rows if not row.reference
    )


def test_each_worker_before_one_adds_what_its_death_is_expected_to_cost() -> None:
    # One in a hundred dies: four in five cost 0.2 s, one is noticed after a second; 998 hops have
    # somebody that may die before the last but one.
    assert death_cost_s(0.003) == pytest.approx(0.01 * (0.2 + 0.2 * 1.0))
    assert death_cost_s(1.0) == pytest.approx(0.01 * (0.2 + 0.2 * 20.0)), (
        "slow pieces, later noticed"
    )
    assert told("chain", 1000).death_seconds == pytest.approx(999 * death_cost_s(0.003))
    assert told("chain", 1).death_seconds == 0
    assert told("mesh", 1000).death_seconds < 0.1 * told("chain", 1000).death_seconds


@pytest.mark.parametrize(("topology", "penalty"), SHARING_OVERHEAD.items())
def test_streams_sharing_links_cost_the_measured_overhead(
    topology: Topology, penalty: float
) -> None:
    assert told(topology, 100).seconds == pytest.approx(400 * (1 + penalty), rel=0.01)
    assert told(topology, 1).seconds == pytest.approx(400, rel=0.01), "one stream shares nothing"


@pytest.mark.parametrize("workers", [100, 320, 3200])
@pytest.mark.parametrize("topology", STRIPED)
def test_stripes_stay_within_three_percent_of_what_sharing_costs(
    topology: Topology, workers: int
) -> None:
    made = told(topology, workers, chunk_bytes=238 * 4 * MIB)
    assert made.seconds <= 1.03 * (1 + SHARING_OVERHEAD[topology]) * made.bound_seconds
    assert made.origin_bytes == MODEL
    assert made.cross_rack_bytes == (-(-workers // 32) - 1) * MODEL, "the least there can be"


def test_what_limits_a_fleet_is_named() -> None:
    assert told("chain", 100).limited_by == "link"
    assert told("direct", 100).limited_by == "origin"
    assert told("chain", 100, external_mbit=1000).limited_by == "origin"
    slow_disk = told("chain", 100, disk_mbit=5000)
    assert slow_disk.limited_by == "disk"
    assert slow_disk.seconds == pytest.approx(800, abs=0.5)
    assert told("chain", 10_000).limited_by == "depth"
    assert told("mesh", 64, racks=64, oversubscription=4).limited_by == "uplink"


def test_an_uplink_carries_its_share() -> None:
    # 8 hosts behind a quarter of their links: 20 Gbit/s for one copy in and one out
    assert told("chain", 64, racks=8, oversubscription=4).seconds == pytest.approx(400, abs=1)
    # 2 hosts behind 5 Gbit/s
    assert told("chain", 64, racks=32, oversubscription=4).seconds == pytest.approx(800, abs=1)


def test_a_slow_source_is_the_bound() -> None:
    for topology in RELAYED:
        made = told(topology, 50, external_mbit=1000)
        assert made.bound_seconds == 4000
        assert made.seconds <= 1.01 * (1 + SHARING_OVERHEAD.get(topology, 0.0)) * made.bound_seconds


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 40),
    topology=st.sampled_from(list(Topology)),
    external=st.sampled_from([None, 10.0, 400.0]),
    racks=st.integers(1, 5),
    oversubscription=st.sampled_from([1.0, 4.0]),
)
def test_a_plan_predicts_the_same_as_predict(
    count: int, topology: Topology, external: float | None, racks: int, oversubscription: float
) -> None:
    fleet = [worker(n, rack=f"r{n * min(racks, count) // count}") for n in range(count)]
    made = plan(fleet, topology, external_mbit=external, oversubscription=oversubscription)
    forecast = predict(
        topology,
        total_bytes=S,
        workers=count,
        piece_bytes=P,
        link_mbit=40.0,
        external_mbit=external,
        racks=racks,
        chunk_bytes=2 * P,
        oversubscription=oversubscription,
    )
    assert made.predicted_seconds == pytest.approx(forecast.seconds)
    assert made.bound_seconds == forecast.bound_seconds <= made.predicted_seconds + 1e-9
    assert made.cross_rack_bytes == forecast.cross_rack_bytes
    assert (made.origin_bytes, made.depth) == (forecast.origin_bytes, forecast.depth)


@pytest.mark.parametrize("topology", RELAYED)
def test_a_fleet_that_holds_half_takes_half_as_long(topology: Topology) -> None:
    manifest = manifest_of(16, 100)
    fleet = racks_of(24, 8)
    whole = plan(fleet, topology, manifest)
    half = plan([replace(each, held_pieces=800) for each in fleet], topology, manifest)
    assert half.predicted_seconds == pytest.approx(whole.predicted_seconds / 2, rel=0.1)
    assert half.bound_seconds == whole.bound_seconds
    assert half.origin_bytes == pytest.approx(whole.origin_bytes / 2)


@pytest.mark.parametrize("topology", RELAYED)
def test_one_slow_worker_is_the_only_one_to_wait(topology: Topology) -> None:
    fleet = racks_of(40, 10)
    fleet[7] = replace(fleet[7], link_mbit=10.0)
    manifest = manifest_of(16, 200)
    made = plan(fleet, topology, manifest)
    alone = manifest.total_size / (10e6 / 8)
    most = 1.1 * (1 + SHARING_OVERHEAD.get(Topology(topology), 0.0)) * alone
    assert alone <= made.predicted_seconds <= most
    others = [lane.expected_bytes_s for part in made.workers[:-1] for lane in part.lanes]
    assert min(others) >= 0.9 * 5e6 / max(2, len(made.workers[0].lanes))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"size_bytes": 0}, "nothing to move"),
        ({"workers": 0}, "number of workers"),
        ({"workers": 10**9}, "number of workers"),
        ({"racks": -1}, "number of racks"),
        ({"oversubscription": 0.5}, "oversubscription"),
        ({"link_mbit": 0.0}, "link speed"),
        ({"piece_bytes": 7}, "piece size"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(change: dict[str, float], says: str) -> None:
    given = {"size_bytes": MODEL, "workers": 10, "link_mbit": 1e4, **change}
    with pytest.raises(InvalidInput, match=says):
        plan_table(FleetDescription(**given))  # type: ignore[arg-type]


def test_nothing_to_predict_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="nothing to predict"):
        told("chain", 0)
    with pytest.raises(InvalidPlan, match="no such topology"):
        told("ring", 3)
