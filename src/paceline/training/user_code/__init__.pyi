from .checking import (
    check as check,
    check_in_process as check_in_process,
    require_code as require_code,
)
from .loading import (
    Task as Task,
    fetch as fetch,
    load as load,
    require_workload as require_workload,
    task_of as task_of,
)
from .optimizers import (
    load_optimizer as load_optimizer,
    require_optimizer as require_optimizer,
)
from .reference import (
    OPTIMIZER as OPTIMIZER,
    module_digest as module_digest,
    parse as parse,
    require_allowed as require_allowed,
    tree_digest as tree_digest,
    with_code as with_code,
)
