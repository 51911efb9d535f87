"""The coordinator's REST from the caller's side; lean, because every agent imports it.

``calls`` has one method a call, ``asking`` puts it to whoever leads; ``replicas`` says which of
several endpoints that is and refuses older ones; ``connection`` carries one exchange and notices a
server that hangs.
"""

from paceline.client.calls import CoordinatorClient
from paceline.client.connection import Endpoint

__all__ = ["CoordinatorClient", "Endpoint"]
