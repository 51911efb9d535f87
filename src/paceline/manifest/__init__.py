"""A model as files, chunks, pieces and digests: build, parse, publish, fetch, verify.

It works on directories and object URLs, and does not depend on workers, topologies or sockets.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
