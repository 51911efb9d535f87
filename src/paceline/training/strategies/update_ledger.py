"""Bounded staleness: which gradient is applied to which version of the weights. Pure.

No I/O, no clock, no tensors. A worker pulls version v, computes, and pushes (sequence, v); a
sequence counts its own gradients from 1. Applied at version c, a gradient is stale by c - v.

- Stale by more than the bound: refused. The worker pulls again and computes it anew.
- A sequence that was applied already (its answer was lost): confirmed, not applied twice.
- A refused worker has the next turn: until its gradient arrives, a push of another worker that
  would make it stale again has to wait. One worker at a time, in the order of refusals, so that
  slow workers get their turn and no push waits for two of them.

The standby runs the same ledger, fed by the server's updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from paceline.errors import CorruptData, InvalidInput


class PushVerdict(Enum):
    """The decision about a pushed gradient."""

    APPLY = "apply"
    KNOWN = "known"  # applied before
    STALE = "stale"  # pull and compute anew
    WAIT = "wait"  # push again after the next change


@dataclass(frozen=True)
class Update:
    """One applied gradient: the ``version``-th."""

    worker: int
    sequence: int
    base: int  # the version it was computed from
    version: int  # the version it produced


@dataclass
class UpdateLedger:
    """Versions, the last push of each worker, and the order of turns."""

    max_staleness: int
    version: int = 0
    applied: dict[int, int] = field(default_factory=dict)  # worker → its last sequence
    positions: dict[int, dict[str, Any]] = field(default_factory=dict)  # worker → stream position
    _turns: list[int] = field(default_factory=list)  # refused workers, in order
    _pulled: dict[int, int] = field(default_factory=dict)  # worker → version it has

    def pull(self, worker: int) -> int:
        """Record that ``worker`` pulls the present weights; return their version."""
        self._pulled[worker] = self.version
        return self.version

    def judge(self, worker: int, sequence: int, base: int) -> PushVerdict:
        """Return the decision about a push, and record a refusal.

        Raises InvalidInput for a version that does not exist or a sequence that skips some.
        """
        done = self.applied.get(worker, 0)
        if 1 <= sequence <= done:
            return PushVerdict.KNOWN
        if sequence != done + 1:
            raise InvalidInput("gradient out of order", got=sequence, wanted=done + 1)
        if not 0 <= base <= self.version:
            raise InvalidInput("unknown version", got=base, wanted=f"0 to {self.version}")
        if self.version - base > self.max_staleness:
            if worker not in self._turns:
                self._turns.append(worker)
            return PushVerdict.STALE
        if self._must_wait(worker):
            return PushVerdict.WAIT
        return PushVerdict.APPLY

    def apply(self, worker: int, sequence: int, base: int) -> Update:
        """Record the gradient as the next version; only after ``judge`` returned APPLY."""
        update = Update(worker, sequence, base, self.version + 1)
        self.follow(update)
        return update

    def follow(self, update: Update, position: Mapping[str, Any] | None = None) -> None:
        """Record an update that the leading server applied; raises CorruptData for a gap.

        ``position`` is where its worker's data stream continues.
        """
        done = self.applied.get(update.worker, 0)
        if update.version != self.version + 1 or update.sequence != done + 1:
            raise CorruptData(
                "log of updates has a gap",
                got=f"version {update.version}, sequence {update.sequence}",
                wanted=f"version {self.version + 1}, sequence {done + 1}",
            )
        self.version = update.version
        self.applied[update.worker] = update.sequence
        if position is not None:
            self.positions[update.worker] = dict(position)
        self.release(update.worker)

    def release(self, worker: int) -> None:
        """End the turn of ``worker``: it was used, or the worker is gone."""
        if worker in self._turns:
            self._turns.remove(worker)
        self._pulled.pop(worker, None)

    def give_up_turn(self) -> None:
        """Skip the next turn: that worker did not push in time."""
        if self._turns:
            self.release(self._turns[0])

    def to_json(self) -> dict[str, Any]:
        """Return the state from which a standby, or a resumed job, continues."""
        return {
            "version": self.version,
            "applied": {str(worker): count for worker, count in sorted(self.applied.items())},
            "positions": {str(worker): at for worker, at in sorted(self.positions.items())},
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any], max_staleness: int) -> UpdateLedger:
        """Return the ledger that ``to_json`` wrote; turns and pulls start empty.

        Raises CorruptData for anything else.
        """
        try:
            applied = {int(worker): int(count) for worker, count in said["applied"].items()}
            positions = {int(worker): dict(at) for worker, at in said["positions"].items()}
            return cls(max_staleness, int(said["version"]), applied, positions)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptData("ledger of a parameter server is unusable", got=repr(said)) from error

    def of_workers(self, before: int, workers: int) -> UpdateLedger:
        """Return the ledger for another number of workers than the ``before`` that wrote it.

        Shares are cut anew, so all continue from the slowest worker: data that faster ones had read
        beyond it are read again. The learning rate schedule continues at that step.
        """
        if workers == before:
            return self
        slowest = min(range(before), key=lambda worker: self.applied.get(worker, 0))
        steps = self.applied.get(slowest, 0)
        at = self.positions.get(slowest)
        return UpdateLedger(
            self.max_staleness,
            steps * workers,
            dict.fromkeys(range(workers), steps),
            {worker: dict(at) for worker in range(workers)} if at is not None else {},
        )

    def _must_wait(self, worker: int) -> bool:
        if not self._turns or self._turns[0] == worker:
            return False
        base = self._pulled.get(self._turns[0])
        # A worker with the turn that has not pulled again cannot become stale: its pull is fresh.
        return base is not None and self.version + 1 - base > self.max_staleness
