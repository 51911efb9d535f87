"""The contract of a transport: a server that sends verified pieces, streams that pull them.

Several implementations, one conformance suite (tests/relay/test_conformance.py). A transport knows
no lanes, plans or sessions; it reports what happened as the session's events.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import AccessDenied, PacelineError, PeerLost, StorageFailed, StorageFull
from paceline.relay.protocol.events import LocalFailed, SessionEvent, SourceFailed
from paceline.relay.protocol.extents import Extent
from paceline.relay.store.staging import Staging
from paceline.relay.transport.frames import NONCE_BYTES, PROTOCOL_VERSION, Hello
from paceline.relay.transport.pacing import Pacer, Rate, no_limit
from paceline.schemas.plan import Source

# Bytes of one deployment on this node, counted where they pass a socket.


class Counters:
    """Counts that several byte threads add to; ``covering`` hears of each new count of what was
    read from the origin, which begins at ``origin_bytes``.
    """

    def __init__(
        self, origin_bytes: int = 0, covering: Callable[[int], None] = lambda _read: None
    ) -> None:
        self._lock = threading.Lock()
        self._covering = covering
        self.received_bytes = self.refetched_bytes = 0
        self.origin_bytes = origin_bytes

    def add(self, *, received: int = 0, origin: int = 0, refetched: int = 0) -> None:
        """Add to the counts."""
        with self._lock:
            self.received_bytes += received
            self.origin_bytes += origin
            self.refetched_bytes += refetched
            if origin:
                self._covering(self.origin_bytes)


# One attempt to pull: who asks whom, where the pieces go, and who hears of what happens.

log = logging.getLogger(__name__)

Report = Callable[[SessionEvent], None]


@dataclass(frozen=True, kw_only=True)
class Pull:
    """What every transport needs to know of a stream; ``stream`` is its number in its session."""

    source: Source
    stream: int
    worker_id: str  # who asks
    staging: Staging
    pacer: Pacer
    counters: Counters
    keepalive_s: float  # how often the source says that it waits
    report: Report
    portion: Rate = no_limit  # of this worker's link

    @property
    def key(self) -> str:
        """Return what identifies the source."""
        return self.source.key

    def hello(self) -> Hello:
        """Return how this side introduces itself, with a nonce of its own."""
        return Hello(
            PROTOCOL_VERSION,
            self.keepalive_s,
            self.staging.manifest.digest,
            secrets.token_bytes(NONCE_BYTES),
            self.worker_id,
        )

    def start(self, target: Callable[[], None]) -> threading.Thread:
        """Return the stream's receiving thread, begun."""
        thread = threading.Thread(target=target, name=f"pull-{self.key[:20]}", daemon=True)
        thread.start()
        return thread

    @contextmanager
    def receiving(self, is_closed: Callable[[], bool]) -> Iterator[None]:
        """Keep the model open, and report what ends the stream, unless we closed it ourselves.

        What our own disk refuses is told of in any case: it is no fault of the source. So is a
        defect of ours: a stream that ended without a word would be waited for.
        """
        try:
            with self.staging.using():
                yield
        except (StorageFull, StorageFailed) as error:
            self.report(LocalFailed(error))
        except PacelineError as error:
            if not is_closed():
                self.report(SourceFailed(self.key, self.stream, error))
        except OSError as error:
            if not is_closed():
                got = error.strerror or error
                lost = PeerLost("the connection broke", got=got, where=self.key)
                self.report(SourceFailed(self.key, self.stream, lost))
        except Exception as error:
            log.exception("the stream from %s broke", self.key)
            lost = PeerLost("the stream broke", got=repr(error), where=self.key)
            self.report(SourceFailed(self.key, self.stream, lost))


# Workers whose identity was taken back: they are served no more, whatever their certificate says.
#
# A certificate cannot be called back, and nobody reads revocation lists in the middle of a stream;
# so the coordinator names these workers in its answers to beats. It knows no transport.


class Barred:
    """Written by the thread that hears the coordinator, read by each that serves a peer."""

    def __init__(self) -> None:
        self._workers: frozenset[str] = frozenset()

    def replace(self, workers: Iterable[str]) -> None:
        """Bar these workers and nobody else, from now on."""
        found = frozenset(workers)
        if found != self._workers:
            log.warning("served no more: %s", ", ".join(sorted(found)) or "nobody is barred")
            self._workers = found

    def require(self, worker_id: str, admission: str = "") -> None:
        """Raise AccessDenied where ``worker_id`` is barred, or what ``admission`` names.

        A worker that was let in again has another certificate; the one before stays barred.
        """
        if worker_id in self._workers or admission in self._workers:
            raise AccessDenied(
                "this worker's identity was taken back",
                got=worker_id,
                do="Let it join again with a new join token.",
            )


Find = Callable[[str, float], Staging | None]  # (digest, wait_s): the open model, or None yet
Rotten = Callable[[str, int], None]  # (digest, piece): a piece of ours rotted on this disk


class Server(Protocol):
    """Serves what ``find`` returns, until it is stopped."""

    @property
    def address(self) -> str:
        """Return ``host:port`` as peers reach it."""
        ...

    def start(self) -> None:
        """Begin to accept streams."""
        ...

    def stop(self) -> None:
        """Close the port and every stream."""
        ...


class PullStream(Protocol):
    """One attempt to pull from one source; what happens is reported, late news included."""

    def request(self, extent: Extent) -> None:
        """Ask for pieces; never blocks for long."""
        ...

    def close(self) -> None:
        """End the stream; returns at once."""
        ...


class Transport(Protocol):
    """How pieces travel between workers."""

    @property
    def name(self) -> str:
        """Return what profiles call it."""
        ...

    @property
    def barred(self) -> Barred:
        """Return whom its servers serve no more; may be changed while they run."""
        ...

    def serve(
        self,
        *,
        host: str,
        port: int,
        worker_id: str,
        find: Find,
        pacer: Pacer,
        on_rotten: Rotten,
    ) -> Server:
        """Bind a port and return its server, not yet started; raises PortInUse or InvalidInput."""
        ...

    def pull(self, pull: Pull) -> PullStream:
        """Open a stream from a worker and return it at once."""
        ...

    def reload(self) -> bool:
        """Use the credentials' files as they are now, for what is opened from now on.

        Returns whether that is so for the server too; raises InvalidInput where they are not good.
        """
        ...
