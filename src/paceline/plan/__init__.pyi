from .cost import (
    SHARING_OVERHEAD as SHARING_OVERHEAD,
    SLACK_BYTES as SLACK_BYTES,
    Prediction as Prediction,
    death_cost_s as death_cost_s,
    origin_cap_bytes as origin_cap_bytes,
    origin_shares as origin_shares,
)
from .inputs import (
    PlanWorker as PlanWorker,
    Standing as Standing,
    rack_of as rack_of,
)
from .make import make_plan as make_plan, topology_of as topology_of
from .selectors import select_workers as select_workers
from .table import (
    FleetDescription as FleetDescription,
    plan_table as plan_table,
    predict as predict,
)
from .tree_repair import repair_trees as repair_trees
from .trees import (
    ORIGIN as ORIGIN,
    Trees as Trees,
    WorkerLine as WorkerLine,
    build_line as build_line,
    build_trees as build_trees,
    next_order as next_order,
)
