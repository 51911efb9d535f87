from .events import (
    REPLACED_AFTER_S as REPLACED_AFTER_S,
    Abandon as Abandon,
    Cancelled as Cancelled,
    Complete as Complete,
    Fail as Fail,
    Fetch as Fetch,
    HeldPiecesCorrupt as HeldPiecesCorrupt,
    LanesAssigned as LanesAssigned,
    LanesConfirmed as LanesConfirmed,
    LocalFailed as LocalFailed,
    PieceRejected as PieceRejected,
    PiecesDurable as PiecesDurable,
    PieceVerified as PieceVerified,
    ReportCorrupt as ReportCorrupt,
    ReportSourceLost as ReportSourceLost,
    Resumed as Resumed,
    SessionAction as SessionAction,
    SessionEvent as SessionEvent,
    SourceAlive as SourceAlive,
    SourceFailed as SourceFailed,
    Tick as Tick,
)
from .extents import Extent as Extent, Extents as Extents
from .limits import PieceMap as PieceMap, SessionLimits as SessionLimits
from .pull_state import PullState as PullState
from .pulling import Puller as Puller
from .recovery import Failback as Failback, Repairs as Repairs
from .session import RelaySession as RelaySession, as_failure as as_failure
from .source_selection import (
    OriginBudget as OriginBudget,
    SourceSelector as SourceSelector,
    SourceStream as SourceStream,
)
