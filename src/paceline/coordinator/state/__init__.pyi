from .activation import ActivationManager as ActivationManager
from .deployment import DeploymentState as DeploymentState
from .deployment_index import DeploymentIndex as DeploymentIndex, kept_bytes as kept_bytes
from .membership import Membership as Membership
from .messages import (
    Activate as Activate,
    AdmitWorker as AdmitWorker,
    Answer as Answer,
    AwaitCommands as AwaitCommands,
    Cancel as Cancel,
    Create as Create,
    Drop as Drop,
    DropDeployment as DropDeployment,
    Effect as Effect,
    EmitEvent as EmitEvent,
    Event as Event,
    FetchLanes as FetchLanes,
    FlowReported as FlowReported,
    HeartbeatReceived as HeartbeatReceived,
    IssueToken as IssueToken,
    LoadedDeployment as LoadedDeployment,
    LoadedState as LoadedState,
    RaiseBudget as RaiseBudget,
    Register as Register,
    RevokeToken as RevokeToken,
    Rollback as Rollback,
    Save as Save,
    Saved as Saved,
    SaveDeployment as SaveDeployment,
    SaveIdempotencyKey as SaveIdempotencyKey,
    SavePlan as SavePlan,
    Tick as Tick,
    TokenEvent as TokenEvent,
    TokenFirstUsed as TokenFirstUsed,
    TokensUsed as TokensUsed,
)
from .peer_health import Edge as Edge, PeerHealth as PeerHealth
from .persisted_state import PersistedState as PersistedState
from .planning import (
    REPORTS_PER_SLACK as REPORTS_PER_SLACK,
    remaining_origin_bytes as remaining_origin_bytes,
)
from .settings import CoordinatorSettings as CoordinatorSettings
from .state import CoordinatorState as CoordinatorState
from .targets import (
    TargetProgress as TargetProgress,
    remaining_budget_bytes as remaining_budget_bytes,
)
