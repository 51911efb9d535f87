from .admission import (
    MIB as MIB,
    admit as admit,
    require_batches as require_batches,
    require_checkpoint as require_checkpoint,
    require_data as require_data,
    require_memory as require_memory,
    require_mesh as require_mesh,
    require_tokens as require_tokens,
)
from .attempt import RankState as RankState
from .driver import (
    CANCEL_GRACE_S as CANCEL_GRACE_S,
    RANK as RANK,
    RESULT_FILE as RESULT_FILE,
    rank_environment as rank_environment,
    run_job as run_job,
    run_on_nodes as run_on_nodes,
    stored_result as stored_result,
)
from .gang import GangSupervisor as GangSupervisor
from .job_history import read_history as read_history
from .job_tracker import JobTracker as JobTracker, TimeAccounts as TimeAccounts
from .local import LocalLauncher as LocalLauncher, launcher_argv as launcher_argv
from .placement import NodePool as NodePool, with_fewer_ranks as with_fewer_ranks
from .ports import (
    GangMember as GangMember,
    GangResult as GangResult,
    Launcher as Launcher,
    NodeMessage as NodeMessage,
)
from .preemption import MetadataWatcher as MetadataWatcher
from .served_attempt import STATE_LOST_EXIT as STATE_LOST_EXIT, ServedAttempt as ServedAttempt
