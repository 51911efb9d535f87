from .audit import Audit as Audit, PostgresAudit as PostgresAudit, SqliteAudit as SqliteAudit
from .contracts import (
    MAX_QUERY_EVENTS as MAX_QUERY_EVENTS,
    RECENT_EVENTS as RECENT_EVENTS,
    Candidate as Candidate,
    EventQuery as EventQuery,
    Outbox as Outbox,
    Term as Term,
)
from .coordination import Coordination as Coordination
from .opening import (
    open_audit as open_audit,
    open_coordination as open_coordination,
    open_progress as open_progress,
)
from .progress import (
    MemoryProgress as MemoryProgress,
    Progress as Progress,
    RedisProgress as RedisProgress,
)
from .rows import (
    MAX_TEXT_CHARS as MAX_TEXT_CHARS,
    Delete as Delete,
    KeyLayout as KeyLayout,
    Put as Put,
    after_prefix as after_prefix,
    boot_id as boot_id,
    pack as pack,
    to_event as to_event,
    unpack as unpack,
)
from .shipper import OutboxShipper as OutboxShipper
from .sqlite import SqliteCoordination as SqliteCoordination
