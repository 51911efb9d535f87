"""Export of the whole model as safetensors on rank 0, from any layout, one tensor at a time.

The files are byte for byte those of ``models.save_model``, so what is published does not depend on
the layout of the training. A rank needs memory for one whole tensor beyond the training's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.config import EXPORT_FILE_BYTES
from paceline.errors import InvalidInput, PacelineError, TrainingFailed
from paceline.models import (
    CONFIG_FILE,
    INDEX_FILE,
    ModelConfig,
    Pretrained,
    cut_groups,
    file_groups,
)
from paceline.system import write_durably
from paceline.training.checkpoint.layout import DTYPES, MODEL, TrainState, name_of
from paceline.training.checkpoint.writer import Exchange, header_of

DEADLINE_S = 600.0

Owner = tuple[int, torch.dtype, tuple[int, ...]]  # rank that sends the tensor, dtype, shape
Written = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name → dtype, shape


def export(
    state: TrainState,
    config: ModelConfig | None,
    directory: Path,
    *,
    pretrained: Pretrained | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = EXPORT_FILE_BYTES,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Write the model into ``directory`` on rank 0; every rank calls it.

    Weights are written in ``dtype``, by default that of ``config`` or of the ``pretrained`` model;
    a pretrained model's in its own layout, tied ones once, with its config and tokenizer; without
    either (a user's own model) by default in their own dtypes. A file has at most ``file_bytes``,
    or one tensor. Raises InvalidInput on rank 0 where weights are not finite in that dtype,
    TrainingFailed where rank 0 cannot write; TrainingFailed on the other ranks in both cases.
    """
    live = {
        name.removeprefix(MODEL): tensor
        for name, tensor in state.tensors().items()
        if name.startswith(MODEL)
    }
    exchange = Exchange(state.group, deadline_s)
    mine = {name: (name_of(each.dtype), tuple(each.shape)) for name, each in live.items()}
    owners: dict[str, Owner] = {}
    for rank, raw in enumerate(exchange.all(json.dumps(mine).encode())):
        for name, (trained, shape) in json.loads(raw).items():
            owners.setdefault(name, (rank, DTYPES[trained], tuple(shape)))
    if config is not None and dtype is not None:
        config = config.model_copy(update={"torch_dtype": str(dtype).removeprefix("torch.")})
    written, files = _files(owners, config, pretrained, dtype, file_bytes)
    tensors = _gathered(
        [name for names in files.values() for name in names], owners, live, exchange
    )
    wrong: PacelineError | None = None
    if state.group.rank == 0:
        try:
            names = None if pretrained is None else pretrained.file_name
            _write_all(directory, files, written, tensors, config, names or str)
            if pretrained is not None:
                pretrained.copy_others(directory, dtype)
        except PacelineError as error:
            wrong = error
        except OSError as error:
            wrong = TrainingFailed(
                "model cannot be exported", got=error.strerror or error, where=directory
            )
            wrong.__cause__ = error
    for _ in tensors:  # after an error too: the other ranks send all the same
        pass
    verdict = exchange.all(wrong.one_line().encode() if wrong else b"")[0]
    if verdict:
        raise wrong or TrainingFailed("model was not exported", got=verdict.decode())


def _files(
    owners: Mapping[str, Owner],
    config: ModelConfig | None,
    pretrained: Pretrained | None,
    dtype: torch.dtype | None,
    file_bytes: int,
) -> tuple[Written, dict[str, list[str]]]:
    """Return dtype and shape of each weight to write, and the weights of each file in order."""
    if config is not None:
        dtype = getattr(torch, config.torch_dtype)
        written = {name: (dtype, shape) for name, (_, _, shape) in owners.items()}
        groups = file_groups(config, sorted(owners))
    elif pretrained is not None:
        written = {
            name: (dtype or pretrained.dtype, owners[name][2]) for name in pretrained.written
        }
        groups = [list(written)]
    else:
        written = {
            name: (dtype if dtype and own.is_floating_point else own, shape)
            for name, (_, own, shape) in owners.items()
        }
        groups = [sorted(owners)]
    sizes = {
        name: torch.Size(shape).numel() * each.itemsize for name, (each, shape) in written.items()
    }
    groups = cut_groups(groups, sizes, file_bytes)
    # In the order of the safetensors library: widest dtype, then name.
    return written, {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": sorted(
            names, key=lambda each: (-written[each][0].itemsize, each)
        )
        for number, names in enumerate(groups, start=1)
    }


def _gathered(
    names: list[str], owners: Mapping[str, Owner], live: Mapping[str, Tensor], exchange: Exchange
) -> Iterator[Tensor]:
    """Yield each whole tensor in host memory on rank 0, something else on the others; all ranks
    iterate together."""
    for name in names:
        owner, dtype, shape = owners[name]
        whole = torch.empty(0)
        if name in live:
            each = live[name]
            whole = each.full_tensor() if isinstance(each, DTensor) else each
        if exchange.rank == 0 and owner != 0:
            whole = torch.empty(shape, dtype=dtype)
            exchange.receive(whole, owner)
        elif exchange.rank == owner:
            whole = whole.cpu().contiguous()
            if owner != 0:
                exchange.send(whole, 0)
        yield whole


def _write_all(
    directory: Path,
    files: Mapping[str, list[str]],
    written: Written,
    tensors: Iterator[Tensor],
    config: ModelConfig | None,
    stored_name: Callable[[str], str],
) -> None:
    """Write every file, index and config; ``stored_name`` returns a weight's name in files."""
    directory.mkdir(parents=True, exist_ok=True)
    total = 0
    for file_name, names in files.items():
        entries = []
        for name in names:
            dtype, shape = written[name]
            size = torch.Size(shape).numel() * dtype.itemsize
            entries.append((stored_name(name), name_of(dtype), shape, size))
            total += size
        with (directory / file_name).open("wb") as file:
            file.write(header_of(entries, align=8))
            for name in names:
                whole = next(tensors).to(written[name][0])
                if whole.is_floating_point() and not whole.isfinite().all():
                    raise InvalidInput(
                        "weights are not finite", got=name, where=directory / file_name
                    )
                flat = whole.reshape(-1).view(torch.uint8)
                file.write(flat.numpy().data)
            file.flush()
            os.fsync(file.fileno())
    weight_map = {stored_name(name): file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    write_durably(directory / INDEX_FILE, text.encode(), 0o666)
    if config is not None:
        unset = None if config.tokenizer_digest else {"tokenizer_digest"}
        text = config.model_dump_json(indent=2, exclude=unset) + "\n"
        write_durably(directory / CONFIG_FILE, text.encode(), 0o666)
