"""What the installation's trainings and jobs used: MLflow's results and the table of jobs together.

The coordinator reads both. Where it does not answer, a machine with the state directory reads
MLflow alone. Imports neither MLflow nor pandas.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from time import monotonic

from paceline.client import CoordinatorClient
from paceline.config import PriceSettings, Runtime, TrainingSettings
from paceline.errors import InvalidInput, PacelineError, ServiceUnavailable
from paceline.jobs.cost import estimate, like
from paceline.jobs.usage import recorded
from paceline.registry import Registry
from paceline.schemas import CostEstimate, TrainingCosts, TrainingJob, TrainingUsage

MOST_ROWS = 20_000  # in one answer
RECENT_S = 60.0


def training_costs(
    jobs: Iterable[TrainingJob],
    runtime: Runtime,
    now: float,
    shown: Callable[[TrainingUsage], bool] = lambda _: True,
) -> TrainingCosts:
    """Return what ``jobs`` and MLflow's trainings used until ``now``, of those that are ``shown``;
    a note says where MLflow does not answer."""
    known = list(jobs)
    finished: list[TrainingUsage] = []
    without: list[str] = []
    notes: tuple[str, ...] = ()
    if runtime.endpoints.mlflow_url:
        try:
            finished, without = Registry.from_runtime(runtime).trainings()
        except PacelineError as error:
            notes = (f"trainings that no job is recorded for are not counted: {error.one_line()}",)
    rows = [each for each in recorded(known, finished, now) if shown(each)]
    of_jobs = {each.run_id for each in known if each.usage}
    return TrainingCosts(
        prices=runtime.profile.prices,
        usages=tuple(rows[:MOST_ROWS]),
        left_out=max(0, len(rows) - MOST_ROWS),
        without_result=sum(each not in of_jobs for each in without),
        notes=notes,
    )


class RecentCosts:
    """``training_costs`` of at most RECENT_S ago, for estimates: all of MLflow is not read for each
    of many submissions, nor waited for each time where it does not answer. Threads may share it."""

    def __init__(self, jobs: Callable[[], Iterable[TrainingJob]], runtime: Runtime) -> None:
        self._jobs, self._runtime = jobs, runtime
        self._lock = threading.Lock()
        self._costs: TrainingCosts | None = None
        self._read_s = 0.0

    def __call__(self) -> TrainingCosts:
        known = self._costs
        is_due = known is None or monotonic() - self._read_s >= RECENT_S
        if is_due and self._lock.acquire(blocking=known is None):
            try:
                if self._costs is known:  # no other thread read it meanwhile
                    self._costs = training_costs(self._jobs(), self._runtime, time.time())
                    self._read_s = monotonic()
            finally:
                self._lock.release()
        assert self._costs is not None
        return self._costs


def costs_of_installation(runtime: Runtime) -> TrainingCosts:
    """Return the installation's costs as its coordinator has them, else those of MLflow alone.

    Raises ServiceUnavailable where neither answers, and for a login whose coordinator does not.
    """
    note = "the coordinator does not run"
    if runtime.endpoints.coordinator_url:
        try:
            return CoordinatorClient.of(runtime).training_costs()
        except ServiceUnavailable as error:
            if runtime.is_login:
                raise
            note = error.one_line()
    finished, without = Registry.from_runtime(runtime).trainings()
    return TrainingCosts(
        prices=runtime.profile.prices,
        usages=tuple(finished),
        without_result=len(without),
        notes=(f"teams, projects and attempts of jobs are not known: {note}",),
    )


def estimate_like(
    model_id: str,
    settings: TrainingSettings,
    prices: PriceSettings,
    usages: Iterable[TrainingUsage],
    capacity: str = "",
) -> CostEstimate | None:
    """Return what a training of ``settings`` would take, from those of the same model with as many
    ranks, and cost where ``prices`` say it; None where there is no such training."""
    count = settings.ranks + settings.guard.spares
    earlier = [
        each
        for each in usages
        if each.model_id == model_id
        and each.tokens_per_step
        and (each.ranks or sum(each.accelerators.values())) == count
    ]
    if not earlier:
        return None
    try:
        alike = like(earlier[0], earlier)
        return estimate(prices, steps=settings.steps, earlier=alike, capacity=capacity)
    except InvalidInput:
        return None
