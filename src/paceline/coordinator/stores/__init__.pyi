from .audit import (
    MAX_QUERY_EVENTS as MAX_QUERY_EVENTS,
    Audit as Audit,
    EventQuery as EventQuery,
    PostgresAudit as PostgresAudit,
    SqliteAudit as SqliteAudit,
)
from .coordination import (
    RECENT_EVENTS as RECENT_EVENTS,
    Candidate as Candidate,
    Coordination as Coordination,
    Outbox as Outbox,
    Term as Term,
)
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
