"""Names of what happens, shared by logs, watchers, the fleet page and Prefect's events."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from paceline.wire.base import Record


class EventName(StrEnum):
    """What can happen; dotted, past tense."""

    WORKER_REGISTERED = "worker.registered"
    WORKER_LOST = "worker.lost"
    WORKER_RETURNED = "worker.returned"
    WORKER_FORGOTTEN = "worker.forgotten"  # lost a month ago
    DEPLOYMENT_CREATED = "deployment.created"
    DEPLOYMENT_PLANNED = "deployment.planned"
    DEPLOYMENT_REPLANNED = "deployment.replanned"
    DEPLOYMENT_STATUS_CHANGED = "deployment.status_changed"
    DEPLOYMENT_SWITCHING = "deployment.switching"  # a quorum is ready: everybody is told
    DEPLOYMENT_SWITCH_REFUSED = "deployment.switch_refused"  # nobody was told
    DEPLOYMENT_SWITCH_LATE = "deployment.switch_late"  # told long ago, and no quorum has yet
    DEPLOYMENT_ACTIVATED = "deployment.activated"
    DEPLOYMENT_ROLLED_BACK = "deployment.rolled_back"
    DEPLOYMENT_FORGOTTEN = "deployment.forgotten"
    BUDGET_RAISED = "deployment.budget_raised"
    FLOW_STARTED = "deployment.flow_started"  # a Prefect flow run drives it
    FLOW_DELAYED = "deployment.flow_delayed"  # Prefect is away: the start is tried again
    FLOW_ENDED = "deployment.flow_ended"  # not well, while the deployment went on
    WORKER_COMPLETED = "deployment.worker_completed"
    WORKER_FAILED = "deployment.worker_failed"
    SOURCE_LOST = "relay.source_lost"
    PIECE_CORRUPT = "relay.piece_corrupt"
    WORKER_SLOW = "relay.worker_slow"
    WORKER_QUARANTINED = "relay.worker_quarantined"
    CHANGE_ACCEPTED = "change.accepted"
    CHANGE_REFUSED = "change.refused"
    STAGE_FINISHED = "run.stage_finished"
    TRAINING_STEP = "training.step"
    TRAINING_CHECKPOINT = "training.checkpoint"
    TRAINING_RANK_LOST = "training.rank_lost"
    TRAINING_RESTARTED = "training.restarted"


class Event(Record):
    """One thing that happened, numbered by the coordinator that saw it."""

    seq: int = Field(ge=1)
    name: EventName
    at: float  # seconds since the Unix epoch
    deployment_id: str | None = None
    worker_id: str | None = None
    data: dict[str, object] = {}
