"""Parallelism: a model spread over a mesh, by one function per kind and ``parallelise`` for all.

Each function takes a plain module and changes how it is held or run, never what it computes. The
training loop drives a ``Parallel`` and does not depend on the layout. ``require_layout`` rejects
impossible layouts and does not import torch, so a driver calls it before any rank starts.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
