"""Prometheus metrics, the Moments of the event stream, and the HTML pages.

Works on the records of ``schemas`` and does not depend on the coordinator.
"""

from paceline.telemetry.metrics import FleetMetrics, Snapshot
from paceline.telemetry.page import docs_page, fleet_page
from paceline.telemetry.watch_items import (
    DeploymentSnapshot,
    MomentBuilder,
    PartSnapshot,
    StateSnapshot,
    of_deployment,
)

__all__ = [
    "DeploymentSnapshot",
    "FleetMetrics",
    "MomentBuilder",
    "PartSnapshot",
    "Snapshot",
    "StateSnapshot",
    "docs_page",
    "fleet_page",
    "of_deployment",
]
