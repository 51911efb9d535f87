"""A whole deployment in one process, without any server: ``distribute``.

The second driver of the coordinator's state machine, beside the coordinator's own: its workers are
relay drivers of this process, on real sockets and disks. ``simulation`` is the third.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
