"""Small fleets whose times can be worked out by hand."""

from __future__ import annotations

from typing import Any

from paceline.coordinator import CoordinatorSettings
from paceline.schemas import SimulationReport, Topology
from paceline.simulation import Scenario, Timing, simulate

PIECE = 1 << 20
LINK = 80.0  # Mbit/s: 10 MB a second
LINK_BYTES_S = LINK * 1e6 / 8

# Software and disks take no time: only the network is left, as in the closed formulas.
NO_TIME = Timing(
    latency_s=0.0,
    connect_s=0.0,
    hop_s=0.0,
    group_s=0.0,
    commit_s=0.0,
    publish_s=0.0,
    call_s=0.0,
    calls_per_second=1e9,
    prepare_s=0.0,
)
PATIENCE = CoordinatorSettings(beat_s=0.25, deadline_s=1e6)


def scenario(workers: int, pieces: int, **options: Any) -> Scenario:
    """Return ``workers`` that fetch ``pieces`` pieces of 1 MiB over 10 MB/s."""
    return Scenario(
        **{
            "workers": workers,
            "size_bytes": pieces * PIECE,
            "piece_bytes": PIECE,
            "chunk_bytes": 4 * PIECE,
            "link_mbit": LINK,
            "settings": PATIENCE,
            "racks": 1,
            "coalesce_pieces": 1,
            "step_s": 0.0,
            **options,
        }
    )


def timeless(workers: int, pieces: int, topology: Topology, **options: Any) -> SimulationReport:
    """Return the report of a fleet whose software takes no time: what the closed formulas say."""
    return simulate(scenario(workers, pieces, topology=topology, timing=NO_TIME, **options))


def assert_well(report: SimulationReport) -> None:
    """Whoever lives is complete, and no promise was broken (the fuse itself is one)."""
    assert report.violations == ()
    assert report.survivors_complete


def seconds(pieces: float) -> float:
    """Return how long a link takes for ``pieces``."""
    return pieces * PIECE / LINK_BYTES_S
