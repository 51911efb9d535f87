"""Sessions in memory: the third driver, for tests. Bytes exist only as "good" or "bad"."""

from paceline.relay.memory.fleet import MemoryFleet
from paceline.relay.memory.nodes import Faults, Node, Stream

__all__ = ["Faults", "MemoryFleet", "Node", "Stream"]
