"""Prometheus metrics, the Moments of the event stream, and the HTML pages.

Works on the records of ``schemas`` and does not depend on the coordinator.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
