"""Operating system helpers: durable and private files, signals by pid, loopback addresses."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
