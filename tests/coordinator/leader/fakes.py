"""A cluster without servers: one SQLite file is the truth, a lock decides who leads, links break.

Transactions, fencing by epoch and reloading are the real store's; only the election, and who can
reach the store, are played, so that tests decide when a lease runs out and who notices.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paceline.coordinator import Coordinator, CoordinatorSettings, Replica
from paceline.coordinator.state import Effect, LoadedState
from paceline.coordinator.stores import Candidate, MemoryProgress, SqliteCoordination, Term
from paceline.errors import ServiceUnavailable
from paceline.manifest import Manifest
from paceline.schemas import Event


class Cluster:
    """The store as everybody would see it, and who holds the lease."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.holder: Term | None = None
        self.changes = 0

    def expire(self) -> None:
        """Have the lease run out; its holder need not know."""
        with self.lock:
            self.holder = None
            self.changes += 1


class Link:
    """One replica's way to the cluster: the rest of the contract is the SQLite store's."""

    backend = "played"
    standbys = True

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.store = SqliteCoordination(cluster.path)
        self.up = True
        self.lapsed = False  # the local clock says that the lease may have expired
        self.lost_answers = 0  # so many commits take effect, and their answers are lost
        self.loads = 0
        self.failing_loads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reached(), name)

    def _reached(self) -> SqliteCoordination:
        if not self.up:
            raise ServiceUnavailable("the store is away", where="played")
        return self.store

    def campaign(self, candidate: Candidate, give_up: Callable[[], bool]) -> Term | None:
        while not give_up():
            with self.cluster.lock:
                if self.up and self.cluster.holder is None:
                    term = self.store.campaign(candidate, lambda: False)
                    self.cluster.holder = term
                    self.cluster.changes += 1
                    self.lapsed = False
                    return term
            time.sleep(0.01)
        return None

    def resign(self, term: Term) -> None:
        with self.cluster.lock:
            if self.up and self.cluster.holder == term:
                self.cluster.holder = None
                self.cluster.changes += 1

    def is_leading(self, term: Term) -> bool:
        return not self.lapsed and self.store.is_leading(term)

    def leader(self) -> Term | None:
        self._reached()
        return self.cluster.holder

    def commit(self, term: Term, effects: Iterable[Effect]) -> list[Event]:
        told = self._reached().commit(term, list(effects))
        if self.lost_answers:
            self.lost_answers -= 1
            raise ServiceUnavailable("the store did not answer in time", where="played")
        return told

    def load(self, now_s: float) -> LoadedState:
        store = self._reached()
        self.loads += 1
        if self.failing_loads:
            self.failing_loads -= 1
            raise ServiceUnavailable("the store did not answer in time", where="played")
        return store.load(now_s)

    def revision(self) -> int:
        return self._reached().revision() * 1000 + self.cluster.changes


class Node:
    """One replica: its link, its coordinator, its threads."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        progress: MemoryProgress,
        manifest: Manifest,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = Link(cluster)
        self.url = f"http://{name}:1"
        self.coordinator = Coordinator(
            self.link,
            progress=progress,
            audit=None,
            resolve_source=lambda url: (url, manifest),
            settings=CoordinatorSettings(beat_s=0.2),
            wall=wall,
            monotonic=monotonic,
        )
        self.replica = Replica(
            self.coordinator, self.link, progress, Candidate(name, self.url), monotonic=monotonic
        )

    def start(self) -> None:
        self.replica.start()

    def stop(self) -> None:
        self.replica.stop()
        self.link.store.close()

    @property
    def leads(self) -> bool:
        return self.coordinator.term is not None


def until(what: Callable[[], object], why: str, timeout_s: float = 30.0) -> None:
    """Wait for a condition, not for a time."""
    end_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end_s, f"never came: {why}"
        time.sleep(0.01)
