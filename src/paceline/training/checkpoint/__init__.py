"""Checkpoints: sharded, asynchronous, atomic, verified before use, several generations.

``Checkpointer`` saves on every rank; ``resume_newest_healthy`` restores on any layout and any
number of ranks; ``export`` writes the whole model as safetensors; ``Generations`` reads and edits
a job's checkpoints in the store without torch. ``training.interval`` decides when to save.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.training.checkpoint.generations import FoundGenerations, Generation, Generations
from paceline.training.checkpoint.records import (
    BEST_METRIC,
    COMMIT_FILE,
    REJECTED_FILE,
    Commit,
    SavedFile,
)
from paceline.training.interval import CheckpointAlert, FailureCount

if TYPE_CHECKING:
    from paceline.training.checkpoint.exporting import export
    from paceline.training.checkpoint.resume import Restored, resume_newest_healthy
    from paceline.training.checkpoint.saver import Checkpointer
    from paceline.training.checkpoint.stateful import TrainState, WholeModel

_LATE = {
    "Checkpointer": "saver",
    "Restored": "resume",
    "TrainState": "stateful",
    "WholeModel": "stateful",
    "export": "exporting",
    "resume_newest_healthy": "resume",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BEST_METRIC",
    "COMMIT_FILE",
    "REJECTED_FILE",
    "CheckpointAlert",
    "Checkpointer",
    "Commit",
    "FailureCount",
    "FoundGenerations",
    "Generation",
    "Generations",
    "Restored",
    "SavedFile",
    "TrainState",
    "WholeModel",
    "export",
    "resume_newest_healthy",
]
