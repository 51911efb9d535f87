from .access import IdentityIssuer as IdentityIssuer
from .app import create_app as create_app, serve as serve
from .deployments import HeartbeatMiddleware as HeartbeatMiddleware, answer_beat as answer_beat
from .event_stream import (
    EventStream as EventStream,
    SnapshotReader as SnapshotReader,
    StreamHub as StreamHub,
)
from .flow_starter import (
    RETRY_S as RETRY_S,
    STATES_S as STATES_S,
    FlowRunSupervisor as FlowRunSupervisor,
    PrefectStarter as PrefectStarter,
)
from .limits import (
    BODY_S as BODY_S,
    MAX_BODY_BYTES as MAX_BODY_BYTES,
    MOST as MOST,
    HttpProtocol as HttpProtocol,
    TokenBuckets as TokenBuckets,
    bounded_body as bounded_body,
    host_of as host_of,
)
from .middleware import (
    BATCH as BATCH,
    OPEN_PER_S as OPEN_PER_S,
    ROWS_AT_ONCE as ROWS_AT_ONCE,
    AccessMiddleware as AccessMiddleware,
    AuditWriter as AuditWriter,
    Authenticator as Authenticator,
    LeaderGate as LeaderGate,
    RefusedCall as RefusedCall,
)
from .problems import add_problem_handlers as add_problem_handlers
from .routes import (
    ROUTES as ROUTES,
    Route as Route,
    require_declared as require_declared,
    routes_of as routes_of,
)
from .serving import allowed_hosts as allowed_hosts, port_protection as port_protection
