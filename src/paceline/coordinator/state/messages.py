"""What goes into the coordinator's state machine and what comes out of it.

Events carry what happened; effects say what must be kept, told and answered. An effect is only a
wish: the driver commits every ``Keep…`` of one event in one transaction before it lets ``Answer``
out. Nothing here knows SQL or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel

from paceline.coordinator.state.persisted_state import Memo
from paceline.manifest import Manifest
from paceline.schemas.access import CreateJoinToken, CreateToken, TokenRecord
from paceline.schemas.calls import CreateDeployment, Heartbeat, RegisterWorker
from paceline.schemas.events import EventName
from paceline.schemas.plan import Plan
from paceline.schemas.records import Deployment, Receipt, Worker

# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    at: float = 0.0  # seconds since the Unix epoch, for people; decisions use ``now_s``


@dataclass(frozen=True, kw_only=True, slots=True)
class Create(_Event):
    """Somebody wants a deployment; its manifest was read from the source already."""

    deployment_id: str
    call: CreateDeployment
    manifest: Manifest
    key: str | None = None
    body_digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Register(_Event):
    """An agent makes itself known."""

    call: RegisterWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat(_Event):
    """An agent reports."""

    beat: Heartbeat


@dataclass(frozen=True, kw_only=True, slots=True)
class Listen(_Event):
    """An agent whose beat was answered without a command still holds the line: is there one now?"""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchLanes(_Event):
    """An agent asks for its part of the newest plan, which also acknowledges the manifest."""

    deployment_id: str
    worker_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel(_Event):
    """Somebody wants the deployment stopped for good."""

    deployment_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Activate(_Event):
    """Somebody wants the fleet to switch to this version."""

    deployment_id: str
    allow_older: bool = False  # than the one that is active


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback(_Event):
    """Somebody wants the fleet to go back from this version to the one that was active before."""

    deployment_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RaiseBudget(_Event):
    """Somebody lets a deployment read more from the origin than its fuse allows."""

    deployment_id: str
    extra_bytes: int
    key: str | None = None
    body_digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class IssueToken(_Event):
    """Somebody wants a bearer token or a join token; its secret was drawn already."""

    token_id: str
    sha256: str
    call: CreateToken | CreateJoinToken


@dataclass(frozen=True, kw_only=True, slots=True)
class RevokeToken(_Event):
    """Somebody wants a token to open nothing any more; a worker's ends with all of that worker."""

    token_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmitWorker(_Event):
    """An agent gets a token of its own: for a join token, which is spent, or for the one before.

    The answer may be lost. So the one before works on until the new one is first used, and a join
    token is taken again for the same key.
    """

    spends: str  # the token_id that the agent showed
    worker_id: str
    token_id: str
    sha256: str
    expires_at: float
    key_sha256: str | None = None  # of the public key that the certificate is for


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginToken(_Event):
    """A worker's token is used for the first time: what it was issued in place of ends."""

    token_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensUsed(_Event):
    """When tokens were last shown: (token_id, seconds since the Unix epoch)."""

    uses: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowTold(_Event):
    """What became of the flow run that drives a deployment, or of starting it."""

    deployment_id: str
    name: EventName
    flow_run_id: str | None = None  # that drives it from now on; None: as before
    data: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick(_Event):
    """Time passed."""


TokenEvent = IssueToken | RevokeToken | AdmitWorker | BeginToken | TokensUsed
Event = (
    Create
    | Register
    | Beat
    | Listen
    | FetchLanes
    | Cancel
    | Activate
    | Rollback
    | RaiseBudget
    | FlowTold
    | Tick
    | TokenEvent
)

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeepDeployment:
    deployment: Deployment
    memo: Memo
    manifest: Manifest | None = None  # given once, when the deployment is created


@dataclass(frozen=True, slots=True)
class KeepPlan:
    plan: Plan


@dataclass(frozen=True, slots=True)
class KeepWorker:
    worker: Worker


@dataclass(frozen=True, slots=True)
class DropWorker:
    """Forget a worker that has been away for so long that nobody asks for it any more."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class KeepReceipt:
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class KeepKey:
    key: str
    body_digest: str
    deployment_id: str


@dataclass(frozen=True, slots=True)
class KeepToken:
    token: TokenRecord  # in place of an older record of the same token_id


@dataclass(frozen=True, slots=True)
class DropToken:
    token_id: str


@dataclass(frozen=True, slots=True)
class DropStage:
    """Forget an old record of the ledger."""

    stage: str
    input_digest: str


@dataclass(frozen=True, slots=True)
class DropDeployment:
    """Forget a deployment with its plans, its receipts and the keys that named it."""

    deployment_id: str


@dataclass(frozen=True, slots=True)
class Observed:
    """Something worth telling: goes to the audit history and to whoever watches."""

    name: EventName
    at: float
    deployment_id: str | None = None
    worker_id: str | None = None
    data: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the caller hears, once everything else is committed."""

    record: BaseModel


Effect = (
    KeepDeployment
    | KeepPlan
    | KeepWorker
    | DropWorker
    | KeepReceipt
    | KeepKey
    | KeepToken
    | DropToken
    | DropStage
    | DropDeployment
    | Observed
    | Answer
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptDeployment:
    """One deployment as the store gives it back."""

    deployment: Deployment
    memo: Memo
    manifest: Manifest
    plan: Plan | None
    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Everything the state machine needs to go on after a restart."""

    deployments: tuple[KeptDeployment, ...] = ()
    workers: tuple[Worker, ...] = ()
    keys: tuple[KeepKey, ...] = ()
    tokens: tuple[TokenRecord, ...] = ()
