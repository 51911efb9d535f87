"""What people and monitors look at: metrics and the fleet page.

It knows the records of the wire, and not where they come from.
"""

from paceline.observe.metrics import FleetMetrics, Snapshot
from paceline.observe.page import docs_page, fleet_page

__all__ = ["FleetMetrics", "Snapshot", "docs_page", "fleet_page"]
