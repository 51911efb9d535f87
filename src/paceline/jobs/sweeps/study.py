"""The Optuna study of a sweep: where it is stored, what draws and prunes, and what came of it."""

from __future__ import annotations

import json
import math
import os
import secrets
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import Runtime, named_secret
from paceline.errors import (
    Conflict,
    InvalidInput,
    InvalidProfile,
    NotFound,
    RunElsewhere,
    ServiceUnavailable,
)
from paceline.jobs.sweeps.search_space import Sweep
from paceline.schemas import Resources, SweepShown, SweepTrial
from paceline.system import ensure_private

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import RDBStorage

# Pruners compare trials at equal points; a point is a sixteenth of the training's steps, because a
# poll sees other steps of each job. The first points hold the warm-up: nothing is pruned there.
POINTS, FIRST_POINT = 16, 2
REDUCTION = 3  # of a rung's trials one in three goes on
MEDIAN_AFTER = 4  # complete trials
IMPORTANCE_AFTER = 10  # complete trials; of fewer the shares are chance
NOWHERE = (0, 0, 0)  # step, steps and point of a trial whose job has not begun: attribute "at"
FILE = "studies.sqlite"  # in the state directory
LOOK_S = 2.0
HELD_S = 90.0  # longer than a process that holds the study waits for a coordinator that is away


def studies_of(runtime: Runtime) -> str:
    """Return where the installation keeps its studies: a file, or a URL with its password.

    Raises InvalidProfile for a URL that cannot be read.
    """
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    settings = runtime.profile.sweeps
    if not settings.storage:
        return str(runtime.state_dir / FILE)
    try:
        url = make_url(settings.storage)
    except ArgumentError as error:
        raise InvalidProfile("not a database's URL", got=error, where="sweeps.storage") from error
    password = named_secret(settings.password_env) or None
    return url.set(password=password).render_as_string(hide_password=False)


@contextmanager
def opened(storage: str, name: str, identity: dict[str, Any] | None) -> Iterator[Study]:
    """Open the stored study; with ``identity`` make it where there is none.

    Raises NotFound, InvalidInput for a storage that cannot be used, Conflict where the study
    has another identity, and ServiceUnavailable where the database is lost meanwhile.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    where = storage.rpartition("@")[2]  # without a password
    missing = NotFound("no such sweep", got=name, where=where, do="Name its --storage.")
    is_file = "://" not in storage
    if identity is None and is_file and not Path(storage).is_file():
        raise missing
    try:
        if is_file:
            ensure_private(Path(storage))
        rows = _rows(storage)
    except (SQLAlchemyError, ImportError, RuntimeError, OSError) as error:
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
        create = partial(
            optuna.create_study,
            study_name=name, storage=rows, load_if_exists=True, direction=direction,
        )  # fmt: skip
        study = create()
        if not _is_same(study, identity):
            optuna.delete_study(study_name=name, storage=rows)
            study = create()
        study.set_user_attr("sweep", identity)
        yield study
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise ServiceUnavailable("the study's database does not answer", where=where,
                                 got=str(error.__cause__ or error).splitlines()[0],
                                 do="Start the sweep again: its jobs go on, and it follows them.",
                                 ) from error  # fmt: skip
    finally:
        rows.remove_session()
        rows.engine.dispose()


def _is_same(study: Study, identity: dict[str, Any]) -> bool:
    """Return whether the study is the sweep's; False for another's that has not begun. Raises
    Conflict for another's that has."""
    before = _stored(study) or identity
    different = [key for key in identity | before if before.get(key) != identity.get(key)]
    if different and _has_begun(study):
        raise Conflict(
            "this name is another sweep's",
            got=f"{different[0]} {identity.get(different[0])}",
            wanted=f"{different[0]} {before.get(different[0])}",
            where=study.study_name,
            do="Go on with what it was begun with, or choose another name.",
        )
    return not different


def _stored(study: Study) -> dict[str, Any]:
    """Return the identity of the sweep that the study was begun with, {} where it is new."""
    kept: dict[str, Any] = dict(study.user_attrs.get("sweep", {}))
    if "snapshot" not in kept:
        return kept
    kept["snapshot_url"] = kept.pop("snapshot")  # the release before stored it so
    return Sweep.of(kept | {"name": study.study_name}).identity


def _has_begun(study: Study) -> bool:
    """Return False where the first job was refused: its name is free for another sweep."""
    trials = study.get_trials(deepcopy=False)
    return bool(study.user_attrs.get("holder")) or any("job_id" in e.user_attrs for e in trials)


def _rows(storage: str) -> RDBStorage:
    """Return Optuna's tables, made where there are none."""
    from optuna.storages import RDBStorage
    from sqlalchemy import make_url

    url = make_url(storage if "://" in storage else f"sqlite:///{storage}")
    if url.drivername == "postgresql":  # SQLAlchemy would take psycopg2
        url = url.set(drivername="postgresql+psycopg")
    return RDBStorage(
        url.render_as_string(hide_password=False), engine_kwargs={"pool_pre_ping": True}
    )


def stored_run_id(storage: str, name: str, identity: dict[str, Any]) -> str:
    """Return the run id of the stored sweep; "" where there is no such sweep, or it has none.
    Raises Conflict where the name is another sweep's, whose run is not to be opened."""
    try:
        with opened(storage, name, None) as study:
            return str(study.user_attrs.get("run_id", "")) if _is_same(study, identity) else ""
    except NotFound:
        return ""


@contextmanager
def held(study: Study, sleep: Callable[[float], None]) -> Iterator[Callable[[], None]]:
    """Hold the study for this process; yield what must be called within HELD_S, again and again.

    It compares no clocks of two hosts: a holder that changes nothing for HELD_S is gone. Raises
    RunElsewhere where another process holds the study or has taken it over.
    """
    me = f"{socket.gethostname()}, process {os.getpid()}"
    mine, count = f"{me}, {secrets.token_hex(4)}", 0

    def holder() -> Any:
        return study.user_attrs.get("holder")

    def conflict(other: Any) -> RunElsewhere:
        return RunElsewhere("another process runs this sweep", got=other[0].rpartition(",")[0],
                            wanted="one process", where=study.study_name,
                            do="See `paceline sweep report`, or end that one first.")  # fmt: skip

    def renew() -> None:
        nonlocal count
        if count and (found := holder()) and found[0] != mine:
            raise conflict(found)
        count += 1
        study.set_user_attr("holder", [mine, count])

    waited_s, before = 0.0, holder()
    while before and waited_s < HELD_S:
        sleep(LOOK_S)
        waited_s += LOOK_S
        if (now := holder()) and now != before:
            raise conflict(now)
        before = now
    renew()
    try:
        yield renew
    finally:
        if (last := holder()) and last[0] == mine:
            study.set_user_attr("holder", None)


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

    spec, name = _stored(study), study.study_name
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
        name=name, run_id=study.user_attrs.get("run_id", ""), trials=trials, best=best,
        metric=spec["metric"], maximize=spec["maximize"],
        importance=shares if all(map(math.isfinite, shares.values())) else {},
        reproduce=_command(name, spec, best) if best else "",
        stopped=study.user_attrs.get("stopped", ""),
    )  # fmt: skip


def _command(name: str, spec: Mapping[str, Any], best: SweepTrial) -> str:
    """Return the command that trains as the best trial did."""
    words = ["paceline", "jobs", "submit", spec["model_id"], spec["version"]]
    words += ["--snapshot", spec["snapshot_url"], "--name", f"{name} trial {best.number}"]
    given = Resources.model_validate(spec["resources"]).model_dump(exclude_defaults=True)
    if "memory_bytes" in given:
        given["memory"] = f"{given.pop('memory_bytes')}B"
    words += [
        w for pair in given.pop("node_labels", {}).items() for w in ("--label", "=".join(pair))
    ]
    given |= {key: spec.get(key) for key in ("code_ref", "team", "project", "purpose", "priority")}
    for key, value in given.items():
        if value:
            words += [f"--{key.replace('_', '-')}", str(value)]
    for key, value in {**spec["settings"], **best.parameters}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return shlex.join(words)
