"""Resume from the newest healthy checkpoint; a fresh start is a resume from nothing.

All ranks agree on the newest generation of which every byte matches its commit; only then is
anything loaded. Each box of each tensor is copied from where it was saved to where this layout
wants it, so layout and number of ranks may differ from those that saved.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CorruptData, PacelineError, TemporaryError, TrainingFailed
from paceline.training.checkpoint.generations import Generation, Generations
from paceline.training.checkpoint.layout import (
    DTYPES,
    EMA,
    EXTRA,
    KEPT,
    MODEL,
    BoxRead,
    TrainState,
    local_of,
    reads_for,
)
from paceline.training.checkpoint.records import INDEX_FILE, Commit, Index, StoredTensor

log = logging.getLogger(__name__)

MAX_GENERATIONS_TRIED = 100
_NONE, _UNREADABLE = -1, -2


class VerifiedFiles(contextlib.ExitStack):
    """The files of one generation, each verified whole before it is opened; a context manager.

    A file from S3 is kept below ``directory`` until the end of the ``with``.
    """

    def __init__(
        self, generations: Generations, generation: Generation, commit: Commit, directory: Path
    ) -> None:
        super().__init__()
        self._generations, self._generation, self._commit = generations, generation, commit
        self._directory = directory
        self._paths: dict[str, Path] = {}
        self._opened: dict[str, Any] = {}
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.callback(shutil.rmtree, directory, ignore_errors=True)

    def verify(self, name: str) -> Path:
        """Return the path of the file ``name``; raises CorruptData unless it matches its commit."""
        if name not in self._paths:
            self._paths[name] = self._generations.fetch(
                self._generation, name, self._commit.files[name], self._directory
            )
        return self._paths[name]

    def fill(self, target: Tensor, reads: Iterable[BoxRead]) -> None:
        """Copy the boxes of ``reads`` into this rank's part of ``target``."""
        local = local_of(target)
        for read in reads:
            local[_box(read.target, read.lengths)].copy_(self._read(read))

    def _read(self, read: BoxRead) -> Tensor:
        name, path = read.file, self.verify(read.file)
        try:
            if name not in self._opened:
                self._opened[name] = self.enter_context(safe_open(path, framework="pt"))
            found: Tensor
            if read.lengths:
                found = self._opened[name].get_slice(read.key)[_box(read.source, read.lengths)]
            else:  # a scalar has no slices
                found = self._opened[name].get_tensor(read.key)
        except (SafetensorError, OSError) as error:
            raise CorruptData("checkpoint file cannot be read", got=error, where=path) from error
        return found


def _box(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))


def resume_newest_healthy(
    generations: Generations,
    state: TrainState,
    *,
    config_digest: str,
    work_dir: Path,
    on_rejected: Callable[[int, str], None] | None = None,
) -> Commit | None:
    """Restore the newest healthy generation on every rank and return its marker; None where there
    is none.

    A damaged one is rejected (rank 0 moves its marker aside) and the one before is tried. A store
    that does not answer raises: that is no reason to reject a checkpoint. Raises TrainingFailed
    where the newest is of another configuration or another model. Nothing changes before every
    byte was verified on all ranks.
    """
    for _ in range(MAX_GENERATIONS_TRIED):
        generation = _chosen(generations, state, lambda found: found[:1])
        if generation is None:
            return None
        why = _restore(generations, generation, state, config_digest, work_dir / "resume")
        if isinstance(why, Commit):
            return why
        if state.group.rank == 0:
            generations.reject(generation, why)
        if on_rejected is not None:
            on_rejected(generation.step, why)
    raise TrainingFailed("too many damaged checkpoints", where=generations.url)


def restore_best(
    generations: Generations,
    state: TrainState,
    *,
    config_digest: str,
    work_dir: Path,
    evaluated: Callable[[int], bool],
    best: float,
) -> Commit | None:
    """Restore the kept generation of lowest held-out loss on every rank and return its marker.

    None where none of the ``evaluated`` steps is kept whose loss is ``best`` or lower, or where it
    is damaged: then the state is unchanged. Raises as ``resume_newest_healthy``.
    """

    def lowest(found: Sequence[Generation]) -> Sequence[Generation]:
        return generations.best([each for each in found if evaluated(each.step)], 1, best)

    generation = _chosen(generations, state, lowest)
    if generation is None:
        return None
    found = _restore(generations, generation, state, config_digest, work_dir / "resume")
    return found if isinstance(found, Commit) else None


def _chosen(
    generations: Generations,
    state: TrainState,
    choose: Callable[[Sequence[Generation]], Sequence[Generation]],
) -> Generation | None:
    """Return the first that rank 0 chooses of the committed generations, newest first; all ranks
    get the same."""
    group = state.group
    step, number, error = _NONE, 0, None
    if group.rank == 0:
        try:
            found = choose(generations.find().committed)
            if found:
                step, number = found[0]
        except PacelineError as caught:
            step, error = _UNREADABLE, caught
    step, number = group.from_rank0(step), group.from_rank0(number)
    if step == _UNREADABLE:
        raise error or _other_rank_failed(generations, away=True)
    return None if step == _NONE else Generation(step, number)


def _other_rank_failed(generations: Generations, away: bool) -> PacelineError:
    what = "another rank cannot read the checkpoints"
    if away:
        return TemporaryError(what, where=generations.url, do="Try again when the store answers.")
    return TrainingFailed(what, where=generations.url, do="That rank's log says why.")


def _restore(
    generations: Generations,
    generation: Generation,
    state: TrainState,
    config_digest: str,
    directory: Path,
) -> Commit | str:
    """Load ``generation`` and return its marker, or the reason why it is damaged for any rank."""
    group, url = state.group, generations.url_of(generation)
    error: PacelineError | None = None
    with contextlib.ExitStack() as stack:
        try:
            commit = generations.commit_of(generation, config_digest)
            plan = _Plan(generations.index_of(generation, commit), state, url)
            files = stack.enter_context(VerifiedFiles(generations, generation, commit, directory))
            # Together the ranks verify every file.
            names = sorted(name for name in commit.files if name != INDEX_FILE)
            for name in sorted(plan.files() | set(names[group.rank :: group.world_size])):
                files.verify(name)
        except PacelineError as caught:
            error = caught
        damaged = isinstance(error, CorruptData)
        # Every rank has checked before the marker is moved, so none finds it missing.
        bad, refused, away = group.sums(
            [
                float(damaged),
                float(error is not None and not damaged),
                float(isinstance(error, TemporaryError)),
            ]
        )
        if refused:
            mine = error is not None and not damaged
            raise error if error and mine else _other_rank_failed(generations, away > 0)
        if bad:
            return error.one_line() if error else "another rank found it damaged"
        plan.load(files)
        state.position = dict(commit.position)
        state.extra.update(commit.extra)
        return commit


class _Plan:
    """What a rank reads of a generation, and the new tensors for it.

    Raises TrainingFailed for a generation of another model.
    """

    def __init__(self, index: Index, state: TrainState, where: str) -> None:
        self._state = state
        live = state.tensors()
        targets = {name: tensor for name, tensor in live.items() if name.startswith(MODEL)}
        missing = sorted(set(targets) - set(index.tensors))
        if missing:
            raise _another_model(f"no {missing[0]} (and {len(missing) - 1} more)", where)
        self._kept = {
            name.removeprefix(KEPT): torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
            for name, stored in index.tensors.items()
            if name.startswith(KEPT)
            and any(each.wants(name.removeprefix(KEPT)) for each in state.keeps)
        }
        targets |= {KEPT + name: tensor for name, tensor in self._kept.items()}
        self._moments = _new_moments(index, state)  # by parameter, then moment
        for name, moments in self._moments.items():
            targets |= {f"{moment}.{name}": tensor for moment, tensor in moments.items()}
        for name, value in state.extra.items():
            if isinstance(value, Tensor) and EXTRA + name in index.tensors:
                targets[EXTRA + name] = value
        self._reads: list[tuple[Tensor, list[BoxRead]]] = []
        for name, target in sorted(targets.items()):
            stored = index.tensors[name]
            if tuple(target.shape) != stored.shape:
                raise _another_model(f"{name}: {stored.shape}, not {tuple(target.shape)}", where)
            if target.dtype != DTYPES[stored.dtype]:
                raise _another_model(f"{name}: {stored.dtype}, not {target.dtype}", where)
            self._reads.append((target, list(reads_for(name, stored, target))))

    def files(self) -> set[str]:
        """Return the names of the files to read."""
        return {read.file for _, reads in self._reads for read in reads}

    def load(self, files: VerifiedFiles) -> None:
        """Copy every box to its target, then replace the optimizer's and the further state."""
        with torch.no_grad():
            for target, reads in self._reads:
                files.fill(target, reads)
        for each in self._state.keeps:
            each.restore({name: its for name, its in self._kept.items() if each.wants(name)})
        optimizer, averages = self._state.optimizer, self._state.averages
        optimizer.state.clear()
        averages.clear()
        for name, parameter in self._state.parameters():
            moments = dict(self._moments.get(name, {}))
            if EMA in moments:
                averages.setdefault(parameter, moments.pop(EMA))
            if moments and parameter not in optimizer.state:
                optimizer.state[parameter] = moments


def _new_moments(index: Index, state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Return new tensors for the saved moments of each parameter of this rank."""
    saved: dict[str, list[str]] = {}
    for name in sorted(index.tensors):
        moment, _, of = name.partition(".")
        if MODEL + of in index.tensors and not name.startswith((MODEL, EXTRA, KEPT)):
            saved.setdefault(of, []).append(moment)
    on_device = {
        id(each)
        for group in state.optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for each in group["params"]
    }
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in state.parameters():
        present = state.optimizer.state.get(parameter, {})
        for moment in saved.get(name, ()):
            found.setdefault(name, {})[moment] = new_moment(
                index.tensors[f"{moment}.{name}"],
                parameter,
                present.get(moment),
                on_device=id(parameter) in on_device,
            )
    return found


def new_moment(
    stored: StoredTensor, parameter: Tensor, present: object, *, on_device: bool
) -> Tensor:
    """Return a new tensor for a moment: laid out as its parameter where the shapes are equal.

    A count of steps is on the host, unless a fused kernel counts ``on_device``.
    """
    dtype = DTYPES[stored.dtype]
    if stored.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.device if on_device else torch.device("cpu")
    if isinstance(present, Tensor):
        device = present.device
    return torch.empty(stored.shape, dtype=dtype, device=device)


def _another_model(got: str, where: str) -> TrainingFailed:
    return TrainingFailed(
        "checkpoint is of another model",
        got=got,
        where=where,
        do="Use another job id, or the model the job was started with.",
    )
