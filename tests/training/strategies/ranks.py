"""Two ranks of local SGD, all cases in one launch: each rank prints one JSON object."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import numpy as np
import torch

from paceline.config import GuardSettings, SynchronySettings, TrainingSettings
from paceline.data import Batch
from paceline.models import config_for
from paceline.training.loop import (
    Evaluator,
    Group,
    Progress,
    TransformerWorkload,
    average_replicas,
    join_group,
    new_optimizer,
    train,
)
from paceline.training.parallel import Mesh, MeshSpec, open_mesh, parallelise
from paceline.training.strategies.local_sgd import local_sgd

CONTEXT, ROWS, STEPS = 16, 5, 12  # an odd number of rows: shares are uneven
WORKLOAD = TransformerWorkload(config_for(10_000, CONTEXT))


class Rows:
    """A stream of random rows, a pure function of the step; this rank's share of each."""

    def __init__(self, rank: int, world: int, step: int = 0) -> None:
        self._rank, self._world, self._step = rank, world, step
        self.data_wait_s, self.quarantined = 0.0, {}
        self.global_batch, self.context = ROWS, CONTEXT

    @property
    def position(self) -> dict[str, Any]:
        return {"step": self._step}

    def next(self) -> Batch:
        rows = np.random.default_rng(self._step).integers(0, 256, (ROWS, CONTEXT + 1))
        share = range(ROWS * self._rank // self._world, ROWS * (self._rank + 1) // self._world)
        mine = rows[share.start : share.stop].astype(np.uint8)
        self._step += 1
        return Batch(
            step=self._step - 1,
            inputs_BT=mine[:, :-1],
            targets_BT=mine[:, 1:],
            weights_BT=np.ones((len(mine), CONTEXT), np.float32),
            rows=share,
            global_tokens=float(ROWS * CONTEXT),
        )


class Keeper:
    """A saver that keeps copies, every ``every`` steps."""

    stall_s = 0.0

    def __init__(self, modules: Any, optimizer: torch.optim.Optimizer, every: int) -> None:
        self._modules, self._optimizer, self._every = modules, optimizer, every
        self.kept: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def due(self, step: int, steps: int) -> bool:
        return step % self._every == 0

    def save(self, step: int, position: dict[str, Any], metrics: dict[str, float]) -> bool:
        model = {name: t.clone() for name, t in self._modules[0].state_dict().items()}
        held = json_free(self._optimizer.state_dict())
        self.kept[step] = (model, held)
        return True

    def save_last(self, step: int, position: dict[str, Any], metrics: dict[str, float]) -> None:
        self.save(step, position, metrics)


def json_free(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: json_free(value) for key, value in state.items()}
    return state


def settings_of(**changes: Any) -> TrainingSettings:
    plain = {
        "steps": STEPS,
        "batch_sequences": ROWS,
        "learning_rate": 0.05,
        "warmup_steps": 0,
        "clip_norm": 1e9,
        "optimizer": "sgd",
        "precision": "float64",
        "guard": GuardSettings(spike_factor=1e9),
    }
    return TrainingSettings.model_validate(plain | changes)


def run(
    rank: int, world: int, settings: TrainingSettings, mesh: Mesh, group: Group, **more: Any
) -> tuple[list[float], list[float], Any]:
    """Train; return losses, the flat weights, and the keeper."""
    model = WORKLOAD.build()
    relaxed = settings.synchrony.kind == "local-sgd"
    spread = local_sgd if relaxed else parallelise
    parallel = spread(model, mesh, settings, WORKLOAD)
    optimizer = new_optimizer(parallel.modules, settings)
    keeper = Keeper(parallel.modules, optimizer, more.get("every", 10**9))
    start = 0
    if (state := more.get("state")) is not None:
        start = more["start"]
        parallel.modules[0].load_state_dict(state[0])
        optimizer.load_state_dict(json_free(state[1]))
    if relaxed:
        parallel.follow(optimizer, start)
    losses: list[float] = []
    progress = Progress(step=start)
    train(
        parallel, WORKLOAD, optimizer, Rows(rank, world, start), settings, group,
        progress=progress, saver=keeper, on_step=lambda report: losses.append(report.loss),
    )  # fmt: skip
    apart = flat(parallel.modules[0])
    average_replicas(parallel)
    keeper.save_last(progress.step, {}, {})
    return losses, flat(parallel.modules[0]), (keeper, apart, parallel)


class HeldOutRows(Rows):
    """Rows of other steps, as an evaluation opens them."""

    def __enter__(self) -> HeldOutRows:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def judged(rank: int, mesh: Mesh, group: Group, settings: TrainingSettings) -> dict[str, Any]:
    """Evaluate between two averages, and at one."""
    parallel = local_sgd(WORKLOAD.build(), mesh, settings, WORKLOAD)
    optimizer = new_optimizer(parallel.modules, settings)
    parallel.follow(optimizer, 0)
    rows = Rows(rank, 2)
    for _ in range(2):
        parallel.accumulate([WORKLOAD.inputs(rows.next(), torch.device("cpu"))], 1e-2)
        optimizer.step()
    evaluator = Evaluator(lambda: HeldOutRows(rank, 2, 100), 2 * ROWS)
    own = flat(parallel.modules[0])

    def loss() -> float:
        return evaluator.evaluate(parallel, WORKLOAD, group, torch.device("cpu"))["held_out_loss"]

    between, still_own = loss(), flat(parallel.modules[0]) == own
    parallel.average()
    return {"between": between, "met": loss(), "still own": still_own, "own": own[:50]}


def flat(module: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def main() -> None:
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if rank == 0:
        alone = Mesh(MeshSpec())
        found["alone"] = run(0, 1, settings_of(), alone, Group())[:2]
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(join_group(rank, 2, "127.0.0.1", port, 1, 60.0))
        mesh = open_mesh(MeshSpec(dp=2))
        each_step = SynchronySettings(kind="local-sgd", local_steps=1)
        every_four = SynchronySettings(kind="local-sgd", local_steps=4)
        losses, weights, (_, _, parallel) = run(
            rank, 2, settings_of(synchrony=each_step), mesh, group
        )
        found["one"] = (losses, weights, parallel.bytes_reduced)
        adam = {"optimizer": "adamw", "learning_rate": 3e-3, "synchrony": every_four}
        losses, weights, (_, apart, parallel) = run(
            rank, 2, settings_of(**adam, steps=10), mesh, group
        )
        found["four"] = (losses, weights, apart, parallel.bytes_reduced)

        whole_losses, whole, (keeper, _, _) = run(
            rank, 2, settings_of(**adam), mesh, group, every=6
        )
        state = keeper.kept[6]
        rest_losses, rest, _ = run(
            rank, 2, settings_of(**adam), mesh, group, every=6, state=state, start=6
        )
        found["resumed"] = (whole_losses[6:] == rest_losses, whole == rest)
        found["kept"] = flat_state(state)

        found["judged"] = judged(rank, mesh, group, settings_of(synchrony=every_four))

        parallel = local_sgd(WORKLOAD.build(), mesh, settings_of(synchrony=each_step), WORKLOAD)
        part = WORKLOAD.inputs(Rows(rank, 2).next(), torch.device("cpu"))
        parallel.accumulate([part], 1.0)
        if rank == 1:
            next(parallel.modules[0].parameters()).grad.fill_(float("nan"))
        found["finite"] = bool(np.isfinite(parallel.clip(1.0)))
    sys.stdout.write(json.dumps(found) + "\n")


def flat_state(state: tuple[dict[str, Any], dict[str, Any]]) -> list[float]:
    moments = [value["exp_avg"].flatten() for _, value in sorted(state[1]["state"].items())]
    weights = [tensor.flatten() for _, tensor in sorted(state[0].items())]
    return torch.cat([*weights, *moments]).tolist()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
