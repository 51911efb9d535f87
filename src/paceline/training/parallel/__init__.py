"""Parallelism: a model spread over a mesh, by one function per kind and ``parallelise`` for all.

Each function takes a plain module and changes how it is held or run, never what it computes. The
training loop drives a ``Parallel`` and does not depend on the layout. ``require_layout`` rejects
impossible layouts and does not import torch, so a driver calls it before any rank starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.training.parallel.checks import cuts_of, readers_of, require_layout

if TYPE_CHECKING:
    from paceline.training.parallel.base import Parallel
    from paceline.training.parallel.compose import parallelise

_LATE = {"Parallel": "base", "parallelise": "compose"}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Parallel", "cuts_of", "parallelise", "readers_of", "require_layout"]
