"""Asynchronous checkpoints as the training thread sees them: when to save, the copy, the result.

``save`` blocks training for one copy into reused buffers; a thread does the rest (``writer``). At
most one save is in flight: a save that is due meanwhile is postponed and counted, so a slow store
lengthens the interval and never stops training. Every method is called on every rank, in the same
order.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from paceline.config import CheckpointSettings
from paceline.errors import NotSaved, PacelineError, TrainingFailed
from paceline.schemas import CheckpointRef
from paceline.training.checkpoint.generations import Generation, Generations
from paceline.training.checkpoint.layout import TrainState, assign_writes, chunks_of, index_of
from paceline.training.checkpoint.records import Commit, Index
from paceline.training.checkpoint.writer import Exchange, SaveResult, Staging, Writer
from paceline.training.interval import CheckpointAlert, CheckpointInterval, FailureCount

log = logging.getLogger(__name__)

MAX_PERMANENT_FAILURES = 2  # consecutive permanent failures (no permission) before training fails
# Consecutive saves for which the store did not answer or was full. An operator may be repairing it,
# and stopping loses for certain what a further failure only might lose.
MAX_TEMPORARY_FAILURES = 10
MOST_ALERTS = 100
CLOSE_S = 5.0


class Checkpointer:
    """Saves one job's state; created on every rank at the same time."""

    def __init__(
        self,
        generations: Generations,
        state: TrainState,
        settings: CheckpointSettings,
        *,
        job_id: str,
        config_digest: str,
        code_version: str,
        environment: Mapping[str, Any] | None = None,
        failures: FailureCount | None = None,
        deadline_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``deadline_s``: for one save, from its first byte to its marker."""
        self.stall_s = 0.0  # time that saves blocked training
        self.postponed = 0  # saves that were due while another was in flight
        self.alerts: list[CheckpointAlert] = []
        self.saved: dict[int, CheckpointRef] = {}
        self._generations, self._state = generations, state
        self._deadline_s, self._clock = deadline_s, clock
        self._interval = CheckpointInterval(settings, failures or FailureCount())
        self._exchange = Exchange(state.group, deadline_s)
        self._identity: dict[
            str, Any
        ] = {  # the fields of every marker that describe the job and its code
            "job_id": job_id,
            "config_digest": config_digest,
            "code_version": code_version,
            "environment": dict(environment or {}),
            "world_size": state.group.world_size,
            "layout": state.layout(),
            "files": {},
        }
        keep, best = settings.keep, settings.keep_best
        self._writer = Writer(generations, state.group, self._exchange, keep=keep, keep_best=best)
        self._signature: object = None
        self._staging: Staging | None = None
        self._index = Index(tensors={})
        self._members: list[list[str]] = []  # names in each of the optimizer's groups
        self._waiting = False  # a save was postponed and not made up for
        self._retry = False  # it is due again
        self._flight: Future[SaveResult] | None = None
        self._error: PacelineError | None = None
        self._failed_in_row = 0
        self._unreported: list[CheckpointRef] = []

    @property
    def expected_s(self) -> float | None:
        """Return the expected seconds between checkpoints; None before a step was measured."""
        return self._interval.expected_s

    # ── called by the training loop ──────────────────────────────────────────────────────────────

    def due(self, step: int, steps: int) -> bool:
        """Return rank 0's decision whether to save after ``step`` of ``steps``; False on the other
        ranks: the caller sends it to them. Called once a step."""
        now = self._clock()
        self._reap()
        self._interval.stepped(now)
        if self._state.group.rank != 0:
            return False
        again, self._retry = self._retry, False
        return self._interval.due(step, now) or again or step >= steps

    def save(
        self,
        step: int,
        position: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        wait: bool = False,
    ) -> bool:
        """Start saving and return True, or False where the last save is still in flight.

        With ``wait``, wait for that one first. After the return the state may change. Raises the
        error that made earlier saves fail permanently.
        """
        started = self._clock()
        group = self._state.group
        if wait:
            self._join()
        self._reap()
        tensors = self._state.tensors()
        signature = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        first = group.rank == 0
        busy, changed, failed, number = group.sums(
            [
                float(self._flight is not None),
                float(signature != self._signature),
                float(self._error is not None),
                float(random.getrandbits(32)) if first else 0.0,
            ]
        )
        if busy:
            self._note(self._interval.postponed(step))
            self.postponed += 0 if self._waiting else 1
            self._waiting = self._retry = True
            self.stall_s += self._clock() - started
            return False
        if failed:
            self._raise()
        if changed:
            self._plan(tensors, signature)
        assert self._staging is not None
        self._staging.fill(tensors)
        self._waiting = self._retry = False
        self._state.position = dict(position)
        extra = {k: v for k, v in self._state.extra.items() if not isinstance(v, Tensor)}
        commit = Commit(
            **self._identity,
            step=step,
            position=copy.deepcopy(dict(position)),  # it and ``extra`` change while it is written
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            extra=copy.deepcopy(extra),
        )
        groups = self._state.groups(self._members) if first else None
        index = self._index.model_copy(update={"groups": groups})
        self._start(Generation(step, int(number)), self._staging, commit, index)
        now = self._clock()
        self._interval.saved(now, now - started)
        self.stall_s += now - started
        return True

    def save_last(
        self, step: int, position: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Return once ``step`` is saved, whatever was in flight or postponed: for the last save and
        for emergencies. Raises the error that prevents the save.
        """
        self._join()
        self._reap()
        if step in self.saved:
            return
        self._error = None  # try again in spite of earlier failures
        self.save(step, position, metrics)
        self._join()
        error = self._reap()
        if step not in self.saved:
            raise error or NotSaved("last state was not saved", where=self._generations.url)

    def finish(self) -> None:
        """Wait for the save in flight; raises the error that made saves fail permanently."""
        self._join()
        self._reap()
        if self._error is not None:
            self._raise()

    def close(self) -> None:
        """Release the buffers after a short wait for a save in flight; raises nothing.

        Used on every exit path: with a dead peer, a save in flight may never end.
        """
        self._ended_within(CLOSE_S)
        self._staging = None  # a running writer has its own reference

    def report(self) -> list[CheckpointRef]:
        """Return the checkpoints committed since the last call."""
        self._reap()
        found, self._unreported = self._unreported, []
        return found

    def kept(self) -> tuple[CheckpointRef, ...]:
        """Return the checkpoints of this process that still exist, oldest first."""
        self._reap()
        return tuple(self.saved[step] for step in sorted(self.saved))

    # ── a save, and its result on the training thread ────────────────────────────────────────────

    def _plan(self, tensors: Mapping[str, Tensor], signature: object) -> None:
        """Agree on who writes what, and allocate the buffer; once a layout."""
        written = assign_writes(self._exchange.chunks(chunks_of(tensors)))
        self._index = index_of(written)
        every = self._exchange.all(json.dumps(self._state.members()).encode())
        parts = zip(*map(json.loads, sorted(set(every))), strict=True)  # of a pipeline, by group
        self._members = [sorted({name for part in group for name in part}) for group in parts]
        self._staging = None  # release the old buffer first
        pin = any(each.device.type == "cuda" for each in tensors.values())
        self._staging = Staging(written[self._state.group.rank], pin=pin)
        self._signature = signature

    def _start(
        self, generation: Generation, staging: Staging, commit: Commit, index: Index
    ) -> None:
        flight: Future[SaveResult] = Future()

        def write() -> None:
            flight.set_result(self._writer.run(generation, staging, commit, index))

        # No executor: the interpreter would wait at its exit for a save that never ends.
        threading.Thread(target=write, name="checkpoint-writer", daemon=True).start()
        self._flight = flight

    def _ended_within(self, seconds: float) -> bool:
        try:
            return self._flight is None or self._flight.result(seconds) is not None
        except TimeoutError:
            return False

    def _join(self) -> None:
        if not self._ended_within(2 * self._deadline_s):
            raise TrainingFailed(
                "checkpoint cannot be written",
                got=f"nothing for {2 * self._deadline_s:.0f} s",
                where=self._generations.url,
                do="Check the store of checkpoints.",
            )

    def _reap(self) -> PacelineError | None:
        """Record the result of the last save if it has ended, and return its error."""
        if self._flight is None or not self._flight.done():
            return None
        ended, self._flight = self._flight.result(), None
        self._note(self._interval.written(ended.step, ended.seconds))
        if ended.ref is not None:
            self._failed_in_row = 0
            self.saved[ended.step] = ended.ref
            self._unreported.append(ended.ref)
            if ended.kept is not None:
                self.saved = {s: ref for s, ref in self.saved.items() if s in ended.kept}
            return None
        self._failed_in_row += 1
        self._note(CheckpointAlert("checkpoint-failed", ended.step, str(ended.error)))
        temporary = ended.kind in ("temporary", "full")
        most = MAX_TEMPORARY_FAILURES if temporary else MAX_PERMANENT_FAILURES
        if ended.kind == "final" or self._failed_in_row >= most:
            self._error = ended.error
        return ended.error

    def _note(self, alert: CheckpointAlert | None) -> None:
        if alert is not None and len(self.alerts) < MOST_ALERTS:
            log.warning("%s step=%d %s", alert.kind, alert.step, alert.message)
            self.alerts.append(alert)

    def _raise(self) -> None:
        error, self._error = self._error, None
        raise error or NotSaved("another rank could not save", where=self._generations.url)
