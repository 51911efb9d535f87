"""A model spread over a mesh: one function a kind of parallelism, and ``parallelise`` for all.

Each function takes a plain module and changes how it is held or run, never what it computes. The
loop drives a ``Parallel`` and knows no layout. ``require_layout`` refuses what cannot work without
needing torch, so a driver calls it before any rank starts; ``parallelise`` imports it.
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
