from .callers import (
    Call as Call,
    Caller as Caller,
    audit_event as audit_event,
    current_call as current_call,
    current_caller as current_caller,
    may_see as may_see,
    owner_of as owner_of,
    refuse_own as refuse_own,
    require_owner as require_owner,
    require_worker as require_worker,
    sees as sees,
)
from .coordinator import Coordinator as Coordinator
from .leadership import (
    STEP_DOWN_DELAY_S as STEP_DOWN_DELAY_S,
    RepeatedTask as RepeatedTask,
    Replica as Replica,
    TermTask as TermTask,
)
from .ledger import LedgerEntry as LedgerEntry, LedgerIndex as LedgerIndex
from .notifier import EventRing as EventRing, Notifier as Notifier
from .state.settings import CoordinatorSettings as CoordinatorSettings
from .state.state import CoordinatorState as CoordinatorState
from .submitters import (
    is_anothers_run as is_anothers_run,
    is_own_run as is_own_run,
    is_submitter as is_submitter,
    note_submitter as note_submitter,
    submitters as submitters,
    submitting as submitting,
)
from .tokens import (
    INCLUDES as INCLUDES,
    KEEP_ENDED_S as KEEP_ENDED_S,
    MAX_UNUSED as MAX_UNUSED,
    NewToken as NewToken,
    TokenRegistry as TokenRegistry,
    member_id as member_id,
    new_token as new_token,
    scopes_of as scopes_of,
    sha256_of as sha256_of,
)
