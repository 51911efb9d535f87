"""The parameter server's weights and optimizer: flat gradients in, flat weights out.

The update of version v is a pure function of the state before it and one gradient: the learning
rate depends on the version, so a standby with the same gradients holds the same bits.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from paceline.config import TrainingSettings
from paceline.errors import CorruptData, InvalidInput
from paceline.training.loop.optimizer import learning_rate, new_optimizer, set_learning_rate

_LEDGER = "ledger"  # its JSON, among the tensors


class Learner:
    """A model's weights and optimizer; ``workers`` gradients count as one step of the schedule."""

    def __init__(self, model: nn.Module, settings: TrainingSettings, workers: int) -> None:
        self._settings, self._workers = settings, workers
        self._names = [name for name, each in model.named_parameters() if each.requires_grad]
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        kinds = {each.dtype for each in self._parameters}
        if len(kinds) != 1 or str(next(iter(kinds))) not in ("torch.float32", "torch.float64"):
            raise InvalidInput(
                "a parameter server keeps weights of one type",
                got=", ".join(sorted(map(str, kinds))),
                wanted="float32 or float64",
            )
        self.model = model
        self.dtype = str(next(iter(kinds))).removeprefix("torch.")
        self.count = sum(each.numel() for each in self._parameters)
        self.optimizer = new_optimizer(model, settings)

    def weights(self) -> npt.NDArray[Any]:
        """Return a copy of all weights as one flat array."""
        return flat(self._parameters)

    def rate(self, version: int) -> float:
        """Return the learning rate of the update to ``version``."""
        step = (version - 1) // self._workers
        return learning_rate(step, self._settings.steps, self._settings)

    def apply(self, gradient: npt.NDArray[Any], version: int, norm: float | None = None) -> float:
        """Take the step to ``version`` from the one before; return the gradient's norm.

        ``norm`` is ``norm_of(gradient)`` where the caller has it. Raises InvalidInput, and changes
        nothing, where the gradient is not finite.
        """
        norm = norm_of(gradient) if norm is None else norm
        if not math.isfinite(norm):
            raise InvalidInput("gradient is not finite", got=norm)
        whole = torch.from_numpy(np.array(gradient))
        if norm > self._settings.clip_norm:
            whole *= self._settings.clip_norm / (norm + 1e-6)
        parts = torch.split(whole, [each.numel() for each in self._parameters])
        for each, part in zip(self._parameters, parts, strict=True):
            each.grad = part.view_as(each)
        set_learning_rate(self.optimizer, self.rate(version))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def to_bytes(self, ledger: dict[str, Any]) -> bytes:
        """Return weights, moments and the ledger as one safetensors file."""
        tensors: dict[str, Tensor] = {}
        for name, each in zip(self._names, self._parameters, strict=True):
            tensors[f"model.{name}"] = each.detach().contiguous()
            for moment, value in self.optimizer.state.get(each, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{moment}.{name}"] = value.detach().contiguous()
        said = json.dumps(ledger, sort_keys=True).encode()
        tensors[_LEDGER] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        raw: bytes = save(tensors)
        return raw

    def from_bytes(self, raw: bytes) -> dict[str, Any]:
        """Load what ``to_bytes`` wrote, and return the ledger.

        Raises CorruptData, and changes nothing, for a state of another model.
        """
        try:
            tensors = load(raw)
            ledger = json.loads(bytes(tensors.pop(_LEDGER).numpy().tobytes()))
        except (SafetensorError, KeyError, ValueError) as error:
            raise CorruptData("state of a parameter server cannot be read", got=error) from error
        weights = {f"model.{name}": each for name, each in self._named()}
        for name, each in weights.items():
            found = tensors.get(name)
            if found is None or found.shape != each.shape or found.dtype != each.dtype:
                raise CorruptData("state is of another model", got=name)
        with torch.no_grad():
            for name, each in weights.items():
                each.copy_(tensors.pop(name))
        self.optimizer.state.clear()
        named = dict(self._named())
        for name, tensor in tensors.items():
            moment, _, parameter = name.partition(".")
            self.optimizer.state[named[parameter]][moment] = tensor.clone()
        assert isinstance(ledger, dict)
        return ledger

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._names, self._parameters, strict=True))


def norm_of(gradient: npt.NDArray[Any]) -> float:
    """Return the gradient's norm; not finite where an element is not."""
    wide = gradient.astype(np.float64)
    return float(np.sqrt(np.dot(wide, wide)))


def flat(tensors: list[nn.Parameter]) -> npt.NDArray[Any]:
    """Return ``tensors`` as one flat array."""
    found: npt.NDArray[Any] = (
        torch.cat([each.detach().reshape(-1) for each in tensors]).cpu().numpy()
    )
    return found


def flat_gradients(parameters: list[nn.Parameter]) -> npt.NDArray[Any]:
    """Return all gradients as one flat array; zeros where a parameter has none."""
    found: npt.NDArray[Any] = (
        torch.cat(
            [
                torch.zeros(each.numel(), dtype=each.dtype, device=each.device)
                if each.grad is None
                else each.grad.flatten()
                for each in parameters
            ]
        )
        .cpu()
        .numpy()
    )
    return found


def put(parameters: list[nn.Parameter], weights: npt.NDArray[Any]) -> None:
    """Copy the flat ``weights`` into ``parameters``."""
    parts = torch.split(torch.from_numpy(np.array(weights)), [p.numel() for p in parameters])
    with torch.no_grad():
        for each, part in zip(parameters, parts, strict=True):
            each.copy_(part.view_as(each))
