from .agent import Agent as Agent, run_agent as run_agent
from .control import ControlLoop as ControlLoop, HeartbeatBuilder as HeartbeatBuilder
from .deployments import ActiveDeployment as ActiveDeployment
from .inventory import (
    measure_disk as measure_disk,
    read_inventory as read_inventory,
    shows_like_cards as shows_like_cards,
)
from .joining import (
    DIRECTORY as DIRECTORY,
    JOINING_FILE as JOINING_FILE,
    Renewal as Renewal,
    fetch_authority as fetch_authority,
    has_joined as has_joined,
    join as join,
    joined_worker_id as joined_worker_id,
)
from .node import RelayDriver as RelayDriver
from .origin import (
    FIRST_RANGE as FIRST_RANGE,
    OriginStream as OriginStream,
    range_bytes as range_bytes,
)
from .process import (
    LINK_MBIT_RANGE as LINK_MBIT_RANGE,
    MAX_PORT as MAX_PORT,
    AgentConfig as AgentConfig,
    SignalEvent as SignalEvent,
    advertised_address as advertised_address,
)
from .rotation import (
    add_authority as add_authority,
    endorse as endorse,
    require_trusted as require_trusted,
    retire_authority as retire_authority,
    switch_authority as switch_authority,
    trusted_set as trusted_set,
)
from .sources import (
    DirectoryReader as DirectoryReader,
    OnSocket as OnSocket,
    RangeReader as RangeReader,
    S3Reader as S3Reader,
    Sources as Sources,
    allowed_source as allowed_source,
    fetch_allowed_manifest as fetch_allowed_manifest,
)
