"""What the relay takes at 100, 1,000 and 10,000 workers, simulated: 500 GB over 10 Gbps.

    python benchmarks/scale.py --workers 100 1000 10000 --faults --out benchmarks/results

The production planner, sessions and coordinator under a virtual clock (``paceline.simulation``).
With ``--faults`` each fleet is run again with 5 % of the workers dying (one in five without a
word) and 1 % of all transfers of pieces corrupt. Prints a table, one JSON line, and with ``--out``
writes both and a plot of seconds against workers by topology. ``--tiny`` is the version for tests.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from paceline.schemas import Topology
from paceline.simulation import Scenario, simulate

FAIL, CORRUPT = 0.05, 0.01
GOALS = {  # seconds, nothing failing and with faults; of MISSION.md's last table and issue 3
    100: (404.0, 424.0),
    1_000: (412.0, 440.0),
    10_000: (440.0, 480.0),
}


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write; return 0 when no invariant was violated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--topology", nargs="+", default=["auto"], choices=[*map(str, Topology)])
    parser.add_argument("--bytes", type=float, default=500e9)
    parser.add_argument("--link-mbit", type=float, default=10_000.0)
    parser.add_argument("--racks", type=int, default=0, help="0: 32 workers each")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    if given.tiny:
        given.workers, given.bytes, given.link_mbit = [4, 8], 12e6, 50.0
    rows = []
    for workers in given.workers:
        for topology in given.topology:
            for faults in (False, True) if given.faults else (False,):
                rows.append(measure(given, workers, topology, faults))
                sys.stderr.write(line(rows[-1]) + "\n")
    result = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "rows": rows}
    print(json.dumps(result))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "scale.json").write_text(json.dumps(result, indent=1))
        plot(rows, given.out / "scale.png")
    return 1 if any(row["violations"] for row in rows) else 0


def measure(given: argparse.Namespace, workers: int, topology: str, faults: bool) -> dict[str, Any]:
    """Return one fleet's report, and what simulating it cost."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    report = simulate(
        Scenario(
            workers=workers,
            size_bytes=round(given.bytes),
            link_mbit=given.link_mbit,
            racks=given.racks,
            topology=Topology(topology),
            fail=FAIL if faults else 0.0,
            corrupt=CORRUPT if faults else 0.0,
            seed=given.seed,
        )
    )
    told = report.model_dump(mode="json")
    told["killed"] = len(told["killed"])
    goals = GOALS.get(workers) if given.bytes == 500e9 and given.link_mbit == 10_000 else None
    return {
        **told,
        "asked": topology,
        "faults": faults,
        "goal_seconds": goals[faults] if goals is not None else None,
        "wall_s": round(time.perf_counter() - wall_s, 1),
        "cpu_s": round(time.process_time() - cpu_s, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    goal = f"(goal {row['goal_seconds']:.0f})" if row["goal_seconds"] else ""
    return (
        f"{row['workers']:>6} {row['topology']:<15} {'5 % die' if row['faults'] else '':<8}"
        f"{row['seconds']:>9.2f} s {goal:<11} x{row['ratio']:.4f}"
        f"  plan {row['predicted_seconds']:.2f}  origin x{row['origin_ratio']:.4f}"
        f"  violations {len(row['violations'])}"
        f"  wall {row['wall_s']} s, cpu {row['cpu_s']} s, {row['peak_mb']} MB"
    )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw seconds against workers, a line a topology."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for topology, faults in dict.fromkeys((row["asked"], row["faults"]) for row in rows):
        mine = [row for row in rows if (row["asked"], row["faults"]) == (topology, faults)]
        axes.plot(
            [row["workers"] for row in mine],
            [row["seconds"] for row in mine],
            marker="o",
            linestyle="--" if faults else "-",
            label=f"{topology}, {'5 % die, 1 % corrupt' if faults else 'nothing fails'}",
        )
    axes.axhline(rows[0]["bound_seconds"], color="black", linewidth=0.8, label="bound")
    for faults, marker in ((False, "_"), (True, "x")):
        goals = sorted({(r["workers"], r["goal_seconds"]) for r in rows if r["faults"] == faults})
        goals = [goal for goal in goals if goal[1] is not None]
        if goals:
            what = "with faults" if faults else "nothing failing"
            axes.scatter(*zip(*goals, strict=True), marker=marker, c="grey", label=f"goal, {what}")
    sizes = sorted({row["workers"] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("workers")
    axes.set_ylabel("seconds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
