"""What server, standby and workers agree on, what comes with a gradient, and who judges it.

No I/O and no tensors.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import InvalidFrame, InvalidInput
from paceline.training.relaxed.ledger import Update

BEAT_S = 0.5
SILENCE_S = 3.0  # a leading server that is silent for so long is taken over from
GREET_S = 5.0
WORKER_SILENCE_S = 600.0  # a worker computes meanwhile; a dead one's connection breaks at once
TURN_S = 30.0  # for whoever was refused: nobody waits longer than this for it
VACANT_S = 10.0  # that a share lies there before somebody who has finished takes it
MAX_POSITION_FIELDS = 32

Address = tuple[str, int]


@dataclass(frozen=True)
class Terms:
    """What server, standby and workers have agreed on."""

    key: str  # the gang's, "" only in a test
    workers: int  # into how many shares each global batch is cut
    pushes: int  # of each share; then all is done
    max_staleness: int
    silence_s: float = SILENCE_S
    vacant_s: float = VACANT_S


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a worker says of the batch that a gradient is of."""

    loss: float = 0.0  # mean nats a token; not finite where it went wrong
    tokens: float = 1.0  # that counted; none: every sample of it is in quarantine
    batch: int = 0  # number of the global batch
    waited_s: float = 0.0  # for its data
    position: dict[str, Any] | None = None  # of the stream, behind this batch
    quarantined: tuple[str, ...] = ()  # shards, so far

    def to_head(self) -> dict[str, Any]:
        """Return it as JSON; a loss that is no number is None."""
        said = asdict(self)
        return said | {"loss": self.loss if math.isfinite(self.loss) else None}

    @classmethod
    def from_head(cls, said: object) -> Note:
        """Return what ``to_head`` gave; raises InvalidFrame where it is not that."""
        try:
            if not isinstance(said, dict):
                raise TypeError(type(said).__name__)
            position = said["position"]
            if position is not None and (
                not isinstance(position, dict) or len(position) > MAX_POSITION_FIELDS
            ):
                raise ValueError("position")
            return cls(
                loss=math.nan if said["loss"] is None else float(said["loss"]),
                tokens=float(said["tokens"]),
                batch=int(said["batch"]),
                waited_s=float(said["waited_s"]),
                position=position,
                quarantined=tuple(map(str, said["quarantined"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidFrame("note of a gradient cannot be read", got=repr(error)) from error


@dataclass(frozen=True, kw_only=True)
class Applied:
    """An update that is counted."""

    update: Update
    note: Note
    norm: float  # of its gradient; not finite where it went wrong
    taken: bool  # it changed the weights
    leads: bool  # here is the server that decided it


class Steward:
    """Judges gradients before they change weights, and hears of those that did.

    Called under the server's lock, in the order of versions, in server and standby alike. This one
    only refuses numbers that are not finite; a job's own also guards, counts and saves.
    """

    def judge(self, note: Note, norm: float) -> bool:  # noqa: ARG002 - a job's looks at it
        """Return whether the next update may change the weights; only the leading server asks.

        Raises InvalidInput to refuse the gradient, TrainingFailed to end the server.
        """
        if not math.isfinite(norm):
            raise InvalidInput("gradient is not finite", do="Lower training.learning_rate.")
        return True

    def applied(self, applied: Applied) -> None:
        """Learn what was counted."""

    def state(self) -> dict[str, Any]:
        """Return what a standby needs to judge alike, as JSON."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` gave."""
