"""Shared types of the parameter server: terms, a gradient's note, its judge, and shares of work.

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
SILENCE_S = 3.0  # the standby takes over from a leader silent for this long
GREET_S = 5.0
WORKER_SILENCE_S = 600.0  # a worker may compute for long; if it dies, its connection breaks
TURN_S = 30.0  # longest wait of others for a worker whose gradient was refused
VACANT_S = 10.0  # before a worker that has finished takes over a free share
MAX_POSITION_FIELDS = 32

Address = tuple[str, int]


@dataclass(frozen=True)
class ServerTerms:
    """The parameters that server, standby and workers share."""

    key: str  # of the gang; "" only in tests
    workers: int  # number of shares of each global batch
    pushes: int  # of each share; then all work is done
    max_staleness: int
    silence_s: float = SILENCE_S
    vacant_s: float = VACANT_S


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """What a worker reports about the batch of a gradient."""

    loss: float = 0.0  # mean nats a token; not finite after divergence
    tokens: float = 1.0  # with weight; 0: every sample is in quarantine
    batch: int = 0  # number of the global batch
    waited_s: float = 0.0  # time waited for its data
    position: dict[str, Any] | None = None  # of the stream, after this batch
    quarantined: tuple[str, ...] = ()  # shards, so far

    def to_head(self) -> dict[str, Any]:
        """Return it as JSON values; a loss that is not finite becomes None."""
        said = asdict(self)
        return said | {"loss": self.loss if math.isfinite(self.loss) else None}

    @classmethod
    def from_head(cls, said: object) -> BatchReport:
        """Return the note that ``to_head`` wrote; raises InvalidFrame for anything else."""
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
class AppliedUpdate:
    """A counted update."""

    update: Update
    note: BatchReport
    norm: float  # of its gradient; not finite after divergence
    taken: bool  # it changed the weights
    leads: bool  # this server decided it


class UpdatePolicy:
    """Judges gradients before they change weights, and is notified of those that were counted.

    Called under the server's lock, in the order of versions, in server and standby alike. This
    base class only rejects values that are not finite; ``JobUpdatePolicy`` also guards, counts and
    saves.
    """

    def judge(self, note: BatchReport, norm: float) -> bool:  # noqa: ARG002 - used by JobSteward
        """Return whether the next update may change the weights; called by the leading server only.

        Raises InvalidInput to refuse the gradient, TrainingFailed to end the server.
        """
        if not math.isfinite(norm):
            raise InvalidInput("gradient is not finite", do="Lower training.learning_rate.")
        return True

    def applied(self, applied: AppliedUpdate) -> None:
        """Record a counted update."""

    def state(self) -> dict[str, Any]:
        """Return the JSON state with which a standby judges alike."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Load what ``state`` returned."""


@dataclass(frozen=True)
class Holder:
    """A rank at work on a share; ``line`` is its connection (any object)."""

    rank: int
    line: Any


class ShareAssignment:
    """Assignment of shares of the batches to ranks; pure, the caller passes the clock.

    The share of a lost rank waits for that rank to return; after ``vacant_s`` a worker that has
    finished its own share takes it, so a lost worker costs time and no data. A rank has one share
    at a time; its newest connection counts.
    """

    def __init__(self, shares: int, vacant_s: float, now: float) -> None:
        self._vacant_s = vacant_s
        self._holders: dict[int, Holder] = {}
        self._free_since = dict.fromkeys(range(shares), now)

    def take(
        self, rank: int, wanted: int, line: Any, unfinished: Collection[int], now: float
    ) -> tuple[int | None, Any]:
        """Return the share that ``rank`` works on from now, and the older connection to close.

        A share of None: there is nothing to do now; call again after a change.
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
        """Free the share of the connection ``line``, which ended, unless another holds it."""
        holder = self._holders.get(share)
        if holder is not None and holder.line is line:
            del self._holders[share]
            self._free_since[share] = now
