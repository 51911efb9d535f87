"""A job's handling of updates: guards them, counts steps, saves between steps, and reports.

A step is ``workers`` versions. As in the loop, a state is saved only after the next gradient has
shown that its loss is sane, and before that gradient changes the weights. Everything runs under the
server's lock, in the order of versions; the standby runs the same to judge alike, but neither saves
nor reports.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.config import TrainingSettings
from paceline.errors import PacelineError
from paceline.training.loop.loop import Progress, StepReport
from paceline.training.loop.step_guard import StepGuard, Verdict
from paceline.training.strategies.protocol import AppliedUpdate, BatchReport, UpdatePolicy
from paceline.training.strategies.update_ledger import Update, UpdateLedger

log = logging.getLogger(__name__)

POSITION = "parameter-server"  # kind of a checkpoint's position


class Saver(Protocol):
    """The part of ``Checkpointer`` that is needed here."""

    stall_s: float

    def due(self, step: int, steps: int) -> bool: ...
    def save(self, step: int, position: dict[str, Any], metrics: dict[str, float]) -> bool: ...


@dataclass
class _Step:
    """Sums over the updates of the present step."""

    nats: float = 0.0
    tokens: float = 0.0
    norms: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    waited_s: float = 0.0
    taken: int = 0


class JobUpdatePolicy(UpdatePolicy):
    """Judges, counts and saves; ``progress`` is the progress of the job.

    ``led_by`` attaches a saver and a callback for steps.
    """

    def __init__(self, settings: TrainingSettings, workers: int, bad_before: int) -> None:
        self.settings, self.workers = settings, workers
        self.progress = Progress()
        self.quarantined: set[str] = set()
        self.guard = StepGuard.of(settings.guard, bad_before)
        self._rate: Callable[[int], float] = lambda _version: 0.0
        self._ledger: Callable[[], UpdateLedger] | None = None
        self._saver: Saver | None = None
        self._on_step: Callable[[StepReport], None] | None = None
        self._owed = False
        self._step = _Step()
        self._stepped_at = self._began = time.perf_counter()

    def led_by(
        self,
        saver: Saver,
        ledger: Callable[[], UpdateLedger],
        rate: Callable[[int], float],
        on_step: Callable[[StepReport], None],
    ) -> None:
        """Save and report from now on; the lock is held."""
        self._saver, self._ledger, self._rate, self._on_step = saver, ledger, rate, on_step
        self._stepped_at = self._began = time.perf_counter()
        self.progress.tokens, self.progress.data_wait_s = 0, 0.0  # counted by this leader
        self.progress.extra.update(self._kept())

    # -- Steward

    def judge(self, note: BatchReport, norm: float) -> bool:
        """Return whether to apply the gradient; write a due save before it changes anything."""
        if not note.tokens:  # every sample of it is in quarantine
            return False
        verdict = self._verdict(self.progress.step, note, norm)
        if verdict is not Verdict.TAKE:
            return False
        if self._owed and self._saver is not None:
            assert self._ledger is not None, "it came with the saver"
            position = position_of(self._ledger(), self.workers)
            self._saver.save(self.progress.step, position, self.progress.metrics())
            self.progress.stall_s, self._owed = self._saver.stall_s, False
        return True

    def applied(self, applied: AppliedUpdate) -> None:
        """Count the update; at the end of a step report it, and check whether a save is due."""
        if not applied.leads and applied.note.tokens:
            self._follow_guard(applied)
        self._count(applied)
        if applied.update.version % self.workers == 0:
            self._end_step(applied.update)

    def state(self) -> dict[str, Any]:
        """Return the JSON state for the standby."""
        progress = self.progress
        return {
            "guard": self.guard.state,
            "step": progress.step,
            "metrics": progress.metrics(),
            "quarantined": sorted(self.quarantined),
            "skipped": progress.bad_steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Load what ``state`` returned."""
        self.guard.restore(state["guard"])
        self.quarantined = set(state["quarantined"])
        self.progress = Progress.at(int(state["step"]), state["metrics"])
        self.progress.bad_steps = int(state["skipped"])
        self._step = _Step()

    # -- internal

    def _verdict(self, step: int, note: BatchReport, norm: float) -> Verdict:
        loss = note.loss if math.isfinite(norm) else math.nan
        return self.guard.judge(step=step, batch=note.batch, loss=loss, norm=norm)

    def _follow_guard(self, applied: AppliedUpdate) -> None:
        step = (applied.update.version - 1) // self.workers
        try:
            self._verdict(step, applied.note, applied.norm)
        except PacelineError as error:
            # Guards differ if bad steps were counted before this rank joined; the leader decides.
            log.info("the leader counted what this guard would not: %s", error)

    def _count(self, applied: AppliedUpdate) -> None:
        update, note = applied.update, applied.note
        step, progress = self._step, self.progress
        self.quarantined.update(note.quarantined)
        step.waited_s += note.waited_s
        step.staleness.append(update.version - 1 - update.base)
        progress.tokens += int(note.tokens)
        if not applied.taken:
            return
        step.taken += 1
        step.nats += note.loss * note.tokens
        step.tokens += note.tokens
        step.norms.append(applied.norm)
        if progress.first_loss is None:
            progress.first_loss = note.loss

    def _end_step(self, update: Update) -> None:
        done, self._step = self._step, _Step()
        progress, now = self.progress, time.perf_counter()
        progress.step = update.version // self.workers
        progress.bad_steps += done.taken < self.workers
        if done.tokens:
            progress.loss = done.nats / done.tokens
        waited = done.waited_s / self.workers
        progress.data_wait_s += waited
        progress.seconds = now - self._began
        seconds, self._stepped_at = now - self._stepped_at, now
        progress.extra.update(self._kept())
        if self._saver is not None and self._saver.due(progress.step, self.settings.steps):
            self._owed = True
        if self._on_step is not None:
            self._on_step(
                StepReport(
                    step=progress.step,
                    loss=progress.loss if progress.loss is not None else math.nan,
                    grad_norm=max(done.norms, default=math.nan),
                    learning_rate=self._rate(update.version),
                    seconds=seconds,
                    tokens_per_second=done.tokens / seconds if seconds else 0.0,
                    data_wait_s=waited,
                    taken=done.taken > 0,
                    figures={
                        "step_seconds": seconds,
                        "tokens_per_second": done.tokens / seconds if seconds else 0.0,
                        "data_wait_s": waited,
                        "staleness": sum(done.staleness) / max(1, len(done.staleness)),
                        "staleness_most": float(max(done.staleness, default=0)),
                    },
                )
            )

    def _kept(self) -> dict[str, Any]:
        return {"guard": self.guard.state, "quarantined": sorted(self.quarantined)}


def position_of(ledger: UpdateLedger, workers: int) -> dict[str, Any]:
    """Return the position for a checkpoint: the number of workers, and the ledger."""
    return {"kind": POSITION, "workers": workers, "ledger": ledger.to_json()}
