"""`paceline train`: fine-tune what an installation's nodes hold, or train here without any server.

With MODEL_ID and VERSION it is the flow `train-model` on a running installation. Without, it trains
on this machine alone: text in, model out, and the same command again goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import json_option, profile_options, read_profile, state_option
from paceline.errors import Cancelled, InvalidInput

if TYPE_CHECKING:
    from paceline.profile import Profile
    from paceline.wire.training import RankEvent, TrainJob, TrainResult


@click.command()
@click.argument("model_id", required=False)
@click.argument("version", required=False)
@click.option(
    "--snapshot", default=None, help="A data snapshot: its URL, or its directory on this disk."
)
@click.option(
    "--labels",
    type=click.Choice(["true", "shuffled"]),
    default="true",
    help="'shuffled' is the control that must not pass the gate.",
)
@click.option("--steps", type=click.IntRange(min=0), default=None, help="Default: the profile's.")
@click.option("--run-id", default=None, help="Go on with this run (default: new).")
@click.option("--ranks", type=click.IntRange(min=1), default=None, help="Here: processes.")
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True),
    default=None,
    help="Here: the directory of text files to learn from.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Here: a model directory to start from (default: a new model).",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("paceline-training"),
    show_default=True,
    help="Here: where snapshot, checkpoints and the model go.",
)
@profile_options
@state_option
@json_option
def train(
    model_id: str | None,
    version: str | None,
    snapshot: str | None,
    labels: str,
    steps: int | None,
    run_id: str | None,
    ranks: int | None,
    text: Path | None,
    model: Path | None,
    output: Path,
    profile: str,
    overrides: tuple[str, ...],
    state: Path | None,
    as_json: bool,
) -> int:
    """Fine-tune VERSION of MODEL_ID, as the nodes hold it, on a snapshot.

    Without MODEL_ID: train on this machine, without any server, on --text or --snapshot.
    """
    if model_id is None:
        settings = read_profile(profile, _with(overrides, steps, ranks))
        return train_here(
            settings, output, text=text, snapshot=snapshot, model=model, labels=labels,
            run_id=run_id, as_json=as_json,
        )  # fmt: skip
    if version is None or snapshot is None:
        raise InvalidInput(
            "not enough to train on an installation",
            got=f"MODEL_ID {model_id}, VERSION {version}, --snapshot {snapshot}",
            wanted="MODEL_ID VERSION --snapshot URL",
            do="Leave out MODEL_ID to train on this machine alone.",
        )
    if text or model or ranks or overrides:
        raise InvalidInput(
            "--text, --model, --ranks and --set are for training on this machine alone",
            got=f"MODEL_ID {model_id}",
            do="An installation's profile decides them there.",
        )
    from paceline.cli.flows import run_flow, start_flow

    here = start_flow(state, run_id)
    from flows.train import train_model

    return run_flow(
        train_model,
        as_json,
        model_id=model_id,
        version=version,
        snapshot_url=snapshot,
        labels=labels,
        steps=steps,
        **here,
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
) -> int:
    """Train on this machine and print what came of it."""
    from paceline.training import single

    if text is not None and snapshot is not None:
        raise InvalidInput("two sources of data", got="--text and --snapshot", wanted="one of them")
    asked = single.Single(
        output=output,
        profile=profile,
        source=None if text is None else str(text.absolute()),
        snapshot_url=snapshot,
        model=model,
    )
    cancel = threading.Event()
    with single.held(output), _stopping_gently(cancel) as signals:
        say(f"preparing data and model below {output}")
        job = single.prepare(asked, run_id)
        if labels == "shuffled":
            job = job.model_copy(update={"labels": "shuffled", "job_id": f"{job.job_id}-shuffled"})
        lines = Lines(job)
        lines.begin(output)
        signals.running = True
        try:
            result = single.run(job, on_event=lines, cancel=cancel)
        except Cancelled as error:
            raise lines.stopped(single.checkpoints_of(job)) from error
    if as_json:
        answer = {"status": "complete", "run_id": job.run_id, "notes": lines.notes}
        click.echo(json.dumps(answer | result.model_dump(mode="json")))
    else:
        if not lines.heard:
            say("this very training is finished: nothing was trained again, this is its result")
        click.echo("\n".join(summary(job, result)))
    return 0


def say(line: str) -> None:
    """Write a line for whoever watches, on standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class Lines:
    """Tells on standard error how training goes; keeps what a summary should mention."""

    def __init__(self, job: TrainJob) -> None:
        self.heard = False  # whether any rank said a word
        self.step = 0
        self.saved = 0  # the newest step of which there is a checkpoint
        self.notes: list[str] = []
        self._job = job
        self._every = max(1, job.settings.steps // 40)

    def begin(self, output: Path) -> None:
        """Say what starts."""
        settings = self._job.settings
        say(
            f"training {self._job.job_id}: {settings.steps} steps on {settings.ranks} ranks, "
            f"below {output}"
        )

    def __call__(self, event: RankEvent) -> None:
        """Take in one event."""
        self.heard = True
        if event.event == "failed" and event.data.get("code") != "Stopped":
            self._note(f"rank {event.rank} failed: {event.data.get('message')}")
        if event.rank != 0:
            return
        if event.event == "resumed" and event.step:
            self.step = self.saved = event.step
            self._note(f"goes on after step {event.step}")
        elif event.event == "checkpoint" and not event.data.get("rejected"):
            self.saved = event.step
            say(f"  checkpoint of step {event.step}: {event.data.get('url')}")
        elif event.event == "step":
            self.step = event.step
            for alert in _list(event.data.get("alerts")):
                if isinstance(alert, dict) and alert.get("raised"):
                    self._note(str(alert.get("message")))
            if event.step % self._every == 0 or event.step in (1, self._job.settings.steps):
                loss = _number(event.data.get("loss"))
                rate = _number(event.data.get("tokens_per_second"))
                say(
                    f"  step {event.step:>6}/{self._job.settings.steps}  loss {loss:.4f}  "
                    f"{rate:,.0f} tokens/s"
                )

    def stopped(self, checkpoints: Path) -> Cancelled:
        """Return the error that says what is saved of a training that was asked to stop."""
        reached = f"step {self.step} of {self._job.settings.steps}"
        if self.saved and self.saved >= self.step:
            what, got, do = (
                "training was stopped, its state is saved",
                reached,
                "goes on from there",
            )
        elif self.saved:
            what = "training was stopped before its last steps were saved"
            got, do = f"{reached}, saved {self.saved}", f"goes on from step {self.saved}"
        else:
            what, got, do = "training was stopped before anything was saved", reached, "begins anew"
        return Cancelled(what, got=got, where=checkpoints, do=f"The same command {do}.")

    def _note(self, line: str) -> None:
        self.notes.append(line)
        say(f"! {line}")


def summary(job: TrainJob, result: TrainResult) -> list[str]:
    """Return the one screen that ends a run."""
    from paceline.training.single import checkpoints_of, directory_of

    lines = [
        f"done: {result.steps} steps on {result.ranks} ranks in {result.seconds:.1f} s, "
        f"{result.tokens_per_second:,.0f} tokens/s",
        f"  loss          {_shown(result.first_loss)} → {_shown(result.final_loss)} nats a token",
    ]
    if "held_out_loss" in result.held_out:
        lines.append(f"  held out      {result.held_out['held_out_loss']:.4f} nats a token")
    lines += [
        f"  waiting       data {result.data_wait_share:.1%}, "
        f"checkpoints {result.checkpoint_stall_share:.1%}",
        f"  checkpoints   {len(result.checkpoints)} in {checkpoints_of(job)}",
        f"  model         {directory_of(result.export_url)}",
    ]
    if result.ledger is not None:
        ledger = result.ledger
        parts = {name: getattr(ledger, name) for name in type(ledger).model_fields}
        told = [
            f"{name.removesuffix('_s').replace('_', ' ')} {seconds:.1f}"
            for name, seconds in parts.items()
            if name not in ("wall_s", "goodput") and seconds >= 0.05
        ]
        lines.append(f"  seconds       {', '.join(told)} of {ledger.wall_s:.1f}")
        lines.append(f"  goodput       {ledger.goodput:.1%} from the first step to the last")
    for restart in result.restarts:
        lines.append(
            f"  restart       {restart.kind}: {restart.reason}; {restart.lost_steps} steps lost, "
            f"{restart.seconds:.1f} s"
        )
    if result.skipped_batches or result.quarantined_shards:
        lines.append(
            f"  needs review  {len(result.quarantined_shards)} bad shards, "
            f"batches passed over: {list(result.skipped_batches)}"
        )
    return lines


class _stopping_gently:  # noqa: N801 - reads as what it does
    """Within the ``with``, the first SIGINT, SIGTERM or SIGHUP asks training to save its state and
    end; before it is ``running``, and the second time, it ends at once.

    A signal that is ignored (``nohup``) stays ignored.
    """

    def __init__(self, cancel: threading.Event) -> None:
        self.running = False
        self._cancel = cancel
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _stopping_gently:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, _number: int, _frame: FrameType | None) -> None:
        if self._cancel.is_set() or not self.running:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):  # not a write of Python's: the signal may be inside one
            os.write(2, b"! stopping: every rank saves its state (once more: at once, unsaved)\n")
        self._cancel.set()


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
