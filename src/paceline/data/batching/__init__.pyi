from .fill import RowFiller as RowFiller
from .open_shards import ShardReader as ShardReader
from .planner import GroupPlanner as GroupPlanner
from .plans import (
    BucketedPlan as BucketedPlan,
    PackedPlan as PackedPlan,
    StatefulPlan as StatefulPlan,
    WindowPlan as WindowPlan,
    best_fit as best_fit,
)
from .rows import (
    DocumentPlan as DocumentPlan,
    Lengths as Lengths,
    Plan as Plan,
    Rows as Rows,
    identity as identity,
)
