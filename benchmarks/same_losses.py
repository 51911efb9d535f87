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
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.layouts.layouts import (
    CLIP,
    CONFIG,
    CPU,
    LAYOUTS,
    SINGLES,
    Layout,
    Run,
    batch_of,
    mesh,
)
from benchmarks.layouts.ranks import Job, run_jobs
from paceline.config import TrainingSettings
from paceline.models import new_model
from paceline.training.loop import TransformerWorkload
from paceline.training.parallel import MeshSpec, open_mesh, parallelise

LIMITS = {"float64": (1e-10, 1e-10), "float32": (1e-5, 1e-4)}  # first 10 steps, all
QUICK = ("dp2", "dp2 x tp2 x pp2", "local SGD, step 1", "pp2", "shard2", "shard2 x pp2", "tp2")


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
