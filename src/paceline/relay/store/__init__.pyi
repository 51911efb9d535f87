from .disk_space import (
    StorePolicy as StorePolicy,
    freed_bytes as freed_bytes,
    leftovers as leftovers,
    missing_bytes as missing_bytes,
    reclaimable_bytes as reclaimable_bytes,
)
from .inspection import (
    has_published as has_published,
    missing_bytes_on_node as missing_bytes_on_node,
    verify_copy as verify_copy,
)
from .library import OpenModels as OpenModels
from .origin_reads import OriginReadCount as OriginReadCount, OriginReadCounts as OriginReadCounts
from .piece_log import GROUP_BYTES as GROUP_BYTES, Committer as Committer
from .requests import RequestQueue as RequestQueue
from .staging import Staging as Staging, disk_errors as disk_errors
from .store import Store as Store
