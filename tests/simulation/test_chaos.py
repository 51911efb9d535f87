"""Seeds of everything at once, the same report for the same seed, and planted bugs that show."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from paceline.relay.protocol import OriginBudget, RelaySession, Repairs, SourceSelector
from paceline.schemas import Topology
from paceline.simulation import Fault, Scenario, simulate
from tests.simulation.kit import scenario

TOPOLOGIES = [Topology.CHAIN, Topology.TREE, Topology.TREE_OF_CHAINS, Topology.MESH]


def chaos(seed: int, workers: int = 16, pieces: int = 64, **options: Any) -> Scenario:
    """Return a scenario in which about a fifth of the workers die, freeze, slow down or corrupt."""
    random = Random(seed)
    small = scenario(workers, pieces)
    names = random.sample(small.names(), 3)
    kinds = [random.choice(["kill", "silence", "freeze", "rate", "corrupt"]) for _ in names]
    faults = tuple(
        Fault(
            at_s=random.uniform(0.0, small.bound_s * 1.2),
            worker=name,
            kind=kind,  # type: ignore[arg-type]
            for_s=random.choice([1.5, 4.0]) if kind == "freeze" else 0.0,
            restart_s=random.choice([None, 1.0]) if kind == "kill" else None,
            value={"rate": small.link_mbit / 4, "corrupt": 0.5}.get(kind, 0.0),
        )
        for name, kind in zip(names, kinds, strict=True)
    )
    return scenario(
        workers,
        pieces,
        seed=seed,
        topology=random.choice(TOPOLOGIES),
        racks=random.choice([1, 4]),
        corrupt=random.choice([0.0, 0.01]),
        faults=faults,
        step_s=0.004,
        **options,
    )


# In world 760 a worker is frozen before it has lanes: it thaws without a session.
@pytest.mark.parametrize("seed", [1, 760])
def test_survivors_finish_whatever_happens(seed: int) -> None:
    report = simulate(chaos(seed))
    assert report.violations == (), f"replay with chaos({seed})"
    assert report.survivors_complete


def test_the_same_seed_gives_the_same_report_to_the_byte() -> None:
    first, second, other = (simulate(chaos(seed, 8, 32)).model_dump_json() for seed in (3, 3, 103))
    assert first == second != other


def test_a_session_that_publishes_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rejected = RelaySession._reject

    def believes_it(self: RelaySession, *args: Any) -> None:
        rejected(self, *args)
        extent = args[2]
        self._durable.add(extent)
        self.verified.add(extent)

    monkeypatch.setattr(RelaySession, "_reject", believes_it)
    report = simulate(scenario(6, 80, corrupt=0.2, seed=1))
    assert any(each.startswith("I1") for each in report.violations)


def test_a_session_that_never_repairs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repairs, "choose", lambda *_: None)
    report = simulate(scenario(6, 80, topology=Topology.CHAIN, corrupt=0.05))
    assert any(each.startswith("I7") for each in report.violations)
    assert not report.survivors_complete


def test_sessions_that_forget_the_origins_budget_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OriginBudget, "left_bytes", 1 << 60)
    monkeypatch.setattr(
        SourceSelector, "failures", lambda _self, source, _work: 0 if source.kind == "origin" else 1
    )
    report = simulate(scenario(6, 80, topology=Topology.CHAIN))
    assert any(each.startswith("I6") for each in report.violations)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(1000))
def test_survivors_finish_over_many_seeds(seed: int) -> None:
    report = simulate(chaos(seed))
    assert report.violations == (), f"replay with chaos({seed})"


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("workers", "seed", "most_s"),
    [*((100, seed, 424.0) for seed in range(3)), *((1_000, seed, 440.0) for seed in range(3))],
)
def test_large_fleets_survive(workers: int, seed: int, most_s: float) -> None:
    report = simulate(
        Scenario(
            workers=workers,
            size_bytes=500_000_000_000,
            link_mbit=10_000,
            fail=0.05,
            corrupt=0.01,
            seed=seed,
        )
    )
    assert report.violations == (), f"replay with seed {seed}"
    assert report.survivors_complete
    assert report.origin_ratio <= 1.02
    assert report.seconds <= most_s
