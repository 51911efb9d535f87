"""LoRA (arXiv 2106.09685) and DoRA (2402.09353): adapters, trained instead of a model's weights.

The one module that imports peft, which puts a layer with adapters in the place of each targeted
linear layer. The layer below keeps its frozen weight under ``….base_layer.weight``. Contains no
parallelism: a model that already is sharded is merged as it is.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import LoraSettings
from paceline.errors import InvalidInput
from paceline.models.description import ALL_LINEAR, TARGETS, ends_with, require_layers
from paceline.models.transformer import output_layer
from paceline.system import write_durably

NAME = "default"  # peft's, of the only adapter
WEIGHTS_FILE = "adapter_model.safetensors"  # peft's name


@dataclass(frozen=True)
class Adapters:
    """What ``add_adapters`` added; ``initial`` are the whole adapters' values, by name."""

    config: Any  # peft's LoraConfig
    initial: Mapping[str, Tensor]

    def write(self, tensors: Mapping[str, Tensor], directory: Path, base: str, digest: str) -> None:
        """Write trained adapters in peft's layout; ``base`` and ``digest`` name what they adapt."""
        from safetensors.torch import save

        config = copy.copy(self.config)
        config.base_model_name_or_path, config.revision = base, digest
        config.inference_mode, config.target_modules = True, sorted(config.target_modules)
        config.save_pretrained(str(directory))
        named = {f"base_model.model.{_stored_name(name)}": each for name, each in tensors.items()}
        write_durably(directory / WEIGHTS_FILE, save(named, {"format": "pt"}), 0o666)


def add_adapters(model: nn.Module, lora: LoraSettings, seed: int) -> Adapters:
    """Add adapters to ``model`` in place and freeze all else; return them.

    Their values are those of ``torch.manual_seed(seed); peft.get_peft_model(model, …)``. A model on
    the meta device stays there, in float32: fill the adapters from ``initial``, and then call
    ``set_magnitudes``. Raises InvalidInput for a target that is no linear layer of the model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        **lora.model_dump(exclude={"target_modules"}),
        target_modules=_targets(model, lora),
        task_type="CAUSAL_LM",
    )
    is_empty = any(each.is_meta for each in model.parameters())
    if is_empty:  # peft would put the values of adapters on the meta device, too
        model.float()._apply(_without_memory)  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for what peft looks at
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, NAME)
        except ValueError as error:
            got = str(error).split("\n")[0][:300]
            raise InvalidInput("peft cannot adapt the model", got=got, where=TARGETS) from error
    initial = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    if is_empty:
        model.to("meta")
    return Adapters(config, initial)


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def base_name(name: str) -> str:
    """Return the name that a weight has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def set_magnitudes(model: nn.Module) -> None:
    """Set DoRA's magnitudes to the norms of the rows of the weights, as peft does at the start.

    Rows lie on the same rank as their magnitudes where a model is sharded.
    """
    for _, layer in _adapted(model):
        for each in layer.lora_magnitude_vector.values():
            weight, into = _local(layer.base_layer.weight), _local(each.weight)
            into.copy_(torch.linalg.norm(weight, dim=1))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within the ``with``, let ``model`` compute what it did before ``add_adapters``.

    Not by peft's own switch: that also changes which parameters want gradients.
    """
    layers = [layer for _, layer in _adapted(model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merge_adapters(model: nn.Module) -> None:
    """Add the adapters to the weights in place; ``model`` has its first names and layers again."""
    for name, layer in list(_adapted(model)):
        weight = layer.base_layer.weight.detach()
        # peft's ``merge`` gives DoRA's weight a new tensor, which FSDP does not see.
        if (dora := layer.lora_variant.get(NAME)) is not None:
            weight.copy_(dora.merge_safe(layer, NAME, weight).detach())
        else:
            weight.add_(layer.get_delta_weight(NAME).detach())
        model.set_submodule(name, layer.base_layer)


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return ((name, each) for name, each in model.named_modules() if isinstance(each, LoraLayer))


def _local(tensor: Tensor) -> Tensor:
    part = tensor.detach()
    return part.to_local() if hasattr(part, "to_local") else part  # of a DTensor


def _stored_name(name: str) -> str:
    """Return the name in peft's files: without the adapter's."""
    name = name.replace(f".{NAME}.", ".")
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def _targets(model: nn.Module, lora: LoraSettings) -> list[str]:
    """Return names of the layers to adapt, for peft: it adapts all whose names end so."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as FAMILIES

    linear = _linear_layers(model)
    wanted = list(lora.target_modules)
    if wanted == [ALL_LINEAR]:
        wanted = sorted({each.rsplit(".", 1)[-1] for each in linear})
    family = getattr(getattr(model, "config", None), "model_type", None)
    wanted = wanted or FAMILIES.get(family, [])
    if not wanted:
        raise InvalidInput(
            "no default layers to adapt",
            got=f"model_type {family!r}",
            wanted=f"names of linear layers, or {ALL_LINEAR}",
            where=TARGETS,
        )
    require_layers(wanted, linear)
    matched = [name for name in linear if ends_with(name, wanted)]
    exact = all(name in matched for name, _ in model.named_modules() if ends_with(name, wanted))
    return wanted if exact else matched


def _linear_layers(model: Any) -> list[str]:
    """Return the names of linear layers, without the output layer: it may be tied."""
    output = output_layer(model)
    return [
        name
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and each is not output
    ]
