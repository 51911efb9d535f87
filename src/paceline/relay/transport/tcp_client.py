"""The client side of the TCP transport: one stream from one source, with one receiving thread.

Blocks are received into a reused buffer and passed to ``intake``, which hashes and writes them.
Another thread sends the requests; a request is a 12-byte frame.
"""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.errors import AccessDenied, InvalidFrame, PacelineError, PeerLost
from paceline.relay.protocol import Extent
from paceline.relay.transport import intake
from paceline.relay.transport.contract import PullSpec
from paceline.relay.transport.frames import (
    HEADER,
    NONCE_BYTES,
    Kind,
    decode,
    encode,
    encode_hello,
    encode_payload,
    proof,
    proofs_equal,
)
from paceline.relay.transport.intake import PieceReceiver
from paceline.relay.transport.pacing import ReceiveWindow
from paceline.relay.transport.sockets import (
    Channel,
    PlainChannel,
    configure,
    read_frame,
    shutdown_socket,
)
from paceline.relay.transport.tls import connect_tls

if TYPE_CHECKING:
    from paceline.relay.transport.tcp_server import TcpTransport

CONNECT_S = 3.0
IDLE_S = 600.0  # while nothing is requested; the server closes long before
_PIECE = encode(Kind.PIECE)[:4]  # how the header of a PIECE frame begins; two numbers follow
_NUMBERS = struct.Struct(">II")
_LEAST_TIMEOUT_S = 0.05
_NO_DESCRIPTOR_S = 0.05


class TcpPullStream:
    """Pulls requested pieces from ``source`` into ``staging`` until it fails or is closed."""

    def __init__(self, pull: PullSpec, transport: TcpTransport) -> None:
        self._pull = pull
        self._token = transport.token
        self._tls = transport.client_tls
        self._hello = pull.hello()
        self._intake = PieceReceiver(pull)
        self._receive_window = ReceiveWindow(pull.planned_rate)
        self._buffer = memoryview(bytearray(pull.pacer.block_bytes))
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None  # until the channel exists
        self._channel: Channel | None = None
        self._backlog: list[Extent] = []
        self._ready = False
        self._closed = False
        self.thread = pull.start(self._run)

    def request(self, extent: Extent) -> None:
        """Request pieces; never blocks for long (a request is 12 bytes)."""
        with self._lock:
            self._intake.ask(extent)
            if not self._ready:
                self._backlog.append(extent)
                return
            with suppress(PacelineError):  # the receiving thread sees it too, and reports it
                self._send_request(extent)

    def close(self) -> None:
        """End the stream; returns at once."""
        self._closed = True  # without the lock: its holder may be waiting for the peer
        for each in (self._channel, self._sock):
            if isinstance(each, socket.socket):
                shutdown_socket(each)
            elif each is not None:
                each.shut()

    def _send_request(self, extent: Extent) -> None:
        if self._channel is not None:
            self._receive_window.apply(self._channel.socket)  # a new plan may have changed it
            self._channel.send(encode(Kind.REQUEST, extent.first, extent.size))

    def _run(self) -> None:
        try:
            with self._pull.receiving(lambda: self._closed):
                channel = self._connect()
                while not self._closed:  # a shut socket still returns bytes that have arrived
                    self._next_frame(channel)
        finally:
            self._intake.drop()
            with self._lock:
                self._ready = False
                for each in (self._channel, self._sock):
                    if each is not None:
                        each.close()
                self._channel = self._sock = None

    def _connect(self) -> Channel:
        deadline_s = time.monotonic() + CONNECT_S
        host, _, port = self._pull.source.address.rpartition(":")
        sock = self._socket(socket.AF_INET6 if ":" in host else socket.AF_INET, deadline_s)
        self._sock = sock
        if self._closed:
            raise PeerLost("closed before it was open")
        configure(sock, self._pull.pacer)
        self._receive_window.apply(sock)
        sock.settimeout(CONNECT_S)
        sock.connect((host.strip("[]"), int(port)))
        channel = self._channel = self._protect(sock)
        self._sock = None
        if self._closed:
            raise PeerLost("closed before it was open")
        channel.send(encode_hello(self._hello))
        _, payload = read_frame(channel, deadline_s, Kind.CHALLENGE)
        nonce, said = payload[:NONCE_BYTES], payload[NONCE_BYTES:]
        if not proofs_equal(said, proof(self._token, "server", self._hello, nonce)):
            raise AccessDenied(
                "the peer does not know the cluster's token", where=self._pull.source.address
            )
        answer = proof(self._token, "client", self._hello, nonce)
        channel.send(encode_payload(Kind.PROOF, answer))
        read_frame(channel, deadline_s, Kind.WELCOME)
        with self._lock:
            self._ready = True
            for extent in self._backlog:
                self._send_request(extent)
            self._backlog.clear()
        return channel

    def _socket(self, family: int, deadline_s: float) -> socket.socket:
        """Return a socket; retries until ``deadline_s`` while no file descriptors are left."""
        while True:
            try:
                return socket.socket(family)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or self._closed:
                    raise
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_NO_DESCRIPTOR_S)

    def _protect(self, sock: socket.socket) -> Channel:
        timeout_s = max(_LEAST_TIMEOUT_S, self._hello.keepalive_s)
        if self._tls is None:
            return PlainChannel(sock, timeout_s)
        channel = connect_tls(sock, self._tls, self._pull.key, CONNECT_S)
        channel.timeout_s = timeout_s
        return channel

    def _next_frame(self, channel: Channel) -> None:
        raw = bytearray(HEADER.size)
        # An idle stream waits until the server closes it; a busy one is bounded here too.
        silence_s = intake.SILENCE_S if self._intake.waiting else IDLE_S
        channel.receive(memoryview(raw), time.monotonic() + silence_s)
        if raw.startswith(_PIECE):  # decoded here: this is the hot path
            self._take_piece(channel, *_NUMBERS.unpack_from(raw, len(_PIECE)))
            return
        header = decode(raw)
        match header.kind:
            case Kind.WAITING:
                self._intake.waits()
            case Kind.ERROR:
                payload = bytearray(header.payload_bytes)
                channel.receive(memoryview(payload), time.monotonic() + CONNECT_S)
                said = payload.decode("utf-8", "replace")
                raise PeerLost("the peer refused", got=said, where=self._pull.key)
            case _:
                raise InvalidFrame("unexpected frame", got=header.kind.name, wanted="PIECE")

    def _take_piece(self, channel: Channel, index: int, length: int) -> None:
        arriving, left = self._intake, length
        arriving.begin(index, length)
        deadline_s = time.monotonic() + intake.SILENCE_S
        while left:
            block = self._buffer[:left]
            channel.receive(block, deadline_s, lambda: arriving.alive(moving=True))
            if self._closed:
                return
            arriving.take(block)
            left -= len(block)
        if not arriving.end():
            with self._lock:
                channel.send(encode(Kind.CORRUPT, index))
