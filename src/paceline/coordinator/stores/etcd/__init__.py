"""The coordination store in an etcd cluster (v3 API, 3.4 and later)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
