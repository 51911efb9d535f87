"""What server, standby and workers agree on, what comes with a gradient, and who judges it.

No I/O and no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import InvalidFrame, InvalidInput
from paceline.training.strategies.update_ledger import Update

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


# Who works on which share of the batches: each rank on its own, until somebody falls out.
#
# A share whose rank is gone waits for that rank to come back; after ``vacant_s`` whoever has
# finished its own takes it, so that a worker that is left out costs time and no data. Pure: no I/O,
# the clock is the caller's. A rank has one share at a time; its newest connection counts.


@dataclass(frozen=True)
class Holder:
    """A rank at work on a share; ``line`` is its connection, whatever that is."""

    rank: int
    line: Any


class Seats:
    """The shares and their holders."""

    def __init__(self, shares: int, vacant_s: float, now: float) -> None:
        self._vacant_s = vacant_s
        self._holders: dict[int, Holder] = {}
        self._free_since = dict.fromkeys(range(shares), now)

    def take(
        self, rank: int, wanted: int, line: Any, unfinished: Collection[int], now: float
    ) -> tuple[int | None, Any]:
        """Return the share that ``rank`` works on from now, and the older line to be cut.

        None for a share: there is nothing to do now; ask again when something changed.
        """
        for share in (wanted, *(each for each in sorted(unfinished) if each != wanted)):
            if share not in unfinished:
                continue
            holder = self._holders.get(share)
            mine = holder is not None and holder.rank == rank
            waited = now - self._free_since[share] >= self._vacant_s
            if mine or (holder is None and (share == wanted or waited)):
                self._holders[share] = Holder(rank, line)
                return (
                    share,
                    holder.line if holder is not None and holder.line is not line else None,
                )
        return None, None

    def leave(self, share: int, line: Any, now: float) -> None:
        """The connection ``line`` broke or finished; the share is free unless another has it."""
        holder = self._holders.get(share)
        if holder is not None and holder.line is line:
            del self._holders[share]
            self._free_since[share] = now
