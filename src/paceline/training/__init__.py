"""Distributed training: a gang of ranks, the loop, checkpoints, and a driver with restarts.

``run_job`` drives a job through a launcher that the caller passes in (a port: this package imports
neither Dask nor Prefect). ``python -m paceline.training.loop.rank`` runs one rank;
``base.train_base`` makes the demo's base model. The ranks import torch, this package does not.
"""

from paceline.training.identity import (
    code_version,
    config_digest,
    data_numbers,
    own_task,
    with_own_id,
)
from paceline.training.launcher.driver import run_job
from paceline.training.launcher.gang import (
    Deadlines,
    GangMember,
    GangResult,
    GangSupervisor,
    Launcher,
)
from paceline.training.launcher.local import LocalLauncher

__all__ = [
    "Deadlines",
    "GangMember",
    "GangResult",
    "GangSupervisor",
    "Launcher",
    "LocalLauncher",
    "code_version",
    "config_digest",
    "data_numbers",
    "own_task",
    "run_job",
    "with_own_id",
]
