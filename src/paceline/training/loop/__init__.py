"""One rank's process: load, join the group, resume, train step by step, report."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
