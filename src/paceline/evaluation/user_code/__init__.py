"""User code that judges or is judged: its process, and metrics of the user's own.

The child's side is in ``paceline.training.user_code``, which is started by name.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
