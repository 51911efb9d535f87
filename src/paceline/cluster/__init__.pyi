from .addresses import (
    AgentInfo as AgentInfo,
    Machine as Machine,
    Node as Node,
    by_number as by_number,
    reserve_port as reserve_port,
)
from .agents import AgentKeeper as AgentKeeper, AgentOrder as AgentOrder
from .client import Fleet as Fleet, ProcessResult as ProcessResult
from .dask_service import (
    run as run,
    security_of as security_of,
    serve as serve,
    serve_nodes as serve_nodes,
)
from .embedded import (
    PLAIN as PLAIN,
    SECRETS_FILE as SECRETS_FILE,
    embedded_services as embedded_services,
    ensure_secrets as ensure_secrets,
    make_dask_tls as make_dask_tls,
    require_protected as require_protected,
)
from .held_nodes import (
    HeldNodes as HeldNodes,
    NodeOutput as NodeOutput,
    events_in as events_in,
)
from .installation import (
    ended_by_stop as ended_by_stop,
    start as start,
    status as status,
    stop as stop,
)
from .pinned_calls import Crew as Crew, Member as Member, call as call
from .remote import (
    PARTS as PARTS,
    SlurmJob as SlurmJob,
    batch_argv as batch_argv,
    pod_group as pod_group,
    render as render,
    run_command as run_command,
    sbatch as sbatch,
    serve_allocation as serve_allocation,
    serve_job_allocations as serve_job_allocations,
    slurm_prefix as slurm_prefix,
    squeue as squeue,
)
from .service import Ready as Ready, ServiceSpec as ServiceSpec, StopReport as StopReport
from .supervisor import LOCK_FILE as LOCK_FILE
from .worker_processes import Order as Order, ProcessReport as ProcessReport, launch as launch
