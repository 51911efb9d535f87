"""The Optuna study of a sweep: where it is stored, what draws and prunes, and what came of it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import Conflict, InvalidInput, NotFound
from paceline.schemas import SweepShown, SweepTrial

if TYPE_CHECKING:
    from optuna import Study

# Pruners compare trials at equal points; a point is a sixteenth of the training's steps, because a
# poll sees other steps of each job. The first points hold the warm-up: nothing is pruned there.
POINTS, FIRST_POINT = 16, 2
REDUCTION = 3  # of a rung's trials one in three goes on
MEDIAN_AFTER = 4  # complete trials
IMPORTANCE_AFTER = 10  # complete trials; of fewer the shares are chance
NOWHERE = (0, 0, 0)  # step, steps and point of a trial whose job has not begun: attribute "at"


@contextmanager
def opened(storage: str, name: str, identity: dict[str, Any] | None) -> Iterator[Study]:
    """Open the stored study; with ``identity`` make it where there is none.

    Raises NotFound, InvalidInput for a storage that cannot be used, and Conflict where the study
    has another identity.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = storage if "://" in storage else f"sqlite:///{storage}"
    where = storage.rpartition("@")[2]  # without a password
    missing = NotFound("no such sweep", got=name, where=where, do="Name its --storage.")
    if identity is None and "://" not in storage and not Path(storage).is_file():
        raise missing
    try:
        rows = optuna.storages.RDBStorage(url)
    except (SQLAlchemyError, ImportError, RuntimeError) as error:
        raise InvalidInput("the study cannot be stored", got=str(error).splitlines()[0],
                           wanted="a file, or SQLAlchemy's URL of a database", where=where,
                           ) from error  # fmt: skip
    try:
        if identity is None:
            if name not in optuna.get_all_study_names(rows):
                raise missing
            yield optuna.load_study(study_name=name, storage=rows)
            return
        direction = "maximize" if identity["maximize"] else "minimize"
        study = optuna.create_study(
            study_name=name, storage=rows, load_if_exists=True, direction=direction
        )
        before = study.user_attrs.get("sweep", identity)
        for key in identity:
            if before[key] != identity[key]:
                raise Conflict("this name is another sweep's", got=f"{key} {identity[key]}",
                               wanted=f"{key} {before[key]}", where=name,
                               do="Go on with what it was begun with, or choose another name.",
                )  # fmt: skip
        study.set_user_attr("sweep", identity)
        yield study
    finally:
        rows.remove_session()
        rows.engine.dispose()


def set_strategy(study: Study, sampler: str, pruner: str, seed: int | None) -> None:
    """Set what draws settings and what prunes."""
    from optuna import pruners, samplers

    if seed is not None:  # a sweep that goes on must not draw again what it drew first
        seed += len(study.get_trials(deepcopy=False))
    study.sampler = {
        "tpe": samplers.TPESampler,
        "cmaes": lambda seed: samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False),
        "random": samplers.RandomSampler,
    }[sampler](seed=seed)
    study.pruner = {
        "none": pruners.NopPruner(),
        "asha": pruners.SuccessiveHalvingPruner(FIRST_POINT, REDUCTION),
        "hyperband": pruners.HyperbandPruner(FIRST_POINT, POINTS, REDUCTION),
        "median": pruners.MedianPruner(MEDIAN_AFTER, FIRST_POINT),
    }[pruner]


def shown(study: Study) -> SweepShown:
    """Return the study's trials, the best, and how much each setting matters."""
    import optuna

    spec, name = study.user_attrs["sweep"], study.study_name
    trials = tuple(
        SweepTrial(number=each.number, state=each.state.name.lower(), value=each.value,
                   parameters=each.params, job_id=each.user_attrs.get("job_id", ""),
                   step=each.user_attrs.get("at", NOWHERE)[0],
                   steps=each.user_attrs.get("at", NOWHERE)[1],
                   reason=each.user_attrs.get("reason", ""))
        for each in study.get_trials(deepcopy=False)
    )  # fmt: skip
    complete = [each for each in trials if each.state == "complete"]
    sign = -1 if spec["maximize"] else 1
    best = min(complete, key=lambda each: sign * (each.value or 0.0), default=None)
    shares: dict[str, float] = {}
    if len(complete) >= IMPORTANCE_AFTER:
        with suppress(ValueError, RuntimeError):  # all trials are alike
            found = optuna.importance.get_param_importances(study)
            shares = {key: float(share) for key, share in found.items()}
    return SweepShown(
        name=name, metric=spec["metric"], maximize=spec["maximize"], trials=trials, best=best,
        importance=shares if all(map(math.isfinite, shares.values())) else {},
        reproduce=_command(name, spec, best) if best else "",
    )  # fmt: skip


def _command(name: str, spec: Mapping[str, Any], best: SweepTrial) -> str:
    """Return the command that trains as the best trial did."""
    words = ["paceline", "jobs", "submit", spec["model_id"], spec["version"]]
    words += ["--snapshot", spec["snapshot"], "--name", f"{name} trial {best.number}"]
    given = {**spec["resources"], "team": spec["team"], "priority": spec["priority"]}
    for key, value in given.items():
        if value:
            words += [f"--{key.replace('_', '-')}", str(value)]
    for key, value in {**spec["settings"], **best.parameters}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return shlex.join(words)
