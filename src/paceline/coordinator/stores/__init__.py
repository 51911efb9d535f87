"""The coordinator's stores: three contracts, each with a local and a cluster backend."""

from paceline.coordinator.stores.contracts import (
    Audit,
    Candidate,
    Coordination,
    EventQuery,
    Outbox,
    Progress,
    Term,
)
from paceline.coordinator.stores.opening import open_audit, open_coordination, open_progress
from paceline.coordinator.stores.shipper import OutboxShipper

__all__ = [
    "Audit",
    "Candidate",
    "Coordination",
    "EventQuery",
    "Outbox",
    "OutboxShipper",
    "Progress",
    "Term",
    "open_audit",
    "open_coordination",
    "open_progress",
]
