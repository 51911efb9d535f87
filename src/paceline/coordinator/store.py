"""The embedded coordinator's store: one SQLite file, one replica, which leads from the start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.coordinator.messages import Effect, Kept, Observed
from paceline.coordinator.stores.contracts import Candidate
from paceline.coordinator.stores.sqlite import SqliteCoordination
from paceline.wire.events import Event
from paceline.wire.records import StageRecord

SHIP_EVERY = 500  # events; nothing ships them elsewhere here, so they must not wait for that


class CoordinatorStore:
    """A coordination store with the term that this process holds."""

    def __init__(self, path: Path) -> None:
        self._store = SqliteCoordination(path)
        try:
            term = self._store.campaign(Candidate("embedded", ""), lambda: False)
        except BaseException:
            self._store.close()
            raise
        assert term is not None
        self._term = term
        self.leader_epoch = term.epoch
        self._db = self._store._db

    def close(self) -> None:
        """Let the file go."""
        self._store.close()

    def commit(self, effects: Iterable[Effect]) -> list[Event]:
        """Keep everything that ``effects`` ask for, or nothing; return the events with numbers."""
        events = self._store.commit(self._term, effects)
        if events and events[-1].seq % SHIP_EVERY < len(events):
            self._store.trim_events(self._term, events[-1].seq)
        return events

    def load(self, now_s: float) -> Kept:
        """Return everything."""
        return self._store.load(now_s)

    def recent_events(self, count: int) -> list[Event]:
        """Return the newest events, oldest first."""
        return self._store.events_after(max(0, self._store.outbox().last - count), count)

    def stage(self, stage: str, input_digest: str) -> StageRecord | None:
        """Return the ledger's record, or None."""
        return self._store.stage(stage, input_digest)

    def keep_stage(self, record: StageRecord, told: Observed) -> list[Event]:
        """Put ``record`` into the ledger, in place of an older one, and return what to tell."""
        return self._store.keep_stage(self._term, record, told)

    def history(self, **question: Any) -> list[Event]:
        """Return the newest events that fit; see ``Audit.query``."""
        names, limit = question.get("names") or (), question["limit"]
        rows = [e for e in self.recent_events(10_000) if not names or e.name in names]
        rows = [e for e in rows if e.seq > question["after"]]
        return list(reversed(rows))[:limit] if question["newest_first"] else rows[:limit]
