"""The TCP transport and its server: authenticates peers and sends them verified pieces.

One thread per connection. A connection is a pending handshake until the peer has proved that it
holds the cluster's token and, over TLS, that its certificate is that of the worker id it claims.
``serving`` selects the pieces; here they are sent from the page cache (``sendfile``) if the
connection is plain. The client side is in ``tcp_client``.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

from paceline.errors import AccessDenied, InvalidInput, PacelineError, PeerLost, PortInUse
from paceline.manifest import Piece
from paceline.relay.protocol import Extent
from paceline.relay.store import Staging
from paceline.relay.transport.contract import ServeSpec, Transport
from paceline.relay.transport.frames import (
    HEADER,
    Hello,
    Kind,
    decode_hello,
    encode,
    encode_payload,
)
from paceline.relay.transport.serving import (
    HANDSHAKE_TIMEOUT_S,
    MAX_STREAMS,
    CorruptReport,
    PeerMessage,
    PeerServer,
)
from paceline.relay.transport.sockets import (
    TAKES_NOTHING,
    Channel,
    PlainChannel,
    configure,
    read_frame,
    shutdown_socket,
)
from paceline.relay.transport.tcp_client import TcpPullStream
from paceline.relay.transport.tls import (
    TlsChannel,
    accept_tls,
    plain_refused,
    wrong_identity,
)

log = logging.getLogger(__name__)

FRAME_DEADLINE_S = 10.0
NO_DESCRIPTOR_S = 0.1  # between two attempts to accept while no file descriptors are left
_TLS_HANDSHAKE = b"\x16\x03"


class TcpServer(PeerServer[socket.socket]):
    """Listens on a port and serves the models that ``spec.find`` returns."""

    def __init__(self, transport: TcpTransport, spec: ServeSpec) -> None:
        super().__init__(transport, spec, shutdown_socket)
        self._transport = transport  # its context changes when credentials are renewed
        self._lock = threading.Lock()
        self._streams: set[socket.socket] = set()  # of authenticated peers
        self._listener = listen(spec.host, spec.port)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._thread = threading.Thread(target=self._accept, name="peer-accept", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()
        shutdown_socket(self._listener)  # wakes the accepting thread
        self.pending_handshakes.close()
        with self._lock:
            for sock in self._streams:
                shutdown_socket(sock)
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._listener.close()

    def _accept(self) -> None:
        failing = False
        callers = select.poll()
        callers.register(self._listener, select.POLLIN)
        while not self.stopping.is_set():
            due_s = self.pending_handshakes.sweep(time.monotonic())
            wait_ms = None if due_s is None else max(1.0, (due_s - time.monotonic()) * 1000)
            if not callers.poll(wait_ms):
                continue
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self.stopping.is_set():
                    return
                # Out of file descriptors: connections wait in the backlog, open streams continue.
                if not failing:
                    log.warning("cannot accept a peer now: %s", error)
                failing = True
                self.stopping.wait(NO_DESCRIPTOR_S)
                continue
            failing = False
            self.pending_handshakes.enter(sock, time.monotonic())
            threading.Thread(
                target=self._serve, args=(sock,), name="peer-serve", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        who = "a peer"
        channel: Channel | None = None
        try:
            configure(sock, self.spec.pacer)
            channel = self._protect(sock)
            hello = self._welcome(channel)
            who = hello.worker_id
            with self.slots.taken(hello.worker_id, MAX_STREAMS):
                self._seat(channel)
                for staging in self.await_model(hello.digest, hello.keepalive_s):
                    if staging is None:
                        channel.send(encode(Kind.WAITING))
                        continue
                    with staging.serving():
                        self._send_all(channel, hello, staging)
        except PeerLost as error:
            level = logging.WARNING if error.what == TAKES_NOTHING else logging.DEBUG
            log.log(level, "stream of %s ended: %s", who, error)
        except (PacelineError, OSError) as error:
            log.info("stream of %s refused: %s", who, error)
            with suppress(PacelineError, OSError):
                said = encode_payload(Kind.ERROR, str(error).encode()[:500])
                if channel is not None:
                    channel.send(said)
                elif sock.fileno() >= 0:  # a plain connection to a TLS port
                    sock.send(said)
        finally:
            seen = sock if channel is None else channel.socket
            self.pending_handshakes.leave(seen)
            with self._lock:
                self._streams.discard(seen)
            if channel is not None:
                channel.close()
            sock.close()

    def _protect(self, sock: socket.socket) -> Channel:
        """Return the channel of a new connection; its first bytes must fit the port's TLS mode."""
        plain, tls = PlainChannel(sock), self._transport.server_tls
        first = sock.recv(HEADER.size, socket.MSG_PEEK)
        if tls is not None and first.startswith(encode(Kind.HELLO)[:3]):
            raise plain_refused("a plain greeting")
        if tls is not None:
            # The wrapped socket owns the descriptor from the handshake on.
            return accept_tls(
                sock,
                tls,
                HANDSHAKE_TIMEOUT_S,
                lambda made: self.pending_handshakes.replace(sock, made),
            )
        if first.startswith(_TLS_HANDSHAKE):
            raise AccessDenied(
                "this peer port is plain",
                got="a TLS handshake",
                do="Set [security] peer_tls the same on every worker.",
            )
        return plain

    def _welcome(self, channel: Channel) -> Hello:
        # Later than the pending handshake's deadline.
        deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
        hello = decode_hello(read_frame(channel, deadline_s, Kind.HELLO)[1])
        if isinstance(channel, TlsChannel) and channel.peer_id != hello.worker_id:
            raise wrong_identity(channel.peer_id, hello.worker_id)
        self.barred.require(hello.worker_id, _admission(channel))
        nonce, own_proof = self.challenge(hello)
        channel.send(encode_payload(Kind.CHALLENGE, nonce + own_proof))
        self.check_proof(hello, nonce, read_frame(channel, deadline_s, Kind.PROOF)[1])
        return hello

    def _seat(self, channel: Channel) -> None:
        """Make an authenticated connection a stream and send WELCOME."""
        with self._lock:
            if not self.pending_handshakes.leave(channel.socket) or self.stopping.is_set():
                raise PeerLost("others called meanwhile, or the port is closing")
            self._streams.add(channel.socket)
        channel.send(encode(Kind.WELCOME))

    def _send_all(self, channel: Channel, hello: Hello, staging: Staging) -> None:
        peer = self.stream(staging, hello.worker_id, hello.keepalive_s, _admission(channel))
        manifest = staging.manifest
        with closing(peer.runs(lambda wait_s: _peer_messages(channel, wait_s))) as runs:
            for run in runs:
                if run is None:
                    channel.send(encode(Kind.WAITING))
                    continue
                for index in range(*run):
                    piece = manifest.piece_of(index)
                    descriptor = staging.descriptor(piece.file_index)
                    more = index + 1 < run.stop
                    for sent in self._send_piece(channel, descriptor, piece, more):
                        peer.carried(sent, last=False)
                peer.carried(0, last=True)

    def _send_piece(
        self, channel: Channel, descriptor: int, piece: Piece, more: bool
    ) -> Iterator[int]:
        header = encode(Kind.PIECE, piece.index, piece.length)
        offset, stop = piece.file_offset, piece.file_offset + piece.length
        # Unpaced, the kernel accepts the whole piece in one call and waits for the link itself.
        longest = self.spec.pacer.block_bytes if self.spec.pacer.paced else piece.length
        while offset < stop:
            block = min(longest, stop - offset)
            sent = channel.send_file(descriptor, offset, block, header, more)
            if sent == 0:
                raise PeerLost("a file became shorter while it was served")
            header = b""
            offset += sent
            self.spec.pacer.take(sent)
            yield sent


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises PortInUse, or InvalidInput if it cannot bind ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=128)
    except OSError as error:
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                "the peer port is taken", where=where, do="Stop what listens there, or take port 0."
            ) from error
        raise InvalidInput(
            "cannot listen for peers there",
            got=error.strerror or error,
            where=where,
            do="Name an address of this machine.",
        ) from error


def _admission(channel: Channel) -> str:
    return channel.admission if isinstance(channel, TlsChannel) else ""


def _peer_messages(channel: Channel, wait_s: float) -> Iterator[PeerMessage]:
    while channel.readable(wait_s):
        wait_s = 0.0
        deadline_s = time.monotonic() + FRAME_DEADLINE_S
        header, _ = read_frame(channel, deadline_s, Kind.REQUEST, Kind.CORRUPT)
        if header.kind is Kind.CORRUPT:
            yield CorruptReport(header.first)
        else:
            yield Extent(header.first, header.first + header.second)


class TcpTransport(Transport):
    """Frames over TCP; see Transport."""

    name = "tcp"
    server_type, stream_type = TcpServer, TcpPullStream
    server_tls: ssl.SSLContext | None = None
    client_tls: ssl.SSLContext | None = None

    def reload(self) -> bool:
        if self.tls is not None:
            self.client_tls = self.tls.context(server=False)  # checks them
            self.server_tls = self.tls.context(server=True)
        return True
