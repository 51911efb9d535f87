"""What people and monitors look at: metrics, what watchers get, and the fleet page.

It knows the records of the wire, and not where they come from.
"""

from paceline.telemetry.metrics import FleetMetrics, Snapshot
from paceline.telemetry.page import docs_page, fleet_page
from paceline.telemetry.watch_items import DeploymentSeen, Look, Moments, PartSeen, of_deployment

__all__ = [
    "DeploymentSeen",
    "FleetMetrics",
    "Look",
    "Moments",
    "PartSeen",
    "Snapshot",
    "docs_page",
    "fleet_page",
    "of_deployment",
]
