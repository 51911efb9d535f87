"""Deadlines of a rank: after how long a part of its work counts as hung.

They do not change what a training learns. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.schemas import TrainJob

LONG_PHASES = ("saving", "exporting", "evaluating")
SLOWER = 20  # times the slowest of the newest steps: one that takes longer hangs
STEP_AT_LEAST_S = 60.0
STEP_AT_MOST_S = 1800.0
COMPILE_START_S = 600.0  # of the first step, at the least, where it compiles the model
BASE_BYTES_S = 100e6  # of the base model's files: a slow disk, or object store


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Deadlines of a rank in seconds: first step, each step, and save, export or evaluation."""

    start_s: float = 120.0
    step_s: float | None = 60.0  # None: by the slowest of the newest steps
    checkpoint_s: float = 600.0

    @classmethod
    def of_job(cls, job: TrainJob) -> Deadlines:
        """Return the deadlines of ``job``: a larger base takes longer to read and write."""
        guard, margin_s = job.settings.guard, job.base_bytes / BASE_BYTES_S
        least_s = COMPILE_START_S if job.settings.compile else 0.0
        return cls(
            start_s=max(guard.start_deadline_s, least_s) + margin_s,
            step_s=guard.step_deadline_s,
            checkpoint_s=guard.checkpoint_deadline_s + margin_s,
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


def slowest_step_s(before_s: float, took_s: float) -> float:
    """Return the slowest of a rank's newest steps; one of long ago fades."""
    return max(took_s, 0.95 * before_s)
