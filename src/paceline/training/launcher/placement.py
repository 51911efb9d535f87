"""Placement of ranks on nodes for the next attempt, given the failures so far.

Pure decisions. An unreachable node is replaced at once and used again when it returns; a node that
fails too often is excluded while others remain. Spares take a lost node's ranks first; then, where
``min_ranks`` allows, the gang continues with fewer ranks; else the other nodes take more ranks.
Failures older than a day are ignored: within a month every machine fails twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.config import TrainingSettings
from paceline.errors import TrainingFailed
from paceline.training.launcher.ports import GangMember

FAILURE_MEMORY_S = 86_400.0  # older failures of a node or a job are ignored


@dataclass(frozen=True)
class Assignment:
    """The assignment of all ranks for the next attempt, each to a node or to a spare there."""

    members: tuple[GangMember, ...]  # without their environment
    reduced: bool  # fewer ranks, or more ranks per node, than with all nodes

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.members)


class NodePool:
    """The nodes of a job, their failures and availability."""

    def __init__(
        self,
        workers: Sequence[str],
        settings: TrainingSettings,
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        """``ranks`` are how many each of ``workers`` holds; without, ``settings`` say it."""
        self.workers = tuple(dict.fromkeys(workers))
        self._settings = settings
        self.failures: Counter[str] = Counter()  # by node
        self._failed_at: dict[str, list[float]] = {}
        self.excluded: set[str] = set()
        self.unreachable: set[str] = set()
        each, count = max(1, settings.ranks_per_node), len(self.workers)
        nodes_of_ranks = [self.workers[rank // each % count] for rank in range(settings.ranks)]
        if ranks:
            nodes_of_ranks = [worker for worker in self.workers for _ in range(ranks[worker])]
        # node of each rank while all nodes are available; those left over are for spares
        self._home_nodes = tuple(nodes_of_ranks[: settings.ranks])

    @property
    def missing(self) -> list[str]:
        """Return the unreachable nodes that are used again once they return."""
        return [
            each for each in self.workers if each in self.unreachable and each not in self.excluded
        ]

    def record_failure(self, worker_id: str, *, lost: bool, now: float = 0.0) -> None:
        """Record a rank's failure on the node, or the node's loss; ``now`` in seconds."""
        self.failures[worker_id] += 1
        known = self._failed_at.setdefault(worker_id, [])
        known[:] = [*(each for each in known if now - each < FAILURE_MEMORY_S), now]
        if lost:
            self.unreachable.add(worker_id)
        if len(known) >= self._settings.guard.failures_per_host:
            self.excluded.add(worker_id)
        if not self.usable:  # a failing node is better than none
            self.excluded.clear()
            self.unreachable.clear()

    def record_preemption(self, worker_id: str) -> None:
        """Record a preemption of the node; it does not count as a failure."""
        self.unreachable.add(worker_id)
        if not self.usable:
            self.unreachable.clear()

    def mark_reachable(self, worker_id: str) -> None:
        """Record that the node is reachable again."""
        self.unreachable.discard(worker_id)

    def forget_old_failures(self, now: float) -> None:
        """Readmit excluded nodes whose failures are old enough to be ignored."""
        most = self._settings.guard.failures_per_host
        for worker_id in list(self.excluded):
            recent = [e for e in self._failed_at.get(worker_id, ()) if now - e < FAILURE_MEMORY_S]
            if len(recent) < most:
                self.excluded.discard(worker_id)

    @property
    def usable(self) -> list[str]:
        """Return the usable nodes: neither excluded nor unreachable."""
        return [
            each
            for each in self.workers
            if each not in self.excluded and each not in self.unreachable
        ]

    def assignment(self, spares: Mapping[str, str]) -> Assignment:
        """Return the assignment of the next attempt; ``spares``: name → node of waiting spares.

        Raises TrainingFailed where fewer ranks remain than ``guard.min_ranks``.
        """
        usable = self.usable
        waiting = {name: at for name, at in spares.items() if at in usable}
        homes: list[str | None] = [each if each in usable else None for each in self._home_nodes]
        free = list(waiting.values())
        homes = [each if each is not None else (free.pop(0) if free else None) for each in homes]
        vacant = homes.count(None)
        floor = self._settings.guard.min_ranks
        if vacant and floor:
            kept = [each for each in homes if each is not None]
            size = self._size(len(kept), floor)
            return Assignment(_members(kept[:size], waiting), reduced=True)
        nodes = iter(usable[number % len(usable)] for number in range(vacant))
        full = [each if each is not None else next(nodes) for each in homes]
        return Assignment(_members(full, waiting), reduced=vacant > 0)

    def spare_nodes(self, count: int) -> list[str]:
        """Return nodes for ``count`` spares, those with the fewest ranks first."""
        usable = self.usable
        load = Counter(each for each in self._home_nodes if each in usable)
        ordered = sorted(usable, key=lambda each: (load[each], -usable.index(each)))
        return [ordered[number % len(ordered)] for number in range(count)]

    def _size(self, available: int, floor: int) -> int:
        unit = self._settings.mesh.ranks_per_replica  # only whole replicas run
        size = available // unit * unit
        if size < max(1, floor):
            raise TrainingFailed(
                "too few ranks are left",
                got=f"{available} (replicas of {unit})",
                wanted=f"at least {floor}, training.guard.min_ranks",
                do="Bring nodes back and run the same job again: it resumes.",
            )
        return size


def _members(homes: Sequence[str], waiting: Mapping[str, str]) -> tuple[GangMember, ...]:
    left = dict(waiting)
    members = []
    for rank, worker in enumerate(homes):
        spare = next((name for name, at in left.items() if at == worker), "")
        left.pop(spare, None)
        members.append(GangMember(worker, rank, spare=spare))
    return tuple(members)


def with_fewer_ranks(settings: TrainingSettings, ranks: int) -> TrainingSettings:
    """Return ``settings`` for fewer ranks: the same global batch, more accumulation steps."""
    if ranks == settings.ranks:
        return settings
    parts = math.ceil(settings.accumulation * settings.ranks / ranks)
    return settings.model_copy(
        update={
            "ranks": ranks,
            "accumulation": min(parts, settings.batch_sequences),
            "mesh": settings.mesh.model_copy(update={"dp": 0}),
        }
    )
