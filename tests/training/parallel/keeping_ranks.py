"""Two ranks whose hook or task carries state of its own: ``RANK PORT DIRECTORY`` → one JSON line.

Each case trains in one go and saves on the way; then new objects resume that checkpoint and take
the rest of the steps, on two ranks, and (rank 0 alone, after the gang) on one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from examples.carried_state.byte_gru import RecurrentWorkload
from paceline.config import CheckpointSettings, GuardSettings, MeshSettings, TrainingSettings
from paceline.data import Batch
from paceline.storage import DiskStore
from paceline.training.checkpoint import (
    Checkpointer,
    Generations,
    TrainState,
    resume_newest_healthy,
    stateful_of,
)
from paceline.training.loop import (
    Group,
    Inputs,
    Progress,
    TransformerWorkload,
    Workload,
    join_group,
    new_optimizer,
    train,
)
from paceline.training.parallel import Mesh, MeshSpec, open_mesh, parallelise
from tests.training.strategies.ranks import WORKLOAD, Rows, settings_of

DIGEST = "e" * 64
SAVE_AT, STEPS = 14, 18
COMPRESSED = settings_of(
    steps=STEPS,
    learning_rate=0.02,
    optimizer="adamw",
    mesh=MeshSettings(hook="powersgd", powersgd_rank=1),
    checkpoints=CheckpointSettings(every_steps=SAVE_AT, max_stall_share=0.99),
)
CARRIED = COMPRESSED.model_copy(update={"mesh": MeshSettings()})


class CarriedRows(Rows):
    """Rows that all go on where the same rows of the batch before stopped."""

    def next(self) -> Batch:
        batch = super().next()
        return dataclasses.replace(batch, carries_B=np.full(len(batch.rows), batch.step > 0))


class Case:
    """One way to carry state."""

    def __init__(self, name: str, settings: TrainingSettings, rows: type[Rows]) -> None:
        self.name, self.settings, self.rows = name, settings, rows

    def workload(self) -> Workload:
        if self.name == "drawn":
            return Drawing(WORKLOAD.config)
        return WORKLOAD if self.name == "compressed" else RecurrentWorkload(256, 16)


class Spoiling:
    """A task whose outputs are no numbers for batch ``SAVE_AT``, where hook or task carry state."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.batch = workload, 0

    def build(self) -> nn.Module:
        return self.workload.build()

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        self.batch = batch.step
        return self.workload.inputs(batch, device)

    def loss_sum(self, outputs: Any, *targets: torch.Tensor) -> torch.Tensor:
        if self.batch == SAVE_AT:
            outputs = tree_map(lambda each: each * float("nan"), outputs)
        return self.workload.loss_sum(outputs, *targets)


class Drawing(TransformerWorkload):
    """A task whose model draws and counts in each forward pass."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Counting()


class Counting(nn.Module):
    """Embedding, dropout, logits; a buffer counts forward passes, and is added."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        x_BTD = nn.functional.dropout(self.embed(tokens_BT), 0.5, self.training)
        return self.head(x_BTD)


DRAWN = Case("drawn", CARRIED, Rows)
CASES = (Case("compressed", COMPRESSED, Rows), Case("carried", CARRIED, CarriedRows))


def run(
    case: Case,
    root: Path,
    mesh: Mesh,
    group: Group,
    *,
    resume: str = "",
    keep: bool = True,
    workload: Workload | None = None,
) -> dict[str, Any]:
    """Train, from the checkpoint below ``resume`` where one is named; what came out."""
    name = case.name if workload is None else f"{case.name}-spoilt"
    workload = workload or case.workload()
    parallel = parallelise(workload.build(), mesh, case.settings, workload)
    optimizer = new_optimizer(parallel.modules, case.settings)
    keeps = stateful_of(parallel, workload) if keep else []
    state = TrainState(parallel.modules, optimizer, group, mesh, keeps=keeps)
    progress, saver = Progress(), None
    if resume:
        generations = Generations(DiskStore(), DiskStore.url_of(root / resume))
        restored = resume_newest_healthy(
            generations, state, config_digest=DIGEST, work_dir=root / f"work-{group.rank}"
        )
        assert restored is not None
        progress = Progress(step=restored.step)
    else:
        generations = Generations(DiskStore(), DiskStore.url_of(root / name))
        saver = Checkpointer(
            generations, state, case.settings.checkpoints, job_id=case.name, config_digest=DIGEST,
            code_version="",
        )  # fmt: skip
    state.extra = progress.extra
    losses: list[float] = []
    train(
        parallel, workload, optimizer, case.rows(group.rank, group.world_size, progress.step),
        case.settings, group, progress=progress, saver=saver,
        on_step=lambda report: losses.append(report.loss),
    )  # fmt: skip
    if saver is not None:
        saver.finish()
        saver.close()
    (module,) = parallel.modules
    flat = torch.cat([each.detach().flatten() for each in module.parameters()])
    return {"losses": losses[-(STEPS - SAVE_AT) :], "weights": flat.tolist()}


class Warned(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def tensors_of(root: Path, name: str) -> Sequence[str]:
    """Return what the case's checkpoint has beside model and optimiser."""
    (index,) = (root / name).glob("step-*/index.json")
    return sorted(each for each in json.loads(index.read_text())["tensors"] if "kept." in each)


def main() -> None:
    rank, port, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warned = Warned()
    logging.getLogger("paceline").addHandler(warned)
    found: dict[str, Any] = {}
    with join_group(rank, 2, "127.0.0.1", port, 1, 60.0) as group:
        mesh = open_mesh(MeshSpec(dp=2))
        for case in CASES:
            whole = run(case, root, mesh, group)
            skipping = {"guard": GuardSettings(on_bad_step="skip")}
            spoilt = Case(case.name, case.settings.model_copy(update=skipping), case.rows)
            workload = Spoiling(spoilt.workload())
            found[case.name] = {
                "spoilt": run(spoilt, root, mesh, group, workload=workload)["losses"],
                "kept": tensors_of(root, case.name),
                "resumed": run(case, root, mesh, group, resume=case.name) == whole,
                "without": run(case, root, mesh, group, resume=case.name, keep=False) == whole,
                "losses": whole["losses"],
            }
        whole = run(DRAWN, root, mesh, group)
        found["drawn"] = run(DRAWN, root, mesh, group, resume="drawn") == whole
    found["warned before"] = list(warned.messages)
    if rank == 0:
        alone = run(CASES[1], root, Mesh(MeshSpec()), Group(), resume="carried")
        found["alone"] = alone["losses"]
    # A world of another size: what it would be given, without starting one.
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    from paceline.training.parallel import CompressionMemory

    names = [each.removeprefix("kept.") for each in found["compressed"]["kept"]]
    state = PowerSGDState(None, start_powerSGD_iter=10)
    other = CompressionMemory(state, 0, 3, torch.device("cpu"))
    other.restore({each: torch.ones(2) if "." in each[9:] else torch.tensor(15)
                   for each in names if other.wants(each)})  # fmt: skip
    other.buckets_ready()
    found["of three"] = (state.iter, len(state.error_dict), len(state.q_memory_dict))
    found["warned"] = warned.messages
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
