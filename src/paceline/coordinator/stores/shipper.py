"""Ships events from coordination's outbox to the audit store, on a thread of the leader.

An event stays in the outbox until the audit store has it, and is appended under its number, so
neither a crash in between nor a second leader loses or duplicates one. While the audit store is
unavailable, writes continue until OUTBOX_EVENTS wait; then coordination refuses them.
"""

from __future__ import annotations

import logging
import threading
import time

from paceline.coordinator.state.messages import EmitEvent
from paceline.coordinator.stores.audit import cleaned
from paceline.coordinator.stores.contracts import (
    PRUNE_EVENTS,
    Audit,
    Coordination,
    EventQuery,
    Term,
)
from paceline.errors import Conflict, PacelineError, StaleEpoch
from paceline.schemas.events import Event

log = logging.getLogger(__name__)

BATCH_EVENTS = 500
PAUSE_S = 0.25  # between two rounds: a batch costs both stores one transaction
KEPT_EVENTS = 1_000_000  # in the audit store, by default
PRUNE_S = 3600.0
PATIENCE_S = 2.0  # between two attempts while the audit store is unavailable


class OutboxShipper:
    """Ships events during one term; each term gets a new instance."""

    def __init__(
        self,
        coordination: Coordination,
        audit: Audit,
        term: Term,
        *,
        keep_events: int = KEPT_EVENTS,
    ) -> None:
        """``keep_events``: how many the audit store keeps; older ones are deleted each hour."""
        self._coordination, self._audit, self._term = coordination, audit, term
        self._keep_events = keep_events
        self._pruned_s = float("-inf")
        self._numbered = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._ship_on, name="audit-shipper", daemon=True)
        self.trouble: PacelineError | None = None  # why nothing is shipped now

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the thread; the next leader ships the rest."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def ship(self) -> int:
        """Ship one batch and return how many events it had.

        Raises what either store raises; StaleEpoch where the term has ended.
        """
        if not self._numbered:
            self._coordination.number_after(self._term, self._audit.last())
            self._numbered = True
        shipped = self._coordination.outbox().shipped
        events = self._coordination.events_after(shipped, BATCH_EVENTS)
        if events:
            try:
                self._audit.append(events)
            except Conflict as error:
                log.error("events get new numbers: %s", error)  # noqa: TRY400 (its text says all)
                self._tell_again(events)
            self._coordination.trim_events(self._term, events[-1].seq)
        return len(events)

    def _tell_again(self, events: list[Event]) -> None:
        """Ship the events without a conflict; commit the others again, under free numbers.

        Coordination was restored from an older backup, and continued before it could read the audit
        store's newest number.
        """
        self._coordination.number_after(self._term, self._audit.last())
        first, last = events[0].seq, events[-1].seq
        taken = {
            each.seq: each
            for each in self._audit.query(EventQuery(after=first - 1, before=last + 1))
        }
        told = [each for each in events if taken.get(each.seq) not in (None, cleaned(each))]
        again = [
            EmitEvent(each.name, each.at, each.deployment_id, each.worker_id, dict(each.data))
            for each in told
        ]
        self._coordination.commit(self._term, again)
        self._audit.append([each for each in events if each not in told])

    def _ship_on(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            try:
                count = self.ship()
            except StaleEpoch as error:
                log.info("the next leader ships events from here on: %s", error)
                return
            except PacelineError as error:
                self._note(error)
                pause_s = PATIENCE_S
            except Exception:
                # A defect must not stop the shipping silently: log it and continue.
                log.exception("events were not shipped")
                pause_s = PATIENCE_S
            else:
                self._note(None)
                self._prune()
                pause_s = 0.0 if count == BATCH_EVENTS else PAUSE_S

    def _prune(self) -> None:
        if time.monotonic() < self._pruned_s + PRUNE_S:
            return
        try:
            pruned = self._audit.prune(self._keep_events)
        except PacelineError as error:
            log.info("the audit history is shortened later: %s", error)
            pruned = 0
        if pruned < PRUNE_EVENTS:  # otherwise the next round continues
            self._pruned_s = time.monotonic()

    def _note(self, error: PacelineError | None) -> None:
        if error is not None and self.trouble is None:
            log.warning("events wait for the audit store: %s", error)
        elif error is None and self.trouble is not None:
            log.info("events are shipped to the audit store again")
        self.trouble = error
