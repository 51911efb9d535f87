"""The model of a step (``paceline.jobs.StepModel``) against measured collectives and steps, on this
machine's cores with gloo.

    python benchmarks/step_times.py [--rounds 5] [--out benchmarks/results]
    python benchmarks/step_times.py --tiny    # runs everything once, for tests

1. Collectives of 2 and 4 ranks at several sizes: latency and bandwidth are fitted to some sizes,
   the others are predicted.
2. Steps of the training loop: rate and overhead of a block are fitted to one rank and three sizes
   of model (memory bandwidth is assumed: at one batch it looks like the rate); overlap to two
   replicas. Other meshes are predicted.

Rounds are interleaved; of each case the shortest time counts, because other programs of a busy
machine only add to it. Four ranks on two cores share them: each has half a core's rate. Prints the
accelerator as a section of a profile, the errors, and one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.layouts.ranks import Job, run_jobs
from paceline.config import AcceleratorSettings, LinkSettings, MeshSettings, TrainingSettings
from paceline.data import Batch
from paceline.jobs import RankGroup, StepModel, read_mesh
from paceline.models import ModelConfig, ModelShape, count_parameters
from paceline.training.loop import Group, Progress, TransformerWorkload, new_optimizer, train
from paceline.training.parallel import MeshSpec, open_mesh, parallelise

CONTEXT, ROWS, WARM = 64, 8, 3
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")
FITTED_BYTES = (4096, 65_536, 1_048_576, 4_194_304)
PREDICTED_BYTES = (16_384, 262_144, 2_097_152)
CORES = os.cpu_count() or 1


def config(width: int, layers: int) -> ModelConfig:
    """A decoder whose heads, feed-forward and vocabulary two ranks can share."""
    return ModelConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=CONTEXT,
    )


MODELS = {"small": config(64, 4), "middle": config(128, 4), "large": config(256, 6)}
FITTED = (*((model, "") for model in MODELS), ("middle", "dp2"))
PREDICTED = (
    *itertools.product(("small", "large"), ("dp2",)),
    *itertools.product(("small", "large"), ("shard2", "tp2", "pp2", "dp2xtp2")),
)
TINY = (("small", "tp2"), ("small", "pp2"), ("small", "dp2xtp2"))


@dataclass
class OneBatch:
    """A stream that returns the same share of a batch again and again."""

    batch: Batch
    context: int = CONTEXT
    global_batch: int = ROWS
    data_wait_s: float = 0.0
    position: dict[str, Any] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)

    def next(self) -> Batch:
        return self.batch


def settings_of(mesh: str, ranks: int, steps: int) -> TrainingSettings:
    """Return the settings of a case; a step has as many rows on each mesh."""
    return TrainingSettings(
        ranks=ranks, steps=steps, batch_sequences=ROWS, mesh=read_mesh(mesh, MeshSettings())
    )


def ranks_of(mesh: str) -> int:
    """Return the ranks that ``mesh`` names."""
    axes = read_mesh(mesh, MeshSettings())
    return max(1, axes.dp) * axes.ranks_per_replica


def steps_job(model: str, mesh: str, steps: int) -> Job:
    """Train ``steps`` steps after warm ones; answer with the seconds of each."""
    ranks = ranks_of(mesh)

    def run() -> list[float]:
        settings = settings_of(mesh, ranks, WARM + steps)
        spread = open_mesh(MeshSpec.of(settings.mesh, ranks))
        workload = TransformerWorkload(MODELS[model])
        parallel = parallelise(workload.build(), spread, settings, workload)
        mine = ROWS // spread.data_world
        tokens = np.random.default_rng(0).integers(0, 256, (mine, CONTEXT + 1), dtype=np.int32)
        batch = Batch(
            step=0,
            inputs_BT=tokens[:, :-1],
            targets_BT=tokens[:, 1:],
            weights_BT=np.ones((mine, CONTEXT), dtype=np.float32),
            rows=range(mine),
            global_tokens=float(ROWS * CONTEXT),
        )
        moments: list[float] = []
        train(
            parallel,
            workload,
            new_optimizer(parallel.modules, settings),
            OneBatch(batch),  # it needs no closing
            settings,
            Group(spread.rank, ranks),
            progress=Progress(),
            on_step=lambda _: moments.append(time.perf_counter()),
        )
        return [after - before for before, after in itertools.pairwise(moments[WARM - 1 :])]

    return Job(f"{model} {mesh}", ranks, run)


def collectives_job(ranks: int, sizes: Sequence[int], repeats: int) -> Job:
    """Run each collective at each size; answer with rank 0's seconds of each."""

    def run() -> dict[str, list[float]]:
        return {
            f"{kind} {size}": [timed(call) for _ in range(repeats)]
            for size in sizes
            for kind, call in calls_of(ranks, size).items()
        }

    return Job(f"collectives {ranks}", ranks, run)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of ``call`` between two barriers' ends."""
    dist.barrier()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def calls_of(ranks: int, size: int) -> dict[str, Callable[[], object]]:
    """Return the collectives of ``size`` bytes; "send" goes there and back, once each."""
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // ranks)

    def there_and_back() -> None:
        if dist.get_rank() < 2:
            first = dist.get_rank() == 0
            for sends in (first, not first):
                (dist.send if sends else dist.recv)(whole, 1 if first else 0)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
        "send": there_and_back,
    }


def predicted_s(kind: str, size: int, ranks: int, link: LinkSettings) -> float:
    """Return what the model says of a collective."""
    group = RankGroup(ranks, 1, link, link)
    calls = {"all_reduce": group.all_reduce, "send": lambda size: 2 * group.send(size)}
    return calls.get(kind, group.all_gather)(size)


def fit(wanted: dict[str, Iterable[float]], error: Callable[[dict[str, float]], float],
        rounds: int = 4) -> dict[str, float]:  # fmt: skip
    """Return the values within ``wanted``'s bounds with the least ``error``, on grids (logarithmic
    where the bounds are above 0) that get finer round by round."""
    bounds = {name: tuple(each) for name, each in wanted.items()}
    best: dict[str, float] = {}
    for _ in range(rounds):
        grids = {name: grid(*bound) for name, bound in bounds.items()}
        points = (
            dict(zip(grids, each, strict=True)) for each in itertools.product(*grids.values())
        )
        best = min(points, key=error)
        for name, values in grids.items():
            at = values.index(best[name])
            bounds[name] = (values[max(0, at - 1)], values[min(len(values) - 1, at + 1)])
    return best


def grid(low: float, high: float, count: int = 12) -> list[float]:
    """Return ``count`` values from ``low`` to ``high``."""
    if low <= 0:
        return [low + (high - low) * at / (count - 1) for at in range(count)]
    return [low * (high / low) ** (at / (count - 1)) for at in range(count)]


def deviation(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the mean of |log(predicted / measured)|."""
    return statistics.fmean(abs(math.log(predicted / measured)) for predicted, measured in pairs)


def step_of(model: str, mesh: str, cpu: AcceleratorSettings) -> StepModel:
    """Return the model of a case's step; ranks that share a core have a part of its rate."""
    ranks = ranks_of(mesh)
    settings = settings_of(mesh, ranks, 1)
    share = max(1.0, ranks / CORES)
    slower = {
        "tflops": {"float32": cpu.tflops["float32"] / share},
        "block_us": cpu.block_us * share,
        "memory_gb_s": cpu.memory_gb_s / share,
    }
    spec = MeshSpec.of(settings.mesh, ranks)
    shape = ModelShape.of(MODELS[model])
    return StepModel(shape, spec, settings, CONTEXT, cpu.model_copy(update=slower))


def cpu_of(link: LinkSettings, **values: float) -> AcceleratorSettings:
    """Return one core of this machine; the products' rate is the peak, all of it achieved."""
    rest = {
        "memory_gb_s": 8.0,
        "memory_gb": 4.0,
        "copy_gb_s": 6.0,
        "per_host": 64,
        "achieved": 1.0,
        "overlap": 0.0,
    }
    tflops = {"float32": values.pop("tflops")}
    return AcceleratorSettings(tflops=tflops, inside=link, between=link, **(rest | values))


def calibrate(
    collectives: dict[tuple[str, int, int], float], steps: dict[tuple[str, str], float]
) -> AcceleratorSettings:
    """Return what fits the fitted sizes and cases."""
    known = {key: each for key, each in collectives.items() if key[1] in FITTED_BYTES}
    alpha_beta = fit(
        {"latency_us": (1, 1e5), "gb_s": (1e-3, 1e2)},
        lambda link: deviation(
            (predicted_s(*key, LinkSettings(**link)), each) for key, each in known.items()
        ),
    )
    link = LinkSettings(**alpha_beta)

    def error(cases: Sequence[tuple[str, str]], values: dict[str, float]) -> float:
        cpu = cpu_of(link, **values)
        return deviation((step_of(*case, cpu).step_s, steps[case]) for case in cases)

    single = [case for case in FITTED if ranks_of(case[1]) == 1]
    alone = fit_one_rank({case: steps[case] for case in single}, link)
    both = [case for case in FITTED if case not in single]
    overlap = fit({"overlap": (0.0, 1.0)}, lambda value: error(both, alone | value))
    return cpu_of(link, **alone, **overlap)


def fit_one_rank(steps: dict[tuple[str, str], float], link: LinkSettings) -> dict[str, float]:
    """Return rate and overhead of a block: least squares of the relative errors, both linear."""
    rows = []
    for case, seconds in steps.items():
        bare = step_of(*case, cpu_of(link, tflops=1.0, block_us=0.0))
        block_s = step_of(*case, cpu_of(link, tflops=1.0, block_us=1.0)).step_s - bare.step_s
        products = bare.seconds["products"]
        rows.append((products / seconds, block_s / seconds, 1 - bare.update_s / seconds))
    table = np.array(rows)
    inverse, block_us = np.linalg.lstsq(table[:, :2], table[:, 2], rcond=None)[0]
    return {"tflops": 1 / max(inverse, 1e-3), "block_us": max(0.0, float(block_us))}


def measure(
    cases: Sequence[tuple[str, str]], sizes: Sequence[int], rounds: int, repeats: int, steps: int
) -> tuple[dict[tuple[str, int, int], float], dict[tuple[str, str], float]]:
    """Return the shortest of each collective's and each case's seconds."""
    jobs = [collectives_job(ranks, sizes, repeats) for ranks in (2, 4)]
    jobs += [steps_job(*case, steps) for case in cases]
    collectives: dict[tuple[str, int, int], list[float]] = {}
    found: dict[tuple[str, str], list[float]] = {}
    # Apart by ranks: ranks without a part in a job would wait for the next one until a timeout.
    gangs = [[each for each in jobs if each.ranks == ranks] for ranks in (1, 2, 4)]
    for gang in gangs * rounds:
        for answer in run_jobs(gang):
            name, _, rest = answer["job"].partition(" ")
            if name != "collectives":
                found.setdefault((name, rest), []).extend(answer["answer"])
                continue
            for key, seconds in answer["answer"].items():
                kind, size = key.split()
                collectives.setdefault((kind, int(size), int(rest)), []).extend(seconds)
    return ({key: min(each) for key, each in collectives.items()},
            {key: min(each) for key, each in found.items()})  # fmt: skip


def errors(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the median and the worst relative error of the rows that were not fitted."""
    found = [abs(each["predicted_s"] / each["measured_s"] - 1) for each in rows]
    return {"median": statistics.median(found), "worst": max(found)}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, fit, predict, print, and write the result where ``--out`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10, help="of a collective, each round")
    parser.add_argument("--steps", type=int, default=12, help="of a case, each round")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    asked = parser.parse_args(arguments)
    cases, sizes = (*FITTED, *PREDICTED), (*FITTED_BYTES, *PREDICTED_BYTES)
    often = (asked.rounds, asked.repeats, asked.steps)
    if asked.tiny:
        cases, sizes, often = (*FITTED, *TINY), (*FITTED_BYTES[:2], *PREDICTED_BYTES[:1]), (1, 2, 2)
    collectives, steps = measure(cases, sizes, *often)
    cpu = calibrate(collectives, steps)
    collective_rows = [
        {
            "kind": kind,
            "bytes": size,
            "ranks": ranks,
            "fitted": size in FITTED_BYTES,
            "measured_s": each,
            "predicted_s": predicted_s(kind, size, ranks, cpu.inside),
        }
        for (kind, size, ranks), each in collectives.items()
    ]
    step_rows = [
        {
            "model": model,
            "parameters": count_parameters(MODELS[model]),
            "mesh": mesh or "single",
            "fitted": (model, mesh) in FITTED,
            "measured_s": each,
            "predicted_s": step_of(model, mesh, cpu).step_s,
            "parts": step_of(model, mesh, cpu).seconds,
        }
        for (model, mesh), each in steps.items()
    ]
    result = {
        "benchmark": "step_times",
        "tiny": asked.tiny,
        "cores": CORES,
        "load": os.getloadavg()[1],
        "accelerator": cpu.model_dump(),
        "collectives": collective_rows,
        "steps": step_rows,
        "collective_errors": errors(each for each in collective_rows if not each["fitted"]),
        "step_errors": errors(each for each in step_rows if not each["fitted"]),
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "step_times.json").write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    print(json.dumps(result))
    return result


def show(result: dict[str, Any]) -> None:
    """Print the section of a profile, and a table of steps."""
    cpu = result["accelerator"]
    print("[hardware.cpu]")
    for name, value in cpu.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{key} = {each:.4g}" for key, each in value.items())
            print(f"{name} = {{ {inner} }}")
        else:
            print(f"{name} = {value:.4g}")
    print(
        f"\n{'kind':<15}{'bytes':>9}{'ranks':>6}{'measured ms':>13}{'predicted ms':>13}{'error':>8}"
    )
    for row in result["collectives"]:
        figures = (row["measured_s"] * 1000, row["predicted_s"] * 1000)
        print(f"{row['kind']:<15}{row['bytes']:>9}{row['ranks']:>6}{figures[0]:>13.2f}"
              f"{figures[1]:>13.2f}{figures[1] / figures[0] - 1:>+8.0%}"
              f"{' fitted' if row['fitted'] else ''}")  # fmt: skip
    print(f"\n{'model':<8}{'mesh':<12}{'measured ms':>12}{'predicted ms':>13}{'error':>8}")
    for row in result["steps"]:
        figures = (row["measured_s"] * 1000, row["predicted_s"] * 1000)
        name = f"{row['model']:<8}{row['mesh']:<12}"
        print(f"{name}{figures[0]:>12.1f}{figures[1]:>13.1f}{figures[1] / figures[0] - 1:>+8.0%}"
              f"{' fitted' if row['fitted'] else ''}")  # fmt: skip
    for name in ("collective_errors", "step_errors"):
        print(name, ", ".join(f"{key} {each:.0%}" for key, each in result[name].items()))


if __name__ == "__main__":
    main(sys.argv[1:])
