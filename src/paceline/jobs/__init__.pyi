from .admission import (
    AGED_AFTER_S as AGED_AFTER_S,
    OVERTAKEN_AFTER_S as OVERTAKEN_AFTER_S,
    Decision as Decision,
    Quota as Quota,
    decide as decide,
    why_never as why_never,
)
from .collectives import RankGroup as RankGroup
from .cost import (
    HOUR_S as HOUR_S,
    By as By,
    compared as compared,
    cost_of as cost_of,
    cost_row as cost_row,
    day_of as day_of,
    estimate as estimate,
    grouped as grouped,
    held_price as held_price,
    held_text as held_text,
    like as like,
    money as money,
    price_of as price_of,
    range_text as range_text,
)
from .data_purposes import require_permitted as require_permitted
from .engines import (
    Engine as Engine,
    KubernetesEngine as KubernetesEngine,
    OwnAdmission as OwnAdmission,
    Request as Request,
    SlurmEngine as SlurmEngine,
    Standing as Standing,
    engine_of as engine_of,
)
from .mesh_estimate import (
    DescribedModel as DescribedModel,
    accelerator_of as accelerator_of,
    estimate_by_model as estimate_by_model,
    estimate_meshes as estimate_meshes,
    estimate_submitted as estimate_submitted,
    read_mesh as read_mesh,
)
from .placement import (
    Gang as Gang,
    Host as Host,
    Placement as Placement,
    gang_of as gang_of,
    hosts_of as hosts_of,
)
from .preemption import Reservation as Reservation
from .recorded_costs import (
    RecentCosts as RecentCosts,
    costs_of_installation as costs_of_installation,
    estimate_like as estimate_like,
    training_costs as training_costs,
)
from .scheduler import (
    FlowPort as FlowPort,
    JobScheduler as JobScheduler,
    parameters_of as parameters_of,
)
from .service_levels import JobTotals as JobTotals
from .states import (
    NEXT as NEXT,
    end_requested as end_requested,
    require_open as require_open,
    resumed as resumed,
    with_state as with_state,
)
from .step_model import StepModel as StepModel
from .sweeps import (
    COLUMNS as COLUMNS,
    POINTS as POINTS,
    Search as Search,
    Sweep as Sweep,
    page_of as page_of,
    read_space as read_space,
    report_sweep as report_sweep,
    run_sweep as run_sweep,
    stored_run_id as stored_run_id,
    studies_of as studies_of,
    trial_row as trial_row,
)
from .table import MOST_OPEN as MOST_OPEN, JobTable as JobTable
from .usage import (
    budget_reason as budget_reason,
    flow_runs as flow_runs,
    recorded as recorded,
    require_prices as require_prices,
    used as used,
)
