"""The peer port's serving side: any verified piece to whoever holds the cluster's token.

A thread a connection. Requests queue up; the first requested piece that is verified here is sent
straight from the page cache (``sendfile``), and while none is, the stream is *parked*: it stays
open, says WAITING four times a deadline, and goes on the moment a piece is verified. That is all
of cut-through. Nothing unverified is ever sent (I3). It knows no lanes and no plans.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from paceline.errors import AccessDenied, InvalidFrame, NotFound, PacelineError, PeerLost
from paceline.manifest import Piece
from paceline.relay.extents import Extent, Extents
from paceline.relay.frames import (
    NONCE_BYTES,
    Hello,
    Kind,
    decode_hello,
    encode,
    encode_payload,
    proof,
    same,
)
from paceline.relay.pacing import Pacer
from paceline.relay.sockets import configure, read_frame, send, shut
from paceline.relay.staging import Staging

log = logging.getLogger(__name__)

MAX_STREAMS = 128
HELLO_DEADLINE_S = 5.0
UNKNOWN_DIGEST_S = 30.0  # a peer may hear of a deployment before this agent does
IDLE_S = 120.0  # without any request
FRAME_DEADLINE_S = 10.0
TALLY_S = 0.2  # how old an edge's count may be while a piece is being sent
RUN_PIECES = 16  # sent between two looks at what the peer asks


class PeerServer:
    """Listens on ``host:port`` and serves what ``find(digest, wait_s)`` returns."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        worker_id: str,
        token: str,
        find: Callable[[str, float], Staging | None],
        pacer: Pacer,
        on_rotten: Callable[[str, int], None] = lambda _digest, _piece: None,
    ) -> None:
        self._worker_id = worker_id
        self._token = token
        self._find = find
        self._pacer = pacer
        self._on_rotten = on_rotten
        self._lock = threading.Lock()
        self._streams: set[socket.socket] = set()
        self._stopping = threading.Event()
        self._listener = socket.create_server((host, port), backlog=128)
        self._thread = threading.Thread(target=self._accept, name="peer-accept", daemon=True)

    @property
    def address(self) -> str:
        """Return ``host:port`` as peers reach it."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def start(self) -> None:
        """Begin to accept streams."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port and every stream."""
        self._stopping.set()
        shut(self._listener)
        self._listener.close()
        with self._lock:
            for sock in self._streams:
                shut(sock)
        self._thread.join(5.0)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                log.warning("cannot accept a peer: %s", error)  # out of descriptors: back-pressure
                self._stopping.wait(0.1)
                continue
            with self._lock:
                room = len(self._streams) < MAX_STREAMS
                if room:
                    self._streams.add(sock)
            if not room:
                with suppress(OSError):
                    sock.send(encode_payload(Kind.ERROR, b"too many streams"))
                sock.close()
                continue
            threading.Thread(
                target=self._serve, args=(sock,), name="peer-serve", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        who = "a peer"
        try:
            configure(sock, self._pacer)
            hello = self._welcome(sock)
            who = hello.worker_id
            staging = self._await_model(sock, hello)
            with staging.using():
                _Stream(
                    sock, hello, staging, self._pacer, self._on_rotten, self._worker_id
                ).run()
        except PeerLost:
            log.debug("stream of %s ended", who)
        except (PacelineError, OSError) as error:
            log.info("stream of %s refused: %s", who, error)
            with suppress(OSError):
                sock.send(encode_payload(Kind.ERROR, str(error).encode()[:500]))
        finally:
            with self._lock:
                self._streams.discard(sock)
            sock.close()

    def _welcome(self, sock: socket.socket) -> Hello:
        deadline_s = time.monotonic() + HELLO_DEADLINE_S
        hello = decode_hello(read_frame(sock, deadline_s, Kind.HELLO)[1])
        nonce = secrets.token_bytes(NONCE_BYTES)
        send(
            sock,
            encode_payload(Kind.CHALLENGE, nonce + proof(self._token, "server", hello, nonce)),
        )
        said = read_frame(sock, deadline_s, Kind.PROOF)[1]
        if not same(said, proof(self._token, "client", hello, nonce)):
            raise AccessDenied("the peer does not know the cluster's token", got=hello.worker_id)
        send(sock, encode(Kind.WELCOME))
        return hello

    def _await_model(self, sock: socket.socket, hello: Hello) -> Staging:
        give_up_s = time.monotonic() + UNKNOWN_DIGEST_S
        while (staging := self._find(hello.digest, hello.keepalive_s)) is None:
            if time.monotonic() > give_up_s or self._stopping.is_set():
                raise PeerLost("nobody deploys this model here", got=hello.digest[:12])
            send(sock, encode(Kind.WAITING))
        return staging


class _Stream:
    """One welcomed connection: what is asked, and sending it."""

    def __init__(
        self,
        sock: socket.socket,
        hello: Hello,
        staging: Staging,
        pacer: Pacer,
        on_rotten: Callable[[str, int], None],
        worker_id: str,
    ) -> None:
        self._worker_id = worker_id
        self._sock = sock
        self._hello = hello
        self._staging = staging
        self._pacer = pacer
        self._on_rotten = on_rotten
        self._wanted = Extents()
        self._sent = Extents()  # a peer may complain once of each piece it was sent
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def run(self) -> None:
        """Serve until the peer closes (PeerLost) or the model is gone."""
        while True:
            self._read_requests(wait_s=0.0 if self._wanted else IDLE_S)
            if not self._wanted:
                continue
            run = self._staging.next_held(self._wanted, self._hello.keepalive_s)
            if run is not None:
                self._send(Extent(run.first, min(run.stop, run.first + RUN_PIECES)))
            elif self._staging.closed:
                raise PeerLost("the model is no longer open here")
            elif self._staging.gave_up:
                raise NotFound("this worker gave the model up", got=self._hello.digest[:12])
            else:
                send(self._sock, encode(Kind.WAITING))

    def _read_requests(self, wait_s: float) -> None:
        while self._poll.poll(wait_s * 1000):
            wait_s = 0.0
            deadline_s = time.monotonic() + FRAME_DEADLINE_S
            header, _ = read_frame(self._sock, deadline_s, Kind.REQUEST, Kind.CORRUPT)
            if header.kind is Kind.CORRUPT:
                self._look_at(header.first)
                continue
            extent = Extent(header.first, header.first + header.second)
            if extent.stop > self._staging.manifest.piece_count:
                raise InvalidFrame(
                    "request beyond the model",
                    got=extent,
                    wanted=self._staging.manifest.piece_count,
                )
            self._wanted.add(extent)
        if wait_s:
            raise PeerLost("the peer asks for nothing")

    def _look_at(self, index: int) -> None:
        """A peer says that a piece of ours is corrupt: was it the wire, or is it this disk?"""
        if self._sent.remove(Extent(index, index + 1)) and self._staging.distrust(index):
            log.error("piece %d of %s rotted on this disk", index, self._hello.digest[:12])
            self._on_rotten(self._hello.digest, index)

    def _send(self, run: Extent) -> None:
        manifest, staging = self._staging.manifest, self._staging
        self._wanted.remove(run)
        self._sent.add(run)
        for index in range(*run):
            piece = manifest.piece_of(index)
            self._send_piece(staging.descriptor(piece.file_index), piece)

    def _send_piece(self, descriptor: int, piece: Piece) -> None:
        out, pacer = self._sock.fileno(), self._pacer
        since_s, counted = time.monotonic(), 0
        try:
            # MSG_MORE: the header leaves in one segment with the first bytes.
            self._sock.sendall(encode(Kind.PIECE, piece.index, piece.length), socket.MSG_MORE)
            offset, stop = piece.file_offset, piece.file_offset + piece.length
            while offset < stop:
                sent = os.sendfile(out, descriptor, offset, min(pacer.block_bytes, stop - offset))
                if sent == 0:
                    raise PeerLost("a file became shorter while it was served")
                offset += sent
                counted += sent
                pacer.take(sent)
                now = time.monotonic()
                if offset == stop or now - since_s >= TALLY_S:
                    self._staging.edges.carried(
                        self._worker_id, self._hello.worker_id, counted, now - since_s
                    )
                    since_s, counted = now, 0
        except OSError as error:
            raise PeerLost("the connection broke", got=error.strerror or error) from error
