"""The port between the parameter server and the program that trains with it.

A *worker* hands in a ``Compute``: its forward and backward pass. It is called with the next
``Task`` (which batch) and the newest weights as one flat array, and returns the gradient, flat and
in the order of ``model.parameters()``, with a ``BatchReport``. The parameter server sends weights,
delivers gradients, and calls it again for the same task where the server was replaced meanwhile.

A *server* hands in an ``UpdatePolicy``: it decides whether a gradient may change the weights, and
is called after each update, as after ``optimizer.step()``. The optimizer itself is in ``learner``.

Shares: worker ``k`` computes share k of every global batch, and each share is one update, so
``steps`` steps of W workers are ``steps`` x W versions of the weights. No I/O and no tensors here.

``UpdateLedger`` bounds staleness. A worker pulls version v, computes, and pushes (sequence, v); a
sequence counts its own gradients from 1. Applied at version c, a gradient is stale by c - v. No
gradient is computed in vain: a pull or a push waits while it would make a gradient that is being
computed staler than ``max_staleness`` by the time of its push (earliest base first). The worker
with the oldest base never waits with its push, so there is always one that can continue. Of workers
that wait to pull, the one with the fewest updates goes first. (Stale synchronous parallel, Ho et
al. 2013, with versions for clocks.) The standby runs the same ledger, fed by the leader's updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import numpy.typing as npt
from pydantic import ConfigDict, Field

from paceline.errors import CorruptData, InvalidInput
from paceline.schemas import Record

Address = tuple[str, int]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Terms:
    """The parameters that server, standby and workers share."""

    key: str = field(repr=False)  # secret of the gang
    workers: int  # number of shares of each global batch
    pushes: int  # updates of each share; then all work is done
    max_staleness: int
    silence_s: float = 3.0  # the standby takes over from a leader silent for this long


@dataclass(frozen=True)
class Task:
    """The batch to compute: the ``sequence``-th (from 1) of share ``worker``.

    ``position`` is where the share's data stream continues; None at its beginning.
    """

    worker: int
    sequence: int
    position: dict[str, Any] | None = None


class BatchReport(Record):
    """What a worker reports about the batch of a gradient."""

    model_config = ConfigDict(allow_inf_nan=True)

    loss: float = 0.0  # mean nats a token; not finite after divergence
    tokens: float = 1.0  # with weight; 0: every sample is in quarantine
    batch: int = 0  # number of the global batch
    waited_s: float = 0.0  # time waited for its data
    position: Annotated[dict[str, Any], Field(max_length=32)] | None = None  # after this batch
    quarantined: tuple[str, ...] = ()  # shards, so far


Compute = Callable[[Task, Array], tuple[Array, BatchReport]]


@dataclass(frozen=True)
class Update:
    """One counted gradient: the ``version``-th."""

    worker: int
    sequence: int
    base: int  # the version it was computed from
    version: int  # the version it produced
    report: BatchReport = field(default_factory=BatchReport)
    norm: float = 0.0  # of the gradient; not finite after divergence
    taken: bool = True  # it changed the weights

    @property
    def staleness(self) -> int:
        """Return the number of versions between the gradient's weights and its update."""
        return self.version - 1 - self.base


class UpdatePolicy(Protocol):
    """Judges gradients and counts updates, under the server's lock, in the order of versions."""

    def judge(self, report: BatchReport, norm: float) -> bool:
        """Return whether the next gradient may change the weights; only the leader calls it.

        Raises InvalidInput to refuse the gradient, another permanent error to end the server.
        """

    def applied(self, update: Update) -> None:
        """Count an update, in leader and standby."""

    def state(self) -> dict[str, Any]:
        """Return the JSON state that the standby gets with each update, before it is counted."""

    def restore(self, state: dict[str, Any]) -> None:
        """Load what ``state`` returned."""


@dataclass
class UpdateLedger:
    """Versions, the last push of each worker, and the gradients that are being computed."""

    max_staleness: int
    version: int = 0
    applied: dict[int, int] = field(default_factory=dict)  # worker → its last sequence
    positions: dict[int, dict[str, Any]] = field(default_factory=dict)  # worker → stream position
    _pulled: dict[int, int] = field(default_factory=dict, compare=False)  # worker → version it has
    _waiting: set[int] = field(default_factory=set, compare=False)  # workers that want to pull

    def pull(self, worker: int) -> int | None:
        """Record that ``worker`` has the present weights; return their version, None: wait."""
        self._pulled.pop(worker, None)
        self._waiting.add(worker)
        first = min(self._waiting, key=lambda each: (self.applied.get(each, 0), each))
        if worker != first or not self._in_time([*self._pulled.values(), self.version], 0):
            return None
        self._waiting.discard(worker)
        self._pulled[worker] = self.version
        return self.version

    def may_push(self, worker: int, sequence: int, base: int) -> bool:
        """Return whether the gradient can be applied now; False: wait for the next change.

        Raises InvalidInput for a gradient that is not the worker's next one, or not of the weights
        that it pulled.
        """
        if sequence != self.applied.get(worker, 0) + 1 or base != self._pulled.get(worker):
            raise InvalidInput(
                "gradient out of order",
                got=f"sequence {sequence} of version {base}",
                wanted=f"sequence {self.applied.get(worker, 0) + 1} of version "
                f"{self._pulled.get(worker)}",
            )
        return self._in_time((at for each, at in self._pulled.items() if each != worker), 1)

    def apply(self, update: Update) -> None:
        """Record an update; raises CorruptData for a gap."""
        done = self.applied.get(update.worker, 0)
        if update.version != self.version + 1 or update.sequence != done + 1:
            raise CorruptData(
                "log of updates has a gap",
                got=f"version {update.version}, sequence {update.sequence}",
                wanted=f"version {self.version + 1}, sequence {done + 1}",
            )
        self.version = update.version
        self.applied[update.worker] = update.sequence
        if update.report.position is not None:
            self.positions[update.worker] = dict(update.report.position)
        self.release(update.worker)

    def release(self, worker: int) -> None:
        """Forget what ``worker`` pulled: it was used, or the worker is gone."""
        self._pulled.pop(worker, None)
        self._waiting.discard(worker)

    def _in_time(self, bases: Iterable[int], more: int) -> bool:
        """Return whether gradients of ``bases``, pushed oldest first, stay within the bound."""
        at = self.version + more
        return all(at + n - b <= self.max_staleness for n, b in enumerate(sorted(bases)))

    def to_json(self) -> dict[str, Any]:
        """Return the state from which a standby, or a resumed job, continues."""
        return {
            "version": self.version,
            "applied": {str(worker): count for worker, count in sorted(self.applied.items())},
            "positions": {str(worker): at for worker, at in sorted(self.positions.items())},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any], max_staleness: int) -> UpdateLedger:
        """Return the ledger that ``to_json`` wrote; raises CorruptData for anything else."""
        try:
            applied = {int(worker): int(count) for worker, count in found["applied"].items()}
            positions = {int(worker): dict(at) for worker, at in found["positions"].items()}
            return cls(max_staleness, int(found["version"]), applied, positions)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptData("ledger of a parameter server is unusable", got=found) from error

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
