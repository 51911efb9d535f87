"""`paceline reproduce`: train a run again, and say whether the same bits come out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import json_option, state_directory, state_option
from paceline.errors import CorruptData, NotFound
from paceline.profile import Runtime, load_runtime
from paceline.wire.reproducing import Reproduction

if TYPE_CHECKING:
    from paceline.training.reproduce import Recorded
    from paceline.wire.training import RankEvent

NOT_IDENTICAL = 3


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--check", is_flag=True, help="Only say what differs; train nothing.")
@state_option
@json_option
def reproduce(run_id: str, check: bool, state: Path | None, as_json: bool) -> int:
    """Train RUN's job again and compare each step's loss and the final weights, bit by bit.

    Exit code 0: identical. 3: not, and the first step that differs is named.
    """
    from paceline.objects import open_store
    from paceline.training import LocalLauncher
    from paceline.training.reproduce import again, differences_of

    runtime = load_runtime(state_directory(state))
    recorded = recorded_run(runtime, run_id)
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
            said = None if as_json else _tell_step
            found = again(recorded, runtime, store, launcher, on_event=said)
    if as_json:
        click.echo(found.model_dump_json())
    else:
        show(found)
    return 0 if found.identical or (check and not found.differences) else NOT_IDENTICAL


def recorded_run(runtime: Runtime, run_id: str) -> Recorded:
    """Return what ``run_id`` recorded of its training; raises NotFound where it trained nothing."""
    from pydantic import ValidationError

    from paceline.registry import Registry, lineage
    from paceline.training.reproduce import Recorded
    from paceline.wire.training import TrainJob, TrainResult

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
    return Recorded(run_id, job, result, registry.history(mlflow_run, lineage.LOSS))


def show(found: Reproduction) -> None:
    """Print ``found`` for people."""
    for each in found.differences:
        mark = "!" if each.decisive else " "
        click.echo(f"{mark} {each.what}: then {each.then}, now {each.now}")
    if not found.differences:
        click.echo("nothing differs: code, environment, data and base model are as they were")
    if found.status == "checked":
        return
    if found.identical:
        click.echo(
            f"identical: {found.steps} losses and the weights {found.weights_now[:16]}, "
            f"in {found.seconds:.1f} s (job {found.again_job_id})"
        )
    elif found.first_different_step is not None:
        click.echo(
            f"different from step {found.first_different_step} on: loss then {found.loss_then!r}, "
            f"now {found.loss_now!r} (job {found.again_job_id})"
        )
    else:
        click.echo(
            f"{found.steps} losses are identical, the weights are not: then "
            f"{found.weights_then[:16]}, now {found.weights_now[:16]}"
        )


def _tell_step(event: RankEvent) -> None:
    if event.event == "step" and event.rank == 0:
        click.echo(f"step {event.step}: loss {event.data.get('loss')}", err=True)
