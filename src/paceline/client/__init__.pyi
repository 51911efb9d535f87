from .calls import AccessClient as AccessClient, CoordinatorClient as CoordinatorClient
from .events import Follower as Follower, Item as Item, Lost as Lost
from .failover import (
    OUTAGE_S as OUTAGE_S,
    POLL_S as POLL_S,
    SUSPECT_S as SUSPECT_S,
    Replicas as Replicas,
    error_of as error_of,
    retry as retry,
)
from .installation import (
    START_S as START_S,
    TOKEN_VARIABLE as TOKEN_VARIABLE,
    Client as Client,
    FlowRun as FlowRun,
    deploy as deploy,
    finish as finish,
    raised as raised,
    require_complete as require_complete,
    require_encrypted as require_encrypted,
    runtime_of as runtime_of,
)
from .jobs import job_spec as job_spec, require_success as require_success
from .movement import movement as movement
