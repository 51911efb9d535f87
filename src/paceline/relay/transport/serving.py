"""Serves peers independently of the transport: a peer's requests, the order of pieces, admission.

While none of the requested pieces is verified here, the stream stays open, the peer receives a
keep-alive four times per deadline, and sending continues as soon as a piece is verified: that is
cut-through. Unverified pieces are never sent (I3). Also bounds the connections that have not
authenticated yet and the streams of each peer. It does not depend on lanes or plans.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from paceline.errors import AccessDenied, InvalidFrame, NotFound, PeerLost, ServiceUnavailable
from paceline.relay.protocol import Extent, Extents
from paceline.relay.store import RequestQueue, Staging
from paceline.relay.transport.contract import RevokedWorkers, ServeSpec, Transport
from paceline.relay.transport.frames import NONCE_BYTES, Hello, proof, proofs_equal

log = logging.getLogger(__name__)
Caller = TypeVar("Caller")

UNKNOWN_DIGEST_S = 30.0  # a peer may learn of a deployment before this agent does
IDLE_S = 120.0  # without any request
SEND_RUN_PIECES = 16  # sent between two reads of the peer's messages
READ_INTERVAL_S = 0.02  # the longest that a peer's message waits while pieces are sent
# A session has at most 256 pieces in flight and requests them in runs. These bounds keep a peer
# that sends tiny requests below a tenth of a core, and its queue below a megabyte.
MAX_FRAMES_PER_READ = 256  # of one peer; while pieces are sent, each READ_INTERVAL_S
MOST_RUNS = 4096  # separate requested runs of pieces that a peer may wait for
COUNT_INTERVAL_S = 0.2  # the longest between two updates of an edge's byte count in a run


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
        on_disk_corruption: Callable[[str, int], None],
        barred: RevokedWorkers,
        admission: str = "",
    ) -> None:
        self._worker_id = worker_id
        self._reader = reader
        self._staging = staging
        self._keepalive_s = keepalive_s
        self._on_disk_corruption = on_disk_corruption
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
            if frames == MAX_FRAMES_PER_READ and not requests:
                time.sleep(READ_INTERVAL_S)
            frames = 0
            if not requests or time.monotonic() - heard_s >= READ_INTERVAL_S:
                for each in islice(asked(0.0 if requests else IDLE_S), MAX_FRAMES_PER_READ):
                    frames += 1
                    self._hear(each, requests)
                heard_s = time.monotonic()
            if not requests:
                if not frames:
                    raise PeerLost("the peer asks for nothing")
                continue
            more = frames == MAX_FRAMES_PER_READ  # unread messages may request verified pieces
            run = requests.next(
                SEND_RUN_PIECES,
                min(READ_INTERVAL_S, self._keepalive_s) if more else self._keepalive_s,
            )
            if self._staging.closed:
                raise PeerLost("the model is no longer open here")
            if run is not None:
                self._sent.add(run)
                self._since_s = time.monotonic()
                self._staging.edges.sends(self, self._worker_id, self._reader)
                yield run
            elif self._staging.is_abandoned:
                digest = self._staging.manifest.digest
                raise NotFound("this worker gave the model up", got=digest[:12])
            else:
                yield None

    def carried(self, count: int, last: bool) -> None:
        """Count sent bytes of a run; time spent waiting for pieces is excluded from the rate."""
        self._counted += count
        now = time.monotonic()
        if last or now - self._since_s >= COUNT_INTERVAL_S:
            self._staging.edges.sent(self, self._counted, goes_on=not last)
            self._since_s, self._counted = now, 0

    def _hear(self, asked: PeerMessage, requests: RequestQueue) -> None:
        pieces = self._staging.manifest.piece_count
        if isinstance(asked, CorruptReport):
            self._check_reported(asked.piece)
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

    def _check_reported(self, index: int) -> None:
        """Check a piece that a peer reported corrupt: the fault is the wire or this disk."""
        if self._sent.remove(Extent(index, index + 1)) and self._staging.recheck_piece(index):
            digest = self._staging.manifest.digest
            log.error("piece %d of %s rotted on this disk", index, digest[:12])
            self._on_disk_corruption(digest, index)


class PeerServer(ABC, Generic[Caller]):
    """A server of the models that ``spec.find`` returns, until it is stopped; ``end_connection``
    ends a pending handshake.
    """

    address: str  # ``host:port`` as peers reach it

    @abstractmethod
    def start(self) -> None:
        """Start to accept streams."""

    @abstractmethod
    def stop(self) -> None:
        """Close the port and every stream."""

    def __init__(
        self, transport: Transport, spec: ServeSpec, end_connection: Callable[[Caller], None]
    ) -> None:
        self.spec = spec
        self.token, self.barred = transport.token, transport.barred
        self.pending_handshakes: PendingHandshakes[Caller] = PendingHandshakes(end_connection)
        self.slots = StreamSlots()
        self.stopping = threading.Event()

    def challenge(self, hello: Hello) -> tuple[bytes, bytes]:
        """Return a nonce, and the proof that this side holds the token."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce, proof(self.token, "server", hello, nonce)

    def check_proof(self, hello: Hello, nonce: bytes, answer: bytes) -> None:
        """Raise AccessDenied unless ``answer`` proves that the peer holds the token."""
        if not proofs_equal(answer, proof(self.token, "client", hello, nonce)):
            raise AccessDenied("the peer does not know the cluster's token", got=hello.worker_id)

    def await_model(
        self, digest: str, wait_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Staging | None]:
        """Yield None every ``wait_s`` until the model is open here, then yield it."""
        give_up_s = time.monotonic() + UNKNOWN_DIGEST_S
        while (staging := self.spec.find(digest, wait_s)) is None:
            if time.monotonic() > give_up_s or is_over() or self.stopping.is_set():
                raise PeerLost("the model is not deployed here", got=digest[:12])
            yield None
        yield staging

    def stream(
        self, staging: Staging, reader: str, keepalive_s: float, admission: str
    ) -> ServedStream:
        return ServedStream(
            worker_id=self.spec.worker_id,
            reader=reader,
            staging=staging,
            keepalive_s=keepalive_s,
            on_disk_corruption=self.spec.on_disk_corruption,
            barred=self.barred,
            admission=admission,
        )


# Bounds on connections before and after authentication. Any host may connect, and a silent or slow
# one must not take a stream slot from a peer: pending handshakes have slots of their own, and where
# those are full the oldest is closed. A peer authenticates within milliseconds.

PLACES = 128  # pending handshakes; as many as streams, so that a whole fleet may connect at once
HANDSHAKE_TIMEOUT_S = 3.0  # from the connection to the proof
MAX_STREAMS = 128  # of all peers at once
MAX_STREAMS_PER_PEER = 32  # it needs one for each model, and one that just broke


class PendingHandshakes(Generic[Caller]):
    """Connections that have not authenticated yet, each with a deadline; bounded and thread-safe.

    The callback ends a connection from any thread; its serving thread then sees an error.
    """

    def __init__(self, end_connection: Callable[[Caller], None]) -> None:
        self._end_connection = end_connection
        self._lock = threading.Lock()
        self._due_s: dict[Caller, float] = {}

    def enter(self, caller: Caller, now_s: float) -> None:
        """Add ``caller``; where all slots are taken, the oldest connection is ended."""
        with self._lock:
            while len(self._due_s) >= PLACES:
                self._end_oldest()
            self._due_s[caller] = now_s + HANDSHAKE_TIMEOUT_S

    def replace(self, caller: Caller, by: Caller) -> None:
        """Replace ``caller`` by the object that wraps it; if it was ended, end ``by`` too."""
        with self._lock:
            due_s = self._due_s.pop(caller, None)
            if due_s is None:
                self._end_connection(by)
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
                    self._end_connection(caller)
            return min(self._due_s.values(), default=None)

    def close(self) -> None:
        with self._lock:
            while self._due_s:
                self._end_oldest()

    def _end_oldest(self) -> None:
        first = min(self._due_s, key=self._due_s.__getitem__)
        del self._due_s[first]
        self._end_connection(first)


class StreamSlots:
    """Slots of the streams being served, at most ``MAX_STREAMS_PER_PEER`` of one peer."""

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
            if not shared and self._taken[peer] >= MAX_STREAMS_PER_PEER:
                raise ServiceUnavailable(
                    "too many streams of one peer",
                    got=MAX_STREAMS_PER_PEER + 1,
                    wanted=f"at most {MAX_STREAMS_PER_PEER}",
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
