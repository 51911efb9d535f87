"""A model spread over a mesh: one function a kind of parallelism, and ``parallelise`` for all.

Each function takes a plain module and changes how it is held or run, never what it computes. The
loop drives a ``Parallel`` and knows no layout.
"""

from __future__ import annotations

from paceline.training.parallel.base import Parallel
from paceline.training.parallel.compose import parallelise

__all__ = ["Parallel", "parallelise"]
