"""REST client of the coordinator; few imports, because every agent loads it.

``calls`` has one method per REST call. ``failover`` finds the leader among several replicas and
refuses responses from an older epoch. ``connection`` carries one exchange and detects a server that
hangs.
"""

from paceline.client.calls import CoordinatorClient
from paceline.client.connection import Endpoint

__all__ = ["CoordinatorClient", "Endpoint"]
