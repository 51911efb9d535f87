"""Same losses: every layout learns what one process learns, step for step.

Each layout trains the same tiny transformer on the same packed batches, from the same seed, and its
losses are compared with a single process's: ≤ 1e-10 (relative) in float64; in float32 ≤ 1e-5 over
the first 10 steps and ≤ 1e-4 over all. One 2 x 2 x 2 mesh trains on 8 ranks; a mesh of 64 ranks is
built, cut and run backward once on torch's fake backend. Ranks are forked once and go through one
layout after another, with groups of their own for each.

    python benchmarks/same_losses.py [--quick] [--steps 50] [--only NAME,NAME] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from paceline.data import Batch
from paceline.models import ModelConfig
from paceline.profile import MeshSettings, TrainingSettings
from paceline.training.mesh import MeshSpec, open_mesh
from paceline.training.parallel import parallelise
from paceline.training.workload import TransformerWorkload

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
LIMITS = {"float64": (1e-10, 1e-10), "float32": (1e-5, 1e-4)}  # first 10 steps, all
DEADLINE_S = 540.0


@dataclass(frozen=True)
class Layout:
    """One way to share the work."""

    name: str
    mesh: MeshSettings = field(default_factory=lambda: MeshSettings(dp=1))
    accumulation: int = 1
    recompute: bool = False
    config: ModelConfig = CONFIG

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.mesh.dp * self.mesh.shard * self.mesh.tp * self.mesh.pp

    def settings(self, precision: str) -> TrainingSettings:
        """The training settings of this layout."""
        return TrainingSettings(
            ranks=self.ranks,
            batch_sequences=ROWS,
            accumulation=self.accumulation,
            activation_checkpointing=self.recompute,
            precision=precision,
            mesh=self.mesh,
        )


def mesh(**axes: object) -> MeshSettings:
    """A mesh of one replica unless told otherwise."""
    return MeshSettings.model_validate({"dp": 1} | axes)


SINGLE = Layout("single")
LAYOUTS = (
    Layout("dp2", mesh(dp=2)),
    Layout("shard2", mesh(shard=2)),
    Layout("tp2", mesh(tp=2)),
    Layout("pp2", mesh(pp=2)),
    Layout("dp2 x tp2", mesh(dp=2, tp=2)),
    Layout("shard2 x pp2", mesh(shard=2, pp=2)),
    Layout("dp2 x tp2 x pp2", mesh(dp=2, tp=2, pp=2)),
    Layout("dp3, uneven shares", mesh(dp=3)),
    Layout("dp2 x shard2", mesh(dp=2, shard=2)),
    Layout("shard2 x tp2", mesh(shard=2, tp=2)),
    Layout("tp2 x pp2", mesh(tp=2, pp=2)),
    Layout("dp2 x pp2", mesh(dp=2, pp=2)),
    Layout("shard3, uneven shares, accumulation 2", mesh(shard=3), accumulation=2),
    Layout("tp2, whole sequences", mesh(tp=2, sequence_parallel=False)),
    Layout("pp2, GPipe", mesh(pp=2, schedule="gpipe")),
    Layout("pp2, interleaved", mesh(pp=2, schedule="interleaved")),
    Layout("pp4, 3 microbatches of 8 rows", mesh(pp=4, microbatches=3)),
    Layout("dp2, accumulation 3", mesh(dp=2), accumulation=3),
    Layout("single, accumulation 3", accumulation=3),
    Layout("single, recomputed", recompute=True),
    Layout("shard2 x tp2, recomputed", mesh(shard=2, tp=2), recompute=True),
)
UNTIED_LAYOUTS = (
    Layout("untied single", config=UNTIED),
    Layout("untied tp2 x pp2", mesh(tp=2, pp=2), config=UNTIED),
    Layout(
        "untied shard2 x pp2, interleaved",
        mesh(shard=2, pp=2, schedule="interleaved"),
        config=UNTIED,
    ),
)


def batch_of(step: int, share: int, shares: int) -> Batch:
    """One share of global batch ``step``: packed documents, some padding, learnable."""
    generator = np.random.default_rng(step)
    stream = np.cumsum(generator.integers(0, 3, (ROWS, TOKENS + 1)), axis=1) * 7 % 256
    edges = generator.integers(4, TOKENS - 4, ROWS)
    column = np.arange(TOKENS)
    documents = (column >= edges[:, None]).astype(np.int32)
    weights = np.ones((ROWS, TOKENS), np.float32)
    weights[np.arange(ROWS), edges - 1] = 0.0  # across a document's edge
    padded = generator.integers(0, 4, ROWS)
    padding = column >= TOKENS - padded[:, None]
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


def losses_of(layout: Layout, precision: str, steps: int) -> list[float]:
    """Train ``layout`` on the ranks that joined, and return the mean loss of each step."""
    settings = layout.settings(precision)
    spec = MeshSpec.of(settings.mesh, layout.ranks)
    its_mesh = open_mesh(spec)
    workload = TransformerWorkload(layout.config)
    parallel = parallelise(workload.build(), its_mesh, settings, workload)
    parameters = [each for module in parallel.modules for each in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95))
    found = []
    for step in range(steps):
        batch = batch_of(step, parallel.data_rank, parallel.data_world)
        parts = [
            workload.inputs(each, torch.device("cpu")) for each in batch.split(layout.accumulation)
        ]
        sums = parallel.accumulate(parts, 1.0 / batch.global_tokens)
        both = torch.tensor([float(sums.loss), sums.weight], dtype=torch.float64)
        if spec.world_size > 1:
            dist.all_reduce(both)
        found.append(float(both[0] / both[1]))
        parallel.clip(CLIP)
        optimizer.step()
    return found


def run_rank(rank: int, port: int, plan: list[tuple[Layout, str]], steps: int, out: Path) -> None:
    """Go through ``plan`` as ``rank``; rank 0 writes each layout's losses to ``out``."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    for number, (layout, precision) in enumerate(plan):
        if rank >= layout.ranks:
            continue
        started = time.perf_counter()
        if layout.ranks > 1:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"layout-{number}", store),
                rank=rank,
                world_size=layout.ranks,
            )
        record: dict[str, object] = {"name": layout.name, "precision": precision}
        try:
            record["losses"] = losses_of(layout, precision, steps)
        except Exception:
            record["error"] = traceback.format_exc()
            traceback.print_exc()
            raise
        finally:
            record["seconds"] = time.perf_counter() - started
            if rank == 0:
                with out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        if layout.ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
    # Rank 0 serves the store: it leaves last.
    store.set(f"done-{rank}", "1")
    if rank == 0:
        for other in range(max(layout.ranks for layout, _ in plan)):
            store.wait([f"done-{other}"])


def run_plan(plan: list[tuple[Layout, str]], steps: int) -> list[dict[str, object]]:
    """Fork as many ranks as the largest layout needs, and return what rank 0 wrote."""
    ranks = max(layout.ranks for layout, _ in plan)
    context = multiprocessing.get_context("fork")  # torch is imported once
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "losses.jsonl"
        port = free_port()
        children = [
            context.Process(target=run_rank, args=(rank, port, plan, steps, out))
            for rank in range(ranks)
        ]
        for child in children:
            child.start()
        deadline = time.monotonic() + DEADLINE_S
        try:
            while any(child.is_alive() for child in children):
                if any(child.exitcode not in (None, 0) for child in children):
                    break
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            for child in children:
                child.kill()
                child.join()
        if any(child.exitcode for child in children):
            sys.exit(f"ranks failed: {[child.exitcode for child in children]}")
        return [json.loads(line) for line in out.read_text().splitlines()]


def free_port() -> int:
    """A port that nobody listens on now."""
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def worst(mine: list[float], single: list[float], steps: int) -> float:
    """The largest relative difference over the first ``steps`` steps."""
    pairs = zip(mine[:steps], single[:steps], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precisions", default="float64,float32")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    steps = 4 if asked.quick else asked.steps
    layouts = [
        each
        for each in (*LAYOUTS, *UNTIED_LAYOUTS)
        if not asked.only or each.name in asked.only.split(";")
    ]
    plan = [
        (each, precision)
        for precision in asked.precisions.split(",")
        for each in (SINGLE, UNTIED_LAYOUTS[0], *layouts)
    ]
    started = time.perf_counter()
    records = run_plan(plan, steps)
    losses = {(each["name"], each["precision"]): each["losses"] for each in records}
    rows = []
    for record in records:
        name, precision = str(record["name"]), str(record["precision"])
        single = losses["untied single" if "untied" in name else "single", precision]
        row = {
            "layout": name,
            "precision": precision,
            "first_10": worst(record["losses"], single, 10),
            "all": worst(record["losses"], single, steps),
            "seconds": record["seconds"],
            "final_loss": record["losses"][-1],
        }
        first, whole = LIMITS[precision]
        row["met"] = row["first_10"] <= first and row["all"] <= whole
        rows.append(row)
        print(json.dumps(row))
    print(f"{time.perf_counter() - started:.1f} s")
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
