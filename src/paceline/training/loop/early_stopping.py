"""Ends a training whose held-out loss no longer falls.

The decision follows from figures that all ranks share, and its state is part of each checkpoint: a
training that was killed ends at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.config import TrainingSettings

if TYPE_CHECKING:
    from paceline.training.loop.loop import Progress

STATE = "early_stopping"  # key in a checkpoint's extra state
# A continuation with other ones counts anew.
_COUNTS_FOR = {
    "steps",
    "learning_rate",
    "schedule",
    "warmup_steps",
    "decay_share",
    "final_share",
    "early_stopping",
}


class EarlyStopping:
    """Counts the evaluations since the best one; never ends a training without its settings."""

    def __init__(self, settings: TrainingSettings, extra: Mapping[str, Any]) -> None:
        """``extra`` is the extra state of the checkpoint that training goes on from."""
        self._settings = settings.early_stopping
        self._counts_for = settings.model_dump(mode="json", include=_COUNTS_FOR)
        self._best: float | None = None
        self._best_step = self._waited = 0
        state = extra.get(STATE)
        if state is not None and state["counts_for"] == self._counts_for:
            self._best, self._best_step = state["best"], state["best_step"]
            self._waited = state["waited"]

    @property
    def reason(self) -> str:
        """Return why training ends now; "" where it goes on."""
        if self._settings is None or self._waited < self._settings.patience:
            return ""
        best = "no finite loss" if self._best is None else f"{self._best:.4f} nats"
        return (
            f"the held-out loss has not fallen in {self._waited} evaluations "
            f"(best: {best} at step {self._best_step})"
        )

    def take(self, progress: Progress, steps: int) -> None:
        """Count ``progress``'s latest evaluation, and set its state and whether it ends before
        ``steps``. A loss of NaN is no best."""
        if self._settings is None:
            return
        loss = progress.held_out["held_out_loss"]  # nats a token
        if loss < (math.inf if self._best is None else self._best - self._settings.min_delta):
            self._best, self._best_step, self._waited = loss, progress.step, 0
        else:
            self._waited += 1
        progress.extra[STATE] = {
            "best": self._best,
            "best_step": self._best_step,
            "waited": self._waited,
            "counts_for": self._counts_for,
        }
        if progress.step < steps:
            progress.stopped_early = self.reason
