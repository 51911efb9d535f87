"""One rank of one trainer, driven from outside: ours, plain PyTorch, Fabric, Accelerate, Ray Train.

    python benchmarks/peers/trainers.py KIND ADDRESS PARAMETERS CONTEXT BATCH

All train the same model on random bytes with fused AdamW and one thread. A rank connects to ADDRESS
(host:port), says its rank, and then for each line with a number takes so many steps and answers
with the seconds they took: of the clock, and of this process's CPU. RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT are the environment's. Runs in .venv (ours, plain) and in .venv-peers (the others):
imports are each one's own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from paceline.models import ModelShape, config_for, new_model

SILENCE_S = 600.0


@dataclass(frozen=True)
class Load:
    """What is trained."""

    parameters: int
    context: int
    batch: int  # rows of all ranks
    rank: int
    world_size: int

    def model(self) -> nn.Module:
        return new_model(config_for(self.parameters, self.context), 0)

    def tokens(self) -> torch.Tensor:
        rows = self.batch // self.world_size
        generator = torch.Generator().manual_seed(self.rank)
        return torch.randint(0, 256, (rows, self.context + 1), generator=generator)


class Beat:
    """Called after each step; stands still between the pieces of work that are asked for."""

    def __init__(self, address: str, rank: int) -> None:
        host, port = address.rsplit(":", 1)
        self._line = socket.create_connection((host, int(port)), timeout=SILENCE_S).makefile("rw")
        self._say(str(rank))
        self._left = 0
        self._started = self._cpu_s = 0.0

    def __call__(self) -> None:
        if self._left > 1:
            self._left -= 1
            return
        if self._left == 1:
            wall_s = time.perf_counter() - self._started
            self._say(f"{wall_s!r} {time.process_time() - self._cpu_s!r}")
        line = self._line.readline()
        if not line:
            os._exit(0)  # the benchmark is over
        self._left = int(line)
        self._started, self._cpu_s = time.perf_counter(), time.process_time()

    def _say(self, text: str) -> None:
        self._line.write(text + "\n")
        self._line.flush()


def loss_of(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def plain(load: Load, beat: Beat) -> None:
    """The loop that everybody writes first."""
    model: nn.Module = load.model()
    if load.world_size > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens_BT = load.tokens()
    while True:
        beat()
        loss = loss_of(model(tokens_BT[:, :-1]), tokens_BT[:, 1:])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def fabric(load: Load, beat: Beat) -> None:
    """Lightning Fabric, its ranks started for it."""
    from lightning.fabric import Fabric  # type: ignore[import-not-found]
    from lightning.fabric.strategies import DDPStrategy  # type: ignore[import-not-found]

    if load.world_size > 1:
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
        os.environ["GROUP_RANK"] = "0"
        os.environ["TORCHELASTIC_RUN_ID"] = "benchmark"
        run = Fabric(
            accelerator="cpu",
            devices=load.world_size,
            strategy=DDPStrategy(process_group_backend="gloo"),
        )
    else:
        run = Fabric(accelerator="cpu", devices=1)
    run.launch()
    prepared(load, beat, run.setup, run.backward)


def accelerate(load: Load, beat: Beat) -> None:
    """Accelerate, its ranks started for it."""
    from accelerate import Accelerator

    os.environ["ACCELERATE_USE_CPU"] = "true"
    if load.world_size > 1:
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
    run = Accelerator(cpu=True)
    assert run.num_processes == load.world_size
    prepared(load, beat, run.prepare, run.backward)


def prepared(
    load: Load,
    beat: Beat,
    prepare: Callable[..., Any],
    backward: Callable[[torch.Tensor], None],
) -> None:
    """The loop of the peers' documentation: theirs wrap model and optimiser, the rest is plain."""
    model: nn.Module = load.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = prepare(model, optimizer)
    tokens_BT = load.tokens()
    while True:
        beat()
        loss = loss_of(model(tokens_BT[:, :-1]), tokens_BT[:, 1:])
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def ray(load: Load, address: str) -> None:
    """The loop of Ray Train's documentation; Ray starts the ranks."""
    import ray as library  # type: ignore[import-not-found]
    from ray.train import ScalingConfig, get_context  # type: ignore[import-not-found]
    from ray.train.torch import (  # type: ignore[import-not-found]
        TorchConfig,
        TorchTrainer,
        prepare_model,
    )

    sources = os.environ["PYTHONPATH"]
    fields = (load.parameters, load.context, load.batch)

    def loop() -> None:
        torch.set_num_threads(1)
        context = get_context()
        rank = context.get_world_rank()
        mine = Load(*fields, rank=rank, world_size=context.get_world_size())

        def prepare(model: nn.Module, optimizer: object) -> tuple[nn.Module, object]:
            return prepare_model(model), optimizer

        prepared(mine, Beat(address, rank), prepare, torch.autograd.backward)

    library.init(
        num_cpus=load.world_size + 1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}},
    )
    TorchTrainer(
        loop,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=load.world_size),
    ).fit()


def ours(load: Load, beat: Beat) -> None:
    """``paceline.training.loop.loop`` with all that it does: clip, judge, count, tell."""
    import hashlib

    import numpy as np

    from paceline.config import DataSettings, TrainingSettings
    from paceline.data import PlannedStream, Shard
    from paceline.training.loop import (
        Group,
        Progress,
        TransformerWorkload,
        join_group,
        new_optimizer,
        retain_freed_memory,
        train,
    )
    from paceline.training.metrics import StepMetrics, matmul_peak
    from paceline.training.parallel import Mesh, MeshSpec, open_mesh, parallelise

    retain_freed_memory()  # as every rank does (training.loading)
    text = np.random.default_rng(0).integers(0, 255, 4 * load.context * load.batch, dtype=np.uint8)
    digest = hashlib.sha256(text.tobytes()).hexdigest()
    size = len(text)
    shard = Shard(
        split="train",
        sha256=digest,
        bytes=size,
        documents=1,
        text_bytes=size,
        token_count=size,
        lengths_sha256="0" * 64,  # nobody reads the file
    )
    settings = TrainingSettings(
        ranks=load.world_size, steps=10**9, batch_sequences=load.batch, schedule="wsd"
    )
    with contextlib.ExitStack() as stack:
        group, mesh = Group(), Mesh(MeshSpec())
        if load.world_size > 1:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            group = stack.enter_context(
                join_group(load.rank, load.world_size, host, port, 1, SILENCE_S)
            )
            mesh = open_mesh(MeshSpec(dp=load.world_size))
        workload = TransformerWorkload(config_for(load.parameters, load.context))
        parallel = parallelise(workload.build(), mesh, settings, workload)
        stream = stack.enter_context(
            PlannedStream(
                [shard],
                Resident(text.tobytes()),
                DataSettings(),
                context=load.context,
                global_batch=load.batch,
                seed=0,
                rank=parallel.data_rank,
                world_size=parallel.data_world,
            )
        )
        beat()
        train(
            parallel,
            workload,
            new_optimizer(parallel.modules, settings),
            stream,
            settings,
            group,
            progress=Progress(),
            step_metrics=StepMetrics(
                group,
                parallel.modules,
                flops_per_token=ModelShape.of(workload.config).flops_per_token(),
                peak=lambda: matmul_peak("cpu", torch.float32, 1),
            ),
            on_step=lambda _: beat(),
        )


class Resident:
    """A cache of one shard that is there already."""

    def __init__(self, text: bytes) -> None:
        self.quarantined: dict[str, str] = {}
        self._text = text

    def index(self, _: object) -> object:
        import numpy as np

        return np.array([[len(self._text)]], dtype=np.int32)

    def samples(self, _: object) -> object:
        import numpy as np

        from paceline.data.formats import ShardSamples

        key = np.frombuffer(b"random", np.uint8)
        columns = {"tokens": np.frombuffer(self._text, np.uint8), "keys": key}
        ends = {f"{name}.ends": np.array([len(each)]) for name, each in columns.items()}
        return ShardSamples({**columns, **ends}, 1)


def main() -> None:
    """Run one rank (Ray: all of them) until the other side closes the connection."""
    kind, address, *sizes = sys.argv[1:]
    parameters, context, batch = map(int, sizes)
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    load = Load(parameters, context, batch, rank, world_size)
    if kind == "ray":
        ray(load, address)
        return
    runs = {"ours": ours, "plain": plain, "fabric": fabric, "accelerate": accelerate}
    runs[kind](load, Beat(address, rank))


if __name__ == "__main__":
    main()
