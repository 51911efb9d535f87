"""Models: our transformer, its configuration, and its files (config, safetensors weights, digests).

Training and evaluation use it. Does not depend on data, optimisers or parallelism. Imports torch
only when a model is requested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.models.config import (
    SEPARATOR_BYTE,
    ModelConfig,
    config_for,
    count_parameters,
    require_tokenizer,
)
from paceline.models.files import read_config, weights_digest

if TYPE_CHECKING:
    from paceline.models.transformer import Transformer, new_model
    from paceline.models.weights import load_model, save_model

_LATE = {
    "Transformer": "transformer",
    "new_model": "transformer",
    "load_model": "weights",
    "save_model": "weights",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        import importlib

        return getattr(importlib.import_module(f"paceline.models.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "SEPARATOR_BYTE",
    "ModelConfig",
    "Transformer",
    "config_for",
    "count_parameters",
    "load_model",
    "new_model",
    "read_config",
    "require_tokenizer",
    "save_model",
    "weights_digest",
]
