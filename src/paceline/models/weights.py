"""Read and write weights as safetensors: sharded, deterministic bytes, fully checked before use.

Embeddings are one file and each group of blocks another, so that a new version of a model whose
early blocks did not change shares whole files with the old one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.config import EXPORT_FILE_BYTES
from paceline.errors import CorruptData, InvalidInput
from paceline.models.config import ModelConfig, count_parameters
from paceline.models.files import CONFIG_FILE, INDEX_FILE, read_config, read_index, weight_files
from paceline.models.pretrained import CPU, DTYPES
from paceline.models.tensor_files import (
    StoredTensor,
    cut_groups,
    fill,
    not_finite,
    require_finite,
    stored_tensors,
)
from paceline.models.transformer import Transformer

MAX_BLOCK_FILES = 8


def save_model(
    model: Transformer,
    config: ModelConfig,
    directory: Path,
    *,
    file_bytes: int = EXPORT_FILE_BYTES,
) -> None:
    """Write ``config.json``, the weights and their index into ``directory`` (created if missing).

    A file has at most ``file_bytes``, or one tensor. The same weights give the same bytes. Raises
    InvalidInput for weights that are not finite.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise InvalidInput("weights are not finite", got=name, where=directory)
    sizes = {name: each.numel() * each.element_size() for name, each in state.items()}
    groups = cut_groups(file_groups(config, sorted(state)), sizes, file_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(
            {name: state[name] for name in names}, directory / file, metadata={"format": "pt"}
        )
        (directory / file).chmod(0o666 & ~_umask())  # the library writes 0600
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
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


@dataclass(frozen=True)
class SavedTransformer:
    """A checked directory of our transformer, opened without its values: used as ``Pretrained``."""

    directory: Path
    config: ModelConfig
    stored: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, directory: Path) -> SavedTransformer:
        """Return the model in ``directory``, after comparing the headers of its files with its
        config; raises as ``load_model`` does, but for values."""
        directory = Path(directory)
        config = read_config(directory)
        weight_files(directory)  # names pickled weights
        read_index(directory)  # names files elsewhere
        try:
            stored = stored_tensors(directory)
        except InvalidInput as error:
            raise CorruptData(
                "weights do not fit the config", got=error.one_line(), where=directory
            ) from error
        found = cls(directory, config, stored)
        wanted = {name: tuple(each.shape) for name, each in found.build().state_dict().items()}
        if odd := sorted(set(stored) ^ set(wanted)):
            raise CorruptData(
                "weights do not fit the config",
                got=f"{odd[0]} (and {len(odd) - 1} more)",
                where=directory,
            )
        for name, shape in wanted.items():
            its = stored[name]
            if its.shape != shape or DTYPES.get(its.dtype) != found.dtype:
                raise CorruptData(
                    "weights do not fit the config",
                    got=f"{name}: {its.shape} {its.dtype}",
                    wanted=f"{shape} {config.torch_dtype}",
                    where=its.file,
                )
        return found

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding."""
        return self.config.vocab_size

    @property
    def longest_context(self) -> int:
        """Return the number of positions that the model was made for."""
        return self.config.context

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        return count_parameters(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the files."""
        found: torch.dtype = getattr(torch, self.config.torch_dtype)
        return found

    @property
    def tokenizer_digest(self) -> str:
        """Return the SHA-256 of the tokenizer.json of its training; "": bytes."""
        return self.config.tokenizer_digest

    def require_sound(self) -> None:
        """Raise InvalidInput where a weight is not finite; reads all."""
        require_finite(self.stored)

    def build(self) -> Transformer:
        """Return the model without values (on the meta device)."""
        with torch.device("meta"):
            return Transformer(self.config)

    def load(self, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Transformer:
        """Return the whole model on ``device``, with the values of the files."""
        model = self.build().to(dtype).to_empty(device=device)
        self.fill({
            name: (each, (0,) * each.dim()) for name, each in model.state_dict().items()
        })  # fmt: skip
        return model.eval()

    def restore_buffers(self, model: nn.Module) -> None:
        """Do nothing: the model has no buffers."""

    def fill(self, parts: Mapping[str, tuple[Tensor, Sequence[int]]]) -> int:
        """Copy weights into ``parts``, as ``Pretrained.fill``."""
        return fill(parts, self.stored)


def load_model(directory: Path) -> tuple[Transformer, ModelConfig]:
    """Return the model in ``directory`` and its configuration.

    Raises InvalidInput or SourceMissing for a directory without such a model, InvalidInput for
    weights that are not finite, CorruptData for weights that do not match its config.
    """
    found = SavedTransformer.open(directory)
    model = found.load(dtype=found.dtype).train()
    for name, each in model.state_dict().items():
        if not each.isfinite().all():
            raise not_finite(name, found.stored[name].file)
    return model, found.config


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
