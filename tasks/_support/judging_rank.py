"""Entry point of a rank that scores models together with the other ranks of its gang.

A node's launcher forks ``main``, which reads an EvaluationSpec (one line of JSON) from standard
input and writes RankEvent lines: "score" and "unscored" by rank 0, and "result" with the peak of
its memory by each. Weights go from the files straight into each rank's part of the model, as in
training; figures are those of one process. Imports neither Prefect nor Dask.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.config import TrainingSettings
from paceline.errors import PacelineError, from_record, to_record
from paceline.evaluation import score_on_ranks
from paceline.models import Pretrained, SavedTransformer
from paceline.schemas import EvaluationSpec
from paceline.system import usable_cores
from paceline.training.loop import (
    EventWriter,
    Group,
    RankIdentity,
    StopFlag,
    TransformerWorkload,
    as_rank,
    exclusive_device,
    join_gang,
    load_weights,
    return_freed_memory,
)
from paceline.training.parallel import Mesh, MeshSpec, open_mesh, parallelise, require_planned

GROUP_TIMEOUT_S = 86_400.0  # the driver's deadlines end a hung gang, and name the rank
MOST_RECORD_BYTES = 65_536  # of an error, as JSON


class ShardedNetwork:
    """A spread model as one: called with tokens by all its ranks, it returns whole logits."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module

    def __call__(self, tokens_BT: Tensor, cache: Any = None) -> Tensor:
        # FSDP2 counts versions of its parameters, which inference mode does not keep.
        with torch.inference_mode(False), torch.no_grad():
            logits_BTV: Tensor = self._module(tokens_BT, cache=cache)
            return logits_BTV.full_tensor() if isinstance(logits_BTV, DTensor) else logits_BTV

    def new_cache(self) -> Any:
        """Return an empty cache of keys and values."""
        return self._module.new_cache()


class GangRanks:
    """The ranks of this process's gang; see ``paceline.evaluation.Ranks``."""

    def __init__(self, group: Group, mesh: Mesh, device: torch.device) -> None:
        self._group, self._mesh, self.device = group, mesh, device
        self.share, self.shares = mesh.data_rank, mesh.data_world
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.threads = max(1, usable_cores() // here)
        self._counts = mesh.spec.place(group.rank)["tp"] == 0  # others have the same figures

    def place(self, found: Pretrained | SavedTransformer) -> ShardedNetwork:
        """Return this rank's part of the model; raises InvalidInput where it cannot be cut so."""
        if isinstance(found, Pretrained):
            require_planned(found, self._mesh.spec)
            found.require_tied()
        settings = TrainingSettings.model_validate(
            {"batch_sequences": self.shares, "mesh": {"sequence_parallel": False}}
        )
        task = TransformerWorkload(found if isinstance(found, Pretrained) else found.config)
        empty = found.build().requires_grad_(False)
        parallel = parallelise(empty, self._mesh, settings, task, is_frozen=True)
        load_weights(found, parallel)
        (module,) = parallel.modules
        return ShardedNetwork(module.eval())

    def total(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the sum of the shares' ``values``."""
        mine = values if self._counts else np.zeros_like(values)
        return np.array(self.everyone(mine.ravel().tolist())).reshape(values.shape)

    def everyone(self, values: Any) -> list[float]:
        """Return the sum of all ranks' ``values``."""
        return self._group.sums(values)

    def agree(self, error: PacelineError | None) -> None:
        """Raise on every rank the error of the first one that has one."""
        rank, world = self._group.rank, self._group.world_size
        failed = self.everyone([float(each == rank and error is not None) for each in range(world)])
        if not any(failed):
            return
        record = json.dumps(to_record(error)).encode() if error is not None else b""
        mine = record if failed.index(1.0) == rank else b""
        padded = np.frombuffer(mine[:MOST_RECORD_BYTES].ljust(MOST_RECORD_BYTES), np.uint8)
        told = self.everyone((padded - ord(" ")).astype(np.float64).tolist())
        raise from_record(json.loads(bytes(int(each) + ord(" ") for each in told)))


def preload() -> None:
    """Import what a rank needs before ranks are forked; starts no thread."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import paceline.evaluation.run  # noqa: F401

    torch.set_num_threads(1)


def main() -> int:
    """Score as this process's rank; return its exit code."""
    return as_rank(_judge)


def _judge(place: RankIdentity, events: EventWriter, _stop: StopFlag) -> int:
    return_freed_memory()
    spec = EvaluationSpec.model_validate_json(sys.stdin.readline())
    events.emit("started", worker_id=place.worker_id, pid=os.getpid())
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    done = 0

    def emit(kind: str, data: dict[str, Any]) -> None:
        nonlocal done
        if kind == "step":
            done += 1
            events.set_phase("step", done)
        if place.rank == 0:
            events.emit(kind, **data)

    events.set_phase("joining")
    with join_gang(place, GROUP_TIMEOUT_S) as group:
        device = exclusive_device()
        mesh = open_mesh(MeshSpec.of(spec.mesh, place.world_size), device.type)
        events.set_phase("scoring")
        ranks = GangRanks(group, mesh, device)
        score_on_ranks(spec, ranks, place.worker_id, is_first=is_first, emit=emit)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    events.emit("result", done, peak_memory_bytes=1024 * peak_kib)
    return 0
