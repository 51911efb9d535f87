"""Text of `paceline train`: the facts at its start, its progress, the summary at its end.

Progress goes to standard error. Each step's figures are also written, one JSON object per line, to
``metrics.jsonl`` beside the job's checkpoints; together with the job itself (``job.json``) this is
the input of `paceline reproduce DIRECTORY`. This module starts and controls nothing.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import call_every
from paceline.errors import Cancelled
from paceline.system import usable_cores
from paceline.text import OneLine
from paceline.training.deadlines import Deadlines
from paceline.units import counted, duration, size

if TYPE_CHECKING:
    from paceline.data import Snapshot
    from paceline.models import ModelConfig, Pretrained
    from paceline.schemas import RankEvent, TrainJob, TrainResult

JOB_FILE, METRICS_FILE = "job.json", "metrics.jsonl"  # beside a job's checkpoints
REASONS = 3  # quarantine reasons in the summary
LINES = 40  # step lines per training, at least
SILENCE_S = 10.0  # greatest pause between lines while steps run or data are prepared

_KEPT = ("loss", "grad_norm", "lr", "tokens_per_second", "step_seconds", "step_skipped")


def say(line: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@contextmanager
def shown_warnings() -> Iterator[logging.Handler]:
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
    began = time.monotonic()

    def report() -> None:
        files = [each for each in (output / "data").rglob("*") if each.is_file()]
        read = size(sum(each.stat().st_size for each in files))
        say(f"  still preparing: {read} of data, {duration(time.monotonic() - began)}")

    with call_every(SILENCE_S, report):
        yield


class Lines:
    """Prints training progress on standard error; collects notes for the summary."""

    def __init__(
        self,
        job: TrainJob,
        kept: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.started = False  # whether any event has arrived
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
            f"training {self._job.job_id}: {counted(settings.steps, 'step')} on "
            f"{counted(settings.ranks, 'rank')}, "
            f"below {output}"
        )

    def watched(self) -> AbstractContextManager[None]:
        """Within the ``with``, report when no event arrives for long: after 10 s, 20, 40, …"""
        return call_every(1.0, self.look)

    def look(self) -> None:
        """Report where no event arrived for long; called about once a second."""
        silent = self._clock() - self._heard_at
        if silent < self._patience:
            return
        self._patience *= 2
        last = f"step {self.step} was the last" if self.step else "no step was made yet"
        say(
            f"  {duration(silent)} without a word: {last}; the first step also compiles, a step "
            f"may take {duration(Deadlines.of_job(self._job).of('step'))}"
        )

    def __call__(self, event: RankEvent) -> None:
        """Process one event."""
        self._heard_at, self._patience = self._clock(), SILENCE_S
        if not self.started:
            self.started = True
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
            if name in _KEPT or name.startswith(("held_out", "reward_"))
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
        return f"  {duration(seconds)} left" if seconds >= SILENCE_S else ""

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


def figures_in(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each step's figures from a metrics.jsonl; truncated lines are skipped."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            figures = json.loads(line)
            step = int(figures.pop("step"))
        except (ValueError, KeyError, AttributeError, TypeError):
            continue  # its writer was killed
        yield step, figures


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


# The facts at the start and the summary at the end.


def facts(job: TrainJob, snapshot: Snapshot, config: ModelConfig | Pretrained | None) -> list[str]:
    """Return lines on model and data, for the user to check before training."""
    record = snapshot.record
    train, aside = snapshot.of_split("train"), snapshot.of_split("held-out")
    lines = [
        f"  data    {record.documents:,} samples, {snapshot.tokens:,} tokens: "
        f"{sum(each.tokens for each in train):,} to learn from, "
        f"{sum(each.tokens for each in aside):,} held out",
        f"  model   {_shape(job, config)}",
    ]
    if (lora := job.settings.lora) is not None:
        lines.append(
            f"  trained {'DoRA' if lora.use_dora else 'LoRA'} adapters of rank {lora.r} on "
            f"{', '.join(lora.target_modules) or 'the layers that peft chooses'}; no other weight"
        )
    if record.cut_at_bytes is not None:
        lines.append(
            f"! data are cut at {record.cut_at_bytes:,} bytes: more of them is taken with "
            "--set data.max_bytes=…"
        )
    if record.skipped:
        lines.append(
            f"! {record.skipped:,} left out, e.g. {'; '.join(record.skipped_examples[:2])}"
        )
    if record.duplicates:
        lines.append(f"  {record.duplicates:,} samples that say the same as another are left out")
    if (wanted := job.settings.ranks * job.settings.threads_per_rank) > (cores := usable_cores()):
        lines.append(
            f"! {job.settings.ranks} ranks of {job.settings.threads_per_rank} threads take turns "
            f"on {cores} cores: a step takes about {wanted / cores:.1f} times as long"
        )
    return lines


def _shape(job: TrainJob, config: ModelConfig | Pretrained | None) -> str:
    from paceline.models import Pretrained, count_parameters

    if config is None:
        return job.settings.code_ref
    if isinstance(config, Pretrained):
        tokens = "its own tokens" if config.tokenizer_digest else "bytes"
        return f"{config}, rows of {job.task.context if job.task else '?'} tokens ({tokens})"
    return (
        f"{count_parameters(config):,} parameters: {config.num_hidden_layers} layers of width "
        f"{config.hidden_size}, context {config.context}, {config.vocab_size} tokens"
    )


def beside(job: TrainJob, checkpoints: Path) -> str | None:
    """Return a line on another training in this directory, where ``job`` begins anew."""
    if checkpoints.exists() or not checkpoints.parent.is_dir() or job.continues is not None:
        return None
    found = {each.name: _saved_step(each) for each in checkpoints.parent.iterdir()}
    known = [f"{name} (step {step})" for name, step in sorted(found.items()) if step]
    if not known:
        return None
    return (
        f"! below this directory is also {', '.join(known[:3])}: its data, model or settings are "
        f"others, so {job.job_id} begins at its first step"
    )


def summary(job: TrainJob, result: TrainResult, *, as_chat: bool = False) -> list[str]:
    """Return the summary that is printed at the end of a run; ``as_chat``: the data were rendered
    by the model's chat template."""
    from paceline.training import checkpoints_url, display_url, local_record_dir

    record = local_record_dir(job)
    unit = "token" if job.settings.dpo is None else "pair"
    lines = [
        f"done: {counted(result.steps, 'step')} on {counted(result.ranks, 'rank')} in "
        f"{result.seconds:.1f} s, {result.tokens_per_second:,.0f} tokens/s",
        f"  loss          {_shown(result.first_loss)} → {_shown(result.final_loss)} nats a {unit}",
    ]
    if result.stopped_early:
        lines.insert(1, f"  ended early   {result.stopped_early}")
        lines.insert(2, f"  exported      {result.exported}")
    if "held_out_loss" in result.held_out:
        lines.append(f"  held out      {held_out(result.held_out)}")
    lines += [
        f"  waiting       data {result.data_wait_share:.1%}, "
        f"checkpoints {result.checkpoint_stall_share:.1%}",
        f"  checkpoints   {len(result.checkpoints)} in {display_url(checkpoints_url(job))}",
    ]
    if result.ema_decay is not None:
        lines.append(f"  weights       their moving average, decay {result.ema_decay:g}")
    if (record / METRICS_FILE).exists():
        lines.append(f"  each step     {record / METRICS_FILE}")
    if (record / "traces").exists():
        lines.append(f"  traces        {record / 'traces'} (for Perfetto)")
    model = display_url(result.export_url)
    lines.append(f"  model         {model}")
    if not job.settings.code_ref:  # of user code: it is judged, not asked
        lines.append(
            f"  look at it    paceline generate {shlex.quote(model)} PROMPT{' --chat' * as_chat}"
        )
    if job.settings.lora is not None:
        lines.append(f"  adapter       {display_url(checkpoints_url(job))}/adapter")
    if result.ledger is not None:
        ledger = result.ledger
        parts = {name: getattr(ledger, name) for name in type(ledger).model_fields}
        accounts = [
            f"{name.removesuffix('_s').replace('_', ' ')} {seconds:.1f}"
            for name, seconds in parts.items()
            if name not in ("wall_s", "goodput") and seconds >= 0.05
        ]
        lines.append(f"  seconds       {', '.join(accounts)} of {ledger.wall_s:.1f}")
        lines.append(f"  goodput       {ledger.goodput:.1%} from the first step to the last")
    for restart in result.restarts:
        lines.append(
            f"  restart       {restart.kind}: {restart.reason}; "
            f"{counted(restart.lost_steps, 'step')} lost, {restart.seconds:.1f} s"
        )
    if result.skipped_batches or result.quarantined_shards:
        lines.append(
            f"  needs review  {len(result.quarantined_shards)} shards or samples, "
            f"batches passed over: {list(result.skipped_batches)}"
        )
        lines += [f"                {each}" for each in result.quarantine_lines[:REASONS]]
    return lines


def held_out(figures: dict[str, float] | dict[str, object]) -> str:
    """Return an evaluation's figures as text."""
    nats, bits = (number(figures.get(each)) for each in ("held_out_loss", "held_out_bits_per_byte"))
    if "held_out_reward_accuracy" in figures:
        accuracy = number(figures["held_out_reward_accuracy"])
        return f"{nats:.4f} nats a pair, the chosen answer is ahead in {accuracy:.0%}"
    return f"{nats:.4f} nats a token" + ("" if math.isnan(bits) else f", {bits:.3f} bits a byte")


def _saved_step(directory: Path) -> int:
    """Return the newest step with a checkpoint generation in a job's directory, or 0."""
    names = [each.name.split("-") for each in directory.glob("step-*")]
    return max((int(each[1]) for each in names if each[1].isdecimal()), default=0)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def number(value: object) -> float:
    """Return the JSON value ``value`` as a float, NaN where it is not a number."""
    return float(value) if isinstance(value, int | float) else float("nan")
