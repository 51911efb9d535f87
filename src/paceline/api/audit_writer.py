"""Audit rows for refused changes, and the time each token was last used.

Refusals are recorded at a bounded rate (the next row counts those left out), token uses at most
once an hour. A separate thread commits both. Refusals that cannot be committed (on a standby, or
while the store is unavailable) are logged instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping

from paceline.api.limits import TokenBuckets
from paceline.api.middleware import RefusedCall
from paceline.coordinator import Coordinator, audit_event
from paceline.coordinator.state import EmitEvent, TokensUsed
from paceline.errors import PacelineError
from paceline.schemas import EventName

log = logging.getLogger(__name__)

ROWS_PER_S, ROWS_AT_ONCE = 2.0, 200.0
BATCH = 50
WRITE_S = 0.25
USES_S = 30.0  # between two checks for used tokens
TOKEN_USE_INTERVAL_S = 3600.0  # between two stored times of last use of one token


class AuditWriter:
    """Commits audit rows on its own thread; only ``refused`` is called from the event loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        seen: MutableMapping[str, float],
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._coordinator, self._seen, self._wall = coordinator, seen, wall
        self._rows: deque[EmitEvent] = deque(maxlen=int(ROWS_AT_ONCE))
        self._allowance = TokenBuckets(ROWS_PER_S, ROWS_AT_ONCE)
        self._left_out = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="audit-writer", daemon=True)

    def start(self) -> None:
        """Start the writer thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write what is queued and end the thread."""
        self._stopping.set()
        self._thread.join(timeout=10)

    def refused(self, attempt: RefusedCall) -> None:
        """Queue a refused attempt; never blocks, and the queue is bounded."""
        full = len(self._rows) == self._rows.maxlen
        if full or self._allowance.take("refused", time.monotonic()):
            self._left_out += 1
            return
        outcome = f"{attempt.status} {attempt.code}".strip()
        row = audit_event(attempt.call, EventName.CHANGE_REFUSED, outcome, self._wall())
        if self._left_out:
            row.data["left_out_before"], self._left_out = self._left_out, 0
        self._rows.append(row)

    def _work(self) -> None:
        next_uses_s = time.monotonic() + USES_S
        while not self._stopping.wait(WRITE_S):
            self._write()
            if time.monotonic() >= next_uses_s:
                self._keep_uses()
                next_uses_s = time.monotonic() + USES_S
        self._keep_uses()
        self._write()

    def _write(self) -> None:
        while self._rows:
            batch = [self._rows.popleft() for _ in range(min(BATCH, len(self._rows)))]
            try:
                self._coordinator.commit_audit_events(batch)
            except PacelineError as error:
                for row in batch:
                    log.warning("refused, not in the audit history (%s): %s", error.what, row.data)

    def _keep_uses(self) -> None:
        uses = []
        for token_id, at in list(self._seen.items()):
            record = self._coordinator.tokens.find(token_id)
            if record is None:
                self._seen.pop(token_id, None)  # the coordinator no longer stores this token
            if record is not None and (record.last_used_at or 0.0) + TOKEN_USE_INTERVAL_S <= at:
                uses.append((token_id, at))
        for start in range(0, len(uses), BATCH):
            try:
                self._coordinator.handle(TokensUsed(uses=tuple(uses[start : start + BATCH])))
            except PacelineError as error:
                log.info("when tokens were last used is not kept now: %s", error)
                return
