"""`paceline reproduce`: train a run again and report whether the result is bit-identical.

The recorded run is read from MLflow for an installation's run, and from the output directory for a
training without a server.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import json_option, resolve_run_id, state_option
from paceline.cli.training.output import JOB_FILE, METRICS_FILE, figures_in
from paceline.config import Runtime, find_installation, load_runtime, require_here
from paceline.errors import CorruptData, InvalidInput, NotFound, NotReady, NotReproducible
from paceline.schemas import JOB_ID, Reproduction

if TYPE_CHECKING:
    from paceline.schemas import RankEvent
    from paceline.training import Recorded

NOT_IDENTICAL = 3
RESULT_FILE = "result.json"


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--check", is_flag=True, help="Only say what differs; train nothing.")
@click.option("--anyway", is_flag=True, help="Train although code or machine are not as they were.")
@state_option
@json_option
def reproduce(run_id: str, check: bool, anyway: bool, state: Path | None, as_json: bool) -> int:
    """Train RUN's job again and compare each step's loss and the final weights, bit by bit.

    RUN is a run of the installation or the job-… of its training, or the --output directory of a
    `paceline train` without one (or its checkpoints/job-… where several were trained there).

    Exit code 0: bit-identical. 3: not, and the first step that differs is named. 4: nothing was
    trained, because code, libraries, machine, data or base model are not as they were.
    """
    from paceline.storage import open_store
    from paceline.training import LocalLauncher, differences_of, train_again

    if is_directory(run_id):
        runtime, recorded = recorded_here(Path(run_id))
    else:
        runtime = _installation(state)
        recorded = recorded_run(runtime, _run_of(runtime, run_id))
    store = open_store(runtime)
    if check:
        found = Reproduction(
            run_id=run_id,
            job_id=recorded.job.job_id,
            again_job_id=None,
            status="checked",
            differences=tuple(differences_of(recorded, runtime, store)),
            steps=0,
            weights_then=recorded.result.weights_digest,
        )
    else:
        with LocalLauncher() as launcher:
            said = None if as_json else _Teller(recorded.job.settings.steps)
            found = train_again(recorded, runtime, store, launcher, anyway=anyway, on_event=said)
    if as_json:
        click.echo(found.model_dump_json())
    else:
        show(found)
    if found.status == "checked":
        return NotReproducible.exit_code if any(x.decisive for x in found.differences) else 0
    return 0 if found.identical else NOT_IDENTICAL


def _installation(state: Path | None) -> Runtime:
    try:
        return require_here(find_installation(state), "`paceline reproduce`")
    except NotReady as error:
        raise error.as_kind(
            NotReady,
            do="RUN is an installation's (see --state), or the output directory of a training "
            "without one: ./paceline-training.",
        ) from error


def _run_of(runtime: Runtime, given: str) -> str:
    """Return the run that ``given`` is or begins, or the first that recorded the result of the
    training ``given`` (job-…); raises NotFound where none did."""
    if not re.fullmatch(JOB_ID, given):
        return resolve_run_id(runtime, given)
    from paceline.registry import Registry

    done, _ = Registry.from_runtime(runtime).trainings()  # newest first
    if not (runs := [each.run_id for each in done if each.job_id == given]):
        raise NotFound(
            "no run recorded a result of this training",
            got=given,
            where=runtime.endpoints.mlflow_url,
            do="Name the run that trained it: MLflow lists them.",
        )
    return runs[-1]


def is_directory(run: str) -> bool:
    """Return whether ``run`` is a directory path; run ids contain no separator."""
    return Path(run).is_dir() or "/" in run


def recorded_here(place: Path) -> tuple[Runtime, Recorded]:
    """Return the record of a training without a server.

    ``place`` is its output directory or the directory of one of its jobs. Raises NotFound where it
    has no finished training, InvalidInput where it has several, CorruptData for an unreadable one.
    """
    from pydantic import ValidationError

    from paceline.schemas import TrainJob, TrainResult
    from paceline.training import Recorded

    place = place.absolute()
    of_job = (place / RESULT_FILE).is_file()
    found = [place] if of_job else sorted(place.glob(f"checkpoints/*/{RESULT_FILE}"))
    jobs = [each if each.is_dir() else each.parent for each in found]
    jobs = [each for each in jobs if (each / JOB_FILE).is_file()]
    if not jobs:
        raise NotFound(
            "no finished training here",
            wanted="the --output directory of a `paceline train` that was done",
            where=place,
            do="Run the same `paceline train` to its end.",
        )
    if len(jobs) > 1:
        raise InvalidInput(
            "several trainings here",
            got=", ".join(each.name for each in jobs),
            wanted="one of them",
            where=place,
            do=f"Name one: {jobs[0]}",
        )
    (directory,) = jobs
    try:
        job = TrainJob.model_validate_json((directory / JOB_FILE).read_bytes())
        result = TrainResult.model_validate_json((directory / RESULT_FILE).read_bytes())
        losses = _losses(directory / METRICS_FILE)
    except (ValidationError, OSError) as error:
        raise CorruptData(
            "record of the training cannot be read",
            got=str(error).splitlines()[0],
            where=directory,
        ) from error
    return load_runtime(directory.parents[1] / "state"), Recorded(job.run_id, job, result, losses)


def _losses(path: Path) -> dict[int, float]:
    """Return each step's last recorded loss."""
    found = {step: figures["loss"] for step, figures in figures_in(path) if "loss" in figures}
    return {step: math.nan if loss is None else float(loss) for step, loss in found.items()}


def recorded_run(runtime: Runtime, run_id: str) -> Recorded:
    """Return the record of ``run_id``'s training; raises NotFound where it trained nothing."""
    from pydantic import ValidationError

    from paceline.registry import Registry, lineage
    from paceline.schemas import TrainJob, TrainResult
    from paceline.training import Recorded

    registry = Registry.from_runtime(runtime)
    mlflow_run = registry.find_run(run_id)
    try:
        job = TrainJob.model_validate_json(registry.read_artifact(mlflow_run, lineage.JOB_FILE))
        result = TrainResult.model_validate_json(
            registry.read_artifact(mlflow_run, lineage.RESULT_FILE)
        )
    except NotFound as error:
        raise NotFound(
            "run has no finished training of its own",
            got=error.got,
            where=run_id,
            do="It failed, was made before trainings were recorded, or found its training done by "
            "another run: name that one.",
        ) from error
    except ValidationError as error:
        raise CorruptData(
            "record of the training cannot be read", got=str(error).splitlines()[0], where=run_id
        ) from error
    return Recorded(run_id, job, result, registry.losses(mlflow_run))


def show(found: Reproduction) -> None:
    """Print ``found`` as text."""
    for each in found.differences:
        mark = "!" if each.decisive else " "
        click.echo(f"{mark} {each.what}: then {each.then}, now {each.now}")
    if found.status == "checked":
        decisive = sum(each.decisive for each in found.differences)
        click.echo(
            f"{decisive} of these may change bits (marked !)"
            if decisive
            else "code, environment, data and base model are as they were"
        )
    elif found.identical:
        click.echo(
            f"bit-identical: {found.steps} losses and the exported weights "
            f"{found.weights_now[:16]}, in {found.seconds:.1f} s"
        )
    elif found.first_different_step is not None:
        click.echo(
            f"different from step {found.first_different_step} on: loss then {found.loss_then!r}, "
            f"now {found.loss_now!r} (kept as job {found.again_job_id})"
        )
    else:
        click.echo(
            f"{found.steps} losses are identical, the weights are not: then "
            f"{found.weights_then[:16]}, now {found.weights_now[:16]} "
            f"(kept as job {found.again_job_id})"
        )


class _Teller:
    """Prints about forty of the steps."""

    def __init__(self, steps: int) -> None:
        self._steps, self._every = steps, max(1, steps // 40)

    def __call__(self, event: RankEvent) -> None:
        if event.event != "step" or event.rank != 0:
            return
        if event.step % self._every == 0 or event.step in (1, self._steps):
            loss = event.data.get("loss")
            shown = f"{loss:.4f}" if isinstance(loss, int | float) else loss
            click.echo(f"  step {event.step:>6}/{self._steps}  loss {shown}", err=True)
