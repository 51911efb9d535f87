"""The coordinator's web service: routes, authentication, limits and pages on one port."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
