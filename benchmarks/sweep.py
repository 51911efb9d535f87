"""What pruning saves in a sweep: 16 trials with it against the same 16 without.

    python benchmarks/sweep.py --out benchmarks/results
    python benchmarks/sweep.py --live --out benchmarks/results  # real trainings: an hour

Both search the same space with the same seed: a sampler that draws without looking (``random``)
draws the same trials, so "the same winner" is a comparison of settings, and ``tpe``, which looks at
pruned trials too, is compared by the winner's loss. Jobs are those of ``tests.support.job_queue``:
they follow known loss curves, which cross, and each look at a job makes a sixteenth of its steps.
The cost is the steps that all jobs made, as a share of those without pruning.

``--live`` runs both sweeps on an embedded installation of its own each, so that no trial finds the
result of the other sweep's: `paceline sweep`, one rank a trial, four at once, learning rates drawn
at random, the same seed. A step of a trial that is pruned counts until its ranks have ended.

Prints a table and one JSON line; ``--tiny`` is the version for tests.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.jobs_under_faults import prepare
from paceline.client import CoordinatorClient
from paceline.jobs import Sweep, read_space, run_sweep
from paceline.schemas import SweepShown
from tests.support.job_queue import SPACE, STEPS, Queue
from tests.support.stack import await_registered, installation, paceline, wait_until

PRUNERS = ("asha", "hyperband", "median")
RATES = """
[space."training.learning_rate"]
kind = "float"
low = 1e-6
high = 1e-1
log = true
"""
SETTINGS = ("cluster.link_mbit=1000", "data.max_bytes=400000", "control.flow_starter=prefect")
LIMIT_S = 3600.0  # of a sweep


def ran(directory: Path, parallel: int, **search: Any) -> tuple[SweepShown, int]:
    """Return what a sweep found and the steps that its jobs made."""
    space, queue = directory / "space.toml", Queue()
    queue.a_look = 20
    space.write_text(SPACE)
    sweep = Sweep.of(
        {"name": "-".join(map(str, search.values())), "model_id": "org/m", "version": "1",
         "snapshot_url": "s3://b/d", "space": read_space(space), "parallel": parallel,
         "settings": {"training.steps": STEPS}, **search}
    )  # fmt: skip
    storage = str(directory / "sweeps.sqlite")
    found = run_sweep(sweep, queue, storage, sleep=lambda _: None)  # type: ignore[arg-type]
    return found, queue.steps_made


def row(directory: Path, seed: int, sampler: str, pruner: str, trials: int) -> dict[str, Any]:
    """Return one comparison."""
    given = {"seed": seed, "sampler": sampler, "trials": trials}
    whole, all_steps = ran(directory, 4, **given, pruner="none")
    found, steps = ran(directory, 4, **given, pruner=pruner)
    assert whole.best is not None and found.best is not None
    pruned = [each for each in found.trials if each.state == "pruned"]
    return {
        "seed": seed, "sampler": sampler, "pruner": pruner, "trials": trials,
        "pruned": len(pruned), "cost": round(steps / all_steps, 3),
        "same_winner": found.best.parameters == whole.best.parameters,
        "loss": round(found.best.value or 0.0, 4), "loss_whole": round(whole.best.value or 0.0, 4),
    }  # fmt: skip


def ran_live(directory: Path, steps: int, **search: Any) -> dict[str, Any]:
    """Return what a sweep of real trainings found, and the steps that its jobs made."""
    directory.mkdir()
    space = directory / "space.toml"
    space.write_text(RATES)
    with installation(directory / "state", *SETTINGS) as stack:
        await_registered(stack)
        words = ["sweep", "live", "acme/tiny", "1", "--snapshot", prepare(stack, directory)]
        words += ["--space", str(space), "--steps", str(steps), "--ranks", "1", "--json"]
        words += [word for key, value in search.items() for word in (f"--{key}", str(value))]
        began = time.monotonic()
        done = paceline(*words, state=stack.state_dir, timeout_s=LIMIT_S)
        assert done.code == 0, done.err
        seconds, client = time.monotonic() - began, CoordinatorClient.of(stack)
        found = SweepShown.model_validate(done.answer)
        jobs = [each.job_id for each in found.trials]
        wait_until(lambda: all(client.job(e).job.state.is_final for e in jobs), 300, "jobs end")
        made = [sum(use.steps for use in client.job(each).job.usage) for each in jobs]
    assert found.best is not None
    for each, cost in zip(found.trials, made, strict=True):
        rate = each.parameters["training.learning_rate"]
        print(f"{each.number} {each.state} {rate=:.3g} {each.value} {cost} steps", file=sys.stderr)
    states = [each.state for each in found.trials]
    return {
        "steps": sum(made), "seconds": round(seconds), "load": os.getloadavg(),
        "states": {each: states.count(each) for each in sorted(set(states))},
        "winner": found.best.parameters, "loss": found.best.value,
    }  # fmt: skip


def live(directory: Path, steps: int, trials: int) -> dict[str, Any]:
    """Return one comparison of real sweeps."""
    given = {"trials": trials, "parallel": 4, "sampler": "random", "seed": 1}
    whole, pruned = (
        ran_live(directory / each, steps, **given, pruner=each) for each in ("none", "asha")
    )
    return {
        **given, "steps_a_trial": steps,
        "whole": whole, "pruned": pruned, "cost": round(pruned["steps"] / whole["steps"], 3),
        "same_winner": pruned["winner"] == whole["winner"],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Compare; print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--live", action="store_true", help="real trainings, ASHA alone")
    parser.add_argument("--steps", type=int, default=300, help="of each real training")
    parser.add_argument("--out", type=Path, help="a directory for sweep.json")
    options = parser.parse_args(argv)
    samplers, pruners = ("random", "tpe"), PRUNERS
    if options.tiny:
        options.seeds, options.trials = [1], 4
        samplers, pruners = ("random",), ("asha",)
    rows = []
    if options.live:
        with tempfile.TemporaryDirectory() as directory:
            rows = [live(Path(directory), options.steps, options.trials)]
        options.seeds = []
    for seed in options.seeds:
        for sampler in samplers:
            for pruner in pruners:
                with tempfile.TemporaryDirectory() as directory:
                    made = row(Path(directory), seed, sampler, pruner, options.trials)
                rows.append(made)
                print("  ".join(f"{key} {value}" for key, value in made.items()), file=sys.stderr)
    result = {"benchmark": "sweep", "steps": STEPS, "rows": rows}
    print(json.dumps(result))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "sweep.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
