"""Two ranks of the loop in one launch, told as JSON: tests/training/test_loop_ranks.py asks.

    RANK=0 WORLD_SIZE=2 MASTER_PORT=… python -m tests.training.loop_ranks

Rank 1 works slowly for a while, reads an uneven share, and is asked to stop.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from paceline.config import GuardSettings, TrainingSettings
from paceline.training.loop import (
    CPU,
    BadStep,
    Evaluator,
    Group,
    Progress,
    StepReport,
    join_group,
    new_optimizer,
    train,
)
from paceline.training.metrics import StepMetrics
from paceline.training.parallel import Mesh, MeshSpec, Parallel, open_mesh, parallelise
from tests.training.test_loop import CONFIG, ROWS, Batches, Poisoned, batch_of

STEPS = 14
SETTINGS = TrainingSettings(
    ranks=2,
    steps=STEPS,
    batch_sequences=ROWS,  # odd: uneven shares
    warmup_steps=2,
    learning_rate=3e-3,
    precision="float64",
    evaluate_every_steps=7,
    guard=GuardSettings(on_bad_step="roll-back", max_bad_steps=2),
)


@dataclass
class Share(Batches):
    """One rank's rows of the random batches."""

    rank: int = 0
    world_size: int = 1

    def next(self):
        self.number += 1
        return batch_of(self.number - 1).split(self.world_size)[self.rank]


class Slow(nn.Module):
    """A model that takes its time on one rank."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, *args, **kwargs):
        time.sleep(self.seconds)
        return self.inner(*args, **kwargs)


def run(
    group: Group, mesh: Mesh, *, seconds: float = 0.0, bad: frozenset[int] = frozenset(), **how
):
    settings = SETTINGS.model_copy(update=how.pop("changes", {}))
    workload = Poisoned(CONFIG, bad=bad)
    parallel: Parallel = parallelise(
        Slow(workload.build().double(), seconds), mesh, settings, workload
    )
    rank, world = parallel.data_rank, parallel.data_world
    reports: list[StepReport] = []
    progress = train(
        parallel,
        workload,
        new_optimizer(parallel.modules, settings),
        Share(rank=rank, world_size=world),
        settings,
        group,
        progress=Progress(),
        evaluator=Evaluator(lambda: Share(rank=rank, world_size=world), 2 * ROWS),
        step_metrics=StepMetrics.of(settings, parallel, group, CPU, config=CONFIG),
        on_step=reports.append,
        **how,
    )
    return progress, reports


def main() -> None:
    torch.set_num_threads(1)
    rank, port = map(int, sys.argv[1:3])
    _, alone = run(Group(), Mesh(MeshSpec()))
    said: dict[str, object] = {"alone": [each.loss for each in alone]}
    said["alone_held_out"] = [each.held_out for each in alone if each.held_out]
    with join_group(rank, 2, "127.0.0.1", port, 1, 60.0) as group:
        mesh = open_mesh(MeshSpec(dp=2))
        _, both = run(group, mesh, seconds=0.1 if rank == 1 else 0.0)
        said["both"] = [each.loss for each in both]
        said["both_held_out"] = [each.held_out for each in both if each.held_out]
        said["slow"] = [[each.rank, each.factor] for each in both[-1].slow]
        said["figures"] = both[0].figures
        _, parts = run(group, mesh, changes={"accumulation": 3})
        said["parts"] = [each.loss for each in parts]
        stopped, _ = run(group, mesh, should_stop=iter([False] * 3 + [rank == 1]).__next__)
        said["stopped"] = [stopped.step, stopped.stopped]
        try:  # spoilt on rank 1 alone
            run(group, mesh, bad=frozenset({5}) if rank == 1 else frozenset())
        except BadStep as error:
            said["bad"] = [error.step, error.batch, error.reason]
        dist.barrier()
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
