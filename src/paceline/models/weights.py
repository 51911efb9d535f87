"""Read and write weights as safetensors: sharded, deterministic bytes, fully checked before use.

Embeddings are one file and each group of blocks another, so that a new version of a model whose
early blocks did not change shares whole files with the old one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import CorruptData, InvalidInput
from paceline.models.config import ModelConfig
from paceline.models.files import CONFIG_FILE, INDEX_FILE, read_config, read_index, weight_files
from paceline.models.tensor_files import not_finite
from paceline.models.transformer import Transformer

MAX_BLOCK_FILES = 8


def save_model(model: Transformer, config: ModelConfig, directory: Path) -> None:
    """Write ``config.json``, the weights and their index into ``directory`` (created if missing).

    The same weights give the same bytes. Raises InvalidInput for weights that are not finite.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise InvalidInput("weights are not finite", got=name, where=directory)
    groups = file_groups(config, list(state))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(
            {name: state[name] for name in names}, directory / file, metadata={"format": "pt"}
        )
        (directory / file).chmod(0o666 & ~_umask())  # the library writes 0600
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    unset = None if config.tokenizer_digest else {"tokenizer_digest"}  # as other tools write
    (directory / CONFIG_FILE).write_text(config.model_dump_json(indent=2, exclude=unset) + "\n")


def file_groups(config: ModelConfig, names: list[str]) -> list[list[str]]:
    """Return the tensor names of each file: embeddings first, then a few blocks each."""
    layers = config.num_hidden_layers
    per_file = -(-layers // MAX_BLOCK_FILES)
    groups: list[list[str]] = [[] for _ in range(1 + -(-layers // per_file))]
    for name in names:
        parts = name.split(".")
        in_block = parts[1] == "layers"
        groups[1 + int(parts[2]) // per_file if in_block else 0].append(name)
    return groups


def load_model(directory: Path) -> tuple[Transformer, ModelConfig]:
    """Return the model in ``directory`` and its configuration.

    Raises InvalidInput or SourceMissing for a directory without such a model, InvalidInput for
    weights that are not finite, CorruptData for weights that do not match its config.
    """
    directory = Path(directory)
    config = read_config(directory)
    files = {path.name: path for path in weight_files(directory)}
    index = read_index(directory)
    with torch.device("meta"):
        model = Transformer(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if set(index) != set(wanted):
        odd = sorted(set(index) ^ set(wanted))
        raise CorruptData(
            "weights do not fit the config",
            got=f"{odd[0]} (and {len(odd) - 1} more)",
            where=directory,
        )
    dtype = getattr(torch, config.torch_dtype)
    state: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        if file not in files:
            raise CorruptData("weights file is missing", got=file, where=directory)
        state |= _read(files[file], {name for name, its in index.items() if its == file})
    for name, shape in wanted.items():
        tensor = state[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise CorruptData(
                "weights do not fit the config",
                got=f"{name}: {tuple(tensor.shape)} {tensor.dtype}",
                wanted=f"{shape} {dtype}",
                where=directory / index[name],
            )
        if not tensor.isfinite().all():
            raise not_finite(name, directory / index[name])
    model = model.to_empty(device="cpu").to(dtype)
    model.load_state_dict(state)
    return model, config


def _read(path: Path, names: set[str]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            if held != names:
                odd = sorted(held ^ names)
                raise CorruptData("weights file does not match the index", got=odd[0], where=path)
            return {name: file.get_tensor(name) for name in sorted(names)}
    except (SafetensorError, OSError) as error:
        raise CorruptData("weights file cannot be read", got=error, where=path) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
