"""Hyper-parameter sweeps: an Optuna study whose trials are training jobs of the queue.

The loop asks the study for a trial, submits its job, reports the job's metric to the study while
the job runs, cancels the job where the pruner says so, and tells the study how the trial ended. The
study is stored after each step, so a sweep that was interrupted goes on with the same jobs.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from paceline.client import AWAY_S, Client, patiently
from paceline.config import Profile, with_job_settings
from paceline.errors import Conflict, InvalidInput, InvalidProfile, PacelineError
from paceline.extras import require_extras
from paceline.jobs.search_space import DO, Dimension
from paceline.jobs.sweep_study import NOWHERE, POINTS, opened, set_strategy, shown
from paceline.schemas import JobState, SweepShown

if TYPE_CHECKING:
    from optuna import Study, Trial

POLL_S = 2.0
STOPPED = "the sweep was cancelled"  # the reason of a trial that another one replaces
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

OnLine = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep searches, and how."""

    name: str
    model_id: str
    version: str
    snapshot: str
    space: Mapping[str, Dimension]
    trials: int = 16  # in all, those of earlier runs included
    parallel: int = 2
    sampler: Literal["tpe", "cmaes", "random"] = "tpe"
    pruner: Literal["none", "asha", "hyperband", "median"] = "none"
    seed: int | None = None  # the sampler's
    storage: str = "paceline-sweeps.sqlite"  # a file of SQLite, or SQLAlchemy's URL
    metric: str = "loss"  # of the job's report
    maximize: bool = False
    resources: Mapping[str, Any] = field(default_factory=dict)  # as of Client.submit
    settings: Mapping[str, object] = field(default_factory=dict)  # the same in each trial
    team: str = ""
    priority: int = 0

    def check(self, profile: Profile) -> None:
        """Raise InvalidInput unless each setting of the space may be a training's."""
        if not NAME.fullmatch(self.name):
            raise InvalidInput("not a sweep's name", got=self.name, wanted=NAME.pattern, do=DO)
        fixed = {f"training.{k}": v for k, v in self.resources.items() if k.startswith("ranks")}
        fixed |= self.settings
        for key, dimension in self.space.items():
            where = f'[space."{key}"]'
            if key in fixed:
                raise InvalidInput("a setting is fixed and searched", got=key, where=where,
                                   wanted="one of both", do=DO)  # fmt: skip
            for value in dimension.ends:
                try:
                    with_job_settings(profile, {**fixed, key: value})
                except InvalidProfile as error:
                    got = f"{key} = {value!r}: {error.what}, {error.got}"
                    raise InvalidInput("no training has this setting", got=got, where=where,
                                       wanted=error.wanted, do=DO) from error  # fmt: skip

    @property
    def identity(self) -> dict[str, Any]:
        """Return what must not change when the sweep goes on: else trials do not compare."""
        kept = ("model_id", "version", "snapshot", "metric", "maximize", "resources", "settings",
                "team", "priority")  # fmt: skip
        found = {key: getattr(self, key) for key in kept}
        found["space"] = {key: each.model_dump() for key, each in self.space.items()}
        made: dict[str, Any] = json.loads(json.dumps(found))  # as the study stores it
        return made


def run_sweep(
    sweep: Sweep,
    client: Client,
    *,
    on_line: OnLine = lambda _line: None,
    sleep: Callable[[float], None] = time.sleep,
    cancel_jobs: bool = False,
) -> SweepShown:
    """Run the sweep's trials, those of an interrupted run first, and return what came of them.

    A KeyboardInterrupt leaves the jobs running, and the same sweep again follows them; with
    ``cancel_jobs`` they are cancelled, and other trials replace them. Raises InvalidInput for a
    space that is not a training's, Conflict for a study of another sweep, and what `Client.submit`
    raises for a job that can never run.
    """
    require_extras("sweeps")
    sweep.check(client.runtime().profile)
    with opened(sweep.storage, sweep.name, sweep.identity) as study:
        set_strategy(study, sweep.sampler, sweep.pruner, sweep.seed)
        loop = _Loop(sweep, study, client, on_line)
        try:
            loop.run(sleep)
        except KeyboardInterrupt:
            if cancel_jobs:
                loop.cancel()
            raise
        return shown(study)


def report_sweep(name: str, storage: str) -> SweepShown:
    """Return what came of the stored sweep so far; raises NotFound."""
    require_extras("sweeps")
    with opened(storage, name, None) as study:
        return shown(study)


class _Loop:
    def __init__(self, sweep: Sweep, study: Study, client: Client, on_line: OnLine) -> None:
        self._sweep, self._study, self._client, self._on_line = sweep, study, client, on_line
        self._running: list[Trial] = []

    def run(self, sleep: Callable[[float], None]) -> None:
        from optuna.trial import Trial, TrialState

        for each in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            self._begin(Trial(self._study, each._trial_id))
        while True:
            while len(self._running) < self._sweep.parallel and self._needs_trials():
                self._begin(self._study.ask())
            if not self._running:
                return
            sleep(POLL_S)
            for trial in tuple(self._running):
                if self._has_ended(trial):
                    self._running.remove(trial)

    def cancel(self) -> None:
        for trial in self._running:
            job_id = trial.user_attrs["job_id"]
            try:
                self._client.coordinator.change_job(job_id, "cancel")
            except PacelineError as error:  # the trial stays: the sweep goes on with it
                self._on_line(f"{job_id} is not cancelled: {error.one_line()}")
            else:
                self._end(trial, "FAIL", reason=STOPPED)

    def _needs_trials(self) -> bool:
        trials = self._study.get_trials(deepcopy=False)
        counted = [each for each in trials if each.user_attrs.get("reason") != STOPPED]
        return len(counted) < self._sweep.trials

    def _begin(self, trial: Trial) -> None:
        """Follow the trial's job, which is submitted unless it was before."""
        sweep = self._sweep
        values = {key: each.suggest(trial, key) for key, each in sweep.space.items()}
        title, job_id = f"{sweep.name} trial {trial.number}", trial.user_attrs.get("job_id")
        if job_id is None:
            submit = partial(
                self._client.submit, sweep.model_id, sweep.version, sweep.snapshot,
                resources=sweep.resources, key=f"sweep:{sweep.name}:trial-{trial.number}",
                parameters={**sweep.settings, **values}, name=title, team=sweep.team,
                project=f"sweep-{sweep.name}", priority=sweep.priority,
            )  # fmt: skip
            try:
                job_id = patiently(submit, AWAY_S, self._on_line).job_id
            except InvalidProfile as error:  # these settings do not go together
                self._end(trial, "FAIL", reason=error.one_line())
                return
            except Conflict as error:
                do = "Does a sweep of another study have this name? Then choose another."
                raise Conflict(error.what, got=error.got, where=title, do=do) from error
            trial.set_user_attr("job_id", job_id)
        given = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in values.items())
        self._on_line(f"{title}: {job_id}, {given}")
        self._running.append(trial)

    def _has_ended(self, trial: Trial) -> bool:
        """Look at the trial's job; report, prune, or tell the study how it ended."""
        known, metric = trial.user_attrs, self._sweep.metric
        job = patiently(partial(self._client.job, known["job_id"]), AWAY_S, self._on_line)
        step, steps = (job.report.step, job.report.steps) if job.report else (0, 0)
        value = job.report.metrics.get(metric, math.nan) if job.report else math.nan
        # After a fault the job makes earlier points again: those are not new.
        point = step * POINTS // steps if steps else 0
        is_new = point > known.get("at", NOWHERE)[2]
        has_result = job.state in (JobState.SUCCEEDED, JobState.NEEDS_REVIEW)
        if is_new or has_result or job.state.is_final:
            trial.set_user_attr("at", (step, steps, point))
        if has_result:
            if math.isfinite(value):
                return self._end(trial, "COMPLETE", value)
            return self._end(trial, "FAIL", reason=f"its report has no finite {metric}")
        if job.state is JobState.CANCELLED and known.get("pruned"):
            return self._end(trial, "PRUNED")
        if job.state.is_final:
            return self._end(trial, "FAIL", reason=f"job {job.state}: {job.reason}")
        if not is_new or point == POINTS or not math.isfinite(value):
            return False
        trial.report(value, point)
        if not trial.should_prune():
            return False
        trial.set_user_attr("pruned", True)  # first: an interrupted sweep finds it
        try:
            self._client.coordinator.change_job(job.job_id, "cancel")
        except Conflict:  # it has just ended: the next look shows how
            return False
        return self._end(trial, "PRUNED")

    def _end(self, trial: Trial, state: str, value: float | None = None, reason: str = "") -> bool:
        from optuna.trial import TrialState

        if reason:
            trial.set_user_attr("reason", reason[:500])
        self._study.tell(trial, value, TrialState[state])
        figure = "" if value is None else f", {self._sweep.metric} {value:.6g}"
        at = f"{state.lower()} at step {trial.user_attrs.get('at', NOWHERE)[0]}{figure}"
        self._on_line(f"{self._sweep.name} trial {trial.number}: {at}. {reason}".rstrip(". "))
        return True
