"""Ships events from coordination's outbox to the audit store, on a thread of the leader.

An event stays in the outbox until the audit store has it, and is appended under its number, so
neither a crash in between nor a second leader loses or duplicates one. While the audit store is
unavailable, writes continue until MAX_OUTBOX_EVENTS wait; then coordination refuses them.
"""

from __future__ import annotations

import logging
import threading
import time

from paceline.coordinator.stores.audit import PRUNE_EVENTS, Audit, EventQuery
from paceline.coordinator.stores.coordination import Coordination, Term
from paceline.coordinator.stores.rows import sanitized
from paceline.errors import Conflict, PacelineError, StaleEpoch
from paceline.schemas import Event

log = logging.getLogger(__name__)

BATCH_EVENTS = 500
PAUSE_S = 0.25  # between two rounds: a batch costs both stores one transaction
KEPT_EVENTS = 1_000_000  # in the audit store, by default
PRUNE_S = 3600.0
RETRY_S = 2.0  # between two attempts while the audit store is unavailable


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
            self._coordination.continue_numbering(self._term, self._audit.last())
            self._numbered = True
        box = self._coordination.outbox()
        events = self._coordination.events_after(box.shipped, BATCH_EVENTS)
        if events:
            try:
                self._audit.append(events)
            except Conflict as error:
                log.error("events get new numbers: %s", error)  # noqa: TRY400 (its text says all)
                self._audit.append(self._renumbered(events))
            self._coordination.trim_events(self._term, events[-1].seq)
        elif box.waiting:
            self._coordination.trim_events(self._term, box.last)  # the numbers were skipped
        return len(events)

    def _renumbered(self, events: list[Event]) -> list[Event]:
        """Return the events that the audit store lacks, under numbers that are free in both stores.

        Coordination was restored from an older backup, and continued before it could read the audit
        store's newest number.
        """
        asked = EventQuery(after=events[0].seq - 1, before=events[-1].seq + 1)
        there = self._audit.query(asked)
        missing = [each for each in events if sanitized(each) not in there]
        last = self._audit.last()
        self._coordination.continue_numbering(self._term, last + len(missing))
        return [each.model_copy(update={"seq": last + n}) for n, each in enumerate(missing, 1)]

    def _ship_on(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            try:
                count = self.ship()
                if time.monotonic() >= self._pruned_s + PRUNE_S and (
                    self._audit.prune(self._keep_events) < PRUNE_EVENTS
                ):
                    self._pruned_s = time.monotonic()
            except StaleEpoch as error:
                log.info("the next leader ships events from here on: %s", error)
                return
            except PacelineError as error:
                if self.trouble is None:
                    log.warning("events wait for the audit store: %s", error)
                self.trouble, pause_s = error, RETRY_S
            except Exception:
                # A defect must not stop the shipping silently: log it and continue.
                log.exception("events were not shipped")
                pause_s = RETRY_S
            else:
                if self.trouble is not None:
                    log.info("events are shipped to the audit store again")
                self.trouble, pause_s = None, 0.0 if count == BATCH_EVENTS else PAUSE_S
