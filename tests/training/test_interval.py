"""When to save: pure decisions, every time injected."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from paceline.config import CheckpointSettings
from paceline.training import CheckpointInterval, FailureCount

DAY_S = 86_400.0


class Clock:
    """A training under an injected clock: what the checkpointer asks, step by step."""

    def __init__(
        self,
        step_s: float,
        stall_s: float,
        write_s: float,
        failures: FailureCount | None = None,
        **changes: object,
    ) -> None:
        settings = CheckpointSettings.model_validate(changes)
        self.interval = CheckpointInterval(settings, failures or FailureCount())
        self.step_s, self.stall_s, self.write_s = step_s, stall_s, write_s
        self.now, self.step = 0.0, 0
        self.saved: list[float] = []
        self.saved_steps: list[int] = []
        self.alerts: list[str] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += self.step_s
            self.step += 1
            self.interval.stepped(self.now)
            if self.interval.due(self.step, self.now):
                self.now += self.stall_s
                self.saved.append(self.now - self.stall_s)
                self.saved_steps.append(self.step)
                self.interval.saved(self.now, self.stall_s)
                alert = self.interval.written(self.step, self.write_s)
                self.alerts += [alert.kind] if alert else []

    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.saved, self.saved[1:], strict=False)]


@pytest.mark.parametrize("changes", [{"every_steps": 60}, {"interval": "seconds", "every_s": 30.0}])
def test_every_so_many_steps_or_seconds_and_expected_then(changes: dict[str, object]) -> None:
    clock = Clock(0.5, 0.001, 0.2, **changes)
    assert clock.interval.expected_s is None
    clock.run(400)
    assert clock.gaps() == pytest.approx([30.0] * 5, abs=0.6)
    assert clock.interval.expected_s == pytest.approx(clock.gaps()[-1], rel=0.1)
    slow = Clock(0.5, 0.001, 100.0, **changes)
    slow.run(400)
    assert slow.interval.expected_s >= 100.0, "a save that takes so long is not late before"


@pytest.mark.parametrize(
    ("stall_s", "failures", "mtbf_s"),
    [
        (0.01, None, 3600.0),
        (1.0, None, 3600.0),
        (1.0, FailureCount(10, 3600.0), 7200 / 11),  # the profile's rate weighs as one hour
        (1.0, FailureCount(0, 10 * DAY_S), 3600.0),
    ],
)
def test_auto_is_young_and_dalys_interval_of_cost_and_failure_rate(
    stall_s: float, failures: FailureCount | None, mtbf_s: float
) -> None:
    clock = Clock(1.0, stall_s, 0.5, failures, interval="auto", failures_per_day=24)
    clock.run(1000)
    best = math.sqrt(2 * stall_s * mtbf_s) - stall_s
    assert clock.gaps()[-1] == pytest.approx(best, abs=2)


@settings(max_examples=25, deadline=None)
@given(
    stall_s=st.floats(1e-3, 10),
    write_s=st.floats(1e-3, 100),
    step_s=st.floats(0.1, 10),
    share=st.floats(0.01, 0.5),
    kind=st.sampled_from(["steps", "seconds", "auto"]),
)
def test_no_interval_stalls_more_than_its_share_or_outruns_the_store(
    stall_s: float, write_s: float, step_s: float, share: float, kind: str
) -> None:
    clock = Clock(
        step_s, stall_s, write_s, interval=kind, max_stall_share=share, every_steps=7, every_s=5.0
    )
    clock.run(3000)
    for gap in clock.gaps()[5:]:  # the first saves prove nothing
        assert stall_s <= (gap + step_s) * share * 1.01
        assert kind == "steps" or write_s <= gap + step_s
    if kind == "steps":
        assert all(step % 7 == 0 for step in clock.saved_steps)


def test_a_slow_store_lengthens_the_interval_and_alerts_once_until_well() -> None:
    clock = Clock(0.5, 0.01, 1.0, interval="seconds", every_s=10.0)
    clock.run(100)
    assert clock.gaps()[-1] == pytest.approx(10.0, abs=1)
    clock.write_s = 40.0
    clock.run(400)
    assert clock.gaps()[-1] == pytest.approx(50.0, abs=2)
    assert clock.alerts == ["checkpoint-storage-slow"]
    clock.write_s = 1.0
    clock.run(800)
    assert clock.gaps()[-1] == pytest.approx(10.0, abs=1), "and shortens again"
    clock.write_s = 30.0
    clock.run(200)
    assert len(clock.alerts) == 2


def test_a_save_that_is_put_off_alerts_once() -> None:
    interval = CheckpointInterval(CheckpointSettings(), FailureCount())
    assert interval.postponed(5) is not None
    assert interval.postponed(6) is None
    interval.written(7, 0.5)
    assert interval.postponed(8) is not None


def test_the_first_saves_cost_is_dropped_after_the_second_save() -> None:
    interval = CheckpointInterval(CheckpointSettings(), FailureCount())
    interval.stepped(0.0)
    interval.stepped(0.1)
    interval.saved(5.0, 5.0)
    assert interval.costs is not None
    assert interval.costs.stall_s == 5.0
    interval.saved(6.0, 0.01)
    assert interval.costs.stall_s == 0.01
