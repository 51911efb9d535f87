"""Deadlines of a rank: after how long a part of its work counts as hung.

They do not change what a training learns. Does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.schemas import TrainJob

LONG_PHASES = ("saving", "exporting", "evaluating")
SLOWER = 20  # times the slowest of the newest steps: one that takes longer hangs
STEP_AT_LEAST_S = 60.0
STEP_AT_MOST_S = 1800.0
COMPILE_START_S = 600.0  # of the first step, at the least, where it compiles the model
BYTES_S = 100e6  # of the base model's files and of checkpoints: a slow disk, or object store


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Deadlines of a rank in seconds: first step, each step, and save, export or evaluation."""

    start_s: float = 120.0
    step_s: float | None = 60.0  # None: by the slowest of the newest steps
    checkpoint_s: float = 600.0

    @classmethod
    def of_job(cls, job: TrainJob) -> Deadlines:
        """Return the deadlines of ``job``: a larger model takes longer to read and write."""
        settings, guard = job.settings, job.settings.guard
        least_s = COMPILE_START_S if settings.compile else 0.0
        state_bytes, each = state_bytes_of(job), settings.ranks_per_node
        # A node reads its ranks' parts, of a replica on one node the whole; all nodes write.
        readers = settings.mesh.ranks_per_replica // each if each else 1
        writers = math.ceil(settings.ranks / each) if each else 1
        read_bytes = job.base_bytes + state_bytes // max(1, readers)
        written_bytes = max(job.base_bytes, state_bytes // writers)  # an export, a save
        if settings.early_stopping:  # an export begins with reading the best checkpoint
            written_bytes += state_bytes // max(1, readers)
        return cls(
            start_s=max(guard.start_deadline_s, least_s) + read_bytes / BYTES_S,
            step_s=guard.step_deadline_s,
            checkpoint_s=guard.checkpoint_deadline_s + written_bytes / BYTES_S,
        )

    def of(self, phase: str, slowest_s: float = 0.0) -> float:
        """Return the deadline of ``phase``; ``slowest_s``: of the newest steps, 0: none."""
        if phase in LONG_PHASES:
            return self.checkpoint_s
        if phase != "step":
            return self.start_s
        if self.step_s is not None or not slowest_s:
            return self.step_s or STEP_AT_MOST_S
        return min(STEP_AT_MOST_S, max(STEP_AT_LEAST_S, SLOWER * slowest_s))


def state_bytes_of(job: TrainJob) -> int:
    """Return the bytes of one of the job's checkpoints; 0: unknown, or of adapters alone, which
    are less than the base."""
    settings = job.settings
    if settings.lora is not None:
        return 0
    if settings.code_ref:
        return settings.state_bytes((job.task and job.task.parameters) or 0)
    # A job of an older version has no count: its files may be bfloat16.
    return settings.state_bytes(job.base_parameters or job.base_bytes // 2)


def slowest_step_s(before_s: float, took_s: float) -> float:
    """Return the slowest of a rank's newest steps; one of long ago fades."""
    return max(took_s, 0.95 * before_s)
