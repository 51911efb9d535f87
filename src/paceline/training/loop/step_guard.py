"""Steps that go bad: no finite numbers, or a loss far above what was usual. A pure decision.

``Guard`` sees the global loss and gradient norm of each step BEFORE the optimiser uses them, the
same numbers on every rank, so that every rank decides the same without asking. It says go on, skip
(the weights stay as they were), roll back (``BadStep``: resume the last healthy generation and pass
over this batch) or stop. It bounds how often. Knows no torch and no clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from paceline.config import GuardSettings
from paceline.errors import CorruptData, PacelineError, TrainingFailed

Reason = Literal["nan", "spike"]

# A window whose losses hardly differ has a tiny spread: a spike is also this many spreads up.
SPREADS = 10.0
NORMAL = 1.4826  # median absolute deviation → standard deviation of a normal distribution


class BadStep(TrainingFailed):
    """A step that must not be taken: go back to the last healthy generation, leave the batch out.

    ``step`` counts from 0, ``batch`` is the number of the batch in its stream.
    """

    def __init__(self, *, step: int, batch: int, reason: Reason, loss: float, norm: float) -> None:
        self.step, self.batch, self.reason = step, batch, reason
        self.loss, self.norm = loss, norm
        super().__init__(
            "step went bad",
            got=f"{reason}: loss {loss:.6g}, gradient norm {norm:.6g}",
            where=f"step {step}, batch {batch}",
            do="The job goes back to its last healthy checkpoint and passes over the batch.",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (_bad_step, (self.step, self.batch, self.reason, self.loss, self.norm))


def _bad_step(step: int, batch: int, reason: Reason, loss: float, norm: float) -> PacelineError:
    return BadStep(step=step, batch=batch, reason=reason, loss=loss, norm=norm)


class Verdict(Enum):
    """What the loop does with a step."""

    TAKE = "take"
    SKIP = "skip"


@dataclass
class Guard:
    """Judges steps; one for each rank, all in the same state.

    ``bad`` counts bad steps of the whole job, those before a roll-back included.
    """

    settings: GuardSettings
    bad: int = 0

    def __post_init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.settings.spike_window)

    @classmethod
    def of(cls, settings: GuardSettings, bad_before: int = 0) -> Guard:
        """Return a guard of a job that went bad ``bad_before`` times before this attempt."""
        return cls(settings, bad_before)

    def judge(self, *, step: int, batch: int, loss: float, norm: float) -> Verdict:
        """Return what to do with a step of this global loss and gradient norm.

        Raises BadStep where the job is to roll back, TrainingFailed where it is to stop or went bad
        more than ``max_bad_steps`` times.
        """
        reason = self._reason(loss, norm)
        if reason is None:
            self._recent.append(loss)
            return Verdict.TAKE
        self.bad += 1
        if self.settings.on_bad_step == "stop" or self.bad > self.settings.max_bad_steps:
            raise self._failed(step, batch, reason, loss, norm)
        if self.settings.on_bad_step == "roll-back":
            raise BadStep(step=step, batch=batch, reason=reason, loss=loss, norm=norm)
        return Verdict.SKIP

    def require_sound(self, sound: bool, *, step: int, batch: int) -> None:
        """Refuse a state with weights or moments that are no finite numbers on some rank.

        For a state that no further batch will judge: the last one. Raises as ``judge`` does, but
        never skips: the damage is done.
        """
        if sound:
            return
        self.bad += 1
        if self.settings.on_bad_step == "stop" or self.bad > self.settings.max_bad_steps:
            raise self._failed(step, batch, "nan", math.nan, math.nan)
        raise BadStep(step=step, batch=batch, reason="nan", loss=math.nan, norm=math.nan)

    @property
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return {"bad": self.bad, "recent": list(self._recent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state`` gave; raises CorruptData where it is not that.

        Bad steps that were counted since then stay counted.
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

    Robust: ``spike_factor`` times the median, and at least ``SPREADS`` robust standard deviations
    (from the median absolute deviation) above it, so that neither a noisy task nor one whose loss
    is nearly zero trips it.
    """
    losses = list(recent)
    if len(losses) < (settings.spike_window + 1) // 2:
        return math.inf
    middle = statistics.median(losses)
    spread = NORMAL * statistics.median(abs(each - middle) for each in losses)
    return max(settings.spike_factor * middle, middle + SPREADS * spread)
