"""The control plane: a state machine without I/O, its store, its driver and its REST.

It knows workers, deployments and plans. It moves no model bytes and starts no processes.
"""

from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.state.settings import Patience
from paceline.coordinator.state.state import CoordinatorState

__all__ = ["Coordinator", "CoordinatorState", "Patience"]
