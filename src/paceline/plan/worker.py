"""A worker as a planner sees it, and what its plan costs between racks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from paceline.manifest import Manifest
from paceline.wire.plan import Labels, Plan, Source


class Standing(StrEnum):
    """What a worker may be counted on for."""

    LINE = "line"  # feeds others as its place has it
    TAIL = "tail"  # slow, or back with a gap: it is fed, and nobody waits behind it
    QUARANTINED = "quarantined"  # sends corrupt bytes: it is fed, and nobody is told to ask it
    GONE = "gone"  # dead: it keeps its place, so that the others keep theirs, and takes no part


@dataclass(frozen=True, slots=True)
class PlanWorker:
    """One target: where it stands, how fast it is, what it holds already."""

    worker_id: str
    labels: Labels
    address: str  # "host:port" of its peer port
    link_mbit: float
    complete: bool = False  # holds and shows the whole version
    held_pieces: int = 0
    held_chunks: frozenset[int] = frozenset()
    standing: Standing = Standing.LINE
    disk_mbit: float | None = None  # what its disk writes; None: never the bound

    @property
    def source(self) -> Source:
        """Return this worker as a source of pieces."""
        return Source(kind="worker", worker_id=self.worker_id, address=self.address)


def rack_of(worker: PlanWorker) -> tuple[str, str]:
    """Return what names the worker's rack: racks of two zones are two, whatever they are called."""
    return (worker.labels.zone, worker.labels.rack)


def cross_rack_bytes(plan: Plan, workers: Iterable[PlanWorker], manifest: Manifest) -> int:
    """Return how many bytes ``plan`` moves between racks when nobody holds anything yet.

    Bytes from the origin come through the external link and cross no rack here.
    """
    racks = {worker.worker_id: rack_of(worker) for worker in workers}
    ends = [0]
    for chunk in manifest.chunks:
        ends.append(ends[-1] + chunk.size)
    return sum(
        ends[lane.last_chunk + 1] - ends[lane.first_chunk]
        for each in plan.workers
        for lane in each.lanes
        if lane.source.worker_id and racks[lane.source.worker_id] != racks[each.worker_id]
    )
