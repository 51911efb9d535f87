"""Progress output of `paceline train`.

Progress goes to standard error. Each step's figures are also written, one JSON object per line, to
``metrics.jsonl`` beside the job's checkpoints; together with the job itself (``job.json``) this is
the input of `paceline reproduce DIRECTORY`. This module starts and controls nothing.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.training.facts import JOB_FILE, METRICS_FILE, held_out, number
from paceline.errors import Cancelled
from paceline.text import OneLine

if TYPE_CHECKING:
    from paceline.schemas.training import RankEvent, TrainJob

LINES = 40  # step lines per training, at least
SILENCE_S = 10.0  # greatest pause between lines while steps run or data are prepared
MB = 1_000_000

_KEPT = ("loss", "grad_norm", "lr", "tokens_per_second", "step_seconds", "step_skipped")


def say(line: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@contextmanager
def warnings_told() -> Iterator[logging.Handler]:
    """Print the engine's warnings among the other lines; yield the handler, for filters."""
    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("paceline")
    handler.setLevel(logging.WARNING)
    handler.setFormatter(OneLine("! %(message)s"))
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


@contextmanager
def preparing(output: Path) -> Iterator[None]:
    """Report that data and model are being prepared, again every SILENCE_S."""
    say(f"preparing data and model below {output}")
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(SILENCE_S):
            files = [each for each in (output / "data").rglob("*") if each.is_file()]
            size = sum(each.stat().st_size for each in files)
            say(
                f"  still preparing: {size / MB:,.1f} MB of data, {_span(time.monotonic() - began)}"
            )

    teller = threading.Thread(target=tell, name="preparing", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()


class Lines:
    """Prints training progress on standard error; collects notes for the summary."""

    def __init__(
        self,
        job: TrainJob,
        kept: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.heard = False  # whether any event has arrived
        self.step = 0
        self.saved = 0  # the newest step that has a checkpoint
        self.notes: list[str] = []
        self._job = job
        self._kept = kept  # directory for the job and each step's figures
        self._clock = clock
        self._failures: set[str] = set()  # messages of failed ranks in this attempt
        self._every = max(1, job.settings.steps // LINES)
        self._attempt = 0
        self._heard_at, self._patience = clock(), SILENCE_S
        self._told_at = 0.0
        self._saved_at: float | None = None  # when a checkpoint was last printed
        self._from: tuple[int, float] | None = None  # the attempt's first step and its time

    def begin(self, output: Path) -> None:
        """Print the job and its settings."""
        settings = self._job.settings
        say(
            f"training {self._job.job_id}: {settings.steps} steps on {settings.ranks} ranks, "
            f"below {output}"
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the ``with``, report when no event arrives for long: after 10 s, 20, 40, …"""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(1.0):
                self.look()

        watcher = threading.Thread(target=watch, name="silence", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()

    def look(self) -> None:
        """Report where no event arrived for long; called about once a second."""
        silent = self._clock() - self._heard_at
        if silent < self._patience:
            return
        self._patience *= 2
        last = f"step {self.step} was the last" if self.step else "no step was made yet"
        say(
            f"  {_span(silent)} without a word: {last}; the first step also compiles, a step may "
            f"take {_span(self._job.settings.guard.step_deadline_s)}"
        )

    def __call__(self, event: RankEvent) -> None:
        """Process one event."""
        self._heard_at, self._patience = self._clock(), SILENCE_S
        if not self.heard:
            self.heard = True
            self._keep(JOB_FILE, self._job.model_dump_json() + "\n", mode="w")
        if event.attempt > self._attempt:
            if self._attempt:
                self._note(f"all ranks start again (attempt {event.attempt})")
            self._attempt, self._from, self._saved_at = event.attempt, None, None
            self._failures = set()
        if event.event == "failed" and event.data.get("code") != "Stopped":
            self._failed(event.rank, str(event.data.get("message")))
        if event.event == "trace":
            say(f"  trace of step {event.step}, rank {event.rank}: {event.data.get('url')}")
        if event.event == "said":
            say(f"  rank {event.rank}: {event.data.get('text')}")
        if event.rank != 0:
            return
        if event.event == "resumed":
            if event.step:
                self.step = self.saved = event.step
                self._note(f"goes on after step {event.step}")
            if port := event.data.get("metrics_port"):
                say(f"  figures for Prometheus while it runs: http://127.0.0.1:{port}/metrics")
        elif event.event == "checkpoint" and not event.data.get("rejected"):
            self._saved(event)
        elif event.event == "checkpoint":
            self._note(f"checkpoint of step {event.step} is not sound: {event.data.get('why')}")
        elif event.event == "step":
            self._step(event)

    def is_news(self, record: logging.LogRecord) -> bool:
        """Return False for "gang ended" warnings whose cause a rank has already reported."""
        return not (self._failures and record.getMessage().startswith("gang ended"))

    def _failed(self, rank: int, message: str) -> None:
        """Print a failure once, even if several ranks report it."""
        if message not in self._failures:
            self._failures.add(message)
            self._note(f"rank {rank} failed: {message}")

    def _saved(self, event: RankEvent) -> None:
        """Print an attempt's first and newest checkpoint, others at most every SILENCE_S."""
        self.saved, now = event.step, self._clock()
        late = self._saved_at is None or now - self._saved_at >= SILENCE_S
        if late or event.step >= self.step:
            self._saved_at = now
            say(f"  checkpoint of step {event.step}: {event.data.get('url')}")

    def _step(self, event: RankEvent) -> None:
        self.step = event.step
        figures = {
            name: value if math.isfinite(number(value)) else None  # JSON has no NaN
            for name, value in event.data.items()
            if name in _KEPT or name.startswith("held_out")
        }
        line = {"step": event.step, "attempt": event.attempt, **figures}
        self._keep(METRICS_FILE, json.dumps(line) + "\n")
        for alert in _list(event.data.get("alerts")):
            if isinstance(alert, dict) and alert.get("raised"):
                self._note(str(alert.get("message")))
        for message in _list(event.data.get("checkpoint_alerts")):
            if str(message) not in self.notes:  # a slow store repeats its alert
                self._note(str(message))
        now, last = self._clock(), self._job.settings.steps
        if self._from is None:
            self._from = (event.step, now)
        regular = event.step % self._every == 0 or event.step in (1, last)
        if regular or now - self._told_at >= SILENCE_S:
            self._told_at = now
            loss, rate = (number(event.data.get(each)) for each in ("loss", "tokens_per_second"))
            say(
                f"  step {event.step:>6}/{last}  loss {loss:.4f}  {rate:,.0f} tokens/s"
                f"{self._left(event.step, now)}"
            )
        if "held_out_loss" in event.data:
            say(f"  held out after step {event.step}: {held_out(event.data)}")

    def _left(self, step: int, now: float) -> str:
        assert self._from is not None
        first, since = self._from
        if step <= first:
            return ""
        seconds = (now - since) / (step - first) * (self._job.settings.steps - step)
        return f"  {_span(seconds)} left" if seconds >= SILENCE_S else ""

    def stopped(self, checkpoints: object) -> Cancelled:
        """Return the error of a stopped training; it names the last saved step."""
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

    def _keep(self, name: str, text: str, mode: str = "a") -> None:
        """Write into a file beside the checkpoints; a failed write does not stop training."""
        if self._kept is None:
            return
        try:
            self._kept.mkdir(parents=True, exist_ok=True)
            with (self._kept / name).open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self._note(f"{self._kept / name} is not written any more: {error.strerror}")
            self._kept = None

    def _note(self, line: str) -> None:
        self.notes.append(line)
        say(f"! {line}")


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []
