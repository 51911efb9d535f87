"""Hyper-parameter sweeps: an Optuna study whose trials are training jobs of the queue.

The loop asks the study for a trial, submits its job, reports the job's metric to the study while
the job runs, cancels the job where the pruner says so, and tells the study how the trial ended. The
study is stored after each step, so a sweep that was interrupted goes on with the same jobs.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.client import Client, patiently
from paceline.config import Profile, with_job_settings
from paceline.errors import Conflict, InvalidInput, InvalidProfile, NotFound, PacelineError
from paceline.extras import require_extras
from paceline.schemas import JobState, SweepShown, SweepTrial, TrainingJob

if TYPE_CHECKING:
    from optuna import Study, Trial

POLL_S = 2.0
AWAY_S = 60.0  # how long no coordinator may answer
# Pruners compare trials at equal points; a point is a sixteenth of the training's steps, because a
# poll sees other steps of each job. The first points hold the warm-up: nothing is pruned there.
POINTS = 16
FIRST_POINT = 2
REDUCTION = 3
MEDIAN_AFTER = 4  # complete trials
STOPPED = "the sweep was cancelled"  # the reason of a trial that another one replaces
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MAX_SPACE_BYTES = 64 * 1024
KEYS = {  # kind → its keys, and whether each must be there
    "float": {"low": True, "high": True, "log": False},
    "int": {"low": True, "high": True, "log": False},
    "categorical": {"choices": True},
}

Sampler = Literal["tpe", "cmaes", "random"]
Pruner = Literal["none", "asha", "hyperband", "median"]
OnLine = Callable[[str], None]


@dataclass(frozen=True)
class Dimension:
    """One setting of the search space."""

    kind: str
    low: float = 0
    high: float = 0
    log: bool = False
    choices: tuple[str | int | float | bool, ...] = ()

    @classmethod
    def of(cls, given: object, where: str) -> Dimension:
        """Return the dimension that a table of the file describes; raises InvalidInput."""
        table = given if isinstance(given, dict) else {}
        kind = table.get("kind")
        if not isinstance(kind, str) or kind not in KEYS:
            raise _bad("no such kind of setting", kind, f"kind = {', '.join(KEYS)}", where)
        known = KEYS[kind]
        if unknown := sorted(set(table) - {"kind", *known}):
            raise _bad("unknown keys", ", ".join(unknown), f"kind, {', '.join(known)}", where)
        if missing := [key for key, needed in known.items() if needed and key not in table]:
            raise _bad("a key is missing", ", ".join(table), ", ".join(missing), where)
        if kind == "categorical":
            return cls(kind, choices=_choices(table["choices"], where))
        low, high, log = table["low"], table["high"], table.get("log", False)
        types = (int,) if kind == "int" else (int, float)
        for value in (low, high):
            if type(value) not in types or not math.isfinite(value):
                raise _bad("not a bound", repr(value), f"a finite {kind}", where)
        if low >= high:
            raise _bad("the bounds hold nothing between them", f"{low} to {high}", "low < high",
                       where)  # fmt: skip
        if type(log) is not bool or (log and low <= 0):
            raise _bad("no logarithmic scale", f"log = {log!r}, low = {low}", "low > 0", where)
        return cls(kind, low, high, log)

    @property
    def ends(self) -> tuple[object, ...]:
        """Return its lowest and highest value, or every choice."""
        return self.choices or (self.low, self.high)

    def suggest(self, trial: Trial, name: str) -> object:
        """Return the trial's value; the one that is stored, where there is one."""
        if self.kind == "categorical":
            return trial.suggest_categorical(name, self.choices)
        if self.kind == "int":
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)


def _bad(what: str, got: object, wanted: str, where: str) -> InvalidInput:
    do = "See docs/how-to/sweep-hyper-parameters.md."
    return InvalidInput(what, got=got, wanted=wanted, where=where, do=do)


def _choices(given: object, where: str) -> tuple[str | int | float | bool, ...]:
    found = given if isinstance(given, list) else []
    plain = all(isinstance(each, str | int | float) for each in found)
    if not found or not plain or len({json.dumps(each) for each in found}) < len(found):
        raise _bad("no choices", repr(given)[:200], "a list of different texts, numbers, truths",
                   where)  # fmt: skip
    return tuple(found)


def read_space(path: Path) -> dict[str, Dimension]:
    """Return the search space of a TOML file; raises InvalidInput with the table that is wrong."""
    try:
        with path.open("rb") as file:
            raw = tomllib.loads(file.read(MAX_SPACE_BYTES).decode())
    except (OSError, ValueError) as error:
        raise _bad("the search space cannot be read", error, "TOML", str(path)) from error
    space = raw.pop("space", None)
    if raw or not isinstance(space, dict) or not space:
        got = ", ".join(raw) or "no table"
        raise _bad("not a search space", got, 'tables [space."training.…"]', str(path))
    return {key: Dimension.of(each, f'{path} [space."{key}"]') for key, each in space.items()}


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
    sampler: Sampler = "tpe"
    pruner: Pruner = "none"
    seed: int | None = None
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
            raise _bad("not a sweep's name", self.name, NAME.pattern, "NAME")
        fixed = dict(self.settings)
        for key in ("ranks", "ranks_per_node"):
            if self.resources.get(key):
                fixed[f"training.{key}"] = self.resources[key]
        for key, dimension in self.space.items():
            where = f'[space."{key}"]'
            if key in fixed:
                raise _bad("a setting is fixed and searched", key, "one of both", where)
            for value in dimension.ends:
                try:
                    with_job_settings(profile, {**fixed, key: value})
                except InvalidProfile as error:
                    got = f"{key} = {value!r}: {error.what}, {error.got}"
                    raise _bad("no training has this setting", got, str(error.wanted),
                               where) from error  # fmt: skip

    @property
    def identity(self) -> dict[str, Any]:
        """Return what must not change when the sweep goes on: else trials do not compare."""
        kept = ("model_id", "version", "snapshot", "metric", "maximize", "resources", "settings",
                "team", "priority")  # fmt: skip
        space = {key: vars(each) for key, each in self.space.items()}
        found = {"space": space} | {key: getattr(self, key) for key in kept}
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
    with _opened(sweep.storage, sweep.name, sweep) as study:
        return _Loop(sweep, study, client, on_line).run(sleep, cancel_jobs)


def report_sweep(name: str, storage: str) -> SweepShown:
    """Return what came of the stored sweep so far; raises NotFound."""
    require_extras("sweeps")
    with _opened(storage, name, None) as study:
        return _shown(study)


class _Loop:
    def __init__(self, sweep: Sweep, study: Study, client: Client, on_line: OnLine) -> None:
        self._sweep, self._study, self._client, self._on_line = sweep, study, client, on_line
        self._running: list[Trial] = []

    def run(self, sleep: Callable[[float], None], cancel_jobs: bool) -> SweepShown:
        from optuna.trial import Trial, TrialState

        try:
            for each in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
                self._begin(Trial(self._study, each._trial_id))
            while True:
                while len(self._running) < self._sweep.parallel and self._is_short_of_trials():
                    self._begin(self._study.ask())
                if not self._running:
                    return _shown(self._study)
                sleep(POLL_S)
                self._running = [each for each in self._running if not self._has_ended(each)]
        except KeyboardInterrupt:
            if cancel_jobs:
                self._stop()
            raise

    def _is_short_of_trials(self) -> bool:
        trials = self._study.get_trials(deepcopy=False)
        return sum(e.user_attrs.get("reason") != STOPPED for e in trials) < self._sweep.trials

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
                do = f"{error.do or ''} A sweep of another study has this name? Choose another."
                raise Conflict(error.what, got=error.got, where=title, do=do.strip()) from error
            trial.set_user_attr("job_id", job_id)
        self._on_line(f"{title}: {job_id}, {_text(values)}")
        self._running.append(trial)

    def _has_ended(self, trial: Trial) -> bool:
        """Look at the trial's job; report, prune, or tell the study how it ended."""
        get = partial(self._client.job, trial.user_attrs["job_id"])
        job = patiently(get, AWAY_S, self._on_line)
        value = _metric(job, self._sweep.metric)
        step, steps = (job.report.step, job.report.steps) if job.report else (0, 0)
        if trial.user_attrs.get("step") != step:
            trial.set_user_attr("step", step)
            trial.set_user_attr("steps", steps)
        if job.state in (JobState.SUCCEEDED, JobState.NEEDS_REVIEW):
            if value is None:
                self._end(trial, "FAIL", reason=f"its report has no finite {self._sweep.metric}")
            else:
                self._end(trial, "COMPLETE", value)
        elif job.state is JobState.CANCELLED and trial.user_attrs.get("pruned"):
            self._end(trial, "PRUNED")
        elif job.state.is_final:
            self._end(trial, "FAIL", reason=f"job {job.state}: {job.reason}")
        elif value is None or not steps or not self._is_new(trial, point := step * POINTS // steps):
            return False
        else:
            trial.report(value, point)
            if not trial.should_prune():
                return False
            trial.set_user_attr("pruned", True)  # first: an interrupted sweep finds it
            with suppress(Conflict):  # it has just ended: the next look shows how
                self._client.coordinator.change_job(job.job_id, "cancel")
                self._end(trial, "PRUNED")
                return True
            return False
        return True

    def _is_new(self, trial: Trial, point: int) -> bool:
        """Return whether the job has made a point; after a fault it makes earlier ones again."""
        frozen = self._study.get_trials(deepcopy=False)[trial.number]
        return 0 < point < POINTS and point > max(frozen.intermediate_values, default=0)

    def _end(self, trial: Trial, state: str, value: float | None = None, reason: str = "") -> None:
        from optuna.trial import TrialState

        if reason:
            trial.set_user_attr("reason", reason[:500])
        self._study.tell(trial, value, TrialState[state], skip_if_finished=True)
        figure = "" if value is None else f", {self._sweep.metric} {value:.6g}"
        step = trial.user_attrs.get("step", 0)
        line = f"{self._sweep.name} trial {trial.number}: {WORDS[state]} at step {step}{figure}"
        self._on_line(line + (f" ({reason})" if reason else ""))

    def _stop(self) -> None:
        for trial in self._running:
            try:
                self._client.coordinator.change_job(trial.user_attrs["job_id"], "cancel")
            except PacelineError as error:  # it stays a running trial: the sweep goes on with it
                self._on_line(f"{trial.user_attrs['job_id']} is not cancelled: {error.one_line()}")
            else:
                self._end(trial, "FAIL", reason=STOPPED)


WORDS: dict[str, Literal["running", "complete", "pruned", "failed"]] = {
    "RUNNING": "running", "WAITING": "running", "COMPLETE": "complete", "PRUNED": "pruned",
    "FAIL": "failed",
}  # fmt: skip


def _metric(job: TrainingJob, name: str) -> float | None:
    value = job.report.metrics.get(name) if job.report else None
    return value if value is not None and math.isfinite(value) else None


def _text(values: Mapping[str, object]) -> str:
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                     for k, v in values.items())  # fmt: skip


@contextmanager
def _opened(storage: str, name: str, sweep: Sweep | None) -> Iterator[Study]:
    """Open the stored study; ``sweep``: make it where there is none, and require that it fits."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = storage if "://" in storage else f"sqlite:///{storage}"
    path = Path(url.partition("sqlite:///")[2])
    if sweep is None and url.startswith("sqlite:///") and not path.is_file():
        raise NotFound("no such sweep", got=name, where=storage, do="Name its --storage.")
    try:
        rows = optuna.storages.RDBStorage(url)
    except (SQLAlchemyError, ImportError, optuna.exceptions.StorageInternalError) as error:
        raise InvalidInput("the study cannot be stored", got=str(error).splitlines()[0],
                           wanted="a file, or SQLAlchemy's URL of a database",
                           where=storage.rpartition("@")[2]) from error  # fmt: skip
    try:
        if sweep is None:
            yield optuna.load_study(study_name=name, storage=rows)
            return
        study = optuna.create_study(
            study_name=name, storage=rows, load_if_exists=True,
            direction="maximize" if sweep.maximize else "minimize",
        )  # fmt: skip
        _require_same(study, sweep)
        _set_strategy(study, sweep)
        yield study
    except KeyError as error:
        if sweep is not None:
            raise
        raise NotFound("no such sweep", got=name, where=storage.rpartition("@")[2]) from error
    finally:
        rows.remove_session()
        rows.engine.dispose()


def _require_same(study: Study, sweep: Sweep) -> None:
    before, now = study.user_attrs.get("sweep"), sweep.identity
    if before is None:
        study.set_user_attr("sweep", now)
    elif changed := [key for key in now if before.get(key) != now[key]]:
        key = changed[0]
        raise Conflict("this name is another sweep's", got=f"{key} {now[key]}",
                       wanted=f"{key} {before.get(key)}", where=sweep.name,
                       do="Go on with what it was begun with, or choose another name.",
        )  # fmt: skip


def _set_strategy(study: Study, sweep: Sweep) -> None:
    from optuna import pruners, samplers

    # A sweep that goes on must not draw again what it drew first.
    seed = None if sweep.seed is None else sweep.seed + len(study.get_trials(deepcopy=False))
    if sweep.sampler == "cmaes":
        study.sampler = samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    elif sweep.sampler == "random":
        study.sampler = samplers.RandomSampler(seed=seed)
    else:
        study.sampler = samplers.TPESampler(seed=seed)
    if sweep.pruner == "asha":
        study.pruner = pruners.SuccessiveHalvingPruner(FIRST_POINT, REDUCTION)
    elif sweep.pruner == "hyperband":
        study.pruner = pruners.HyperbandPruner(FIRST_POINT, POINTS, REDUCTION)
    elif sweep.pruner == "median":
        study.pruner = pruners.MedianPruner(MEDIAN_AFTER, FIRST_POINT)
    else:
        study.pruner = pruners.NopPruner()


def _shown(study: Study) -> SweepShown:
    import optuna

    spec = study.user_attrs["sweep"]
    trials = tuple(
        SweepTrial(
            number=each.number,
            state=WORDS[each.state.name],
            value=each.value,
            parameters=each.params,
            **{key: each.user_attrs[key] for key in ("job_id", "step", "steps", "reason")
               if key in each.user_attrs},
        )
        for each in study.get_trials(deepcopy=False)
    )  # fmt: skip
    complete = [each for each in trials if each.state == "complete" and each.value is not None]
    sign = -1 if spec["maximize"] else 1
    best = min(complete, key=lambda each: sign * (each.value or 0.0), default=None)
    importance: dict[str, float] = {}
    with suppress(ValueError, RuntimeError):  # too few trials, or all alike
        importance = {
            k: float(v) for k, v in optuna.importance.get_param_importances(study).items()
        }
    return SweepShown(
        name=study.study_name,
        metric=spec["metric"],
        maximize=spec["maximize"],
        trials=trials,
        best=best,
        importance=importance if all(map(math.isfinite, importance.values())) else {},
        reproduce="" if best is None else _command(study.study_name, spec, best),
    )


def _command(name: str, spec: Mapping[str, Any], best: SweepTrial) -> str:
    """Return the command that trains as the best trial did."""
    words = ["paceline", "jobs", "submit", spec["model_id"], spec["version"]]
    words += ["--snapshot", spec["snapshot"], "--name", f"{name} trial {best.number}"]
    given = {**spec["resources"], "team": spec["team"], "priority": spec["priority"]}
    for key, value in given.items():
        if value:
            option = {"memory_bytes": "memory"}.get(key, key.replace("_", "-"))
            words += [f"--{option}", str(value)]
    for key, value in {**spec["settings"], **best.parameters}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return shlex.join(words)
