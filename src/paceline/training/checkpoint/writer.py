"""The background part of a save: hash, upload, agree with the other ranks, commit.

Every rank writes its own file and sends its result to all; rank 0 writes index and marker, and its
result counts for every rank. A failure of any kind on any rank reaches all ranks, so none of them
blocks. The files of a save that failed permanently are removed: on a full disk they would block the
next one. Does not decide when to save.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import (
    NotSaved,
    PacelineError,
    PermanentError,
    ServiceUnavailable,
    StorageFull,
    TrainingFailed,
)
from paceline.schemas.base import canonical_json
from paceline.schemas.training import CheckpointRef
from paceline.training.checkpoint.generations import Generation, Generations
from paceline.training.checkpoint.layout import file_of
from paceline.training.checkpoint.records import Commit, Groups, Index, SavedFile
from paceline.training.checkpoint.staging import Exchange, Staging
from paceline.training.checkpoint.stateful import TrainState

log = logging.getLogger(__name__)

# Of an error: final, no other save can succeed; permanent, an operator must change something; full,
# an operator must free space; temporary, the same save may succeed later.
Kind = Literal["final", "permanent", "full", "temporary"]
_WORST_FIRST: tuple[Kind, ...] = ("final", "permanent", "full", "temporary")


@dataclass(frozen=True)
class SaveRequest:
    """The content of one save beside the tensors."""

    generation: Generation
    position: dict[str, Any]
    metrics: dict[str, float]
    extra: dict[str, Any]
    groups: Groups | None = None  # the optimizer's settings


@dataclass
class SaveResult:
    """The result of a save; the same on every rank."""

    step: int
    seconds: float  # in the background
    ref: CheckpointRef | None = None
    kept: Sequence[int] | None = None  # steps that still have a checkpoint; None: unknown
    error: PacelineError | None = None
    kind: Kind = "final"  # of the error


@dataclass
class _Part:
    """The result of one rank's part of a save."""

    files: dict[str, SavedFile] = field(default_factory=dict)
    error: dict[str, str | None] = field(default_factory=dict)  # what, got, wanted, where, do
    kind: Kind = "final"  # of the error

    def to_json(self) -> bytes:
        files = {name: saved.model_dump() for name, saved in self.files.items()}
        return json.dumps([files, self.error, self.kind]).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> _Part:
        files, error, kind = json.loads(raw)
        return cls({name: SavedFile(**saved) for name, saved in files.items()}, error, kind)

    def failed(self, error: BaseException, size: int, *, final: bool = False) -> None:
        """Record ``error``, raised while ``size`` bytes were written."""
        if not isinstance(error, PacelineError):
            error = TrainingFailed("its writer failed", got=repr(error))
        full = isinstance(error, StorageFull)
        self.error = {
            "what": error.what,
            "got": _text(error.got),
            "wanted": f"room for {size} bytes" if full else _text(error.wanted),
            "where": _text(error.where),
            "do": error.do,
        }
        permanent = isinstance(error, PermanentError)
        self.kind = (
            "final" if final else "full" if full else "permanent" if permanent else "temporary"
        )


class Writer:
    """Writes one rank's part of each save; ``keep`` and ``keep_best`` are counts of generations."""

    def __init__(
        self,
        generations: Generations,
        state: TrainState,
        exchange: Exchange,
        identity: Mapping[str, Any],
        *,
        keep: int,
        keep_best: int,
    ) -> None:
        """``identity``: the fields of every marker that describe the job and its code."""
        self._generations = generations
        self._state = state
        self._exchange = exchange
        self._identity = dict(identity)
        self._keep, self._keep_best = keep, keep_best

    def run(self, save: SaveRequest, staging: Staging, index: Index) -> SaveResult:
        """Write ``save`` and return its result; raises nothing."""
        began = time.perf_counter()
        try:
            ended = self._write(save, staging, index)
        except PacelineError as error:  # another rank is gone: no agreement is possible
            ended = SaveResult(save.generation.step, 0.0, error=error)
        except Exception as error:
            log.exception("checkpoint writer failed step=%d", save.generation.step)
            wrapped = TrainingFailed("checkpoint writer failed", got=repr(error))
            wrapped.__cause__ = error
            ended = SaveResult(save.generation.step, 0.0, error=wrapped)
        ended.seconds = time.perf_counter() - began
        return ended

    def _write(self, save: SaveRequest, staging: Staging, index: Index) -> SaveResult:
        step = save.generation.step
        part = _Part()
        if staging.chunks:
            try:
                staging.require_finite(step)
            except TrainingFailed as error:
                part.failed(error, staging.bytes, final=True)
            else:
                self._upload(save, staging, part)
        parts = [_Part.from_json(raw) for raw in self._exchange.all(part.to_json())]
        failed = _failure_of(step, parts)
        if failed is not None:
            self._take_back(save.generation, failed.kind)
            return failed
        verdict = b""
        if self._state.group.rank == 0:
            verdict = self._commit(save, parts, index)
        kind, *rest = json.loads(self._exchange.all(verdict)[0])
        if kind != "committed":
            return _failure_of(step, [_Part(error=rest[0], kind=kind)]) or SaveResult(step, 0.0)
        return SaveResult(step, 0.0, ref=CheckpointRef(**rest[0]), kept=rest[1])

    def _upload(self, save: SaveRequest, staging: Staging, part: _Part) -> None:
        group = self._state.group
        name = file_of(group.rank, group.world_size)
        saved = SavedFile(sha256=hashlib.sha256(staging.view).hexdigest(), bytes=staging.bytes)
        try:
            self._generations.put_file(save.generation, name, staging.path, saved)
            part.files[name] = saved
        except Exception as error:  # noqa: BLE001 - every failure must reach the other ranks
            log.warning("checkpoint part failed step=%d error=%s", save.generation.step, error)
            part.failed(error, staging.bytes)

    def _commit(self, save: SaveRequest, parts: Sequence[_Part], index: Index) -> bytes:
        """Write the marker and return the result as JSON."""
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
            index = index.model_copy(update={"groups": save.groups})
            commit = generations.commit(generation, commit, index)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a result
            log.warning("checkpoint was not committed step=%d error=%s", generation.step, error)
            part = _Part()
            part.failed(error, len(canonical_json(index)))
            self._take_back(generation, part.kind)
            return json.dumps([part.kind, part.error]).encode()
        ref = CheckpointRef(
            step=generation.step,
            url=generations.url_of(generation),
            digest=commit.digest,
            bytes=commit.bytes,
        )
        steps: list[int] | None = None
        try:
            kept = generations.collect(self._keep, self._keep_best, generation)
            steps = sorted({each.step for each in kept})
        except PacelineError as error:  # the save is committed; the next one collects
            log.warning("old checkpoints were not collected error=%s", error)
        return json.dumps(["committed", ref.model_dump(), steps]).encode()

    def _take_back(self, generation: Generation, kind: Kind) -> None:
        """Remove the files of a failed save; every rank has ended its part of it.

        Not for a temporary failure: the next committed save removes them (``collect``).
        """
        if self._state.group.rank != 0 or kind == "temporary":
            return
        try:
            self._generations.remove(generation)
        except PacelineError as error:
            log.warning("half a checkpoint was left generation=%s error=%s", generation, error)


def _failure_of(step: int, parts: Sequence[_Part]) -> SaveResult | None:
    """Return the result of a save in which ranks failed (the worst failure); None without any."""
    errors = [(rank, part) for rank, part in enumerate(parts) if part.error]
    if not errors:
        return None
    rank, worst = min(errors, key=lambda each: _WORST_FIRST.index(each[1].kind))
    kinds: dict[Kind, type[PacelineError]] = {
        "temporary": ServiceUnavailable,
        "final": TrainingFailed,
    }
    told = worst.error
    at = f"step {step}, rank {rank}"
    error = kinds.get(worst.kind, NotSaved)(
        f"checkpoint was not saved: {told['what']}",
        got=told["got"],
        wanted=told["wanted"],
        where=at if told["where"] is None else f"{told['where']}, {at}",
        do=told["do"],
    )
    return SaveResult(step, 0.0, error=error, kind=worst.kind)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
