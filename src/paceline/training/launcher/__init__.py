"""Launcher: start a gang of ranks, monitor it, and restart it after a failure."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
