"""The state machine's inputs (events) and outputs (effects).

Effects are requests: the driver commits every ``Save…``, ``Drop…`` and ``EmitEvent`` of one event
in one transaction before it returns the ``Answer``. No SQL or HTTP here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel

from paceline.coordinator.state.persisted_state import PersistedState
from paceline.manifest import Manifest
from paceline.schemas import (
    CreateDeployment,
    CreateJoinToken,
    CreateToken,
    Deployment,
    EventName,
    Heartbeat,
    Plan,
    PurposeRule,
    Receipt,
    RegisterWorker,
    StageRecord,
    TokenRecord,
    TrainingJob,
    Worker,
)

# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    at: float = 0.0  # seconds since the Unix epoch, for display; decisions use ``now_s``


@dataclass(frozen=True, kw_only=True, slots=True)
class Create(_Event):
    """Create a deployment; its manifest was read from the source already."""

    deployment_id: str
    call: CreateDeployment
    manifest: Manifest
    key: str | None = None
    body_digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Register(_Event):
    """An agent registers."""

    call: RegisterWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatReceived(_Event):
    """An agent sends a heartbeat."""

    beat: Heartbeat


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitCommands(_Event):
    """An agent waits after its heartbeat's answer: return the commands that there are now."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchLanes(_Event):
    """An agent requests its part of the newest plan, which also acknowledges the manifest."""

    deployment_id: str
    worker_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel(_Event):
    """Stop the deployment for good."""

    deployment_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Activate(_Event):
    """Switch the fleet to this version."""

    deployment_id: str
    allow_older: bool = False  # than the active version


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback(_Event):
    """Switch the fleet back from this version to the one that was active before."""

    deployment_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RaiseBudget(_Event):
    """Let a deployment read more from the origin than its budget allows."""

    deployment_id: str
    extra_bytes: int
    key: str | None = None
    body_digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class IssueToken(_Event):
    """Issue a bearer token or a join token; its secret was drawn already."""

    token_id: str
    sha256: str
    call: CreateToken | CreateJoinToken


@dataclass(frozen=True, kw_only=True, slots=True)
class RevokeToken(_Event):
    """Revoke a token; with a worker's token, all tokens of that worker."""

    token_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmitWorker(_Event):
    """Issue a worker's own token in exchange for a join token, which is used up, or for the
    worker's previous token; a group join token loses one use.

    The answer may be lost. So the previous token stays valid until the first use of the new one,
    and a join token is accepted again for the same key.
    """

    spends: str  # the token_id that the agent presented
    worker_id: str
    token_id: str
    sha256: str
    expires_at: float
    key_sha256: str | None = None  # of the public key in the certificate
    authority: str | None = None  # digest of the authorities that the worker gets with it
    address: str = ""  # of the caller, as its connection has it


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFirstUsed(_Event):
    """First use of a worker's token, which ends the token that it replaces."""

    token_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensUsed(_Event):
    """When tokens were last used: (token_id, seconds since the Unix epoch)."""

    uses: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowReported(_Event):
    """The outcome of the flow run that drives a deployment, or of starting one."""

    deployment_id: str
    name: EventName
    flow_run_id: str | None = None  # of the run that drives it from now on; None: unchanged
    data: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick(_Event):
    """The time passed."""


TokenEvent = IssueToken | RevokeToken | AdmitWorker | TokenFirstUsed | TokensUsed
Event = (
    Create
    | Register
    | HeartbeatReceived
    | AwaitCommands
    | FetchLanes
    | Cancel
    | Activate
    | Rollback
    | RaiseBudget
    | FlowReported
    | Tick
    | TokenEvent
)

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SaveDeployment:
    deployment: Deployment
    persisted: PersistedState
    manifest: Manifest | None = None  # set once, when the deployment is created


@dataclass(frozen=True, slots=True)
class SavePlan:
    plan: Plan


Saved = Worker | Receipt | TokenRecord | StageRecord | TrainingJob | PurposeRule


@dataclass(frozen=True, slots=True)
class Save:
    record: Saved  # replaces an older record of the same kind and key


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete a record; its key as ``stores.rows`` has it."""

    kind: type[Saved]
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SaveIdempotencyKey:
    key: str
    body_digest: str
    deployment_id: str


@dataclass(frozen=True, slots=True)
class DropDeployment:
    """Delete a deployment with its plans, its receipts and its idempotency keys."""

    deployment_id: str


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """An audit event: for the audit store and for readers of the event stream."""

    name: EventName
    at: float
    deployment_id: str | None = None
    worker_id: str | None = None
    data: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the caller, returned after all other effects are committed."""

    record: BaseModel


Effect = (
    SaveDeployment
    | SavePlan
    | Save
    | Drop
    | SaveIdempotencyKey
    | DropDeployment
    | EmitEvent
    | Answer
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedDeployment:
    """One deployment as loaded from the store."""

    deployment: Deployment
    persisted: PersistedState
    manifest: Manifest
    plan: Plan | None
    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedState:
    """Everything that the state machine needs after a restart."""

    deployments: tuple[LoadedDeployment, ...] = ()
    workers: tuple[Worker, ...] = ()
    keys: tuple[SaveIdempotencyKey, ...] = ()
    tokens: tuple[TokenRecord, ...] = ()
