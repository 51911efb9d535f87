"""Configuration: profiles (TOML) as frozen settings, and the state of a running installation.

``load_profile`` reads ``profiles/NAME.toml`` (or a path); an unknown key is an error that names the
nearest valid one. ``Runtime`` adds what a running installation has: the addresses of its servers
and the secrets generated for it. Reads PACELINE_PROFILES, PACELINE_STATE and credentials from the
environment.
"""

from paceline.config.authority import one_certificate, read_certificate
from paceline.config.loading import load_profile, profile_directories
from paceline.config.runtime import (
    RUNTIME_FILE,
    Endpoints,
    ObjectAccess,
    Runtime,
    Secrets,
    default_state_dir,
    derived_token,
    load_runtime,
    named_secret,
    object_access,
    require_unused,
    save_runtime,
)
from paceline.config.settings import (
    CheckpointSettings,
    ClusterSettings,
    ControlSettings,
    DataSettings,
    EvaluationSettings,
    GateSettings,
    GuardSettings,
    MeshSettings,
    ModelSettings,
    ObjectSettings,
    Profile,
    RelaySettings,
    SecuritySettings,
    ServiceSettings,
    StorageSettings,
    StoreSettings,
    SynchronySettings,
    TrainingSettings,
)
from paceline.system.files import write_private

__all__ = [
    "RUNTIME_FILE",
    "CheckpointSettings",
    "ClusterSettings",
    "ControlSettings",
    "DataSettings",
    "Endpoints",
    "EvaluationSettings",
    "GateSettings",
    "GuardSettings",
    "MeshSettings",
    "ModelSettings",
    "ObjectAccess",
    "ObjectSettings",
    "Profile",
    "RelaySettings",
    "Runtime",
    "Secrets",
    "SecuritySettings",
    "ServiceSettings",
    "StorageSettings",
    "StoreSettings",
    "SynchronySettings",
    "TrainingSettings",
    "default_state_dir",
    "derived_token",
    "load_profile",
    "load_runtime",
    "named_secret",
    "object_access",
    "one_certificate",
    "profile_directories",
    "read_certificate",
    "require_unused",
    "save_runtime",
    "write_private",
]
