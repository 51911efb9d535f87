"""A cluster without servers: one SQLite file is the truth, a lock decides who leads, links break.

Transactions, fencing by epoch and reloading are the real store's; only the election, and who can
reach the store, are played, so that tests decide when a lease runs out and who notices.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from paceline.coordinator import Coordinator, CoordinatorSettings
from paceline.coordinator.leadership import Replica
from paceline.coordinator.ledger import LedgerEntry
from paceline.coordinator.state.messages import Effect, EmitEvent, LoadedState
from paceline.coordinator.stores.contracts import Candidate, Outbox, Term
from paceline.coordinator.stores.sqlite import SqliteCoordination
from paceline.errors import ServiceUnavailable
from paceline.manifest import Manifest
from paceline.schemas.events import Event
from paceline.schemas.records import StageRecord, WorkerProgress


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
    """One replica's way to the cluster: the Coordination contract."""

    backend = "played"
    standbys = True

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.store = SqliteCoordination(cluster.path)
        self.up = True
        self.lapsed = False  # the local clock says that the lease may have run out
        self.lost_answers = 0  # so many commits come to pass, and their answers do not come back
        self.loads = 0
        self.failing_loads = 0

    def _reach(self) -> None:
        if not self.up:
            raise ServiceUnavailable("the store is away", where="played")

    def check(self) -> None:
        self._reach()

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
        self._reach()
        return self.cluster.holder

    def commit(self, term: Term, effects: Iterable[Effect]) -> list[Event]:
        effects = list(effects)
        self._reach()
        told = self.store.commit(term, effects)
        if self.lost_answers:
            self.lost_answers -= 1
            raise ServiceUnavailable("the store did not answer in time", where="played")
        return told

    def load(self, now_s: float) -> LoadedState:
        self._reach()
        self.loads += 1
        if self.failing_loads:
            self.failing_loads -= 1
            raise ServiceUnavailable("the store did not answer in time", where="played")
        return self.store.load(now_s)

    def revision(self) -> int:
        self._reach()
        return self.store.revision() * 1000 + self.cluster.changes

    def wait(self, after: int, timeout_s: float) -> int:
        until_s = time.monotonic() + timeout_s
        while (now := self.revision()) == after and time.monotonic() < until_s:
            time.sleep(0.01)
        return now

    def stage(self, stage: str, input_digest: str) -> StageRecord | None:
        self._reach()
        return self.store.stage(stage, input_digest)

    def ledger(self) -> Iterable[LedgerEntry]:
        self._reach()
        return self.store.ledger()

    def keep_stage(self, term: Term, record: StageRecord, told: EmitEvent) -> list[Event]:
        self._reach()
        return self.store.keep_stage(term, record, told)

    def outbox(self) -> Outbox:
        self._reach()
        return self.store.outbox()

    def events_after(self, seq: int, limit: int) -> list[Event]:
        self._reach()
        return self.store.events_after(seq, limit)

    def trim_events(self, term: Term, seq: int) -> None:
        self.store.trim_events(term, seq)

    def number_after(self, term: Term, seq: int) -> None:
        self.store.number_after(term, seq)

    def close(self) -> None:
        self.store.close()


class Remembered:
    """A progress store that everybody shares; it can be wiped."""

    backend, healthy = "played", True

    def __init__(self) -> None:
        self.parts: dict[tuple[str, str], WorkerProgress] = {}
        self.heard: dict[str, float] = {}

    def put(
        self, parts: Mapping[tuple[str, str], WorkerProgress], beats: Mapping[str, float]
    ) -> None:
        self.parts |= parts
        self.heard |= beats

    def get(self, deployment_id: str) -> dict[str, WorkerProgress]:
        return {
            worker: part for (each, worker), part in self.parts.items() if each == deployment_id
        }

    def beats(self) -> dict[str, float]:
        return dict(self.heard)

    def drop(self, deployment_id: str) -> None:
        for key in [key for key in self.parts if key[0] == deployment_id]:
            del self.parts[key]

    def close(self) -> None:
        pass


class History:
    """An audit store that keeps what it is given."""

    backend = "played"

    def __init__(self) -> None:
        self.events: list[Event] = []

    def check(self) -> None:
        pass

    def append(self, events: Sequence[Event]) -> None:
        self.events += events

    def last(self) -> int:
        return self.events[-1].seq if self.events else 0

    def query(self, **question: object) -> list[Event]:
        return list(self.events)

    def close(self) -> None:
        pass


class Node:
    """One replica: its link, its coordinator, its threads."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        progress: Remembered,
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
            audit=History(),
            fetch_manifest=lambda _: manifest,
            patience=CoordinatorSettings(beat_s=0.2),
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
        self.link.close()

    @property
    def leads(self) -> bool:
        return self.coordinator.term is not None


def until(what: Callable[[], object], why: str, timeout_s: float = 30.0) -> None:
    """Wait for a condition, not for a time."""
    end_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end_s, f"never came: {why}"
        time.sleep(0.01)
