"""Saving: every rank's part, staged at once, written by a thread, committed by rank 0 at the end.

``save`` blocks training for one copy into buffers that are used again. A thread hashes and uploads;
all ranks tell each other their files' hashes; then rank 0 writes index and marker. One save
is in flight at most: a due save that finds one is put off and counted, so a slow store lengthens
the interval and never stops training. Every method is called on every rank, in the same order.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.errors import PacelineError, PermanentError, ServiceUnavailable, TrainingFailed
from paceline.profile import CheckpointSettings
from paceline.training.checkpoint.exchange import Exchange, agree_on_held
from paceline.training.checkpoint.generations import Generation, Generations
from paceline.training.checkpoint.layout import Chunk, chunks_of, share_out
from paceline.training.checkpoint.records import (
    Commit,
    Index,
    SavedFile,
    StoredChunk,
    StoredTensor,
)
from paceline.training.checkpoint.staging import Staging
from paceline.training.checkpoint.state import TrainState
from paceline.training.interval import Alert, Failures, Interval
from paceline.wire.training import CheckpointRef

log = logging.getLogger(__name__)

MOST_FAILED = 2  # saves in a row that fail for good (no permission, disk full) before training does
MOST_UNANSWERED = 10  # in a row that a store did not answer
MOST_ALERTS = 100
CLOSE_S = 5.0


@dataclass(frozen=True)
class _Save:
    """What one save was asked to keep beside the tensors."""

    generation: Generation
    position: dict[str, Any]
    metrics: dict[str, float]
    extra: dict[str, Any]


@dataclass
class _Ended:
    """How a save ended; the same on every rank."""

    step: int
    seconds: float
    ref: CheckpointRef | None = None
    kept: tuple[int, ...] = ()
    error: PacelineError | None = None
    final: bool = False  # no other save can do better


@dataclass
class _Part:
    """What one rank tells the others about its part."""

    files: dict[str, SavedFile] = field(default_factory=dict)
    error: str = ""
    kind: str = ""  # of the error: final, permanent, temporary

    def to_json(self) -> bytes:
        files = {name: saved.model_dump() for name, saved in self.files.items()}
        return json.dumps([files, self.error, self.kind]).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> _Part:
        files, error, kind = json.loads(raw)
        return cls({name: SavedFile(**saved) for name, saved in files.items()}, error, kind)

    def failed(self, error: BaseException, *, final: bool = False) -> None:
        self.error = error.one_line() if isinstance(error, PacelineError) else repr(error)
        permanent = isinstance(error, PermanentError) or not isinstance(error, PacelineError)
        self.kind = "final" if final else "permanent" if permanent else "temporary"


class Checkpointer:
    """Saves one job's state; made on every rank at the same time."""

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
        failures: Failures | None = None,
        deadline_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``deadline_s``: for one save, from its first byte to its marker."""
        self.stall_s = 0.0  # for which saves blocked training
        self.put_off = 0  # saves that were due while another was in flight
        self.alerts: list[Alert] = []
        self.saved: dict[int, CheckpointRef] = {}
        self._generations = generations
        self._state = state
        self._settings = settings
        self._identity: dict[str, Any] = {
            "job_id": job_id,
            "config_digest": config_digest,
            "code_version": code_version,
            "environment": dict(environment or {}),
        }
        self._deadline_s = deadline_s
        self._clock = clock
        self._interval = Interval(settings, failures or Failures())
        self._exchange = Exchange(state.group, deadline_s)
        self._signature: object = None
        self._staging: Staging | None = None
        self._index = Index(tensors={})
        self._next: int | None = None  # step at which to save, or to ask the clock; on all ranks
        self._waiting = False  # a save was put off and is due at the next step that finds room
        self._thread: threading.Thread | None = None
        self._ended: _Ended | None = None
        self._error: PacelineError | None = None
        self._failed_in_row = 0
        self._unreported: list[CheckpointRef] = []

    # ── what the loop calls ──────────────────────────────────────────────────────────────────────

    def due(self, step: int, steps: int) -> bool:
        """Return whether to save after ``step`` of ``steps``; the same on every rank."""
        now = self._clock()
        self._reap()
        self._interval.stepped(now)
        if self._next is None:
            self._next = self._interval.next_step(step - 1)
        if step >= steps or self._waiting:
            return True
        if step < self._next:
            return False
        if self._interval.by_steps:
            return True
        group = self._state.group
        due, again = self._interval.ask(step, now) if group.rank == 0 else (False, 0)
        agreed_due, agreed_again = group.sums([float(due), float(again)])
        self._next = int(agreed_again)
        return agreed_due > 0

    def save(
        self,
        step: int,
        position: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        wait: bool = False,
    ) -> bool:
        """Start saving and return True, or False where the last save is still in flight.

        With ``wait``, wait for that one first. When it returns the state may change. Raises what
        made earlier saves fail for good.
        """
        started = self._clock()
        group = self._state.group
        if wait:
            self._join()
        self._reap()
        tensors = self._state.tensors()
        signature = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        first = group.rank == 0
        busy, changed, failed, number, following = group.sums(
            [
                float(self._thread is not None),
                float(signature != self._signature),
                float(self._error is not None),
                float(random.getrandbits(32)) if first else 0.0,
                float(self._interval.next_step(step)) if first else 0.0,
            ]
        )
        if busy:
            self._note(self._interval.put_off(step))
            self.put_off += 0 if self._waiting else 1
            self._waiting = True
            self.stall_s += self._clock() - started
            return False
        if failed:
            self._raise()
        if changed:
            self._plan(tensors, signature)
        assert self._staging is not None
        self._staging.fill(tensors)
        self._waiting = False
        self._next = int(following)
        self._state.position = dict(position)
        save = _Save(
            Generation(step, int(number)),
            copy.deepcopy(dict(position)),  # both go on changing while the thread writes
            {name: value for name, value in metrics.items() if math.isfinite(value)},
            copy.deepcopy(
                {k: v for k, v in self._state.extra.items() if not isinstance(v, Tensor)}
            ),
        )
        self._thread = threading.Thread(
            target=self._run, args=(save, self._staging), name="checkpoint-writer", daemon=True
        )
        self._thread.start()
        now = self._clock()
        self._interval.saved(now, now - started)
        self.stall_s += now - started
        return True

    def save_last(
        self, step: int, position: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Return once ``step`` is saved, whatever was in flight or put off: the last save, or an
        emergency's. Raises what keeps it from being saved.
        """
        self._join()
        self._reap()
        if step in self.saved:
            return
        self._error = None  # it gets its own chance
        self.save(step, position, metrics)
        error = self._join_and_reap()
        if step not in self.saved:
            raise error or TrainingFailed("last state was not saved", where=self._generations.url)

    def finish(self) -> None:
        """Wait for the save in flight; raises what made saves fail for good."""
        self._join_and_reap()
        if self._error is not None:
            self._raise()

    def close(self) -> None:
        """Give the buffers back, after a moment for a save in flight; raises nothing.

        For every way out: with a dead peer there may be nobody left to end a save with.
        """
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._staging = None  # a writer that is still at it holds its own

    def report(self) -> list[CheckpointRef]:
        """Return the checkpoints committed since the last call."""
        self._reap()
        found, self._unreported = self._unreported, []
        return found

    def kept(self) -> tuple[CheckpointRef, ...]:
        """Return the generations this process saved that are still there, oldest first."""
        self._reap()
        return tuple(self.saved[step] for step in sorted(self.saved))

    # ── planning ─────────────────────────────────────────────────────────────────────────────────

    def _plan(self, tensors: Mapping[str, Tensor], signature: object) -> None:
        """Agree on who writes what, and make room for it; once a layout."""
        group = self._state.group
        written = share_out(agree_on_held(self._exchange, chunks_of(tensors)))
        self._index = index_of(written)
        self._staging = None  # give the old room back first
        pin = any(each.device.type == "cuda" for each in tensors.values())
        self._staging = Staging(written[group.rank], pin=pin)
        self._signature = signature

    # ── in the thread ────────────────────────────────────────────────────────────────────────────

    def _run(self, save: _Save, staging: Staging) -> None:
        began = time.perf_counter()
        try:
            ended = self._write(save, staging)
        except PacelineError as error:  # another rank is gone: there is nobody to agree with
            ended = _Ended(save.generation.step, 0.0, error=error, final=True)
        except Exception as error:
            log.exception("checkpoint writer failed step=%d", save.generation.step)
            wrapped = TrainingFailed("checkpoint writer failed", got=repr(error))
            wrapped.__cause__ = error
            ended = _Ended(save.generation.step, 0.0, error=wrapped, final=True)
        ended.seconds = time.perf_counter() - began
        self._ended = ended

    def _write(self, save: _Save, staging: Staging) -> _Ended:
        step = save.generation.step
        part = _Part()
        if staging.chunks:
            try:
                staging.require_finite(step)
            except TrainingFailed as error:
                part.failed(error, final=True)
            else:
                self._upload(save, staging, part)
        parts = [_Part.from_json(raw) for raw in self._exchange.all(part.to_json())]
        failed = _failure_of(step, parts)
        if failed is not None:
            return failed
        verdict = b""
        if self._state.group.rank == 0:
            verdict = self._commit(save, parts)
        kind, *rest = json.loads(self._exchange.all(verdict)[0])
        if kind != "committed":
            return _failure_of(step, [_Part(error=rest[0], kind=kind)]) or _Ended(step, 0.0)
        return _Ended(step, 0.0, ref=CheckpointRef(**rest[0]), kept=tuple(rest[1]))

    def _upload(self, save: _Save, staging: Staging, part: _Part) -> None:
        group = self._state.group
        name = file_of(group.rank, group.world_size)
        saved = SavedFile(sha256=hashlib.sha256(staging.view).hexdigest(), bytes=staging.bytes)
        try:
            self._generations.put_file(save.generation, name, staging.path, saved)
            part.files[name] = saved
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it, whatever it is
            log.warning("checkpoint part failed step=%d error=%s", save.generation.step, error)
            part.failed(error)

    def _commit(self, save: _Save, parts: Sequence[_Part]) -> bytes:
        """Write the marker and return what became of it, as JSON."""
        generations, generation = self._generations, save.generation
        files = {name: saved for part in parts for name, saved in part.files.items()}
        try:
            commit = Commit(
                **self._identity,
                step=generation.step,
                position=save.position,
                world_size=self._state.group.world_size,
                layout=self._state.layout(),
                metrics=save.metrics,
                extra=save.extra,
                files=files,
            )
            commit = generations.commit(generation, commit, self._index)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a word
            log.warning("checkpoint was not committed step=%d error=%s", generation.step, error)
            part = _Part()
            part.failed(error)
            return json.dumps([part.kind, part.error]).encode()
        ref = CheckpointRef(
            step=generation.step,
            url=generations.url_of(generation),
            digest=commit.digest,
            bytes=commit.bytes,
        )
        steps = sorted({generation.step, *self.saved})
        try:
            kept = generations.collect(self._settings.keep, self._settings.keep_best, generation)
            steps = sorted({each.step for each in kept})
        except PacelineError as error:  # the save stands; the next one collects
            log.warning("old checkpoints were not collected error=%s", error)
        return json.dumps(["committed", ref.model_dump(), steps]).encode()

    # ── back in the thread that trains ───────────────────────────────────────────────────────────

    def _join(self) -> None:
        if self._thread is None:
            return
        self._thread.join(2 * self._deadline_s)
        if self._thread.is_alive():
            raise TrainingFailed(
                "checkpoint cannot be written",
                got=f"nothing for {2 * self._deadline_s:.0f} s",
                where=self._generations.url,
                do="Check the store of checkpoints.",
            )

    def _join_and_reap(self) -> PacelineError | None:
        """Wait for the save in flight and return its error."""
        self._join()
        return self._reap()

    def _reap(self) -> PacelineError | None:
        """Take in how the last save ended, if it did, and return its error."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread.join()
        ended, self._thread, self._ended = self._ended, None, None
        assert ended is not None
        self._note(self._interval.written(ended.step, ended.seconds))
        if ended.ref is not None:
            self._failed_in_row = 0
            self.saved[ended.step] = ended.ref
            self._unreported.append(ended.ref)
            for step in set(self.saved) - set(ended.kept):
                del self.saved[step]
            return None
        self._failed_in_row += 1
        self._note(Alert("checkpoint-failed", ended.step, str(ended.error)))
        most = MOST_UNANSWERED if isinstance(ended.error, ServiceUnavailable) else MOST_FAILED
        if ended.final or self._failed_in_row >= most:
            self._error = ended.error
        return ended.error

    def _note(self, alert: Alert | None) -> None:
        if alert is not None and len(self.alerts) < MOST_ALERTS:
            log.warning("%s step=%d %s", alert.kind, alert.step, alert.message)
            self.alerts.append(alert)

    def _raise(self) -> None:
        error, self._error = self._error, None
        raise error or TrainingFailed("another rank could not save", where=self._generations.url)


def file_of(rank: int, world_size: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def index_of(written: Sequence[Sequence[Chunk]]) -> Index:
    """Return where each tensor lies when rank i writes ``written[i]``."""
    found: dict[str, tuple[Chunk, list[StoredChunk]]] = {}
    for rank, chunks in enumerate(written):
        file = file_of(rank, len(written))
        for chunk in chunks:
            stored = StoredChunk(file=file, offsets=chunk.offsets, sizes=chunk.sizes)
            found.setdefault(chunk.tensor, (chunk, []))[1].append(stored)
    return Index(
        tensors={
            name: StoredTensor(
                dtype=chunk.dtype,
                shape=chunk.shape,
                chunks=tuple(sorted(chunks, key=lambda each: each.offsets)),
            )
            for name, (chunk, chunks) in found.items()
        }
    )


def _failure_of(step: int, parts: Sequence[_Part]) -> _Ended | None:
    """Return how a save ends in which some ranks failed, or None where none did."""
    errors = [(rank, part) for rank, part in enumerate(parts) if part.error]
    if not errors:
        return None
    rank, worst = min(errors, key=lambda e: ("final", "permanent", "temporary").index(e[1].kind))
    kind = ServiceUnavailable if worst.kind == "temporary" else TrainingFailed
    error = kind("checkpoint was not saved", got=worst.error, where=f"step {step}, rank {rank}")
    return _Ended(step, 0.0, error=error, final=worst.kind == "final")
