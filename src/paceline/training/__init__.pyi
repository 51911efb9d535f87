from .base_check import check_base as check_base
from .continuing import (
    checkpoints_url as checkpoints_url,
    continuation as continuation,
    earlier_job as earlier_job,
    store_job as store_job,
    stored_training_id as stored_training_id,
)
from .deadlines import Deadlines as Deadlines
from .export_policy import base_facts as base_facts, settings_for as settings_for
from .identity import (
    code_ref_task_size as code_ref_task_size,
    code_version as code_version,
    config_digest as config_digest,
    result_data_settings as result_data_settings,
    training_inputs as training_inputs,
    training_key as training_key,
    with_derived_id as with_derived_id,
)
from .interval import (
    CheckpointInterval as CheckpointInterval,
    FailureCount as FailureCount,
    SaveCosts as SaveCosts,
    wanted_interval_s as wanted_interval_s,
    wanted_steps as wanted_steps,
)
from .launcher.driver import run_job as run_job
from .launcher.gang import GangSupervisor as GangSupervisor
from .launcher.local import LocalLauncher as LocalLauncher
from .launcher.ports import (
    GangMember as GangMember,
    GangResult as GangResult,
    Launcher as Launcher,
)
from .reproduce import compare as compare, train_again as train_again
from .reproducibility import (
    CUBLAS_DETERMINISTIC as CUBLAS_DETERMINISTIC,
    Recorded as Recorded,
    current_environment as current_environment,
    differences_of as differences_of,
    nodes_with_base_model as nodes_with_base_model,
    require_same as require_same,
)
from .single import (
    display_url as display_url,
    local_record_dir as local_record_dir,
    write_new_model as write_new_model,
)
