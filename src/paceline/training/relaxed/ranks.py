"""The ranks of an asynchronous job: 0 serves, 1 stands by, the others work.

Each worker reads its share of the same global batches as in synchronous training, and every share
is one update: ``steps`` steps of W workers are ``steps`` × W versions from the same tokens. Rank 0
leads at first; where it dies, rank 1 takes over and holds the final weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from paceline.data import Batch
from paceline.errors import InvalidInput, PacelineError, TrainingFailed
from paceline.profile import TrainingSettings
from paceline.training.mesh import Mesh, MeshSpec
from paceline.training.parallel import parallelise
from paceline.training.relaxed.claims import Claims
from paceline.training.relaxed.learner import Learner, flat_gradients, put
from paceline.training.relaxed.ledger import Update
from paceline.training.relaxed.server import SILENCE_S, Server, Terms, listen
from paceline.training.relaxed.worker import Told, Worker
from paceline.training.scaling import master_dtype
from paceline.training.workload import Workload

SERVING = 2  # ranks that do not compute gradients: the server and its standby

Role = Literal["server", "standby", "worker"]
OpenShare = Callable[[int, int, int], Iterator[Batch]]  # share, shares, first step (from 0)
Address = tuple[str, int]


@dataclass(frozen=True)
class Outcome:
    """What a rank of an asynchronous job ended with."""

    role: Role
    led: bool  # it held the weights at the end
    version: int
    model: nn.Module | None = None  # of the server, and of a standby
    told: Told | None = None  # of a worker


def role_of(rank: int) -> Role:
    """Return what ``rank`` does."""
    return ("server", "standby")[rank] if rank < SERVING else "worker"


def require_ranks(settings: TrainingSettings, ranks: int) -> int:
    """Return the number of workers; raises InvalidInput for a layout that has no server."""
    if ranks < SERVING + 1:
        raise InvalidInput(
            "too few ranks for a parameter server",
            got=f"{ranks} ranks",
            wanted="a server, a standby and a worker at least: 3",
            do="Raise training.ranks, or change training.synchrony.kind.",
        )
    mesh = settings.mesh
    if mesh.shard * mesh.tp * mesh.pp > 1 or mesh.hook != "none":
        raise InvalidInput(
            "a parameter server serves whole replicas",
            got=f"shard {mesh.shard}, tp {mesh.tp}, pp {mesh.pp}, hook {mesh.hook}",
            wanted="1, 1, 1 and none",
        )
    if settings.precision == "float16":
        raise InvalidInput(
            "a parameter server scales no losses", got="float16", wanted="bfloat16 or float32"
        )
    return ranks - SERVING


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
    """Run ``rank`` of the job to its end.

    ``addresses`` are where rank 0 and rank 1 listen. Raises PeerLost where no server leads any
    longer, or another took this one's place; TrainingFailed where numbers are no longer finite.
    """
    workers = require_ranks(settings, ranks)
    terms = Terms(key, workers, settings.steps, settings.synchrony.max_staleness, silence_s)
    model = (start_model or workload.build()).to(master_dtype(settings))
    try:
        if role_of(rank) == "worker":
            told = _work(rank - SERVING, model, workload, settings, open_share, terms, addresses)
            return Outcome("worker", led=False, version=0, told=told)
        server = Server(
            Learner(model, settings, workers), terms, claims, f"rank-{rank}", on_update=on_update
        )
        with listen(*addresses[rank]) as listener:
            if role_of(rank) == "server":
                server.lead()
                server.serve(listener, deadline_s)
                return Outcome("server", led=True, version=server.ledger.version, model=model)
            return _stand_by(server, listener, addresses[0], model, deadline_s)
    except InvalidInput as error:
        if "not finite" in error.one_line():
            raise TrainingFailed("training diverged", got=error.one_line()) from error
        raise


def _stand_by(
    server: Server, listener: Any, leader: Address, model: nn.Module, deadline_s: float
) -> Outcome:
    failed: list[PacelineError] = []

    def serve() -> None:
        try:
            server.serve(listener, deadline_s)
        except PacelineError as error:
            failed.append(error)

    # It answers from the start, so that workers are told at once that it does not lead.
    thread = threading.Thread(target=serve, name="standby", daemon=True)
    thread.start()
    led = server.follow(leader, deadline_s) == "leads"
    if led:
        thread.join(deadline_s)
        if failed:
            raise failed[0]
    return Outcome("standby", led=led, version=server.ledger.version, model=model)


def _work(
    share: int,
    model: nn.Module,
    workload: Workload,
    settings: TrainingSettings,
    open_share: OpenShare,
    terms: Terms,
    addresses: Sequence[Address],
) -> Told:
    parallel = parallelise(model, Mesh(MeshSpec()), settings, workload)
    parameters = [p for module in parallel.modules for p in module.parameters() if p.requires_grad]
    count = sum(each.numel() for each in parameters)
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    held: dict[str, Any] = {"sequence": 0, "batches": None, "batch": None}

    def batch_of(sequence: int) -> Batch:
        """Return the ``sequence``-th batch; the same again where it is computed anew."""
        if held["sequence"] != sequence:
            if held["batches"] is None or sequence != held["sequence"] + 1:
                held["batches"] = open_share(share, terms.workers, sequence - 1)
            held["batch"], held["sequence"] = next(held["batches"]), sequence
        batch: Batch = held["batch"]
        return batch

    def compute(sequence: int, weights: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], float]:
        put(parameters, weights)
        batch = batch_of(sequence)
        torch.manual_seed((settings.seed * 1_000_003 + sequence) * 4096 + share)
        parts = [
            workload.inputs(each, torch.device("cpu"))
            for each in batch.split(settings.accumulation)
        ]
        share_tokens = max(batch.global_tokens / terms.workers, 1.0)
        sums = parallel.accumulate(parts, 1.0 / share_tokens)
        loss = float(sums.loss) / sums.weight if sums.weight else 0.0
        return flat_gradients(parameters), loss if np.isfinite(loss) else 0.0

    return Worker(share, addresses, terms, count, dtype).run(compute)
