"""Sessions in memory: the third driver, for tests. Bytes exist only as "good" or "bad"."""

from tests.support.memory_fleet.fleet import MemoryFleet
from tests.support.memory_fleet.nodes import Faults, Node, Stream

__all__ = ["Faults", "MemoryFleet", "Node", "Stream"]
