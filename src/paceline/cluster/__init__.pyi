from .addresses import (
    AgentInfo as AgentInfo,
    Node as Node,
    labels_of as labels_of,
    node_names as node_names,
    reserve_port as reserve_port,
)
from .agents import AgentKeeper as AgentKeeper, AgentOrder as AgentOrder
from .client import Fleet as Fleet, ProcessResult as ProcessResult
from .dask_service import security_of as security_of
from .embedded import (
    PLAIN as PLAIN,
    SECRETS_FILE as SECRETS_FILE,
    embedded_services as embedded_services,
    ensure_secrets as ensure_secrets,
    require_protected as require_protected,
)
from .held_nodes import (
    Heard as Heard,
    HeldNodes as HeldNodes,
    events_in as events_in,
)
from .installation import start as start, status as status, stop as stop
from .pinned_calls import Crew as Crew, Member as Member, call as call
from .service import Ready as Ready, ServiceSpec as ServiceSpec, StopReport as StopReport
from .supervisor import LOCK_FILE as LOCK_FILE
from .worker_processes import News as News, Order as Order, launch as launch
