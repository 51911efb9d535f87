"""Same losses: every layout learns what one process learns, step for step.

Each layout trains the same tiny transformer on the same packed batches, from the same seed, and its
losses are compared with a single process's: ≤ 1e-10 (relative) in float64; in float32 ≤ 1e-5 over
the first 10 steps and ≤ 1e-4 over all. One 2 x 2 x 2 mesh trains on 8 ranks; meshes of 64 ranks are
built on torch's fake backend. Ranks are forked once and go through one layout after another, with
groups of their own for each.

    python benchmarks/same_losses.py [--quick] [--steps 50] [--only "NAME;NAME"] [--out DIRECTORY]

prints JSON and writes ``same_losses.json`` to ``--out``; exits with 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.data import Batch
from paceline.models import ModelConfig, new_model
from paceline.profile import MeshSettings, TrainingSettings
from paceline.training.mesh import MeshSpec, open_mesh
from paceline.training.parallel import Parallel, parallelise
from paceline.training.relaxed.averaging import Averaged, local_sgd
from paceline.training.workload import Inputs, TransformerWorkload

CONFIG = ModelConfig(
    hidden_size=32,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=24,
)
UNTIED = CONFIG.model_copy(update={"tie_word_embeddings": False})
ROWS, TOKENS, RATE, CLIP = 8, 24, 3e-3, 0.5
UNCLIPPED = 1e9
LIMITS = {"float64": (1e-10, 1e-10), "float32": (1e-5, 1e-4)}  # first 10 steps, all
DEADLINE_S = 1800.0
GROUP_TIMEOUT_S = 301.0  # for ranks that wait while rank 0 does the single runs, or is silent
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """One way to share the work."""

    name: str
    mesh: MeshSettings = field(default_factory=lambda: MeshSettings(dp=1))
    accumulation: int = 1
    recompute: bool = False
    config: ModelConfig = CONFIG
    optimizer: str = "adamw"
    local: bool = False  # local SGD with one local step
    clip: float = CLIP

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.mesh.dp * self.mesh.shard * self.mesh.tp * self.mesh.pp

    @property
    def single(self) -> str:
        """The name of the run in one process that it must equal."""
        return ("untied " if self.config == UNTIED else "") + (
            "single, sgd" if self.optimizer == "sgd" else "single"
        )

    def settings(self, precision: str) -> TrainingSettings:
        """The training settings of this layout."""
        return TrainingSettings(
            ranks=self.ranks,
            batch_sequences=ROWS,
            accumulation=self.accumulation,
            activation_checkpointing=self.recompute,
            precision=precision,
            mesh=self.mesh,
            synchrony={"kind": "local-sgd", "local_steps": 1} if self.local else {},
        )


def mesh(**axes: object) -> MeshSettings:
    """A mesh of one replica unless told otherwise."""
    return MeshSettings.model_validate({"dp": 1} | axes)


SINGLES = (
    Layout("single"),
    Layout("untied single", config=UNTIED),
    Layout("single, sgd", optimizer="sgd", clip=UNCLIPPED),
)
LAYOUTS = (
    Layout("dp2", mesh(dp=2)),
    Layout("shard2", mesh(shard=2)),
    Layout("tp2", mesh(tp=2)),
    Layout("pp2", mesh(pp=2)),
    Layout("dp2 x tp2", mesh(dp=2, tp=2)),
    Layout("shard2 x pp2", mesh(shard=2, pp=2)),
    Layout("dp2 x tp2 x pp2", mesh(dp=2, tp=2, pp=2)),
    Layout("dp2, sgd", mesh(dp=2), optimizer="sgd", clip=UNCLIPPED),
    # Each replica steps alone, then all average: with plain SGD, the same as averaging gradients.
    Layout("local SGD, step 1", mesh(dp=2), optimizer="sgd", clip=UNCLIPPED, local=True),
    Layout("dp3, uneven shares", mesh(dp=3)),
    Layout("dp2 x shard2", mesh(dp=2, shard=2)),
    Layout("shard2 x tp2", mesh(shard=2, tp=2)),
    Layout("tp2 x pp2", mesh(tp=2, pp=2)),
    Layout("dp2 x pp2", mesh(dp=2, pp=2)),
    Layout("shard3, uneven shares, accumulation 2", mesh(shard=3), accumulation=2),
    Layout("tp2, whole sequences", mesh(tp=2, sequence_parallel=False)),
    Layout("pp2, GPipe", mesh(pp=2, schedule="gpipe")),
    Layout("pp2, interleaved", mesh(pp=2, schedule="interleaved")),
    Layout("pp4, 5 microbatches of 8 rows", mesh(pp=4, microbatches=5)),
    Layout("dp2, accumulation 3", mesh(dp=2), accumulation=3),
    Layout("single, accumulation 3", accumulation=3),
    Layout("single, recomputed", recompute=True),
    Layout("shard2 x tp2, recomputed", mesh(shard=2, tp=2), recompute=True),
    Layout("untied tp2 x pp2", mesh(tp=2, pp=2), config=UNTIED),
    Layout(
        "untied shard2 x pp2, interleaved",
        mesh(shard=2, pp=2, schedule="interleaved"),
        config=UNTIED,
    ),
)
QUICK = ("dp2", "shard2", "tp2", "pp2", "shard2 x pp2", "local SGD, step 1")


def batch_of(step: int, share: int = 0, shares: int = 1) -> Batch:
    """One share of global batch ``step``: packed documents, some padding, learnable."""
    generator = np.random.default_rng(step)
    stream = np.cumsum(generator.integers(0, 3, (ROWS, TOKENS + 1)), axis=1) * 7 % 256
    edges = generator.integers(4, TOKENS - 4, ROWS)
    column = np.arange(TOKENS)
    documents = (column >= edges[:, None]).astype(np.int32)
    weights = np.ones((ROWS, TOKENS), np.float32)
    weights[np.arange(ROWS), edges - 1] = 0.0  # across a document's edge
    padding = column >= TOKENS - generator.integers(0, 4, ROWS)[:, None]
    weights[padding], documents[padding] = 0.0, -1
    positions = np.where(documents == 1, column - edges[:, None], column).astype(np.int32)
    rows = range(ROWS * share // shares, ROWS * (share + 1) // shares)
    part = slice(rows.start, rows.stop)
    return Batch(
        step=step,
        inputs_BT=stream[part, :-1].astype(np.uint8),
        targets_BT=stream[part, 1:].astype(np.uint8),
        weights_BT=weights[part],
        rows=rows,
        global_tokens=float(weights.sum()),
        documents_BT=documents[part],
        positions_BT=positions[part],
    )


@dataclass
class Run:
    """A layout on the ranks that joined, ready to take steps."""

    layout: Layout
    settings: TrainingSettings
    spec: MeshSpec
    workload: TransformerWorkload
    parallel: Parallel
    norms: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, layout: Layout, precision: str) -> Run:
        """Open the mesh and spread the model over it."""
        settings = layout.settings(precision)
        spec = MeshSpec.of(settings.mesh, layout.ranks)
        workload = TransformerWorkload(layout.config)
        spread = local_sgd if layout.local else parallelise
        parallel = spread(workload.build(), open_mesh(spec), settings, workload)
        return cls(layout, settings, spec, workload, parallel)

    def parts(self, step: int) -> list[Inputs]:
        """This rank's share of a batch, cut for accumulation."""
        batch = batch_of(step, self.parallel.data_rank, self.parallel.data_world)
        return [self.workload.inputs(each, CPU) for each in batch.split(self.layout.accumulation)]

    def gradients(self, step: int) -> float:
        """Make the gradients of ``step``, clipped, and return the mean loss over all ranks."""
        sums = self.parallel.accumulate(self.parts(step), 1.0 / batch_of(step).global_tokens)
        self.norms.append(self.parallel.clip(self.layout.clip))
        return self.mean(float(sums.loss), sums.weight)

    def mean(self, loss: float, weight: float) -> float:
        """The mean loss over all ranks."""
        both = torch.tensor([loss, weight], dtype=torch.float64)
        if self.spec.world_size > 1:
            dist.all_reduce(both)
        return float(both[0] / both[1])

    def train(self, steps: int) -> list[float]:
        """Take ``steps`` steps and return the mean loss of each."""
        parameters = [each for part in self.parallel.modules for each in part.parameters()]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95))
        if self.layout.optimizer == "sgd":
            optimizer = torch.optim.SGD(parameters, lr=0.3)
        if isinstance(self.parallel, Averaged):
            self.parallel.follow(optimizer, 0)
        found = []
        for step in range(steps):
            found.append(self.gradients(step))
            optimizer.step()
        return found


@dataclass(frozen=True)
class Job:
    """Something that ``ranks`` ranks do together, in a group of their own; rank 0's answer counts.

    ``around`` is entered on each rank meanwhile.
    """

    name: str
    ranks: int
    run: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def layout_job(layout: Layout, precision: str, steps: int) -> Job:
    """Train ``layout`` and answer with losses and gradient norms."""

    def run() -> dict[str, list[float]]:
        its = Run.of(layout, precision)
        return {"losses": its.train(steps), "norms": its.norms}

    return Job(f"{layout.name} {precision}", layout.ranks, run)


def fake_job(spec: MeshSpec, rank: int, backward: bool) -> Job:
    """Build ``spec`` as ``rank`` on the fake backend; what it sends goes nowhere."""

    def run() -> dict[str, object]:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spec.world_size)
        try:
            config = CONFIG.model_copy(
                update={"num_hidden_layers": 8, "num_key_value_heads": 4, "hidden_size": 64}
            )
            axes = {axis: getattr(spec, axis) for axis in ("dp", "shard", "tp", "pp")}
            settings = TrainingSettings(
                ranks=spec.world_size, batch_sequences=8 * spec.data_world, mesh=mesh(**axes)
            )
            workload = TransformerWorkload(config)
            its_mesh = open_mesh(spec)
            parallel = parallelise(new_model(config, 0), its_mesh, settings, workload)
            if backward:
                parallel.accumulate([workload.inputs(batch_of(0), CPU)], 1.0)
            held = [
                (each.to_local() if hasattr(each, "to_local") else each).numel()
                for part in parallel.modules
                for each in part.parameters()
            ]
            return {
                "data_rank": parallel.data_rank,
                "stage": its_mesh.stage,
                "held": sum(held),
                "whole": sum(each.numel() for each in new_model(config, 0).parameters()),
            }
        finally:
            dist.destroy_process_group()

    return Job(f"fake {spec} rank {rank}", 1, run)


def run_jobs(jobs: Sequence[Job], deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
    """Fork as many ranks as the largest job needs, run all jobs, and return what rank 0 answered.

    A job that raises stops the ranks: RuntimeError with the first traceback.
    """
    for name in ("torch.distributed.tensor.parallel", "torch.distributed.pipelining", "sympy"):
        importlib.import_module(name)  # once, not in each rank
    ranks = max(job.ranks for job in jobs)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        port = _free_port()
        children = [
            context.Process(target=_be_rank, args=(rank, port, jobs, out)) for rank in range(ranks)
        ]
        for child in children:
            child.start()
        deadline = time.monotonic() + deadline_s
        try:
            while any(child.is_alive() for child in children):
                failed = any(child.exitcode not in (None, 0) for child in children)
                if failed or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            for child in children:
                child.kill()
                child.join()
        codes = [child.exitcode for child in children]
        if any(codes):
            why = sorted(out.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
            raise RuntimeError(why[0].read_text() if why else f"ranks ended with {codes}")
        return [json.loads(line) for line in (out / "answers").read_text().splitlines()]


def _be_rank(rank: int, port: int, jobs: Sequence[Job], out: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    for number, job in enumerate(jobs):
        if rank >= job.ranks:
            continue
        started = time.perf_counter()
        try:
            if job.ranks > 1:
                its_store = dist.PrefixStore(f"job-{number}", store)
                dist.init_process_group(
                    "gloo",
                    store=its_store,
                    rank=rank,
                    world_size=job.ranks,
                    timeout=timedelta(seconds=GROUP_TIMEOUT_S),
                )
            with job.around():
                answer = job.run()
            if job.ranks > 1:
                dist.barrier()
                dist.destroy_process_group()
        except BaseException:
            (out / f"error-{rank}").write_text(f"{job.name}: {traceback.format_exc()}")
            raise
        if rank == 0:
            seconds = time.perf_counter() - started
            with (out / "answers").open("a") as file:
                file.write(json.dumps({"job": job.name, "answer": answer, "s": seconds}) + "\n")
    # Rank 0 serves the store: it leaves last.
    store.set(f"done-{rank}", "1")
    if rank == 0:
        for other in range(max(job.ranks for job in jobs)):
            store.wait([f"done-{other}"])


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def worst(mine: Sequence[float], single: Sequence[float], steps: int) -> float:
    """The largest relative difference over the first ``steps`` steps."""
    return max(abs(a - b) / abs(b) for a, b in list(zip(mine, single, strict=True))[:steps])


def compare(
    layouts: Sequence[Layout], precision: str, answers: dict[str, Any], steps: int
) -> list[dict[str, Any]]:
    """One row a layout: how far its losses are from those of its single process."""
    rows = []
    for layout in layouts:
        mine = answers[f"{layout.name} {precision}"]["losses"]
        single = answers[f"{layout.single} {precision}"]["losses"]
        first, whole = worst(mine, single, 10), worst(mine, single, steps)
        limits = LIMITS[precision]
        rows.append(
            {
                "layout": layout.name,
                "ranks": layout.ranks,
                "precision": precision,
                "first_10_steps": first,
                "all_steps": whole,
                "first_loss": mine[0],
                "final_loss": mine[-1],
                "met": first <= limits[0] and whole <= limits[1],
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few layouts, four steps")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precisions", default="float64,float32")
    parser.add_argument("--only", default="", help="names of layouts, between semicolons")
    parser.add_argument("--out", type=Path, help="where to write same_losses.json")
    asked = parser.parse_args(argv)
    steps = 4 if asked.quick else asked.steps
    names = QUICK if asked.quick else tuple(filter(None, asked.only.split(";")))
    layouts = [each for each in LAYOUTS if not names or each.name in names]
    precisions = asked.precisions.split(",")
    jobs = [
        layout_job(each, precision, steps)
        for precision in precisions
        for each in (*SINGLES, *layouts)
    ]
    big, staged = MeshSpec(dp=4, shard=4, tp=4), MeshSpec(dp=2, shard=4, tp=2, pp=4)
    jobs += [fake_job(big, 0, True), *(fake_job(staged, rank, False) for rank in (0, 20, 63))]
    started = time.perf_counter()
    found = run_jobs(jobs)
    answers = {each["job"]: each["answer"] for each in found}
    rows = [row for each in precisions for row in compare(layouts, each, answers, steps)]
    result = {
        "steps": steps,
        "rows": rows,
        "meshes_of_64": {name: each for name, each in answers.items() if name.startswith("fake")},
        "clipped_steps": sum(norm > CLIP for norm in answers["single float64"]["norms"])
        if "float64" in precisions
        else None,
        "seconds": time.perf_counter() - started,
        "seconds_by_job": {each["job"]: each["s"] for each in found},
        "met": all(row["met"] for row in rows),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "same_losses.json").write_text(text + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
