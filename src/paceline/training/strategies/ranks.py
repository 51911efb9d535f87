"""Asynchronous training on known addresses: rank 0 serves, 1 is the standby, others work.

Each worker reads its share of the same global batches as in synchronous training, and every share
is one update: ``steps`` steps of W workers are ``steps`` × W versions from the same tokens. If rank
0 dies, rank 1 takes over and holds the final weights. For programs that start their ranks
themselves; ``job`` runs a rank of a training job, with checkpoints and a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from paceline.config import TrainingSettings
from paceline.data import Batch
from paceline.errors import InvalidInput, TrainingFailed
from paceline.training.loop.optimizer import master_dtype
from paceline.training.loop.workload import Workload
from paceline.training.strategies import SERVING, require_ranks
from paceline.training.strategies.follower import follow
from paceline.training.strategies.learner import Learner
from paceline.training.strategies.protocol import (
    SILENCE_S,
    Address,
    AppliedUpdate,
    ServerTerms,
    UpdatePolicy,
)
from paceline.training.strategies.rendezvous import Claims
from paceline.training.strategies.server import ParameterServer, ServerThread
from paceline.training.strategies.update_ledger import Update
from paceline.training.strategies.worker import BatchTask, GradientComputer, Worker, WorkerCounts

Role = Literal["server", "standby", "worker"]
OpenShare = Callable[[int, int, int], Iterator[Batch]]  # share, shares, first step (from 0)


@dataclass(frozen=True)
class Outcome:
    """The result of one rank of an asynchronous training."""

    role: Role
    led: bool  # it held the weights at the end
    version: int
    model: nn.Module | None = None  # of the server, and of a standby
    told: WorkerCounts | None = None  # counts of a worker


def role_of(rank: int) -> Role:
    """Return the initial role of ``rank``."""
    return ("server", "standby")[rank] if rank < SERVING else "worker"


class CallbackPolicy(UpdatePolicy):
    """A steward that calls ``on_update`` for each update."""

    def __init__(self, on_update: Callable[[Update, float], None]) -> None:
        self._on_update = on_update

    def applied(self, applied: AppliedUpdate) -> None:
        """Call ``on_update`` with the update and its loss."""
        self._on_update(applied.update, applied.note.loss)


class IteratorSource:
    """A ``BatchSource`` of batches from an iterator; it has no position."""

    data_wait_s = 0.0
    position: dict[str, Any] | None = None

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self.quarantined: dict[str, str] = {}

    def next(self) -> Batch:
        """Return the next batch."""
        return next(self._batches)

    def close(self) -> None:
        """Do nothing: no file is open."""


def run_asynchronous(
    rank: int,
    ranks: int,
    workload: Workload,
    settings: TrainingSettings,
    open_share: OpenShare,
    *,
    addresses: Sequence[Address],
    claims: Claims,
    key: str,
    deadline_s: float,
    start_model: nn.Module | None = None,
    on_update: Callable[[Update, float], None] | None = None,
    silence_s: float = SILENCE_S,
) -> Outcome:
    """Run ``rank`` of the training to its end.

    ``addresses`` are those of rank 0 and rank 1. Raises PeerLost where no server leads any longer,
    or another rank took over; TrainingFailed where values are no longer finite.
    """
    workers = require_ranks(settings, ranks)
    terms = ServerTerms(key, workers, settings.steps, settings.synchrony.max_staleness, silence_s)
    model = (start_model or workload.build()).to(master_dtype(settings))
    role = role_of(rank)
    try:
        if role == "worker":
            share = rank - SERVING

            def opened(task: BatchTask) -> IteratorSource:
                return IteratorSource(open_share(task.worker, workers, task.sequence - 1))

            compute = GradientComputer(model, workload, settings, workers, opened)
            count, dtype = compute.count, compute.dtype
            worker = Worker(share, lambda: addresses, terms, count, dtype, rank=rank)
            return Outcome(role, led=False, version=0, told=worker.run(compute))
        steward = CallbackPolicy(on_update) if on_update is not None else None
        owner = f"rank-{rank}"
        server = ParameterServer(
            Learner(model, settings, workers), terms, claims, owner, steward=steward
        )
        with ServerThread(server, addresses[rank], deadline_s) as serving:
            if role == "server":
                server.lead()
                led = True
            else:
                led = follow(server, lambda: addresses[:1], deadline_s) == "leads"
            if led:
                serving.until_done()
                server.release()
        return Outcome(role, led=led, version=server.ledger.version, model=model)
    except InvalidInput as error:
        if "not finite" in error.one_line():
            raise TrainingFailed("training diverged", got=error.one_line()) from error
        raise
