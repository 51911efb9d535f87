"""Serves peers independently of the transport: a peer's requests, the order of pieces, admission.

While none of the requested pieces is verified here, the stream stays open, the peer receives a
keep-alive four times per deadline, and sending continues as soon as a piece is verified: that is
cut-through. Unverified pieces are never sent (I3). Also bounds the connections that have not
authenticated yet and the streams of each peer. It does not depend on lanes or plans.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from paceline.errors import InvalidFrame, NotFound, PeerLost, ServiceUnavailable
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.store.requests import RequestQueue
from paceline.relay.store.staging import Staging
from paceline.relay.transport.contract import RevokedWorkers

log = logging.getLogger(__name__)

UNKNOWN_DIGEST_S = 30.0  # a peer may learn of a deployment before this agent does
IDLE_S = 120.0  # without any request
RUN_PIECES = 16  # sent between two reads of the peer's messages
HEAR_S = 0.02  # the longest that a peer's message waits while pieces are sent
# A session has at most 256 pieces in flight and requests them in runs. These bounds keep a peer
# that sends tiny requests below a tenth of a core, and its queue below a megabyte.
MOST_FRAMES = 256  # of a peer, read every HEAR_S
MOST_RUNS = 4096  # separate requested runs of pieces that a peer may wait for
TALLY_S = 0.2  # the longest between two updates of an edge's byte count while a run is sent


@dataclass(frozen=True, slots=True)
class CorruptReport:
    """A peer's report that the bytes of ``piece`` that it received do not match the digest."""

    piece: int


PeerMessage = Extent | CorruptReport


class ServedStream:
    """One stream to an authenticated peer, ``reader``, of the model in ``staging``; one thread."""

    def __init__(
        self,
        *,
        worker_id: str,
        reader: str,
        staging: Staging,
        keepalive_s: float,
        on_rotten: Callable[[str, int], None],
        barred: RevokedWorkers,
        admission: str = "",
    ) -> None:
        self._worker_id = worker_id
        self._reader = reader
        self._staging = staging
        self._keepalive_s = keepalive_s
        self._on_rotten = on_rotten
        self._barred, self._admission = barred, admission
        self._sent = Extents()  # a peer may report each piece that it was sent once
        self._since_s = time.monotonic()
        self._counted = 0

    def runs(self, asked: Callable[[float], Iterable[PeerMessage]]) -> Generator[Extent | None]:
        """Yield the next run of pieces to send, or None when a keep-alive is due.

        ``asked(wait_s)`` returns the peer's messages and waits up to ``wait_s`` for the first.
        Ends with PeerLost (closed, idle), NotFound (this worker abandoned the model), AccessDenied
        (revoked) or InvalidFrame. A caller that stops early must close the generator.
        """
        try:
            with self._staging.requests() as requests:
                yield from self._runs(asked, requests)
        finally:
            self._staging.edges.rests(self)  # the run that was being sent ended with the stream

    def _runs(
        self, asked: Callable[[float], Iterable[PeerMessage]], requests: RequestQueue
    ) -> Iterator[Extent | None]:
        heard_s, frames = float("-inf"), 0
        while True:
            self._barred.require(self._reader, self._admission)
            if frames == MOST_FRAMES and not requests:
                time.sleep(HEAR_S)
            frames = 0
            if not requests or time.monotonic() - heard_s >= HEAR_S:
                for each in islice(asked(0.0 if requests else IDLE_S), MOST_FRAMES):
                    frames += 1
                    self._hear(each, requests)
                heard_s = time.monotonic()
            if not requests:
                if not frames:
                    raise PeerLost("the peer asks for nothing")
                continue
            more = frames == MOST_FRAMES  # unread messages may request verified pieces
            run = requests.next(
                RUN_PIECES, min(HEAR_S, self._keepalive_s) if more else self._keepalive_s
            )
            if self._staging.closed:
                raise PeerLost("the model is no longer open here")
            if run is not None:
                self._sent.add(run)
                self._since_s = time.monotonic()
                self._staging.edges.sends(self, self._worker_id, self._reader)
                yield run
            elif self._staging.gave_up:
                digest = self._staging.manifest.digest
                raise NotFound("this worker gave the model up", got=digest[:12])
            else:
                yield None

    def carried(self, count: int, last: bool) -> None:
        """Count sent bytes of a run; time spent waiting for pieces is excluded from the rate."""
        self._counted += count
        now = time.monotonic()
        if last or now - self._since_s >= TALLY_S:
            self._staging.edges.sent(self, self._counted, goes_on=not last)
            self._since_s, self._counted = now, 0

    def _hear(self, asked: PeerMessage, requests: RequestQueue) -> None:
        pieces = self._staging.manifest.piece_count
        if isinstance(asked, CorruptReport):
            self._look_at(asked.piece)
        elif asked.stop > pieces:
            raise InvalidFrame("request beyond the model", got=asked, wanted=pieces)
        elif requests.runs >= MOST_RUNS:
            raise InvalidFrame(
                "too many separate runs of pieces are requested",
                got=requests.runs + 1,
                wanted=f"at most {MOST_RUNS} that are not sent yet",
                where=self._reader,
                do="Request neighbouring pieces together, and fewer ahead of what arrives.",
            )
        else:
            requests.add(asked)

    def _look_at(self, index: int) -> None:
        """Check a piece that a peer reported corrupt: the fault is the wire or this disk."""
        if self._sent.remove(Extent(index, index + 1)) and self._staging.distrust(index):
            digest = self._staging.manifest.digest
            log.error("piece %d of %s rotted on this disk", index, digest[:12])
            self._on_rotten(digest, index)


# Bounds on connections before and after authentication. Any host may connect, and a silent or slow
# one must not take a stream slot from a peer: pending handshakes have slots of their own, and where
# those are full the oldest is closed. A peer authenticates within milliseconds.

PLACES = 128  # pending handshakes; as many as streams, so that a whole fleet may connect at once
WELCOME_S = 3.0  # from the connection to the proof
PEER_STREAMS = 32  # of one peer at once: it needs one for each model, and one that just broke

Caller = TypeVar("Caller")


class PendingHandshakes(Generic[Caller]):
    """Connections that have not authenticated yet, each with a deadline; bounded and thread-safe.

    The callback ends a connection from any thread; its serving thread then sees an error.
    """

    def __init__(self, turn_away: Callable[[Caller], None]) -> None:
        self._turn_away = turn_away
        self._lock = threading.Lock()
        self._due_s: dict[Caller, float] = {}

    def enter(self, caller: Caller, now_s: float) -> None:
        """Add ``caller``; where all slots are taken, the oldest connection is ended."""
        with self._lock:
            while len(self._due_s) >= PLACES:
                self._turn_away_first()
            self._due_s[caller] = now_s + WELCOME_S

    def replace(self, caller: Caller, by: Caller) -> None:
        """Replace ``caller`` by the object that wraps it; if it was ended, end ``by`` too."""
        with self._lock:
            due_s = self._due_s.pop(caller, None)
            if due_s is None:
                self._turn_away(by)
            else:
                self._due_s[by] = due_s

    def leave(self, caller: Caller) -> bool:
        """Remove ``caller``; return False if it was ended meanwhile."""
        with self._lock:
            return self._due_s.pop(caller, None) is not None

    def sweep(self, now_s: float) -> float | None:
        """End connections past their deadline; return the next deadline, or None."""
        with self._lock:
            for caller, due_s in list(self._due_s.items()):
                if due_s <= now_s:
                    del self._due_s[caller]
                    self._turn_away(caller)
            return min(self._due_s.values(), default=None)

    def close(self) -> None:
        """End every pending connection."""
        with self._lock:
            while self._due_s:
                self._turn_away_first()

    def _turn_away_first(self) -> None:
        first = min(self._due_s, key=self._due_s.__getitem__)
        del self._due_s[first]
        self._turn_away(first)


class StreamSlots:
    """Slots of the streams being served, at most ``PEER_STREAMS`` of one peer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, peer: str, most: int, *, shared: bool = False) -> Iterator[None]:
        """Hold one of ``most`` slots for a stream of ``peer``; raises ServiceUnavailable.

        ``shared``: several peers use this name, so only the total is bounded.
        """
        with self._lock:
            if self._taken.total() >= most:
                raise ServiceUnavailable("too many streams", got=most)
            if not shared and self._taken[peer] >= PEER_STREAMS:
                raise ServiceUnavailable(
                    "too many streams of one peer",
                    got=PEER_STREAMS + 1,
                    wanted=f"at most {PEER_STREAMS}",
                    where=peer,
                    do="Close streams that are not used.",
                )
            self._taken[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[peer] -= 1
                if not self._taken[peer]:
                    del self._taken[peer]
