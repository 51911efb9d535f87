"""The client side of the TCP transport: one stream from one source, with one receiving thread.

Blocks are received into reused buffers and passed to ``intake``, which verifies and writes them:
one at a time, or several together while more have already arrived. Another thread sends the
requests; a request is a 12-byte frame.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from contextlib import suppress

from paceline.errors import AccessDenied, InvalidFrame, PacelineError, PeerLost
from paceline.relay.protocol.extents import Extent
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
    same,
)
from paceline.relay.transport.intake import BufferPool, PieceReceiver
from paceline.relay.transport.pacing import ReceiveWindow
from paceline.relay.transport.sockets import Channel, PlainChannel, configure, read_frame, shut
from paceline.relay.transport.tls import connect_tls

CONNECT_S = 3.0
IDLE_S = 600.0  # while nothing is requested; the server closes long before
_LEAST_TIMEOUT_S = 0.05
_NO_DESCRIPTOR_S = 0.05


class TcpPullStream:
    """Pulls requested pieces from ``source`` into ``staging`` until it fails or is closed."""

    def __init__(self, pull: PullSpec, token: str, tls: ssl.SSLContext | None = None) -> None:
        self._pull = pull
        self._token = token
        self._tls = tls
        self._hello = pull.hello()
        self._intake = PieceReceiver(pull)
        self._portion = ReceiveWindow(pull.portion)
        self._shelf = BufferPool(pull.pacer)
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
                shut(each)
            elif each is not None:
                each.shut()

    def _send_request(self, extent: Extent) -> None:
        if self._channel is not None:
            self._portion.apply(self._channel.socket)  # a new plan may have changed it
            self._channel.send(encode(Kind.REQUEST, extent.first, extent.size))

    def _run(self) -> None:
        try:
            with self._pull.receiving(lambda: self._closed):
                channel = self._connect()
                try:
                    while not self._closed:  # a shut socket still returns bytes that have arrived
                        self._next_frame(channel)
                finally:
                    while self._intake.keeps:  # pieces that arrived before the end count
                        self._intake.judge()
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
        self._portion.apply(sock)
        sock.settimeout(CONNECT_S)
        sock.connect((host.strip("[]"), int(port)))
        channel = self._channel = self._protect(sock)
        self._sock = None
        if self._closed:
            raise PeerLost("closed before it was open")
        channel.send(encode_hello(self._hello))
        _, payload = read_frame(channel, deadline_s, Kind.CHALLENGE)
        nonce, said = payload[:NONCE_BYTES], payload[NONCE_BYTES:]
        if not same(said, proof(self._token, "server", self._hello, nonce)):
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
        while self._intake.keeps and channel.waiting() < HEADER.size:
            self._judge(channel)
        # An idle stream waits until the server closes it; a busy one is bounded here too.
        patience_s = intake.SILENCE_S if self._intake.waiting else IDLE_S
        channel.receive(memoryview(raw), time.monotonic() + patience_s)
        header = decode(raw)
        if header.kind is Kind.PIECE:
            self._take_piece(channel, header.first, header.second)
            return
        while self._intake.keeps:
            self._judge(channel)
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
        arriving, shelf, left = self._intake, self._shelf, length
        arriving.begin(index, length)
        deadline_s = time.monotonic() + intake.SILENCE_S
        while left:
            here = channel.waiting()
            size = min(shelf.block_bytes(here), left)
            while arriving.keeps and not (shelf.has_room and here >= size):
                self._judge(channel)
                here = channel.waiting()
            block = shelf.room(size)
            channel.receive(block, deadline_s, lambda: arriving.alive(moving=True))
            if self._closed:
                return
            if not arriving.keep(block):
                shelf.take_back([block])
            left -= size
        arriving.end_kept()
        while arriving.keeps and not shelf.has_room:
            self._judge(channel)

    def _judge(self, channel: Channel) -> None:
        """Hash one round of kept blocks, free their buffers and report corrupt pieces."""
        wrong, free = self._intake.judge()
        self._shelf.take_back(free)
        for index in wrong:
            with self._lock:
                channel.send(encode(Kind.CORRUPT, index))
