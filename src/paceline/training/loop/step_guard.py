"""Detection of bad steps (not finite, or a loss far above the recent median), and early stopping.

``StepGuard`` checks the global loss and gradient norm of each step BEFORE the optimiser uses them.
The values are the same on every rank, so all ranks decide alike without communication: apply, skip
(weights unchanged), roll back (``BadStep``: the launcher's driver ends the attempt, and the next
one resumes the last healthy checkpoint and skips this batch) or stop. The number of bad steps is
bounded. ``EarlyStopping`` ends a training whose held-out loss no longer falls. Pure; imports no
torch, reads no clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from paceline.config import GuardSettings, TrainingSettings
from paceline.errors import CorruptData, PacelineError, TrainingFailed

if TYPE_CHECKING:
    from paceline.training.loop.loop import Progress

Reason = Literal["nan", "spike"]

# A spike is also at least this many robust standard deviations above the median.
SPIKE_DEVIATIONS = 10.0
MAD_TO_STD = 1.4826  # median absolute deviation → standard deviation of a normal distribution


class BadStep(TrainingFailed):
    """A bad step: the job rolls back to the last healthy checkpoint and skips the batch.

    ``step`` counts from 0, ``batch`` is the number of the batch in its stream.
    """

    def __init__(self, *, step: int, batch: int, reason: Reason, loss: float, norm: float) -> None:
        self.step, self.batch, self.reason = step, batch, reason
        self.loss, self.norm = loss, norm
        super().__init__(
            "the step has no usable loss or gradient",
            got=f"{reason}: loss {loss:.6g}, gradient norm {norm:.6g}",
            where=f"step {step}, batch {batch}",
            do="The job goes back to its last healthy checkpoint and passes over the batch.",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (_bad_step, (self.step, self.batch, self.reason, self.loss, self.norm))


def _bad_step(step: int, batch: int, reason: Reason, loss: float, norm: float) -> PacelineError:
    return BadStep(step=step, batch=batch, reason=reason, loss=loss, norm=norm)


class StepDecision(Enum):
    """Whether the optimiser applies a step or the loop skips it."""

    APPLY = "take"
    SKIP = "skip"


@dataclass
class StepGuard:
    """Judges steps; every rank has one, all in the same state.

    ``bad`` counts the bad steps of the whole job, including those before a roll-back.
    """

    settings: GuardSettings
    bad: int = 0

    def __post_init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.settings.spike_window)

    def decide(self, *, step: int, batch: int, loss: float, norm: float) -> StepDecision:
        """Return what to do with a step, given its global loss and gradient norm.

        Raises BadStep where the job must roll back, TrainingFailed where it must stop or has more
        than ``max_bad_steps`` bad steps.
        """
        reason = self._reason(loss, norm)
        if reason is None:
            self._recent.append(loss)
            return StepDecision.APPLY
        self.bad += 1
        if self.settings.on_bad_step == "stop" or self.bad > self.settings.max_bad_steps:
            raise self._failed(step, batch, reason, loss, norm)
        if self.settings.on_bad_step == "roll-back":
            raise BadStep(step=step, batch=batch, reason=reason, loss=loss, norm=norm)
        return StepDecision.SKIP

    def require_finite_state(self, is_finite: bool, *, step: int, batch: int) -> None:
        """Raise unless ``is_finite``: weights and optimiser moments are finite on every rank.

        For the final state, which no further batch checks. Raises like ``decide``, but never skips:
        the weights are already damaged.
        """
        if is_finite:
            return
        self.bad += 1
        if self.settings.on_bad_step == "stop" or self.bad > self.settings.max_bad_steps:
            raise self._failed(step, batch, "nan", math.nan, math.nan)
        raise BadStep(step=step, batch=batch, reason="nan", loss=math.nan, norm=math.nan)

    @property
    def state(self) -> dict[str, Any]:
        """Return the JSON state for a checkpoint."""
        return {"bad": self.bad, "recent": list(self._recent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``; raises CorruptData where it is malformed.

        Bad steps counted since that checkpoint stay counted.
        """
        try:
            bad, recent = int(state["bad"]), [float(each) for each in state["recent"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptData("guard of a checkpoint is unusable", got=repr(state)) from error
        self.bad = max(self.bad, bad)
        self._recent.clear()
        self._recent.extend(recent)

    def _reason(self, loss: float, norm: float) -> Reason | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "nan"
        return "spike" if loss > spike_limit(self._recent, self.settings) else None

    def _failed(
        self, step: int, batch: int, reason: Reason, loss: float, norm: float
    ) -> TrainingFailed:
        return TrainingFailed(
            "training diverged",
            got=f"{reason}: loss {loss:.6g}, gradient norm {norm:.6g}; bad steps: {self.bad}",
            wanted=f"finite numbers without spikes; at most {self.settings.max_bad_steps} bad steps"
            if self.settings.on_bad_step != "stop"
            else "finite numbers without spikes",
            where=f"step {step}, batch {batch}",
            do="Lower training.learning_rate or training.clip_norm; the last checkpoint is intact.",
        )


def spike_limit(recent: Iterable[float], settings: GuardSettings) -> float:
    """Return the loss above which a step is a spike; infinite until the window is half full.

    The limit is ``spike_factor`` times the median, and at least ``SPIKE_DEVIATIONS`` robust
    standard deviations (from the median absolute deviation) above it, so that neither a noisy task
    nor a loss near zero triggers it.
    """
    losses = list(recent)
    if len(losses) < (settings.spike_window + 1) // 2:
        return math.inf
    middle = statistics.median(losses)
    spread = MAD_TO_STD * statistics.median(abs(each - middle) for each in losses)
    return max(settings.spike_factor * middle, middle + SPIKE_DEVIATIONS * spread)


STATE = "early_stopping"  # key in a checkpoint's extra state
# The count starts at 0 again where a continued training has another value of one of these settings.
_COUNTING_SETTINGS = {
    "steps",
    "learning_rate",
    "schedule",
    "warmup_steps",
    "decay_share",
    "final_share",
    "early_stopping",
}


class EarlyStopping:
    """Counts the evaluations since the best one; never ends a training without its settings.

    The decision follows from figures that all ranks share, and its state is part of each
    checkpoint: a training that was killed ends at the same step.
    """

    def __init__(self, settings: TrainingSettings, extra: Mapping[str, Any]) -> None:
        """``extra`` is the extra state of the checkpoint that training goes on from."""
        self._settings = settings.early_stopping
        self._counts_for = settings.model_dump(mode="json", include=_COUNTING_SETTINGS)
        self._best: float | None = None
        self._best_step = self._evaluations_without_gain = 0
        state = extra.get(STATE)
        if state is not None and state["counts_for"] == self._counts_for:
            self._best, self._best_step = state["best"], state["best_step"]
            self._evaluations_without_gain = state["waited"]

    @property
    def reason(self) -> str:
        """Return why training ends now; "" where it goes on."""
        if self._settings is None or self._evaluations_without_gain < self._settings.patience:
            return ""
        best = "no finite loss" if self._best is None else f"{self._best:.4f} nats"
        return (
            f"the held-out loss has not fallen in {self._evaluations_without_gain} evaluations "
            f"(best: {best} at step {self._best_step})"
        )

    @staticmethod
    def best_of(progress: Progress) -> float | None:
        """Return the best held-out loss of a training that ended early; None otherwise."""
        best: float | None = progress.extra[STATE]["best"] if progress.stopped_early else None
        return best

    def record_evaluation(self, progress: Progress, steps: int) -> None:
        """Count ``progress``'s latest evaluation, and set its state and whether it ends before
        ``steps``. A loss of NaN is no best."""
        if self._settings is None:
            return
        loss = progress.held_out["held_out_loss"]  # nats a token
        if loss < (math.inf if self._best is None else self._best - self._settings.min_delta):
            self._best, self._best_step, self._evaluations_without_gain = loss, progress.step, 0
        else:
            self._evaluations_without_gain += 1
        progress.extra[STATE] = {
            "best": self._best,
            "best_step": self._best_step,
            "waited": self._evaluations_without_gain,
            "counts_for": self._counts_for,
        }
        if progress.step < steps:
            progress.stopped_early = self.reason
