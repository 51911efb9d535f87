"""What the simulator says of runs that were measured: the same fleet, the same faults, when they
were observed. How far it is off is how far its forecasts for large fleets may be.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.testbed import shaping
from paceline.schemas import Topology
from paceline.simulation import Fault, Scenario, Simulation


def replay(run: dict[str, Any]) -> dict[str, Any]:
    """Return what the simulator makes of one run of Paceline, beside what was measured."""
    simulation = Simulation(
        Scenario(
            workers=run["hosts"],
            size_bytes=run["size"],
            link_mbit=run["rate_mbit"] * shaping.GOODPUT,
            racks=run["racks"],
            oversubscription=run["oversubscription"],
            topology=Topology(run["topology"]),
            piece_bytes=run["piece_bytes"],
            chunk_bytes=run["chunk_bytes"],
            seed=run["seed"],
            faults=tuple(Fault(**each) for each in run["faults"]),
        )
    )
    report = simulation.run()
    # As in the race: when the last of those finished who were neither killed nor slowed.
    hosts = simulation.streams.hosts
    published = [hosts[name].published_s for name in run["finished_s"]]
    seconds = max((each for each in published if each is not None), default=0.0)
    return {
        "row": run["row"],
        "hosts": run["hosts"],
        "repeat": run["repeat"],
        "measured_s": run["seconds"],
        "simulated_s": round(seconds, 3),
        "error": round(seconds / run["seconds"] - 1, 4),
        "violations": report.violations,
    }


def replay_all(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return every replay, and the median and worst of how far they are off."""
    replays = [replay(run) for run in runs if "topology" in run]
    errors = [abs(each["error"]) for each in replays]
    return {
        "replays": replays,
        "median_error": round(statistics.median(errors), 4) if errors else None,
        "worst_error": max(errors, default=None),
    }
