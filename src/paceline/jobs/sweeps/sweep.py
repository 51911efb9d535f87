"""Hyper-parameter sweeps: an Optuna study whose trials are training jobs of the queue.

The loop asks the study for a trial, submits its job, reports the job's metric to the study while
the job runs, cancels the job where the pruner says so, and tells the study how the trial ended. The
study is stored after each step, so a sweep that was interrupted goes on with the same jobs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from paceline.client import OUTAGE_S, Client, retry, runtime_of
from paceline.errors import Cancelled, Conflict, InvalidProfile, NotFound, PacelineError
from paceline.extras import require_extras
from paceline.jobs.cost import money
from paceline.jobs.sweeps.search_space import Sweep
from paceline.jobs.sweeps.study import (
    LOOK_S,
    NOWHERE,
    POINTS,
    held,
    opened,
    set_strategy,
    shown,
)
from paceline.jobs.usage import require_prices, uncounted
from paceline.schemas import JobState, SweepShown

if TYPE_CHECKING:
    from optuna import Study, Trial

STOPPED = "the sweep was cancelled"  # the reason of a trial that another one replaces
OnLine = Callable[[str], None]
OnChange = Callable[[SweepShown], None]


def run_sweep(
    sweep: Sweep,
    client: Client,
    storage: str,
    *,
    run_id: str = "",
    on_line: OnLine = lambda _line: None,
    on_change: OnChange = lambda _found: None,
    sleep: Callable[[float], None] = time.sleep,
    cancels: Callable[[], bool] = lambda: False,
) -> SweepShown:
    """Run the sweep's trials, those of an interrupted run first, and return what came of them.

    ``storage`` is a file of SQLite or SQLAlchemy's URL; ``run_id`` is of the run in MLflow that
    the trials' runs are below, "" for none. ``on_change`` receives what is found whenever a trial
    has ended. A KeyboardInterrupt, or a Cancelled that ``sleep`` raises, leaves the jobs running,
    and the same sweep again follows them; where ``cancels()`` says so they are cancelled, and other
    trials replace them.

    Raises InvalidInput for a space that is not a training's, Conflict for a study of another sweep,
    RunElsewhere for one that another process runs, and what `Client.submit` raises for a job that
    can never run.
    """
    require_extras("sweeps")
    sweep.check(runtime_of(client).profile)
    if sweep.budget:  # a login's profile has no prices
        require_prices(sweep.budget, client.coordinator.training_costs().prices)
    with opened(storage, sweep.name, sweep.identity) as study, held(study, sleep) as renew:
        if run_id and not study.user_attrs.get("run_id"):
            study.set_user_attr("run_id", run_id)
        set_strategy(study, sweep.sampler, sweep.pruner, sweep.seed)
        loop = _Loop(sweep, study, client, on_line)
        try:
            while not loop.is_done():
                sleep(LOOK_S)
                renew()
                if loop.look():
                    on_change(shown(study))
        except (KeyboardInterrupt, Cancelled):
            if cancels():
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
        self._run_id = study.user_attrs.get("run_id", "")
        self._resources = sweep.resources.model_dump(exclude_defaults=True)
        self._spent: dict[str, float] = {}  # of each job that has ended
        self._currency = self._stopped = ""
        study.set_user_attr("stopped", "")
        from optuna.trial import Trial, TrialState

        self._left = [
            Trial(study, each._trial_id)
            for each in study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        ]

    def is_done(self) -> bool:
        """Begin the trials that may run now; return whether none does."""
        while self._left:
            trial = self._left.pop(0)
            if "job_id" in trial.user_attrs or not self._is_stopped() or self._find_job(trial):
                self._begin(trial)
            else:
                self._end(trial, "FAIL", reason=STOPPED)
        if self._has_room() and not self._is_stopped():
            while self._has_room():
                self._begin(self._study.ask())
        return not self._running

    def look(self) -> bool:
        """Look at each running trial's job; return whether any has ended."""
        before = len(self._running)
        for trial in tuple(self._running):
            if self._has_ended(trial):
                self._running.remove(trial)
        return len(self._running) < before

    def cancel(self) -> None:
        for trial in self._running:
            job_id = trial.user_attrs["job_id"]
            try:
                self._client.coordinator.change_job(job_id, "cancel")
            except PacelineError as error:  # the trial stays: the sweep goes on with it
                self._on_line(f"{job_id} is not cancelled: {error.one_line()}")
            else:
                self._end(trial, "FAIL", reason=STOPPED)

    def _title(self, trial: Trial) -> str:
        return f"{self._sweep.name} trial {trial.number}"

    def _find_job(self, trial: Trial) -> bool:
        """Return whether the trial has a job that was submitted, but not noted, and note it."""
        title = self._title(trial)
        project = self._sweep.project or f"sweep-{self._sweep.name}"
        asked = partial(self._client.coordinator.jobs, name=title, project=project)
        for job in retry(asked, OUTAGE_S, self._on_line).jobs:
            if job.spec.name == title and job.spec.sweep == self._run_id:
                trial.set_user_attr("job_id", job.job_id)
                return True
        return False

    def _has_room(self) -> bool:
        if len(self._running) >= self._sweep.parallel:
            return False
        trials = self._study.get_trials(deepcopy=False)
        counted = [each for each in trials if each.user_attrs.get("reason") != STOPPED]
        return len(counted) < self._sweep.trials

    def _is_stopped(self) -> bool:
        """Return whether no other trial may begin, and keep why with the study."""
        if self._sweep.budget and not self._stopped and (why := self._budget_reason()):
            self._stopped = why
            self._study.set_user_attr("stopped", why)
            self._on_line(f"{self._sweep.name}: no other trial starts: {why}")
        return bool(self._stopped)

    def _budget_reason(self) -> str:
        """Return why the trials' cost forbids another one; "" where the budget is not spent."""
        total = 0.0
        for trial in self._study.get_trials(deepcopy=False):
            job_id = trial.user_attrs.get("job_id")
            if job_id is None or job_id in self._spent:
                total += self._spent.get(job_id or "", 0.0)
                continue
            try:
                view = retry(partial(self._client.job_view, job_id), OUTAGE_S, self._on_line)
            except NotFound:  # a job that ended long ago is deleted
                continue
            if view.spent is None and view.job.usage:
                return uncounted(view.job)
            total, self._currency = total + (view.spent or 0.0), view.currency
            if view.job.state.is_final:
                self._spent[job_id] = view.spent or 0.0
        budget = self._sweep.budget or 0.0
        if total < budget:
            return ""
        return f"the budget is spent: {money(total)} of {money(budget)} {self._currency}"

    def _begin(self, trial: Trial) -> None:
        """Follow the trial's job, which is submitted unless it was before."""
        sweep = self._sweep
        values = {key: each.suggest(trial, key) for key, each in sweep.space.items()}
        title, job_id = self._title(trial), trial.user_attrs.get("job_id")
        if job_id is None:
            submit = partial(
                self._client.submit, sweep.model_id, sweep.version, sweep.snapshot_url,
                resources=self._resources, key=f"sweep:{sweep.name}:trial-{trial.number}",
                parameters={**sweep.settings, **values}, name=title, team=sweep.team,
                project=sweep.project or f"sweep-{sweep.name}", priority=sweep.priority,
                purpose=sweep.purpose, sweep=self._run_id, code_ref=sweep.code_ref,
                evaluate_on="",  # the sweep compares them itself
            )  # fmt: skip
            try:
                job_id = retry(submit, OUTAGE_S, self._on_line).job_id
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
        job = retry(partial(self._client.job, known["job_id"]), OUTAGE_S, self._on_line)
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
