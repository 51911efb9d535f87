"""What pruning saves in a sweep: 16 trials with it against the same 16 without.

    python benchmarks/sweep.py --out benchmarks/results

Both search the same space with the same seed: a sampler that draws without looking (``random``)
draws the same trials, so "the same winner" is a comparison of settings, and ``tpe``, which looks at
pruned trials too, is compared by the winner's loss. Jobs are those of ``tests.support.job_queue``:
they follow known loss curves, which cross, and each look at a job makes a sixteenth of its steps.
The cost is the steps that all jobs made, as a share of those without pruning.

Prints a table and one JSON line; ``--tiny`` is the version for tests.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paceline.jobs import Sweep, read_space, run_sweep
from paceline.schemas import SweepShown
from tests.support.job_queue import SPACE, STEPS, Queue

PRUNERS = ("asha", "hyperband", "median")


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


def main(argv: list[str] | None = None) -> int:
    """Compare; print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="a directory for sweep.json")
    options = parser.parse_args(argv)
    samplers, pruners = ("random", "tpe"), PRUNERS
    if options.tiny:
        options.seeds, options.trials = [1], 4
        samplers, pruners = ("random",), ("asha",)
    rows = []
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
