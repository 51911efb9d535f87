"""`paceline doctor`: checks of this machine and of what it reaches, and the support bundle."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
