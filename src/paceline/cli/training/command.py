"""`paceline train` trains on this machine without any server; `paceline training start` on a fleet.

`paceline train` resumes when it is repeated. `paceline training start` runs the flow `train-model`
on a running installation (``cli.flows.FlowCall``, `flows/train.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.commands import ExistingPath, Sections
from paceline.cli.options import (
    F,
    evaluate_on_option,
    evaluate_option,
    job_settings,
    json_option,
    judged_on,
    optimizer_option,
    or_newest_made,
    profile_options,
    project_option,
    purpose_option,
    read_profile,
    resolve_training_id,
    run_id_option,
    settings_option,
    show,
    signal_handler,
    state_option,
    team_option,
)
from paceline.cli.training.mlflow_logging import TrainingLog, location
from paceline.cli.training.output import (
    Lines,
    beside,
    facts,
    preparing,
    say,
    shown_warnings,
    summary,
)
from paceline.errors import Cancelled, InvalidInput, SourceMissing
from paceline.extras import require_extras
from paceline.relay import SignalEvent
from paceline.schemas import TrainAnswer, is_run_id, one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.config import Profile
    from paceline.schemas import RankEvent


def _training_options(function: F) -> F:
    """Add what a training can be asked for wherever it runs."""
    for option in (
        click.option(
            "--ranks",
            type=click.IntRange(min=1),
            default=None,
            help="Processes of the gang. Default: the profile's (training.ranks).",
        ),
        run_id_option,
        click.option(
            "--continue-from",
            metavar="JOB",
            default="",
            help="Go on from the last checkpoint of this finished job (job-…, its beginning; on "
            "an installation also tj-… or last), with more --steps in all or another learning "
            "rate.",
        ),
        click.option(
            "--steps",
            type=click.IntRange(min=0),
            default=None,
            help="Default: the profile's (training.steps). On an installation 0 is the control "
            "that must not pass the gate.",
        ),
        click.option(
            "--labels",
            type=click.Choice(["true", "shuffled"]),
            default="true",
            help="'shuffled' is the control that must not pass the gate.",
        ),
    ):
        function = option(function)
    return function


@click.command(
    cls=Sections,
    sections={
        "Data and model": "text snapshot model",
        "Training": "labels steps ranks continue_from run_id overrides profile",
        "Where it goes": "output checkpoints mlflow",
    },
)
@click.argument("elsewhere", nargs=-1, metavar="")
@click.option(
    "--text",
    type=ExistingPath(path_type=Path),
    default=None,
    help="The directory to learn from: text, or what --set data.format=jsonl, parquet or tar "
    "says. Default: Python's standard library.",
)
@click.option(
    "--snapshot",
    default=None,
    metavar="URL",
    help="Learn from a data snapshot, its URL or its directory on this disk, in place of --text.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="The model directory to start from (default: a new model).",
)
@_training_options
@functools.partial(profile_options, default="local")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("paceline-training"),
    show_default=True,
    help="Where data, checkpoints, figures and the model go.",
)
@click.option(
    "--checkpoints",
    metavar="URL",
    default=None,
    help="Keep checkpoints and the model below s3://bucket/prefix (credentials as for "
    "`publish`) or another directory; the same command goes on from there on any machine.",
)
@click.option(
    "--mlflow",
    metavar="URI",
    envvar="MLFLOW_TRACKING_URI",
    show_envvar=True,
    default=None,
    help="Log to this MLflow, too (http://…, sqlite:///…); '' for none.",
)
@json_option
def train(
    elsewhere: tuple[str, ...],
    snapshot: str | None,
    labels: str,
    steps: int | None,
    continue_from: str,
    run_id: str | None,
    ranks: int | None,
    text: Path | None,
    model: Path | None,
    output: Path,
    checkpoints: str | None,
    mlflow: str | None,
    profile: str,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Train on this machine, without any server: text in, model out.

    The same command goes on where it stopped. Every setting of a profile can be --set. What an
    installation's nodes hold is trained there by `paceline training start`.
    """
    if elsewhere:
        raise InvalidInput(
            "`paceline train` trains on this machine",
            got=" ".join(elsewhere),
            wanted="options alone, such as --text DIRECTORY and --model DIRECTORY",
            do="On an installation it is `paceline training start MODEL_ID VERSION --snapshot "
            "URL`.",
        )
    if str(output).startswith(("s3:/", "file:/")):
        raise InvalidInput(
            "--output is a directory of this machine",
            got=str(output).replace(":/", "://", 1),
            wanted="a directory, and --checkpoints s3://bucket/prefix beside it",
            do="Data, figures and locks stay here; checkpoints and the model go there.",
        )
    settings = read_profile(profile, _with(overrides, steps, ranks))
    return train_here(
        settings, output, text=text, snapshot=snapshot, model=model, labels=labels,
        run_id=run_id, as_json=as_json, checkpoints=checkpoints, mlflow=mlflow or None,
        continue_from=continue_from,
    )  # fmt: skip


@click.command(
    cls=Sections,
    sections={
        "Training": "snapshot labels steps ranks continue_from run_id overrides optimizer_ref",
        "Judging": "evaluate evaluate_on",
        "Whose it is, and where": "team project purpose state",
    },
)
@click.argument("model_id")
@click.argument("version")
@click.option(
    "--snapshot",
    required=True,
    metavar="URL|last",
    help="A data snapshot: its URL, or last: what this user made last on the installation.",
)
@_training_options
@settings_option
@optimizer_option
@evaluate_option
@evaluate_on_option
@team_option
@project_option
@purpose_option
@state_option
@json_option
def start(
    model_id: str,
    version: str,
    snapshot: str,
    labels: str,
    steps: int | None,
    continue_from: str,
    run_id: str | None,
    ranks: int | None,
    overrides: tuple[str, ...],
    optimizer_ref: str,
    evaluate: bool | None,
    evaluate_on: str,
    team: str,
    project: str,
    purpose: str,
    state: Path | None,
    as_json: bool,
) -> int:
    """Fine-tune VERSION of MODEL_ID, which the installation's nodes hold, on a data snapshot.

    What concerns the training (training.…, data.batching) can be --set; the rest is the
    installation's profile.
    """
    from paceline.cli.flows import FlowCall
    from paceline.client import CoordinatorClient
    from paceline.config import find_installation

    snapshot_url = or_newest_made(snapshot, "url", state)
    continue_from = or_newest_made(continue_from, "job_id", state)
    if continue_from.startswith("tj-"):
        client = CoordinatorClient.of(find_installation(state))
        continue_from = resolve_training_id(client, continue_from)
    named = {"team": team, "project": project, "purpose": purpose, "optimizer_ref": optimizer_ref}
    more: dict[str, Any] = {name: value for name, value in named.items() if value}
    if (judging := judged_on(evaluate, evaluate_on, snapshot_url)) is not None:
        more["evaluate_on"] = judging
    return FlowCall(state=state, run_id=run_id, as_json=as_json).run(
        "train.train_model",
        model_id=model_id,
        version=version,
        snapshot_url=snapshot_url,
        labels=labels,
        continue_from=continue_from or None,
        steps=steps,
        ranks=ranks,
        settings=job_settings(overrides) or None,
        **more,
    )


def _with(overrides: tuple[str, ...], steps: int | None, ranks: int | None) -> tuple[str, ...]:
    more = [("training.steps", steps), ("training.ranks", ranks)]
    return (*overrides, *(f"{key}={value}" for key, value in more if value is not None))


def train_here(
    profile: Profile,
    output: Path,
    *,
    text: Path | None,
    snapshot: str | None,
    model: Path | None,
    labels: str,
    run_id: str | None,
    as_json: bool,
    checkpoints: str | None = None,
    mlflow: str | None = None,
    continue_from: str = "",
) -> int:
    """Train on this machine and print the result."""
    if text is not None and snapshot is not None:
        raise InvalidInput("two sources of data", got="--text and --snapshot", wanted="one of them")
    _require_files(text)
    _require_places(snapshot, model, checkpoints, mlflow)
    if not profile.training.steps:
        raise InvalidInput(
            "nothing to train", got="0 steps", wanted="at least 1", where="training.steps"
        )
    require_extras("train")
    steps, ranks = profile.training.steps, profile.training.ranks
    say(f"starting a training below {output}: {steps} steps, ranks: {ranks}")  # torch takes seconds
    from paceline.training import checkpoints_url, single

    asked = single.TrainingRequest(
        output=output,
        profile=profile,
        source=None if text is None else str(text.absolute()),
        snapshot_url=snapshot,
        model=model,
        checkpoints=checkpoints,
        labels="shuffled" if labels == "shuffled" else "true",
        continue_from=continue_from,
    )
    if run_id and run_id.startswith("run-") and not is_run_id(run_id):
        run_id = one_of("run", run_id, single.run_ids(output))
    cancel = SignalEvent()
    with (
        shown_warnings() as handler,
        single.locked_output(output),
        _stopping_gently(cancel) as signals,
    ):
        with preparing(output):
            job = single.prepare(asked, run_id)
        record, place = (
            single.local_record_dir(job),
            single.display_url(checkpoints_url(job)),
        )
        lines = Lines(job, record)
        handler.addFilter(lines.is_news)
        lines.begin(output)
        data, config = single.snapshot_and_config(job)
        for line in (*facts(job, data, config), beside(job, record)):
            if line:
                say(line)
        followers: list[Callable[[RankEvent], None]] = [lines]

        def on_event(event: RankEvent) -> None:
            for each in followers:
                each(event)

        with contextlib.ExitStack() as stack:
            logged: TrainingLog | None = None
            if mlflow is not None:
                logged = TrainingLog(
                    mlflow, job, experiment=profile.model.model_id, record=record, tell=say
                )
                followers.append(stack.enter_context(logged))
            signals.running = True
            try:
                with lines.watched():
                    result = single.run(job, on_event=on_event, cancel=cancel)
            except Cancelled as error:
                raise lines.stopped(place) from error
            if logged is not None:
                logged.done(result)
    if as_json:
        logged_id = None if logged is None else logged.run_id
        show(TrainAnswer(run_id=job.run_id, notes=tuple(lines.notes), mlflow_run_id=logged_id,
                         **dict(result)), as_json)  # fmt: skip
    else:
        if not lines.started:
            say(
                "this very training is finished: nothing was trained again, this is its result "
                "(another mesh or number of ranks is the same training; --output DIR starts anew)"
            )
        click.echo("\n".join(summary(job, result, as_chat=data.template_url is not None)))
        if logged is not None and logged.run_id:
            click.echo(f"  mlflow        {logged.uri}, run {logged.run_id}")
    return 0


def _require_files(text: Path | None) -> None:
    """Refuse a directory without any file, before torch is imported."""
    if text is not None and text.is_dir() and not any(each.is_file() for each in text.rglob("*")):
        raise InvalidInput("no file to learn from", got="an empty directory", where=text)


def _require_places(
    snapshot: str | None, model: Path | None, checkpoints: str | None, mlflow: str | None
) -> None:
    """Refuse what cannot be where it is said to be, before torch is imported; what lies there is
    checked later."""
    if snapshot is not None and "://" not in snapshot and not Path(snapshot).exists():
        raise SourceMissing("no such data snapshot", got=snapshot, wanted="a directory or its URL")
    if model is not None and not model.is_dir():
        raise SourceMissing(
            "no such model directory", got=model, wanted="safetensors and config", where="--model"
        )
    if checkpoints is not None and checkpoints.startswith("s3://"):
        from paceline.storage import parse_url

        parse_url(checkpoints)
    if mlflow is not None:
        location(mlflow)


@contextlib.contextmanager
def _stopping_gently(cancel: threading.Event) -> Iterator[SimpleNamespace]:
    """Within the ``with``, the first SIGINT, SIGTERM or SIGHUP makes training save and end.

    Before ``running`` of what it yields is set, and on a second signal, training ends at once.
    """
    training = SimpleNamespace(running=False)

    def asked(_number: int, _frame: FrameType | None) -> None:
        if cancel.is_set() or not training.running:
            raise KeyboardInterrupt
        # os.write and not sys.stderr.write: the signal may have interrupted one of those.
        with contextlib.suppress(OSError):
            os.write(2, b"! stopping: every rank saves its state (once more: at once, unsaved)\n")
        cancel.set()

    with signal_handler(asked, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield training
