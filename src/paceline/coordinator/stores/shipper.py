"""Ships events from coordination's outbox to the audit store, on a thread of the leader.

An event waits in the outbox until the audit store has it, and is appended under its number, so
that neither a crash between the two nor a second leader loses or doubles one. An audit store that
is away costs nothing until OUTBOX_EVENTS wait; then coordination refuses writes.
"""

from __future__ import annotations

import logging
import threading

from paceline.coordinator.stores.contracts import Audit, Coordination, Term
from paceline.errors import PacelineError, StaleEpoch

log = logging.getLogger(__name__)

BATCH_EVENTS = 500
PAUSE_S = 0.25  # between two looks: a batch costs both stores one transaction
PATIENCE_S = 2.0  # between two tries while the audit store is away


class Shipper:
    """One term's shipping; a new term gets a new shipper."""

    def __init__(self, coordination: Coordination, audit: Audit, term: Term) -> None:
        self._coordination, self._audit, self._term = coordination, audit, term
        self._numbered = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._ship_on, name="audit-shipper", daemon=True)
        self.trouble: PacelineError | None = None  # why nothing is shipped at the moment

    def start(self) -> None:
        """Begin to ship."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop; what waits is shipped by the next leader."""
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
            self._audit.append(events)
            self._coordination.trim_events(self._term, events[-1].seq)
        return len(events)

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
                # A defect must not stop the shipping for good and unsaid.
                log.exception("events were not shipped")
                pause_s = PATIENCE_S
            else:
                self._note(None)
                pause_s = 0.0 if count == BATCH_EVENTS else PAUSE_S

    def _note(self, error: PacelineError | None) -> None:
        if error is not None and self.trouble is None:
            log.warning("events wait for the audit store: %s", error)
        elif error is None and self.trouble is not None:
            log.info("events are shipped to the audit store again")
        self.trouble = error
