"""The peer port's asking side: one stream from one source, one thread that receives its pieces.

Bytes go ``recv_into`` a reused block → SHA-256 → file. Only when the digest matches does the piece
count as held, and only then can the server side pass it on (I3). What happened is reported as
events; what to do next is decided elsewhere.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from paceline.errors import (
    AccessDenied,
    InvalidFrame,
    PacelineError,
    PeerLost,
    StorageFailed,
    StorageFull,
)
from paceline.manifest import Piece
from paceline.relay.counters import Counters
from paceline.relay.events import (
    LocalFailed,
    PieceRejected,
    PieceVerified,
    SessionEvent,
    SourceAlive,
    SourceFailed,
)
from paceline.relay.extents import Extent, Extents
from paceline.relay.frames import (
    HEADER,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Kind,
    decode,
    encode,
    encode_hello,
    encode_payload,
    proof,
    same,
)
from paceline.relay.pacing import Pacer
from paceline.relay.sockets import configure, read_frame, receive, send, shut
from paceline.relay.staging import Staging
from paceline.wire.plan import Source

CONNECT_S = 3.0
SILENCE_S = 30.0  # a bound of this thread's own; the session notices much earlier


class PeerStream:
    """Pulls requested pieces from ``source`` into ``staging`` until it fails or is closed."""

    def __init__(
        self,
        *,
        source: Source,
        stream: int,
        worker_id: str,
        token: str,
        staging: Staging,
        pacer: Pacer,
        counters: Counters,
        keepalive_s: float,
        report: Callable[[SessionEvent], None],
    ) -> None:
        self._source = source
        self._stream = stream
        self._token = token
        self._staging = staging
        self._pacer = pacer
        self._counters = counters
        self._report = report
        self._hello = Hello(
            PROTOCOL_VERSION,
            keepalive_s,
            staging.manifest.digest,
            secrets.token_bytes(NONCE_BYTES),
            worker_id,
        )
        self._block = memoryview(bytearray(pacer.block_bytes))
        self._lock = threading.Lock()
        self._asked = Extents()
        self._backlog: list[Extent] = []  # asked before the stream was welcomed
        self._sock: socket.socket | None = None
        self._ready = False
        self._closed = False
        self._told_alive = 0.0
        self.thread = threading.Thread(
            target=self._run, name=f"pull-{source.key[:20]}", daemon=True
        )
        self.thread.start()

    def request(self, extent: Extent) -> None:
        """Ask for pieces; never blocks for long (a request is 12 bytes)."""
        with self._lock:
            self._asked.add(extent)
            if not self._ready:
                self._backlog.append(extent)
                return
            with suppress(PeerLost):  # the receiving thread sees it too, and reports it
                self._send_request(extent)

    def close(self) -> None:
        """End the stream; returns at once."""
        with self._lock:
            self._closed = True
            if self._sock is not None:
                shut(self._sock)

    def _send_request(self, extent: Extent) -> None:
        if self._sock is not None:
            send(self._sock, encode(Kind.REQUEST, extent.first, extent.size))

    def _run(self) -> None:
        key = self._source.key
        try:
            with self._staging.using():
                self._connect()
                while True:
                    self._next_frame()
        except (StorageFull, StorageFailed) as error:
            self._report(LocalFailed(error))
        except PacelineError as error:
            if not self._closed:
                self._report(SourceFailed(key, self._stream, error))
        except OSError as error:
            if not self._closed:
                lost = PeerLost("the connection broke", got=error.strerror or error, where=key)
                self._report(SourceFailed(key, self._stream, lost))
        finally:
            with self._lock:
                if self._sock is not None:
                    self._sock.close()
                    self._sock = None

    def _connect(self) -> None:
        host, _, port = self._source.address.rpartition(":")
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        with self._lock:
            if self._closed:
                sock.close()
                raise PeerLost("closed before it was open")
            self._sock = sock
        configure(sock, self._pacer, max(0.05, self._hello.keepalive_s))
        sock.settimeout(CONNECT_S)
        sock.connect((host.strip("[]"), int(port)))
        sock.setblocking(True)
        deadline_s = time.monotonic() + CONNECT_S
        send(sock, encode_hello(self._hello))
        _, payload = read_frame(sock, deadline_s, Kind.CHALLENGE)
        nonce, said = payload[:NONCE_BYTES], payload[NONCE_BYTES:]
        if not same(said, proof(self._token, "server", self._hello, nonce)):
            raise AccessDenied(
                "the peer does not know the cluster's token", where=self._source.address
            )
        send(sock, encode_payload(Kind.PROOF, proof(self._token, "client", self._hello, nonce)))
        read_frame(sock, deadline_s, Kind.WELCOME)
        with self._lock:
            self._ready = True
            for extent in self._backlog:
                self._send_request(extent)
            self._backlog.clear()

    def _next_frame(self) -> None:
        sock = self._sock
        if sock is None:
            raise PeerLost("closed")
        raw = bytearray(HEADER.size)
        # An idle stream waits as long as the other side lets it; a busy one is bounded here too.
        receive(sock, memoryview(raw), time.monotonic() + (SILENCE_S if self._asked else 600.0))
        header = decode(raw)
        match header.kind:
            case Kind.PIECE:
                self._take_piece(sock, header.first, header.second)
            case Kind.WAITING:
                self._alive(0.0)
            case Kind.ERROR:
                payload = bytearray(header.payload_bytes)
                receive(sock, memoryview(payload), time.monotonic() + CONNECT_S)
                said = payload.decode("utf-8", "replace")
                raise PeerLost("the peer refused", got=said, where=self._source.key)
            case _:
                raise InvalidFrame("unexpected frame", got=header.kind.name, wanted="PIECE")

    def _take_piece(self, sock: socket.socket, index: int, length: int) -> None:
        staging = self._staging
        with self._lock:
            asked = self._asked.remove(Extent(index, index + 1))
        if not asked or index >= staging.manifest.piece_count:
            raise InvalidFrame("a piece nobody asked for", got=index, where=self._source.key)
        piece = staging.manifest.piece_of(index)
        if length != piece.length:
            raise InvalidFrame("piece of another length", got=length, wanted=piece.length)
        try:
            mine = staging.claim(index)
        except TimeoutError as error:
            raise PeerLost(str(error), where=self._source.key) from error
        matches = False
        try:
            matches = self._receive_piece(sock, piece, mine)
            if mine and matches:
                staging.hold(piece)
        finally:
            if mine and not matches:
                staging.release(index)
        if mine:
            staging.edges.judged(
                self._source.key, self._hello.worker_id, matched=matches, corrupt=not matches
            )
        if matches:
            extent = Extent(index, index + 1)
            self._report(PieceVerified(self._source.key, self._stream, extent))
        else:
            send(sock, encode(Kind.CORRUPT, index))
            self._report(PieceRejected(self._source.key, self._stream, Extent(index, index + 1)))

    def _receive_piece(self, sock: socket.socket, piece: Piece, mine: bool) -> bool:
        """Receive, hash and (where it is ``mine`` to write) write; return whether it is wanted.

        One that is held already is a duplicate: counted and dropped, never written.
        """
        descriptor = self._staging.descriptor(piece.file_index)
        digest, done, length = hashlib.sha256(), 0, piece.length
        deadline_s = time.monotonic() + SILENCE_S
        try:
            while done < length:
                block = self._block[: min(len(self._block), length - done)]
                receive(sock, block, deadline_s, self._alive_now)
                if mine:
                    digest.update(block)
                    self._staging.write(descriptor, block, piece.file_offset + done)
                done += len(block)
                self._pacer.take(len(block))
                if done < length:
                    self._alive(self._hello.keepalive_s)
        finally:
            self._counters.add(received=done)
        matches = not mine or digest.hexdigest() == piece.sha256
        if not (mine and matches):
            self._counters.add(refetched=length)
        return matches

    def _alive_now(self) -> None:
        self._alive(0.0)

    def _alive(self, at_most_every_s: float) -> None:
        now = time.monotonic()
        if now - self._told_alive >= at_most_every_s:
            self._told_alive = now
            self._report(SourceAlive(self._source.key, self._stream))
