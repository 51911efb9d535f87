"""Starting up, which is the same as recovering: a fresh start is a resume from nothing.

All ranks agree on the newest checkpoint that every one of them could fetch, verify and load. Knows
how to choose a generation, not how one is made.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from paceline.errors import CorruptData, TrainingFailed
from paceline.training.checkpoint import Generations, Restored, restore
from paceline.training.group import Group

log = logging.getLogger(__name__)

MAX_GENERATIONS_TRIED = 100


def resume_newest_healthy(
    generations: Generations,
    group: Group,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    config_digest: str,
    work_dir: Path,
    on_rejected: Callable[[int, str], None],
) -> Restored | None:
    """Restore the newest healthy checkpoint on every rank, or return None where there is none.

    Generations that are damaged are rejected (rank 0 takes their marker away) and the one before is
    tried. A store that does not answer raises; it is no reason to throw a checkpoint away.
    """
    for _ in range(MAX_GENERATIONS_TRIED):
        known = generations.steps() if group.rank == 0 else []
        step = group.from_first(known[0] if known else -1)
        if step < 0:
            return None
        restored, why = None, ""
        try:
            commit = generations.fetch(step, work_dir / "resume", config_digest)
            restored = restore(work_dir / "resume", commit, model, optimizer)
        except CorruptData as error:
            why = error.one_line()
            log.warning("checkpoint is damaged step=%d why=%s", step, why)
        finally:
            shutil.rmtree(work_dir / "resume", ignore_errors=True)
        if group.all(restored is not None):
            return restored
        # Every rank has tried before the marker goes, so none of them mistakes its absence.
        if group.rank == 0:
            generations.reject(step, why or "another rank could not verify it")
        on_rejected(step, why)
        optimizer.state.clear()
    raise TrainingFailed("too many damaged checkpoints", where=generations.url)
