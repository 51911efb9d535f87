"""When to save: pure decisions, every time injected."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import CheckpointSettings
from paceline.training.interval import (
    DAY_S,
    SLOW_FACTOR,
    WRITE_SHARE,
    CheckpointInterval,
    FailureCount,
    SaveCosts,
    best_interval_s,
    mtbf_s,
    wanted_interval_s,
    wanted_steps,
)

seconds = st.floats(1e-4, 1e4)


def settings(**changes: object) -> CheckpointSettings:
    return CheckpointSettings.model_validate(changes)


def lost_share(interval: float, stall: float, mtbf: float) -> float:
    """Return the share of time that saving and repeating lost work cost, to first order."""
    return stall / interval + (interval + stall) / 2 / mtbf


@given(stall=st.floats(1e-3, 100), mtbf=st.floats(1e3, 1e7))
def test_auto_loses_least(stall: float, mtbf: float) -> None:
    best = best_interval_s(stall, mtbf)
    for factor in (0.5, 0.8, 1.25, 2.0):
        other = max(stall, best * factor)
        # Daly's correction moves the optimum of the first-order cost by one stall at most.
        slack = 2 * stall / best * lost_share(best, stall, mtbf)
        assert lost_share(best, stall, mtbf) <= lost_share(other, stall, mtbf) + slack


def test_auto_is_young_and_daly_s_figure() -> None:
    assert best_interval_s(0.5, 3600.0) == pytest.approx(math.sqrt(3600.0) - 0.5)
    assert best_interval_s(10.0, 15.0) == 15.0, "saves cost as much as failures: once between two"


def test_failures_count_once_some_were_seen() -> None:
    assert mtbf_s(2.0, FailureCount()) == DAY_S / 2
    assert mtbf_s(2.0, FailureCount(0, 10 * DAY_S)) == DAY_S / 2
    assert mtbf_s(1.0, FailureCount(9, DAY_S)) == pytest.approx(DAY_S / 9, rel=0.05)
    assert mtbf_s(1.0, FailureCount(10, 3600.0)) == pytest.approx(720, rel=0.05), (
        "fails again and again"
    )
    assert mtbf_s(1.0, FailureCount(1, 60.0)) > 3000, "one early failure does not decide alone"
    often = wanted_interval_s(settings(interval="auto"), COSTS, FailureCount(100, 3600.0))
    seldom = wanted_interval_s(settings(interval="auto"), COSTS, FailureCount())
    assert often < seldom


COSTS = SaveCosts(step_s=0.1, stall_s=0.01, write_s=1.0)


@given(
    stall=seconds,
    write=seconds,
    step=seconds,
    share=st.floats(0.001, 0.5),
    kind=st.sampled_from(["seconds", "auto"]),
)
def test_no_interval_stalls_more_than_its_share_or_outruns_the_store(
    stall: float, write: float, step: float, share: float, kind: str
) -> None:
    costs = SaveCosts(step_s=step, stall_s=stall, write_s=write)
    wanted = wanted_interval_s(
        settings(interval=kind, max_stall_share=share, every_s=5.0), costs, FailureCount()
    )
    assert stall / wanted <= share * (1 + 1e-9)
    assert write <= wanted
    assert kind == "auto" or wanted >= 5.0


@given(stall=seconds, step=seconds, share=st.floats(0.001, 0.5), every=st.integers(1, 1000))
def test_steps_stay_multiples_and_stall_no_more_than_their_share(
    stall: float, step: float, share: float, every: int
) -> None:
    costs = SaveCosts(step_s=step, stall_s=stall, write_s=0.0)
    wanted = wanted_steps(settings(every_steps=every, max_stall_share=share), costs)
    assert wanted % every == 0
    assert stall <= wanted * step * share * (1 + 1e-6)
    shorter = wanted - every
    assert shorter == 0 or stall > shorter * step * share * (1 - 1e-6), "no longer than needed"


def test_before_anything_was_measured_the_profile_decides() -> None:
    assert wanted_steps(settings(every_steps=7), None) == 7
    few = SaveCosts(step_s=0.001, stall_s=1.0, write_s=0.0, saves=1)
    assert wanted_steps(settings(every_steps=7), few) == 7, "one slow save proves nothing"
    assert wanted_interval_s(settings(interval="auto", every_s=30.0), None, FailureCount()) == 30.0


class Clock:
    """A training under an injected clock: what the checkpointer asks, step by step."""

    def __init__(self, step_s: float, stall_s: float, write_s: float, **changes: object) -> None:
        self.interval = CheckpointInterval(settings(**changes), FailureCount())
        self.step_s, self.stall_s, self.write_s = step_s, stall_s, write_s
        self.now, self.step = 0.0, 0
        self.next: int | None = None
        self.saved: list[float] = []
        self.asked = 0
        self.alerts: list[str] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += self.step_s
            self.step += 1
            self.interval.stepped(self.now)
            if self.next is None:
                self.next = self.interval.next_step(self.step - 1)
            if self.step < self.next:
                continue
            self.asked += 1
            due, self.next = self.interval.ask(self.step, self.now)
            if due:
                self.now += self.stall_s
                self.saved.append(self.now - self.stall_s)
                self.interval.saved(self.now, self.stall_s)
                alert = self.interval.written(self.step, self.write_s)
                self.alerts += [alert.kind] if alert else []
                self.next = self.interval.next_step(self.step)

    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.saved, self.saved[1:], strict=False)]


def test_every_so_many_steps() -> None:
    clock = Clock(0.1, 0.001, 0.05, every_steps=25)
    clock.run(200)
    assert len(clock.saved) == 8
    assert clock.asked == 8, "in between nobody looks at anything"


@pytest.mark.parametrize("changes", [{"every_steps": 25}, {"interval": "seconds", "every_s": 30.0}])
def test_the_next_save_is_expected_when_it_comes(changes: dict[str, object]) -> None:
    clock = Clock(0.5, 0.001, 0.2, **changes)
    assert clock.interval.expected_s is None
    clock.run(400)
    assert clock.interval.expected_s == pytest.approx(clock.gaps()[-1], rel=0.1)
    slow = Clock(0.5, 0.001, 100.0, **changes)
    slow.run(400)
    assert slow.interval.expected_s >= 100.0, "a save that takes so long is not late before"


@given(step_s=st.floats(0.01, 20), stall_s=st.floats(0.001, 0.5))
def test_every_so_many_seconds_and_seldom_asked(step_s: float, stall_s: float) -> None:
    clock = Clock(step_s, stall_s, 0.1, interval="seconds", every_s=30.0, max_stall_share=0.5)
    clock.run(int(400 / step_s) + 2)
    for gap in clock.gaps():
        assert 30.0 - step_s <= gap <= 30.0 + step_s + stall_s
    assert clock.asked <= len(clock.saved) * 15 + 20, "the clock is looked at a few times a save"


def test_auto_saves_more_often_where_saves_cost_less() -> None:
    cheap = Clock(1.0, 0.01, 0.5, interval="auto", failures_per_day=24)
    dear = Clock(1.0, 1.0, 0.5, interval="auto", failures_per_day=24)
    for clock in (cheap, dear):
        clock.run(3000)
    assert cheap.gaps()[-1] == pytest.approx(best_interval_s(0.01, 3600), abs=2)
    assert dear.gaps()[-1] == pytest.approx(best_interval_s(1.0, 3600), abs=2)


def test_a_store_that_slows_lengthens_the_interval_and_is_told_once_until_it_is_well() -> None:
    clock = Clock(0.5, 0.01, 1.0, interval="seconds", every_s=10.0)
    clock.run(100)
    assert clock.gaps()[-1] == pytest.approx(10.0, abs=1)
    clock.write_s = 40.0
    clock.run(400)
    assert clock.gaps()[-1] == pytest.approx(40.0 / WRITE_SHARE, abs=2)
    assert clock.alerts == ["checkpoint-storage-slow"]
    clock.write_s = 1.0
    clock.run(800)
    assert clock.gaps()[-1] == pytest.approx(10.0, abs=1), "and shortens again"
    clock.write_s = 1.0 * SLOW_FACTOR * 10
    clock.run(200)
    assert len(clock.alerts) == 2


def test_a_save_that_is_put_off_alerts_once() -> None:
    interval = CheckpointInterval(settings(), FailureCount())
    assert interval.put_off(5) is not None
    assert interval.put_off(6) is None
    interval.written(7, 0.5)
    assert interval.put_off(8) is not None


def test_the_first_save_makes_buffers_and_does_not_count_once_there_is_another() -> None:
    interval = CheckpointInterval(settings(), FailureCount())
    interval.stepped(0.0)
    interval.stepped(0.1)
    interval.saved(5.0, 5.0)
    assert interval.costs is not None
    assert interval.costs.stall_s == 5.0
    interval.saved(6.0, 0.01)
    assert interval.costs.stall_s == 0.01
