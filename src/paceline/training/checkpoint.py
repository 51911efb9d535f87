"""Checkpoints: asynchronous, atomic, verified before use, several generations.

A generation is ``<job>/step-NNNNNNNN/`` with ``model.safetensors``, ``optimizer.safetensors`` and,
written last, ``commit.json``: the hash of every file, the data position, how randomness is derived,
the configuration's digest and the code's version. Without a commit marker that matches itself and
every byte it names, there is no generation. Nothing is pickled.

Saving blocks training for one copy in memory; a thread serialises, hashes and uploads. One save is
in flight at most: a due save that finds the last one unfinished is put off and counted, so a slow
store lengthens the interval and never stops training. Any number of ranks can resume from it, as
data parallelism replicates the state. Knows no loop and no ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.errors import CorruptData, PacelineError, SourceMissing, TrainingFailed
from paceline.objects import ObjectStore, join_url
from paceline.training.recipe import optimizer_tensors, restore_optimizer
from paceline.wire.base import Record, Sha256, canonical_json, digest_of
from paceline.wire.training import CheckpointRef

log = logging.getLogger(__name__)

COMMIT_FILE = "commit.json"
REJECTED_FILE = "rejected.json"
MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
FINISH_DEADLINE_S = 300.0
_STEP = re.compile(r"/step-(\d{8})/commit\.json$")


class SavedFile(Record):
    sha256: Sha256
    bytes: int = Field(ge=1)


class Commit(Record):
    """The marker that makes a generation real."""

    format: int = 2
    job_id: str
    step: int = Field(ge=0)
    position: dict[str, Any]  # of the data stream; means the same to any number of ranks
    config_digest: Sha256
    code_version: str
    randomness: str = "a function of (seed, step, row); no generator state"
    metrics: dict[str, float] = {}
    files: dict[str, SavedFile]
    digest: str = ""  # of this record with ``digest`` empty

    def sealed(self) -> Commit:
        """Return the commit with its own digest in it."""
        return self.model_copy(update={"digest": digest_of(self.model_copy(update={"digest": ""}))})


@dataclass(frozen=True)
class Restored:
    """Where a checkpoint left off."""

    step: int
    position: dict[str, Any]
    metrics: dict[str, float]


class Generations:
    """The committed checkpoints of one job in the object store."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self.store = store
        self.url = url

    def steps(self) -> list[int]:
        """Return the steps that have a commit marker, newest first; none of them verified."""
        found = [_STEP.search(info.url) for info in self.store.list(self.url)]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def step_url(self, step: int) -> str:
        """Return where the generation of ``step`` lives."""
        return join_url(self.url, f"step-{step:08d}")

    def fetch(self, step: int, directory: Path, config_digest: str) -> Commit:
        """Download the generation of ``step`` into ``directory`` and return its commit.

        Raises CorruptData unless every byte is the one that was committed, TrainingFailed where it
        is of another configuration.
        """
        where = self.step_url(step)
        commit = self._commit(step)
        if commit.config_digest != config_digest:
            raise TrainingFailed(
                "checkpoint is of another configuration",
                got=f"configuration {commit.config_digest[:16]}",
                wanted=config_digest[:16],
                where=where,
                do="Use another job id, or the settings the job was started with.",
            )
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for name, saved in commit.files.items():
            try:
                self.store.download_file(join_url(where, name), directory / name)
            except SourceMissing as error:
                raise CorruptData("checkpoint file is missing", got=name, where=where) from error
            if _hash(directory / name) != saved:
                raise CorruptData("checkpoint file does not match its hash", got=name, where=where)
        return commit

    def reject(self, step: int, reason: str) -> None:
        """Take the commit marker away from a generation that is not what it says."""
        where = self.step_url(step)
        self.store.put_bytes(join_url(where, REJECTED_FILE), json.dumps({"why": reason}).encode())
        self.store.delete(join_url(where, COMMIT_FILE))
        log.warning("checkpoint rejected step=%d reason=%s", step, reason)

    def remove(self, step: int) -> None:
        """Delete a generation: its marker first, so that it is never half a checkpoint."""
        self.store.delete(join_url(self.step_url(step), COMMIT_FILE))
        self.store.delete_prefix(self.step_url(step))

    def _commit(self, step: int) -> Commit:
        where = join_url(self.step_url(step), COMMIT_FILE)
        try:
            raw = self.store.get_bytes(where, max_bytes=1024 * 1024)
            commit = Commit.model_validate_json(raw)
        except (SourceMissing, ValidationError) as error:
            raise CorruptData("checkpoint has no readable commit marker", where=where) from error
        names = {MODEL_FILE, OPTIMIZER_FILE}
        if commit != commit.sealed() or raw != canonical_json(commit) or set(commit.files) != names:
            raise CorruptData("commit marker does not match itself", where=where)
        if commit.step != step:
            raise CorruptData("commit marker is another step's", got=commit.step, where=where)
        return commit


def restore(
    directory: Path, commit: Commit, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Restored:
    """Load a fetched generation into model and optimiser; raises CorruptData where it cannot be."""
    try:
        weights = load_file(directory / MODEL_FILE)
        moments = load_file(directory / OPTIMIZER_FILE)
        model.load_state_dict(weights)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CorruptData("checkpoint cannot be loaded", got=error, where=directory) from error
    restore_optimizer(model, optimizer, moments)
    return Restored(commit.step, commit.position, dict(commit.metrics))


class Checkpointer:
    """Saves one job's state from one process; use as a context manager, it owns a thread."""

    def __init__(
        self,
        generations: Generations,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        job_id: str,
        config_digest: str,
        code_version: str,
        every_steps: int,
        keep: int,
        work_dir: Path,
    ) -> None:
        self.stall_s = 0.0
        self.put_off = 0  # saves that were due while another was in flight
        self.saved: dict[int, CheckpointRef] = {}
        self._generations = generations
        self._model = model
        self._optimizer = optimizer
        self._identity = {
            "job_id": job_id,
            "config_digest": config_digest,
            "code_version": code_version,
        }
        self._every_steps = every_steps
        self._keep = keep
        self._work_dir = work_dir
        self._buffers: dict[str, dict[str, Tensor]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._unreported: list[CheckpointRef] = []
        self._waiting = False  # a save was put off and is due at the next step that finds room

    def due(self, step: int, steps: int) -> bool:
        """Return whether to save after ``step`` of ``steps``."""
        return self._waiting or step % self._every_steps == 0 or step == steps

    def save(
        self, step: int, position: dict[str, Any], metrics: dict[str, float], *, wait: bool = False
    ) -> bool:
        """Start saving and return True, or False where the last save is still in flight.

        With ``wait``, wait for that one first. Raises TrainingFailed rather than save weights that
        are not finite, and whatever made an earlier save fail for good.
        """
        started = time.perf_counter()
        try:
            self._raise_failure()
            if self._in_flight():
                if not wait:
                    self.put_off += 0 if self._waiting else 1
                    self._waiting = True
                    return False
                self._join()
            self._waiting = False
            self._stage(step)
            self._thread = threading.Thread(
                target=self._write,
                args=(step, position, dict(metrics)),
                name="checkpoint-writer",
                daemon=True,
            )
            self._thread.start()
            return True
        finally:
            self.stall_s += time.perf_counter() - started

    def save_last(self, step: int, position: dict[str, Any], metrics: dict[str, float]) -> None:
        """Return once ``step`` is saved, whatever was in flight or put off."""
        self.finish()
        if step not in self.saved:
            self.save(step, position, metrics)
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight; raises what made it fail."""
        self._join()
        self._raise_failure()

    def report(self) -> list[CheckpointRef]:
        """Return the checkpoints committed since the last call."""
        found, self._unreported = self._unreported, []
        return found

    def kept(self) -> tuple[CheckpointRef, ...]:
        """Return the generations this process saved that are still there, oldest first."""
        return tuple(self.saved[step] for step in sorted(self.saved))

    def _in_flight(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(FINISH_DEADLINE_S)
            if self._thread.is_alive():
                raise TrainingFailed(
                    "checkpoint cannot be written",
                    got=f"nothing for {FINISH_DEADLINE_S:.0f} s",
                    where=self._generations.url,
                    do="Check the object store.",
                )

    def _raise_failure(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _stage(self, step: int) -> None:
        """Copy the state into buffers of our own; the writer reads them while training goes on."""
        live = {
            MODEL_FILE: {k: v.detach() for k, v in self._model.state_dict().items()},
            OPTIMIZER_FILE: optimizer_tensors(self._model, self._optimizer),
        }
        for file, tensors in live.items():
            buffers = self._buffers.setdefault(file, {})
            for name, tensor in tensors.items():
                if not torch.isfinite(tensor).all():
                    raise TrainingFailed(
                        "state is not finite and was not saved",
                        got=name,
                        where=f"step {step}",
                        do="Lower training.learning_rate; the last checkpoint is intact.",
                    )
                if name not in buffers:
                    buffers[name] = torch.empty_like(tensor)
                buffers[name].copy_(tensor)

    def _write(self, step: int, position: dict[str, Any], metrics: dict[str, float]) -> None:
        directory = self._work_dir / f"step-{step:08d}"
        try:
            self._commit(step, position, metrics, directory)
            for old in self._generations.steps()[self._keep :]:
                self._generations.remove(old)
                self.saved.pop(old, None)
        except PacelineError as error:
            # The generation before is intact and the next save tries again; two in a row are fatal.
            log.warning("checkpoint failed step=%d error=%s", step, error)
            if self._failed_before:
                self._error = error
            self._failed_before = True
        except BaseException as error:  # noqa: BLE001 - raised in the thread that trains
            self._error = error
        else:
            self._failed_before = False
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    _failed_before = False

    def _commit(
        self, step: int, position: dict[str, Any], metrics: dict[str, float], directory: Path
    ) -> None:
        generations = self._generations
        where = generations.step_url(step)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        generations.store.delete(join_url(where, COMMIT_FILE))  # files change under no marker
        files: dict[str, SavedFile] = {}
        for name, tensors in self._buffers.items():
            save_file(tensors, directory / name, metadata={"format": "pt"})
            files[name] = _hash(directory / name)
            generations.store.upload_file(directory / name, join_url(where, name))
        fields: dict[str, Any] = {**self._identity, "metrics": metrics, "files": files}
        commit = Commit(step=step, position=position, **fields).sealed()
        generations.store.put_bytes(join_url(where, COMMIT_FILE), canonical_json(commit))
        ref = CheckpointRef(
            step=step,
            url=where,
            digest=commit.digest,
            bytes=sum(each.bytes for each in files.values()),
        )
        self.saved[step] = ref
        self._unreported.append(ref)


def _hash(path: Path) -> SavedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SavedFile(sha256=digest, bytes=max(1, path.stat().st_size))
