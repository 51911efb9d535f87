from .event_writer import (
    FOLLOWER_REPORT_S as FOLLOWER_REPORT_S,
    MAX_PRINTED_CHARACTERS as MAX_PRINTED_CHARACTERS,
    MAX_PRINTED_LINES_PER_MINUTE as MAX_PRINTED_LINES_PER_MINUTE,
    EventWriter as EventWriter,
    QuarantineReporter as QuarantineReporter,
    RankIdentity as RankIdentity,
    StdoutCapture as StdoutCapture,
    StepReporter as StepReporter,
)
from .group import (
    Group as Group,
    as_peer_lost as as_peer_lost,
    interface_of as interface_of,
    join_group as join_group,
)
from .loop import (
    CPU as CPU,
    Evaluator as Evaluator,
    Progress as Progress,
    StepReport as StepReport,
    average_replicas as average_replicas,
    seed_step as seed_step,
    train as train,
)
from .model_export import BASE_CARD as BASE_CARD, export_model as export_model
from .optimizer import (
    LARGEST_SCALE as LARGEST_SCALE,
    LossScale as LossScale,
    MakeOptimizer as MakeOptimizer,
    WeightAverage as WeightAverage,
    apply_gradients as apply_gradients,
    autocast as autocast,
    learning_rate as learning_rate,
    master_dtype as master_dtype,
    new_optimizer as new_optimizer,
    rate_of as rate_of,
    require_groups as require_groups,
)
from .preferences import Preferences as Preferences
from .rank import as_rank as as_rank, join_gang as join_gang, run_rank as run_rank
from .rank_process import (
    STOPPED_EXIT as STOPPED_EXIT,
    StopFlag as StopFlag,
    die_with_parent as die_with_parent,
    leave_removed_directory as leave_removed_directory,
    retain_freed_memory as retain_freed_memory,
    return_freed_memory as return_freed_memory,
    use_passive_waiting as use_passive_waiting,
    waits_for_peers as waits_for_peers,
)
from .rank_setup import (
    checkpointer_of as checkpointer_of,
    device_of as device_of,
    evaluator_of as evaluator_of,
    exclusive_device as exclusive_device,
    exporter_of as exporter_of,
    load_weights as load_weights,
    parallelise_model as parallelise_model,
    restore_checkpoint as restore_checkpoint,
    result_of as result_of,
    save_last as save_last,
    tracer_of as tracer_of,
    uploaded_traces as uploaded_traces,
)
from .starting_state import (
    RankContext as RankContext,
    require_model as require_model,
    require_pretrained as require_pretrained,
)
from .step_guard import (
    BadStep as BadStep,
    StepDecision as StepDecision,
    StepGuard as StepGuard,
)
from .workload import (
    HasLogits as HasLogits,
    Inputs as Inputs,
    LossSums as LossSums,
    TransformerWorkload as TransformerWorkload,
    Workload as Workload,
    as_tensor as as_tensor,
    shuffled as shuffled,
    weighted_loss as weighted_loss,
)
