"""The client side of the TCP transport: one stream from one source, with one receiving thread.

A read of a reused buffer brings part of a large piece or several small ones; ``piece_receiver``
hashes and writes them, and counts those that became whole together. Another thread sends the
requests; a request is a 12-byte frame.
"""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from paceline.errors import InvalidFrame, PacelineError, PeerLost
from paceline.relay.protocol import Extent
from paceline.relay.transport import piece_receiver
from paceline.relay.transport.contract import PullSpec
from paceline.relay.transport.frames import (
    HEADER,
    NONCE_BYTES,
    Kind,
    decode,
    encode,
    encode_hello,
    encode_payload,
)
from paceline.relay.transport.pacing import ReceiveWindow
from paceline.relay.transport.piece_receiver import PieceReceiver
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
        self._receiver = PieceReceiver(pull)
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
            self._receiver.add_request(extent)
            if not self._ready:
                self._backlog.append(extent)
                return
            try:
                self._send_request(extent)
            except PacelineError:  # never answered: the receiving thread ends the stream
                if self._channel is not None:
                    self._channel.shut()

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
                self._receive(channel)
        finally:
            self._receiver.drop_piece()
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
        nonce, theirs = payload[:NONCE_BYTES], payload[NONCE_BYTES:]
        answer = self._pull.answer(self._token, self._hello, nonce, theirs)
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

    def _receive(self, channel: Channel) -> None:
        """Take frames until the stream ends: each turn takes all that a read brought."""
        arriving, buffer, kept = self._receiver, self._buffer, 0
        deadline_s = 0.0
        while not self._closed:  # a shut socket still returns bytes that have arrived
            got = channel.read(buffer[kept:], arriving.requested_bytes, arriving.missing_bytes)
            if got:
                deadline_s = 0.0
            elif not deadline_s:
                # An idle stream waits until the server closes it; a busy one is bounded here too.
                silence_s = piece_receiver.SILENCE_S if arriving.waiting else IDLE_S
                deadline_s = time.monotonic() + silence_s
            elif time.monotonic() > deadline_s:
                raise PeerLost("the peer went silent", where=self._pull.key)
            end = kept + got
            at = self._take_frames(channel, end)
            kept = end - at  # the beginning of a frame
            buffer[:kept] = buffer[at:end]

    def _take_frames(self, channel: Channel, end: int) -> int:
        """Take the frames in the buffer up to ``end``; return where an incomplete header begins."""
        arriving, buffer, at = self._receiver, self._buffer, 0
        while at < end:
            if arriving.missing_bytes:
                block = buffer[at : min(end, at + arriving.missing_bytes)]
                arriving.write_block(block)
                at += len(block)
                if not arriving.missing_bytes and (corrupt := arriving.end_piece()) is not None:
                    with self._lock:
                        channel.send(encode(Kind.CORRUPT, corrupt))
                continue
            header_end = at + HEADER.size
            if header_end > end:
                break
            if buffer[at : at + len(_PIECE)] == _PIECE:  # decoded here: this is the hot path
                arriving.begin_piece(*_NUMBERS.unpack_from(buffer, at + len(_PIECE)))
            else:
                header = decode(buffer[at:header_end])
                if header.kind is Kind.ERROR:
                    self._refused(channel, buffer[header_end:end], header.payload_bytes)
                if header.kind is not Kind.WAITING:
                    raise InvalidFrame("unexpected frame", got=header.kind.name, wanted="PIECE")
                arriving.report_waiting()
            at = header_end
        arriving.flush()
        return at

    def _refused(self, channel: Channel, begun: memoryview, payload_bytes: int) -> NoReturn:
        payload = bytearray(begun[:payload_bytes])
        rest = bytearray(payload_bytes - len(payload))
        channel.receive(memoryview(rest), time.monotonic() + CONNECT_S)
        said = (payload + rest).decode("utf-8", "replace")
        raise PeerLost("the peer refused", got=said, where=self._pull.key)
