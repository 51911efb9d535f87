"""The control plane: the deployment state machine, its stores, leadership and its driver.

It tracks workers, deployments and plans. It transfers no model bytes and starts no processes;
the REST routes are in ``paceline.api``.
"""

from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.state.settings import CoordinatorSettings
from paceline.coordinator.state.state import CoordinatorState

__all__ = ["Coordinator", "CoordinatorSettings", "CoordinatorState"]
