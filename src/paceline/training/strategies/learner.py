"""The parameter server's weights and optimizer: flat gradients in, flat weights out.

The update of version v is a pure function of the state before it and one gradient: the learning
rate depends on the version, so a standby with the same gradients holds the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from paceline.config import TrainingSettings
from paceline.errors import CorruptData, InvalidInput
from paceline.training.loop import apply_gradients, learning_rate, new_optimizer
from paceline.training.metrics import Tracer
from paceline.training.strategies.port import Array


class Learner:
    """A model's weights and optimizer; ``workers`` gradients count as one step of the schedule."""

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingSettings,
        workers: int,
        tracer: Tracer | None = None,
    ) -> None:
        """``tracer`` profiles the first update of each requested step."""
        self._settings, self._workers, self._tracer = settings, workers, tracer
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [each for _, each in self._named]
        kinds = {each.dtype for each in self._parameters}
        if kinds not in ({torch.float32}, {torch.float64}):
            raise InvalidInput(
                "a parameter server keeps weights of one type",
                got=", ".join(sorted(map(str, kinds))),
                wanted="float32 or float64",
            )
        self.model = model
        self.dtype = str(kinds.pop()).removeprefix("torch.")
        self.count = sum(each.numel() for each in self._parameters)
        self.optimizer = new_optimizer(model, settings)

    def weights(self) -> Array:
        """Return a copy of all weights as one flat array."""
        return flat(self._parameters)

    def rate(self, version: int) -> float:
        """Return the learning rate of the update to ``version``."""
        step = (version - 1) // self._workers
        return learning_rate(step, self._settings.steps, self._settings)

    def apply(self, gradient: Array, version: int, norm: float) -> None:
        """Take the step to ``version``; ``norm`` is ``norm_of(gradient)``, a finite number."""
        step = (version - 1) // self._workers + 1
        if self._tracer is not None:
            self._tracer.begin(step)
        whole = torch.from_numpy(gradient)
        if norm > self._settings.clip_norm:
            whole = whole * (self._settings.clip_norm / (norm + 1e-6))
        parts = torch.split(whole, [each.numel() for each in self._parameters])
        for each, part in zip(self._parameters, parts, strict=True):
            each.grad = part.view_as(each)
        apply_gradients(self.optimizer, self.rate(version))
        self.optimizer.zero_grad(set_to_none=True)
        if self._tracer is not None:
            self._tracer.end(step)

    def to_bytes(self) -> bytes:
        """Return weights and moments as one safetensors file."""
        tensors: dict[str, Tensor] = {}
        for name, each in self._named:
            tensors[f"model.{name}"] = each.detach().contiguous()
            for moment, value in self.optimizer.state.get(each, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{moment}.{name}"] = value.detach().contiguous()
        raw: bytes = save(tensors)
        return raw

    def from_bytes(self, raw: bytes) -> None:
        """Load what ``to_bytes`` wrote; raises CorruptData for a state of another model."""
        try:
            tensors = load(raw)
        except (SafetensorError, ValueError) as error:
            raise CorruptData("state of a parameter server cannot be read", got=error) from error
        for name, each in self._named:
            found = tensors.get(f"model.{name}")
            if found is None or found.shape != each.shape or found.dtype != each.dtype:
                raise CorruptData("state is of another model", got=f"model.{name}")
        self.optimizer.state.clear()
        named = dict(self._named)
        with torch.no_grad():
            for key, tensor in tensors.items():
                kind, _, name = key.partition(".")
                if name not in named:
                    raise CorruptData("state is of another model", got=key)
                if kind == "model":
                    named[name].copy_(tensor)
                else:
                    self.optimizer.state[named[name]][kind] = tensor.clone()


def norm_of(gradient: Array) -> float:
    """Return the gradient's norm; not finite where an element is not."""
    wide = gradient.astype(np.float64)
    return float(np.sqrt(np.dot(wide, wide)))


def flat(parameters: Sequence[nn.Parameter]) -> Array:
    """Return a copy of ``parameters`` as one flat array."""
    found: Array = parameters_to_vector(parameters).detach().cpu().numpy()
    return found


def flat_gradients(parameters: Sequence[nn.Parameter]) -> Array:
    """Return all gradients as one flat array; zeros where a parameter has none."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    found: Array = parameters_to_vector(gradients).detach().cpu().numpy()
    return found


def copy_into(parameters: Sequence[nn.Parameter], weights: Array) -> None:
    """Set ``parameters`` to the flat ``weights``, whose memory they share on a CPU."""
    vector_to_parameters(torch.from_numpy(weights).to(parameters[0].device), parameters)
