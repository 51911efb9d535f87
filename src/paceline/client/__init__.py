"""The coordinator's REST from the caller's side; lean, because every agent imports it.

``calls`` has one method a call; ``replicas`` finds the leader among several endpoints and refuses
older ones; ``connection`` carries one exchange and notices a server that hangs.
"""

from paceline.client.calls import CoordinatorClient
from paceline.client.connection import Endpoint

__all__ = ["CoordinatorClient", "Endpoint"]
