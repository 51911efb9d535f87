from .authority import (
    one_certificate as one_certificate,
    other_file as other_file,
    read_certificate as read_certificate,
    read_other as read_other,
)
from .base import (
    MODEL_ID as MODEL_ID,
    module_allowed as module_allowed,
    scrub_variables as scrub_variables,
)
from .cluster import (
    ClusterSettings as ClusterSettings,
    HostSettings as HostSettings,
    KubernetesSettings as KubernetesSettings,
    SlurmSettings as SlurmSettings,
)
from .loading import (
    load_profile as load_profile,
    toml_value as toml_value,
    with_job_settings as with_job_settings,
    with_overrides as with_overrides,
    with_recorded_settings as with_recorded_settings,
)
from .login import (
    CLIENT_FILE as CLIENT_FILE,
    Login as Login,
    RemoteAccess as RemoteAccess,
    config_directory as config_directory,
    delete_login as delete_login,
    find_installation as find_installation,
    hub_access as hub_access,
    oci_access as oci_access,
    read_login as read_login,
    require_here as require_here,
    save_login as save_login,
)
from .runtime import (
    DEFAULT_S3 as DEFAULT_S3,
    RUNTIME_FILE as RUNTIME_FILE,
    Endpoints as Endpoints,
    ObjectAccess as ObjectAccess,
    Runtime as Runtime,
    Secrets as Secrets,
    ThisNode as ThisNode,
    aws_variables as aws_variables,
    default_state_dir as default_state_dir,
    load_runtime as load_runtime,
    named_secret as named_secret,
    object_access as object_access,
    require_unused as require_unused,
    save_runtime as save_runtime,
    this_node as this_node,
)
from .servers import (
    mlflow_headers as mlflow_headers,
    mlflow_server as mlflow_server,
    prefect_headers as prefect_headers,
    prefect_server as prefect_server,
)
from .settings import (
    PREFERENCE_ACCURACY as PREFERENCE_ACCURACY,
    AcceleratorSettings as AcceleratorSettings,
    ControlSettings as ControlSettings,
    EvaluationSettings as EvaluationSettings,
    GateSettings as GateSettings,
    HubSettings as HubSettings,
    LinkSettings as LinkSettings,
    MetricSettings as MetricSettings,
    ModelSettings as ModelSettings,
    ObjectSettings as ObjectSettings,
    OciSettings as OciSettings,
    Policy as Policy,
    PriceSettings as PriceSettings,
    Profile as Profile,
    SecuritySettings as SecuritySettings,
    ServiceSettings as ServiceSettings,
    StorageSettings as StorageSettings,
)
from .training import (
    EXPORT_FILE_BYTES as EXPORT_FILE_BYTES,
    CheckpointSettings as CheckpointSettings,
    DataSettings as DataSettings,
    EarlyStoppingSettings as EarlyStoppingSettings,
    EmaSettings as EmaSettings,
    GroupSettings as GroupSettings,
    GuardSettings as GuardSettings,
    LoraSettings as LoraSettings,
    MeshSettings as MeshSettings,
    SynchronySettings as SynchronySettings,
    TrainingSettings as TrainingSettings,
)
