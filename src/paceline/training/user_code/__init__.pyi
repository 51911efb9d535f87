from .checking import check as check, check_watcher as check_watcher, require_code as require_code
from .loading import (
    Task as Task,
    call as call,
    fetch as fetch,
    load as load,
    require_workload as require_workload,
)
from .reference import (
    CodeRef as CodeRef,
    module_digest as module_digest,
    parse as parse,
    require_allowed as require_allowed,
    tree_digest as tree_digest,
)
from .trying import first_rows as first_rows, try_batch as try_batch
