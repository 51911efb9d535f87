"""What people and monitors look at: metrics, what watchers get, and the fleet page.

It knows the records of the wire, and not where they come from.
"""

from paceline.observe.metrics import FleetMetrics, Snapshot
from paceline.observe.moments import DeploymentSeen, Look, Moments, PartSeen, of_deployment
from paceline.observe.page import docs_page, fleet_page

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
