"""Training: a gang of ranks, one loop, checkpoints that survive it, and a driver that restarts it.

``run_job`` drives a job through a launcher that is handed in (a port: this package knows neither
Dask nor Prefect); ``python -m paceline.training.loop.rank`` is one rank; ``train_base`` makes the
demo's base model. torch is imported by the ranks, not by this package.
"""

from paceline.training.identity import (
    code_version,
    config_digest,
    data_numbers,
    own_task,
    with_own_id,
)
from paceline.training.launcher.driver import run_job
from paceline.training.launcher.gang import Deadlines, GangMember, GangResult, Gangs, Launcher
from paceline.training.launcher.local import LocalLauncher

__all__ = [
    "Deadlines",
    "GangMember",
    "GangResult",
    "Gangs",
    "Launcher",
    "LocalLauncher",
    "code_version",
    "config_digest",
    "data_numbers",
    "own_task",
    "run_job",
    "with_own_id",
]
