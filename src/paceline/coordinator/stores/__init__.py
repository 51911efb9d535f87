"""The coordinator's stores: three contracts, each with a local and a cluster backend."""

from paceline.coordinator.stores.contracts import (
    Audit,
    Candidate,
    Coordination,
    Outbox,
    Progress,
    Question,
    Term,
)
from paceline.coordinator.stores.opening import open_audit, open_coordination, open_progress
from paceline.coordinator.stores.shipper import Shipper

__all__ = [
    "Audit",
    "Candidate",
    "Coordination",
    "Outbox",
    "Progress",
    "Question",
    "Shipper",
    "Term",
    "open_audit",
    "open_coordination",
    "open_progress",
]
