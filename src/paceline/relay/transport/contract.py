"""The transport contract: a server that sends verified pieces, and streams that pull them.

All implementations pass one conformance suite (tests/relay/test_conformance.py). A transport does
not depend on lanes, plans or sessions; it reports the session's events.
"""

from __future__ import annotations

import logging
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from paceline.errors import AccessDenied, PacelineError, PeerLost, StorageFailed, StorageFull
from paceline.relay.protocol import Extent, LocalFailed, SessionEvent, SourceFailed
from paceline.relay.store import Staging
from paceline.relay.transport.frames import (
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    proof,
    proofs_equal,
)
from paceline.relay.transport.pacing import Pacer, PlannedRate, no_limit
from paceline.relay.transport.tls import TlsSettings
from paceline.schemas import Source

if TYPE_CHECKING:
    from paceline.relay.transport.serving import PeerServer

log = logging.getLogger(__name__)


class TransferCounters:
    """Bytes of one deployment on this node, counted where they pass a socket; thread-safe.

    The callback receives each new count of origin bytes, which starts at ``origin_bytes``.
    """

    def __init__(
        self, origin_bytes: int = 0, on_origin_bytes: Callable[[int], None] = lambda _read: None
    ) -> None:
        self._lock = threading.Lock()
        self._on_origin_bytes = on_origin_bytes
        self.received_bytes = self.refetched_bytes = 0
        self.origin_bytes = origin_bytes

    def add(self, *, received: int = 0, origin: int = 0, refetched: int = 0) -> None:
        with self._lock:
            self.received_bytes += received
            self.origin_bytes += origin
            self.refetched_bytes += refetched
            if origin:
                self._on_origin_bytes(self.origin_bytes)


@dataclass(frozen=True, kw_only=True)
class PullSpec:
    """The parameters of one pull stream; ``stream`` is its number in its session."""

    source: Source
    stream: int
    worker_id: str  # the requesting worker
    staging: Staging
    pacer: Pacer
    counters: TransferCounters
    keepalive_s: float  # how often the source sends WAITING
    report: Callable[[SessionEvent], None]
    planned_rate: PlannedRate = no_limit  # this stream's share of the worker's link

    @property
    def key(self) -> str:
        return self.source.key

    def hello(self) -> Hello:
        """Return this side's greeting, with a fresh nonce."""
        return Hello(
            PROTOCOL_VERSION,
            self.keepalive_s,
            self.staging.manifest.digest,
            secrets.token_bytes(NONCE_BYTES),
            self.worker_id,
        )

    def answer(self, token: str, hello: Hello, nonce: bytes, theirs: bytes) -> bytes:
        """Return this side's proof of ``token``; raises AccessDenied if ``theirs`` is wrong."""
        if not proofs_equal(theirs, proof(token, "server", hello, nonce)):
            where = self.source.address
            raise AccessDenied("the peer does not know the cluster's token", where=where)
        return proof(token, "client", hello, nonce)

    def start(self, target: Callable[[], None]) -> threading.Thread:
        """Start the stream's receiving thread and return it."""
        thread = threading.Thread(target=target, name=f"pull-{self.key[:20]}", daemon=True)
        thread.start()
        return thread

    @contextmanager
    def receiving(self, is_closed: Callable[[], bool]) -> Iterator[None]:
        """Keep the model open, and report the error that ends the stream unless it was closed here.

        Errors of the local disk are reported in any case: they are not the source's fault. So are
        defects in this program: the session would wait for a stream that ended silently.
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


class RevokedWorkers:
    """The workers whose identity is revoked: they are not served, whatever their certificate.

    An issued certificate stays valid and peers do not check revocation lists during a stream, so
    the coordinator names these workers in its heartbeat answers. One thread writes it, all serving
    threads read it.
    """

    def __init__(self) -> None:
        self._workers: frozenset[str] = frozenset()

    def replace(self, workers: Iterable[str]) -> None:
        """Set the revoked workers."""
        found = frozenset(workers)
        if found != self._workers:
            log.warning("refused from now on: %s", ", ".join(sorted(found)) or "none")
            self._workers = found

    def require(self, worker_id: str, admission: str = "") -> None:
        """Raise AccessDenied if ``worker_id`` or ``admission`` is revoked.

        A worker that joins again gets another certificate; the previous admission stays revoked.
        """
        if worker_id in self._workers or admission in self._workers:
            raise AccessDenied(
                "this worker's identity was taken back",
                got=worker_id,
                do="Let it join again with a new join token.",
            )


FindModel = Callable[[str, float], Staging | None]  # (digest, wait_s): the open model, or None yet
OnDiskCorruption = Callable[[str, int], None]  # (digest, piece): a held piece is corrupt on disk


class PullStream(Protocol):
    """One attempt to pull from one source; it reports every event, late ones included."""

    def request(self, extent: Extent) -> None:
        """Request pieces; never blocks for long."""
        ...

    def close(self) -> None:
        """End the stream; returns at once."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServeSpec:
    """The parameters of one server; port 0 takes a free one."""

    host: str
    port: int
    worker_id: str
    find: FindModel
    pacer: Pacer
    on_disk_corruption: OnDiskCorruption = lambda _digest, _piece: None


class Transport(ABC):
    """How pieces travel between workers, plain or with mutual TLS 1.3; both sides prove that they
    hold ``token``. Raises InvalidInput if the credentials are not usable.
    """

    name: ClassVar[str]  # in profiles
    server_type: ClassVar[type[Any]]  # a PeerServer, made of (transport, spec)
    stream_type: ClassVar[type[Any]]  # a PullStream, made of (pull, transport)

    def __init__(self, token: str, tls: TlsSettings | None = None) -> None:
        self.token = token
        self.tls = tls
        self.barred = RevokedWorkers()  # may be changed while servers run
        self.reload()  # checks the files before a stream needs them

    def serve(self, spec: ServeSpec) -> PeerServer[Any]:
        """Bind a port and return its server, not started; raises PortInUse or InvalidInput."""
        server: PeerServer[Any] = self.server_type(self, spec)
        return server

    def pull(self, pull: PullSpec) -> PullStream:
        """Open a stream from a worker and return it at once."""
        stream: PullStream = self.stream_type(pull, self)
        return stream

    @abstractmethod
    def reload(self) -> bool:
        """Read the credential files again, for streams that are opened from now on.

        Returns whether the server uses them too; raises InvalidInput if they are not usable.
        """
