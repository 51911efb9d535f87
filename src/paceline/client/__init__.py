"""REST client of the coordinator; few imports, because every agent loads it.

``calls`` has one method per REST call. ``failover`` finds the leader among several replicas and
refuses responses from an older epoch. ``events`` follows the event stream. HTTP itself is
``system.http``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
