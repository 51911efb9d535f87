"""Resume from the newest healthy checkpoint; a fresh start is a resume from nothing.

All ranks agree on the newest generation of which every byte matches its commit; only then is
anything loaded. Each box of each tensor is copied from where it was saved to where this layout
wants it, so layout and number of ranks may differ from those that saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CorruptData, PacelineError, TemporaryError, TrainingFailed
from paceline.storage import DiskStore
from paceline.training.checkpoint.generations import Generation, Generations
from paceline.training.checkpoint.layout import (
    DTYPES,
    BoxRead,
    HeldChunks,
    chunks_of,
    file_of,
    index_of,
    local_of,
    reads_for,
    share_out,
)
from paceline.training.checkpoint.records import INDEX_FILE, Commit, Index, SavedFile, StoredTensor
from paceline.training.checkpoint.staging import Staging
from paceline.training.checkpoint.stateful import EXTRA, KEPT, MODEL, TrainState


def seed_generation(
    generations: Generations,
    tensors: Mapping[str, Tensor],
    *,
    job_id: str,
    config_digest: str,
    code_version: str,
    source: Mapping[str, Any],
) -> Commit:
    """Commit ``tensors`` (named as in ``TrainState``) as step 0; return the marker.

    For a training that starts from given weights: one process calls it before any rank starts, and
    ranks of every layout then resume from it. The position is empty: data start at the beginning.
    ``source`` describes where the tensors come from. Raises TrainingFailed where a number is not
    finite.
    """
    written = share_out(HeldChunks.of([chunks_of(tensors)]))
    staging = Staging(written[0])
    staging.fill(tensors)
    staging.require_finite(0)
    saved = SavedFile(sha256=hashlib.sha256(staging.view).hexdigest(), bytes=staging.bytes)
    generation = Generation(0, random.getrandbits(32))
    generations.put_file(generation, file_of(0, 1), staging.path, saved)
    commit = Commit(
        job_id=job_id,
        step=0,
        position={},
        config_digest=config_digest,
        code_version=code_version,
        world_size=1,
        layout={},
        metrics={},
        environment={"imported_from": dict(source)},
        extra={},
        files={file_of(0, 1): saved},
    )
    return generations.commit(generation, commit, index_of(written))


class VerifiedFiles:
    """Verified files of one generation, one open at a time; a context manager.

    A file is verified whole before it is opened. A file from S3 is kept below ``work_dir`` until
    another one is opened.
    """

    def __init__(
        self,
        generations: Generations,
        generation: Generation,
        commit: Commit,
        work_dir: Path | None = None,
    ) -> None:
        self._generations, self._generation, self._commit = generations, generation, commit
        here = isinstance(generations.store, DiskStore)
        self._scratch = None if here else Path(tempfile.mkdtemp("-checkpoint", dir=work_dir))
        self._name = ""
        self._opened: Any = None
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> VerifiedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def opened(self, name: str) -> Any:
        """Return the file ``name`` for ``box_in``; raises CorruptData unless it matches."""
        if name != self._name:
            self._closing.close()
            self._name = ""
            path = self._generations.fetch(
                self._generation, name, self._commit.files[name], self._scratch or Path()
            )
            if self._scratch is not None:
                self._closing.callback(path.unlink, missing_ok=True)
            self._opened = self._closing.enter_context(open_tensors(path))
            self._name = name
        return self._opened


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file for ``box_in``; raises CorruptData for any other content."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CorruptData("checkpoint file cannot be read", got=error, where=path) from error


def box_in(file: Any, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return a box of the tensor ``key`` of an open file; both () for a scalar."""
    if not lengths:
        whole: Tensor = file.get_tensor(key)
        return whole
    box = tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))
    found: Tensor = file.get_slice(key)[box]
    return found


log = logging.getLogger(__name__)

MAX_GENERATIONS_TRIED = 100
_NONE, _UNREADABLE = -1, -2


@dataclass(frozen=True)
class Restored:
    """The point at which a checkpoint was saved."""

    step: int
    position: dict[str, Any]
    metrics: dict[str, float]
    extra: dict[str, Any]  # entries of ``TrainState.extra`` that are not tensors
    world_size: int
    layout: dict[str, int]
    digest: str
    url: str


def resume_newest_healthy(
    generations: Generations,
    state: TrainState,
    *,
    config_digest: str,
    work_dir: Path,
    on_rejected: Callable[[int, str], None] | None = None,
) -> Restored | None:
    """Restore the newest healthy generation on every rank; None where there is none.

    A damaged one is rejected (rank 0 moves its marker aside) and the one before is tried. A store
    that does not answer raises: that is no reason to reject a checkpoint. Raises TrainingFailed
    where the newest is of another configuration or another model. Nothing changes before every
    byte was verified on all ranks.
    """
    directory = work_dir / "resume"
    for _ in range(MAX_GENERATIONS_TRIED):
        generation = _newest(generations, state)
        if generation is None:
            return None
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        checked: _Checked | None = None
        error: PacelineError | None = None
        try:
            checked = _check(generations, generation, state, config_digest, directory)
        except PacelineError as caught:
            error = caught
        damaged = isinstance(error, CorruptData)
        # Every rank has checked before the marker is moved, so none finds it missing.
        bad, refused, away = state.group.sums(
            [
                float(damaged),
                float(error is not None and not damaged),
                float(isinstance(error, TemporaryError)),
            ]
        )
        if not bad and not refused and checked is not None:
            try:
                _load(checked, state)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            return _restored(generations, generation, checked.commit, state)
        shutil.rmtree(directory, ignore_errors=True)
        if refused:
            raise error if error is not None and not damaged else _others(generations, away > 0)
        why = error.one_line() if error else "another rank found it damaged"
        if state.group.rank == 0:
            generations.reject(generation, why)
        if on_rejected is not None:
            on_rejected(generation.step, why)
    raise TrainingFailed("too many damaged checkpoints", where=generations.url)


@dataclass(frozen=True)
class _Checked:
    commit: Commit
    files: dict[str, Path]
    plan: list[tuple[Tensor, list[BoxRead]]]
    fresh: dict[tuple[str, str], Tensor]  # (parameter, moment) → the optimizer's new state
    kept: dict[str, Tensor]  # new state of ``TrainState.keeps``


def _newest(generations: Generations, state: TrainState) -> Generation | None:
    """Return the newest committed generation; rank 0 lists the store and broadcasts the result."""
    group = state.group
    step, number, error = _NONE, 0, None
    if group.rank == 0:
        try:
            found = generations.find().committed
            if found:
                step, number = found[0]
        except PacelineError as caught:
            step, error = _UNREADABLE, caught
    step, number = group.from_first(step), group.from_first(number)
    if step == _UNREADABLE:
        raise error or _others(generations, away=True)
    return None if step == _NONE else Generation(step, number)


def _others(generations: Generations, away: bool) -> PacelineError:
    what = "another rank cannot read the checkpoints"
    if away:
        return TemporaryError(what, where=generations.url, do="Try again when the store answers.")
    return TrainingFailed(what, where=generations.url, do="That rank's log says why.")


def _check(
    generations: Generations,
    generation: Generation,
    state: TrainState,
    config_digest: str,
    directory: Path,
) -> _Checked:
    """Verify this rank's share of the files and all that it reads, and plan the load.

    Together the ranks verify every file.
    """
    commit = generations.commit_of(generation, config_digest)
    index = generations.index_of(generation, commit)
    _require_whole(index, generations.url_of(generation))
    kept = _room_to_keep(index, state)
    plan, fresh = _plan(index, state, kept, generations.url_of(generation))
    group = state.group
    needed = {read.file for _, reads in plan for read in reads}
    names = sorted(name for name in commit.files if name != INDEX_FILE)
    mine = needed | set(names[group.rank :: group.world_size])
    files = {
        name: generations.fetch(generation, name, commit.files[name], directory)
        for name in sorted(mine)
    }
    return _Checked(commit, files, plan, fresh, kept)


def _require_whole(index: Index, where: str) -> None:
    for name, stored in index.tensors.items():
        volume = sum(torch.Size(chunk.sizes).numel() for chunk in stored.chunks)
        if volume != torch.Size(stored.shape).numel() or stored.dtype not in DTYPES:
            raise CorruptData("checkpoint's index is not whole", got=name, where=where)


def _room_to_keep(index: Index, state: TrainState) -> dict[str, Tensor]:
    """Allocate the tensors of further state (``kept.…``) that this rank wants."""
    return {
        name: torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        for name, stored in index.tensors.items()
        if name.startswith(KEPT)
        and any(each.wants(name.removeprefix(KEPT)) for each in state.keeps)
    }


def _plan(
    index: Index, state: TrainState, kept: dict[str, Tensor], where: str
) -> tuple[list[tuple[Tensor, list[BoxRead]]], dict[tuple[str, str], Tensor]]:
    """Return the reads of each target tensor, and the optimizer's new state."""
    targets: dict[str, Tensor] = {
        name: tensor for name, tensor in state.tensors().items() if name.startswith(MODEL)
    }
    missing = sorted(set(targets) - set(index.tensors))
    if missing:
        raise _another_model(f"no {missing[0]} (and {len(missing) - 1} more)", where)
    fresh: dict[tuple[str, str], Tensor] = {}
    moments = _moments(index)
    counting = {
        id(each)
        for group in state.optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for each in group["params"]
    }
    for name, parameter in state.parameters():
        for moment in moments.get(name, ()):
            stored = index.tensors[f"{moment}.{name}"]
            made = _room_for(
                stored,
                parameter,
                state.optimizer.state.get(parameter, {}).get(moment),
                id(parameter) in counting,
            )
            fresh[name, moment] = targets[f"{moment}.{name}"] = made
    for name, value in state.extra.items():
        if isinstance(value, Tensor) and EXTRA + name in index.tensors:
            targets[EXTRA + name] = value
    targets |= kept
    plan = []
    for name, target in sorted(targets.items()):
        stored = index.tensors[name]
        if tuple(target.shape) != stored.shape:
            raise _another_model(f"{name}: {stored.shape}, not {tuple(target.shape)}", where)
        if target.dtype != DTYPES[stored.dtype]:
            raise _another_model(f"{name}: {stored.dtype}, not {target.dtype}", where)
        plan.append((target, list(reads_for(name, stored, target))))
    return plan, fresh


def _moments(index: Index) -> dict[str, list[str]]:
    """Return the names of the saved moments of each parameter."""
    models = {name.removeprefix(MODEL) for name in index.tensors if name.startswith(MODEL)}
    found: dict[str, list[str]] = {}
    for name in sorted(index.tensors):
        moment, _, of = name.partition(".")
        if not name.startswith((MODEL, EXTRA, KEPT)) and of in models:
            found.setdefault(of, []).append(moment)
    return found


def _room_for(
    stored: StoredTensor, parameter: Tensor, present: object, on_device: bool = False
) -> Tensor:
    """Return a new tensor for a moment: laid out as its parameter where the shapes are equal."""
    dtype = DTYPES[stored.dtype]
    if stored.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(present, Tensor):
        device = present.device
    else:  # a count of steps: on the host, unless a fused kernel counts on the device
        device = parameter.device if on_device else torch.device("cpu")
    return torch.empty(stored.shape, dtype=dtype, device=device)


def _another_model(got: str, where: str) -> TrainingFailed:
    return TrainingFailed(
        "checkpoint is of another model",
        got=got,
        where=where,
        do="Use another job id, or the model the job was started with.",
    )


def _load(checked: _Checked, state: TrainState) -> None:
    """Copy every box to its target; raises CorruptData where a verified file cannot be read."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        opened: dict[str, Any] = {}
        for target, reads in checked.plan:
            local = local_of(target)
            for read in reads:
                if read.file not in opened:
                    opened[read.file] = stack.enter_context(open_tensors(checked.files[read.file]))
                _box(local, read.target, read.lengths).copy_(
                    box_in(opened[read.file], read.key, read.source, read.lengths)
                )
    for each in state.keeps:
        names = [name for name in checked.kept if each.wants(name.removeprefix(KEPT))]
        each.restore({name.removeprefix(KEPT): checked.kept[name] for name in names})
    state.optimizer.state.clear()
    moments: dict[str, dict[str, Tensor]] = {}
    for (name, moment), tensor in checked.fresh.items():
        moments.setdefault(name, {})[moment] = tensor
    for name, parameter in state.parameters():
        if name in moments and parameter not in state.optimizer.state:
            state.optimizer.state[parameter] = moments[name]


def _box(tensor: Tensor, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    for dimension, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    return tensor


def _restored(
    generations: Generations, generation: Generation, commit: Commit, state: TrainState
) -> Restored:
    state.position = dict(commit.position)
    for name, value in commit.extra.items():
        state.extra[name] = value
    return Restored(
        step=commit.step,
        position=dict(commit.position),
        metrics=dict(commit.metrics),
        extra=dict(commit.extra),
        world_size=commit.world_size,
        layout=dict(commit.layout),
        digest=commit.digest,
        url=generations.url_of(generation),
    )
