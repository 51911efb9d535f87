from .base import Parallel as Parallel, recompute_blocks as recompute_blocks
from .checks import (
    SERVING as SERVING,
    cuts_of as cuts_of,
    data_shares_of as data_shares_of,
    is_asynchronous as is_asynchronous,
    layers_of as layers_of,
    microbatches_of as microbatches_of,
    replicas_of as replicas_of,
    require_cuttable as require_cuttable,
    require_layout as require_layout,
    require_ranks as require_ranks,
    require_rows as require_rows,
    require_uncut as require_uncut,
)
from .compose import parallelise as parallelise
from .data_parallel import CompressionMemory as CompressionMemory
from .mesh import (
    AXES as AXES,
    Mesh as Mesh,
    MeshSpec as MeshSpec,
    open_mesh as open_mesh,
    timeout_of as timeout_of,
)
from .pipeline import Pipelined as Pipelined
from .tensor import require_planned as require_planned
