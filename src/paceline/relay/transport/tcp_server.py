"""The TCP transport and its server: authenticates peers and sends them verified pieces.

One thread per connection. A connection is a pending handshake until the peer has proved that it
holds the cluster's token and, over TLS, that its certificate is that of the worker id it claims.
``serving`` selects the pieces; here they are sent from the page cache (``sendfile``) if the
connection is plain. The client side is in ``tcp_client``.
"""

from __future__ import annotations

import errno
import logging
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

from paceline.errors import AccessDenied, InvalidInput, PacelineError, PeerLost, PortInUse
from paceline.manifest import Piece
from paceline.relay.protocol.extents import Extent
from paceline.relay.store.staging import Staging
from paceline.relay.transport import serving
from paceline.relay.transport.contract import FindModel, OnDiskCorruption, PullSpec, RevokedWorkers
from paceline.relay.transport.frames import (
    HEADER,
    NONCE_BYTES,
    Hello,
    Kind,
    decode_hello,
    encode,
    encode_payload,
    proof,
    same,
)
from paceline.relay.transport.pacing import Pacer
from paceline.relay.transport.serving import (
    WELCOME_S,
    CorruptReport,
    PeerMessage,
    PendingHandshakes,
    ServedStream,
    StreamSlots,
)
from paceline.relay.transport.sockets import Channel, PlainChannel, configure, read_frame, shut
from paceline.relay.transport.tcp_client import TcpPullStream
from paceline.relay.transport.tls import (
    TlsChannel,
    TlsSettings,
    accept_tls,
    tls_only,
    wrong_identity,
)

log = logging.getLogger(__name__)

MAX_STREAMS = 128
FRAME_DEADLINE_S = 10.0
LOOK_S = 1.0  # timeout of one poll for connections
NO_DESCRIPTOR_S = 0.1  # between two attempts to accept while no file descriptors are left
_TLS_HANDSHAKE = b"\x16\x03"


class TcpServer:
    """Listens on ``host:port`` and serves the models that ``find(digest, wait_s)`` returns."""

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
        tls: ssl.SSLContext | None = None,
        barred: RevokedWorkers | None = None,
    ) -> None:
        self._barred = barred or RevokedWorkers()
        self._worker_id = worker_id
        self._token = token
        self._find = find
        self._pacer = pacer
        self._on_rotten = on_rotten
        self._tls = tls
        self._lock = threading.Lock()
        self._streams: set[socket.socket] = set()  # of authenticated peers
        self._seats = StreamSlots()
        self._lobby: PendingHandshakes[socket.socket] = PendingHandshakes(shut)
        self._stopping = threading.Event()
        self._listener = listen(host, port)
        self._thread = threading.Thread(target=self._accept, name="peer-accept", daemon=True)

    @property
    def address(self) -> str:
        """Return ``host:port`` as peers reach it."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> None:
        """Start to accept streams."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port and every stream."""
        self._stopping.set()
        shut(self._listener)
        self._listener.close()
        self._lobby.close()
        with self._lock:
            for sock in self._streams:
                shut(sock)
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _accept(self) -> None:
        failing = False
        callers = select.poll()
        callers.register(self._listener, select.POLLIN)
        while not self._stopping.is_set():
            due_s = self._lobby.sweep(time.monotonic())
            wait_s = LOOK_S if due_s is None else min(LOOK_S, due_s - time.monotonic())
            if not callers.poll(max(1.0, wait_s * 1000)):
                continue
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                # Out of file descriptors: connections wait in the backlog, open streams continue.
                if not failing:
                    log.warning("cannot accept a peer now: %s", error)
                failing = True
                self._stopping.wait(NO_DESCRIPTOR_S)
                continue
            failing = False
            self._lobby.enter(sock, time.monotonic())
            threading.Thread(
                target=self._serve, args=(sock,), name="peer-serve", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        who = "a peer"
        channel: Channel | None = None
        try:
            configure(sock, self._pacer)
            channel = self._protect(sock)
            hello = self._welcome(channel)
            who = hello.worker_id
            with self._seats.taken(hello.worker_id, MAX_STREAMS):
                self._seat(channel)
                staging = self._await_model(channel, hello)
                with staging.serving():
                    self._send_all(channel, hello, staging)
        except PeerLost as error:
            log.debug("stream of %s ended: %s", who, error)
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
            self._lobby.leave(seen)
            with self._lock:
                self._streams.discard(seen)
            if channel is not None:
                channel.close()
            sock.close()

    def _protect(self, sock: socket.socket) -> Channel:
        """Return the channel of a new connection; its first bytes must fit the port's TLS mode."""
        plain = PlainChannel(sock)
        first = sock.recv(HEADER.size, socket.MSG_PEEK)
        if self._tls is not None and first.startswith(encode(Kind.HELLO)[:3]):
            raise tls_only("a plain greeting")
        if self._tls is not None:
            # The wrapped socket owns the descriptor from the handshake on.
            return accept_tls(
                sock, self._tls, WELCOME_S, lambda made: self._lobby.replace(sock, made)
            )
        if first.startswith(_TLS_HANDSHAKE):
            raise AccessDenied(
                "this peer port is plain",
                got="a TLS handshake",
                do="Set [security] peer_tls the same on every worker.",
            )
        return plain

    def _welcome(self, channel: Channel) -> Hello:
        deadline_s = time.monotonic() + WELCOME_S  # later than the pending handshake's deadline
        hello = decode_hello(read_frame(channel, deadline_s, Kind.HELLO)[1])
        if isinstance(channel, TlsChannel) and channel.peer_id != hello.worker_id:
            raise wrong_identity(channel.peer_id, hello.worker_id)
        self._barred.require(hello.worker_id, _admission(channel))
        nonce = secrets.token_bytes(NONCE_BYTES)
        said = nonce + proof(self._token, "server", hello, nonce)
        channel.send(encode_payload(Kind.CHALLENGE, said))
        answer = read_frame(channel, deadline_s, Kind.PROOF)[1]
        if not same(answer, proof(self._token, "client", hello, nonce)):
            raise AccessDenied("the peer does not know the cluster's token", got=hello.worker_id)
        return hello

    def _seat(self, channel: Channel) -> None:
        """Make an authenticated connection a stream and send WELCOME."""
        with self._lock:
            if not self._lobby.leave(channel.socket) or self._stopping.is_set():
                raise PeerLost("others called meanwhile, or the port is closing")
            self._streams.add(channel.socket)
        channel.send(encode(Kind.WELCOME))

    def _await_model(self, channel: Channel, hello: Hello) -> Staging:
        give_up_s = time.monotonic() + serving.UNKNOWN_DIGEST_S
        while (staging := self._find(hello.digest, hello.keepalive_s)) is None:
            if time.monotonic() > give_up_s or self._stopping.is_set():
                raise PeerLost("nobody deploys this model here", got=hello.digest[:12])
            channel.send(encode(Kind.WAITING))
        return staging

    def _send_all(self, channel: Channel, hello: Hello, staging: Staging) -> None:
        peer = ServedStream(
            worker_id=self._worker_id,
            reader=hello.worker_id,
            staging=staging,
            keepalive_s=hello.keepalive_s,
            on_rotten=self._on_rotten,
            barred=self._barred,
            admission=_admission(channel),
        )
        manifest = staging.manifest
        with closing(peer.runs(lambda wait_s: _asked(channel, wait_s))) as runs:
            for run in runs:
                if run is None:
                    channel.send(encode(Kind.WAITING))
                    continue
                for index in range(*run):
                    piece = manifest.piece_of(index)
                    descriptor = staging.descriptor(piece.file_index)
                    for sent in self._send_piece(channel, descriptor, piece):
                        peer.carried(sent, last=False)
                peer.carried(0, last=True)

    def _send_piece(self, channel: Channel, descriptor: int, piece: Piece) -> Iterator[int]:
        # The header is sent in one segment with the first bytes.
        channel.send(encode(Kind.PIECE, piece.index, piece.length), more=True)
        offset, stop = piece.file_offset, piece.file_offset + piece.length
        # Unpaced, the kernel accepts the whole piece in one call and waits for the link itself.
        longest = self._pacer.block_bytes if self._pacer.paced else piece.length
        while offset < stop:
            block = min(longest, stop - offset)
            sent = channel.send_file(descriptor, offset, block)
            if sent == 0:
                raise PeerLost("a file became shorter while it was served")
            offset += sent
            self._pacer.take(sent)
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


def _asked(channel: Channel, wait_s: float) -> Iterator[PeerMessage]:
    while channel.readable(wait_s):
        wait_s = 0.0
        deadline_s = time.monotonic() + FRAME_DEADLINE_S
        header, _ = read_frame(channel, deadline_s, Kind.REQUEST, Kind.CORRUPT)
        if header.kind is Kind.CORRUPT:
            yield CorruptReport(header.first)
        else:
            yield Extent(header.first, header.first + header.second)


class TcpTransport:
    """Frames over TCP or mutual TLS 1.3; both sides prove that they hold ``token``.

    Raises InvalidInput if the credentials are not usable.
    """

    def __init__(self, token: str, tls: TlsSettings | None = None) -> None:
        self._token = token
        self.barred = RevokedWorkers()
        self._tls = tls
        self._server_tls = tls.context(server=True) if tls else None
        self._client_tls = tls.context(server=False) if tls else None

    @property
    def name(self) -> str:
        """Return the transport's name in profiles."""
        return "tcp"

    def serve(
        self,
        *,
        host: str,
        port: int,
        worker_id: str,
        find: FindModel,
        pacer: Pacer,
        on_rotten: OnDiskCorruption,
    ) -> TcpServer:
        """Bind a port; see Transport."""
        return TcpServer(
            host=host,
            port=port,
            worker_id=worker_id,
            token=self._token,
            find=find,
            pacer=pacer,
            on_rotten=on_rotten,
            tls=self._server_tls,
            barred=self.barred,
        )

    def pull(self, pull: PullSpec) -> TcpPullStream:
        """Open a stream; see Transport."""
        return TcpPullStream(pull, self._token, self._client_tls)

    def reload(self) -> bool:
        """Read the credential files again; see Transport."""
        if self._tls is not None and self._server_tls is not None:
            self._client_tls = self._tls.context(server=False)  # checks them
            self._server_tls.load_cert_chain(self._tls.cert, self._tls.key)
        return True
