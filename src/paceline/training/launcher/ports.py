"""Ports between driver and launchers: protocols, gang members, deadlines, results.

``Nodes`` carries orders to and messages from each node's launcher (forkserver.py). It is
implemented by ``paceline.cluster`` on Dask and by ``local`` with subprocesses; this module imports
neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.training.loop import STOPPED_EXIT

LineHandler = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class NodeMessage:
    """A message of a node: a line of its launcher or ranks, or the reason why it is ``lost``."""

    worker_id: str
    line: Mapping[str, Any] = field(default_factory=dict)
    lost: str = ""


class NodeMessageLike(Protocol):
    """The message type of ``Nodes``: anything shaped like ``NodeMessage``."""

    @property
    def worker_id(self) -> str: ...
    @property
    def line(self) -> Mapping[str, Any]: ...
    @property
    def lost(self) -> str: ...


class Nodes(Protocol):
    """The nodes held for a job, each with a running launcher."""

    def send_all(self, orders: Mapping[str, Mapping[str, Any]]) -> Mapping[str, str]:
        """Send each node its order in parallel; return the reason by node for each failure."""

    def receive(self, timeout_s: float) -> Sequence[NodeMessageLike]:
        """Return messages as soon as there are any, [] after ``timeout_s``."""

    def host(self, worker_id: str) -> str:
        """Return the address at which other nodes reach this one."""

    def start(self, worker_id: str) -> bool:
        """Start a launcher unless one runs; return whether the node is reachable.

        The launcher sends "ready" later. Returns within seconds, since messages wait meanwhile.
        """

    def drop(self, worker_id: str) -> None:
        """Kill the node's launcher, which does not answer."""


class Launcher(Protocol):
    """Acquires nodes for a job."""

    def open_nodes(
        self,
        workers: Sequence[str],
        argv: Sequence[str],
        *,
        wait_s: float,
        cancel: threading.Event | None,
        on_wait: Callable[[str], None] | None,
        slots: Mapping[str, tuple[int, int]] | None = None,
        work: str = "",
    ) -> AbstractContextManager[Nodes]:
        """Acquire ``workers`` and run ``argv`` on each; wait where other gangs hold them.

        ``slots`` are how many slots of how many are acquired on a worker; one that is not named is
        acquired whole. Two gangs with the same ``work`` never share a worker. Raises Conflict with
        the holder's name after ``wait_s``.
        """


@dataclass(frozen=True)
class GangMember:
    """A rank to start: its node, its environment, and the warm spare to use ("": none)."""

    worker_id: str
    rank: int
    env: Mapping[str, str] = field(default_factory=dict)
    spare: str = ""


@dataclass(frozen=True, kw_only=True)
class GangResult:
    """The result of an attempt."""

    ok: bool  # the attempt succeeded
    exit_codes: Mapping[int, int | None]  # by rank; negative: a signal; None: lost with its node
    failed_rank: int | None = None
    failed_worker: str | None = None
    reason: str = ""
    hung: bool = False
    stderr: Mapping[int, str] = field(default_factory=dict)  # its tail by rank, with stack dumps
    overdue: bool = False  # killed because it did not stop within its grace period
    preempted: frozenset[str] = frozenset()  # nodes with a preemption notice
    lost: frozenset[str] = frozenset()  # unreachable nodes
    found_at: float | None = None  # when the end was detected, monotonic clock

    @property
    def stopped(self) -> bool:
        """Return whether the ranks stopped on request with their state saved."""
        codes = [each for each in self.exit_codes.values() if each is not None]
        return bool(codes) and all(each in (0, STOPPED_EXIT) for each in codes) and not self.ok
