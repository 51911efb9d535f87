"""Stream a snapshot to ranks: fetch, cache, transform, batch and prefetch shards."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
