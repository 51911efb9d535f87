"""Export of the whole model as safetensors on rank 0, from any layout, one tensor at a time.

The files are byte for byte those of ``models.save_model``, so what is published does not depend on
the layout of the training. Rank 0 needs memory for one whole tensor beyond the training's own; each
rank sends only its own boxes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import InvalidInput, PacelineError, TrainingFailed
from paceline.models import ModelConfig
from paceline.models.files import CONFIG_FILE, INDEX_FILE
from paceline.models.weights import file_groups
from paceline.system.files import write_durably
from paceline.training.checkpoint.layout import (
    DTYPES,
    Chunk,
    HeldChunks,
    chunks_of,
    local_of,
    name_of,
    share_out,
)
from paceline.training.checkpoint.staging import Exchange, agree_on_held, header_of
from paceline.training.checkpoint.stateful import MODEL, TrainState

DEADLINE_S = 600.0


@dataclass(frozen=True)
class _Whole:
    """A tensor to export, and the rank that sends each box of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[int, Chunk], ...]


def export(
    state: TrainState,
    config: ModelConfig | None,
    directory: Path,
    *,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Write the model into ``directory`` on rank 0; every rank calls it.

    Weights are written in ``config.torch_dtype``; without a config (a user's own model) in their
    own dtypes, in one file. Raises InvalidInput on rank 0 where weights are not finite,
    TrainingFailed where rank 0 cannot write; TrainingFailed on the other ranks in both cases.
    """
    group = state.group
    live = {
        name.removeprefix(MODEL): tensor
        for name, tensor in state.tensors().items()
        if name.startswith(MODEL)
    }
    exchange = Exchange(group, deadline_s)
    held = agree_on_held(exchange, chunks_of(live))
    share_out(held)  # raises where boxes do not tile their tensors
    wholes = _wholes(held)
    groups = file_groups(config, list(wholes)) if config else [list(wholes)]
    dtype = getattr(torch, config.torch_dtype) if config else None
    files = {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": _in_order(
            [wholes[name] for name in names], dtype
        )
        for number, names in enumerate(groups, start=1)
    }
    wrong: PacelineError | None = None
    if group.rank:
        for its in files.values():
            _send(its, live, exchange, group.rank)
    else:
        wrong = _write_all(directory, files, live, exchange, config)
    verdict = exchange.all(wrong.one_line().encode() if wrong else b"")[0]
    if verdict:
        raise wrong or TrainingFailed("model was not exported", got=verdict.decode())


def _write_all(
    directory: Path,
    files: Mapping[str, list[_Whole]],
    live: Mapping[str, Tensor],
    exchange: Exchange,
    config: ModelConfig | None,
) -> PacelineError | None:
    """Write every file, the index and the config; return the error, if any.

    After an error it still receives everything that other ranks send, so that none of them blocks.
    """
    wrong: PacelineError | None = None
    dtype = getattr(torch, config.torch_dtype) if config else None
    try:
        with _translated(directory):
            directory.mkdir(parents=True, exist_ok=True)
    except PacelineError as error:
        wrong = error
    total = 0
    for name, its in files.items():
        try:
            if wrong is not None:
                raise _Rest(wrong, its)
            total += _write(directory / name, its, live, exchange, dtype)
        except _Rest as rest:
            wrong = wrong or rest.error
            for each in rest.wholes:
                _gather(each, live, exchange)
    if wrong is None:
        weight_map = {each.name: file for file, its in files.items() for each in its}
        try:
            _describe(directory, config, weight_map, total)
        except PacelineError as error:
            wrong = error
    return wrong


class _Rest(Exception):
    """Writing failed; ``wholes`` are the tensors that are still to be received."""

    def __init__(self, error: PacelineError, wholes: Sequence[_Whole]) -> None:
        super().__init__(str(error))
        self.error, self.wholes = error, wholes


def _wholes(held: HeldChunks) -> dict[str, _Whole]:
    """Return every tensor with the lowest rank that holds each box, so that rank 0 reads its own
    copy where it has one."""
    boxes: dict[str, dict[tuple[int, ...], tuple[int, Chunk]]] = {}
    for number, chunks in enumerate(held.lists):
        rank = held.of_rank.index(number)
        for chunk in chunks:
            boxes.setdefault(chunk.tensor, {}).setdefault(chunk.offsets, (rank, chunk))
    found = {}
    for name in sorted(boxes):
        its = tuple(boxes[name][offsets] for offsets in sorted(boxes[name]))
        found[name] = _Whole(name, its[0][1].shape, DTYPES[its[0][1].dtype], its)
    return found


def _in_order(wholes: Sequence[_Whole], dtype: torch.dtype | None) -> list[_Whole]:
    """Return a file's tensors in the order of the safetensors library: widest dtype, then name."""
    return sorted(wholes, key=lambda each: (-(dtype or each.dtype).itemsize, each.name))


def _send(
    wholes: Sequence[_Whole], live: Mapping[str, Tensor], exchange: Exchange, rank: int
) -> None:
    for whole in wholes:
        for owner, chunk in whole.boxes:
            if owner == rank:
                exchange.send(local_of(live[chunk.tensor]).detach().cpu().contiguous(), 0)


def _gather(whole: _Whole, live: Mapping[str, Tensor], exchange: Exchange) -> Tensor:
    """Return one whole tensor in host memory; called on rank 0."""
    full = torch.empty(whole.shape, dtype=whole.dtype)
    for owner, chunk in whole.boxes:
        box = full
        for dimension, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            box = box.narrow(dimension, start, size)
        if owner == 0:
            box.copy_(local_of(live[whole.name]))
        elif box.is_contiguous():
            exchange.receive(box, owner)
        else:
            part = torch.empty(chunk.sizes, dtype=whole.dtype)
            exchange.receive(part, owner)
            box.copy_(part)
    return full


def _write(
    path: Path,
    wholes: Sequence[_Whole],
    live: Mapping[str, Tensor],
    exchange: Exchange,
    dtype: torch.dtype | None,
) -> int:
    """Write one file and return the bytes of its tensors; raises _Rest on failure."""
    kinds = {each.name: dtype or each.dtype for each in wholes}
    left = list(wholes)
    entries = [
        (
            each.name,
            name_of(kinds[each.name]),
            each.shape,
            torch.Size(each.shape).numel() * kinds[each.name].itemsize,
        )
        for each in left
    ]
    try:
        with _translated(path), path.open("wb") as file:
            file.write(header_of(entries, align=8))
            while left:
                whole = left.pop(0)
                full = _gather(whole, live, exchange)
                if full.is_floating_point() and not torch.isfinite(full).all():
                    raise InvalidInput("weights are not finite", got=whole.name, where=path)
                flat = full.to(kinds[whole.name]).reshape(-1).view(torch.uint8)
                file.write(flat.numpy().data)
            file.flush()
            os.fsync(file.fileno())
    except PacelineError as error:
        raise _Rest(error, left) from error
    return sum(size for *_, size in entries)


def _describe(
    directory: Path, config: ModelConfig | None, weight_map: Mapping[str, str], total: int
) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}
    with _translated(directory):
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_durably(directory / INDEX_FILE, text.encode(), 0o666)
        if config is not None:
            unset = None if config.tokenizer_digest else {"tokenizer_digest"}
            text = config.model_dump_json(indent=2, exclude=unset) + "\n"
            write_durably(directory / CONFIG_FILE, text.encode(), 0o666)


@contextlib.contextmanager
def _translated(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingFailed(
            "model cannot be exported", got=error.strerror or error, where=where
        ) from error
