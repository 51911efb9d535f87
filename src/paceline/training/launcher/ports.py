"""What the driver needs of launchers, and what it hears of gangs; no process is started here.

A launcher (forkserver.py) reaches us through ``Nodes``: ``paceline.cluster`` implements it on Dask,
``local`` with plain subprocesses; neither is known here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.training.loop.rank_process import STOPPED_EXIT

LONG_PHASES = ("saving", "exporting", "evaluating")

OnLine = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Heard:
    """A line of a node's launcher or ranks, or that the node is lost."""

    worker_id: str
    line: Mapping[str, Any] = field(default_factory=dict)
    lost: str = ""


class Word(Protocol):
    """What ``Nodes`` hear: anything shaped like ``Heard``."""

    @property
    def worker_id(self) -> str: ...
    @property
    def line(self) -> Mapping[str, Any]: ...
    @property
    def lost(self) -> str: ...


class Nodes(Protocol):
    """Nodes that are ours for the time of a job, each with a launcher running."""

    def tell(self, worker_id: str, order: Mapping[str, Any]) -> None:
        """Send an order to the node's launcher; raises WorkerLost where there is none."""

    def tell_all(self, orders: Mapping[str, Mapping[str, Any]]) -> Mapping[str, str]:
        """Send each node its order, all at once; return why, by node, where none was taken."""

    def hear(self, timeout_s: float) -> Sequence[Word]:
        """Return what was said, as soon as something was, and [] after ``timeout_s``."""

    def host(self, worker_id: str) -> str:
        """Return the address that the other nodes reach this one at."""

    def start(self, worker_id: str) -> bool:
        """Start a launcher where none runs (any more); return whether the node could be reached.

        It says "ready" once it is. Within seconds: nothing is heard meanwhile.
        """

    def drop(self, worker_id: str) -> None:
        """End the node's launcher by force: it does not answer."""


class Launcher(Protocol):
    """Gives nodes to a job."""

    def open_nodes(
        self,
        workers: Sequence[str],
        argv: Sequence[str],
        *,
        wait_s: float,
        cancel: threading.Event | None,
        on_wait: Callable[[str], None] | None,
    ) -> AbstractContextManager[Nodes]:
        """Hold ``workers`` with ``argv`` started on each; other gangs' nodes are waited for.

        Raises Conflict naming who holds them after ``wait_s``.
        """


@dataclass(frozen=True)
class GangMember:
    """A rank to start: on which node, as which spare (if one was kept warm for it)."""

    worker_id: str
    rank: int
    env: Mapping[str, str] = field(default_factory=dict)
    spare: str = ""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds that a rank may take: to its first step, for a step, to save, export or evaluate."""

    start_s: float = 120.0
    step_s: float = 60.0
    checkpoint_s: float = 600.0

    def of(self, phase: str) -> float:
        """Return the deadline of ``phase``."""
        if phase == "step":
            return self.step_s
        return self.checkpoint_s if phase in LONG_PHASES else self.start_s


@dataclass(frozen=True, kw_only=True)
class GangResult:
    """How an attempt ended."""

    ok: bool  # every rank ended with 0
    exit_codes: Mapping[int, int | None]  # by rank; negative: by signal; None: lost with its node
    failed_rank: int | None = None
    failed_worker: str | None = None
    reason: str = ""
    hung: bool = False
    stderr: Mapping[int, str] = field(default_factory=dict)  # by rank, its end; stacks are in it
    overdue: bool = False  # told to stop, it did not within its grace, and was killed
    preempted: frozenset[str] = frozenset()  # nodes whose owner takes them back
    lost: frozenset[str] = frozenset()  # nodes that cannot be reached any more
    found_at: float | None = None  # the failure, by the monotonic clock; then the gang was ended

    @property
    def stderr_tail(self) -> str:
        """Return the last words of the rank at fault."""
        return "" if self.failed_rank is None else self.stderr.get(self.failed_rank, "")

    @property
    def stopped(self) -> bool:
        """Return whether the ranks stopped as asked, their state saved."""
        codes = [each for each in self.exit_codes.values() if each is not None]
        return bool(codes) and all(each in (0, STOPPED_EXIT) for each in codes) and not self.ok
