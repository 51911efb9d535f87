"""The client side of the gRPC transport: one stream from one source, with one receiving thread.

Messages are passed to ``piece_receiver``, which verifies and writes their bytes. gRPC reads this
side's messages from a generator on another thread; the same generator detects a silent source.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from paceline.errors import AccessDenied, InvalidFrame, PacelineError, PeerLost
from paceline.relay.protocol import Extent
from paceline.relay.transport import piece_receiver
from paceline.relay.transport.contract import PullSpec, Transport
from paceline.relay.transport.frames import (
    MAX_DATA,
    METHOD,
    ChunkData,
    ChunkRequest,
    decode_data,
    encode_request,
)
from paceline.relay.transport.piece_receiver import PieceReceiver
from paceline.relay.transport.tls import diagnose_refusal, worker_host_name

CONNECT_S = 3.0
WATCH_S = 0.25  # between two checks for a silent source
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_DATA + 4096),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per stream: closed independently
    ("grpc.enable_retries", 0),  # the session decides about retries
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class GrpcPullStream:
    """Pulls requested pieces from ``source`` into ``staging`` until it fails or is closed."""

    def __init__(self, pull: PullSpec, transport: Transport) -> None:
        self._pull = pull
        self._token = transport.token
        self._tls = transport.tls
        self._hello = pull.hello()
        self._receiver = PieceReceiver(pull)
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[ChunkRequest | None] = queue.SimpleQueue()
        self._backlog: list[ChunkRequest] = []  # until the source has authenticated
        self._call: Any = None
        self._arriving = -1
        self._heard_s = time.monotonic()
        self._welcomed = self._closed = self._silent = False
        self.thread = pull.start(self._run)

    def request(self, extent: Extent) -> None:
        """Request pieces; returns at once."""
        asked = ChunkRequest(first_piece=extent.first, piece_count=extent.size)
        with self._lock:
            self._receiver.add_request(extent)
            (self._outbox.put if self._welcomed else self._backlog.append)(asked)

    def close(self) -> None:
        """End the stream; returns at once."""
        with self._lock:
            self._closed = True
            call = self._call
        self._outbox.put(None)
        if call is not None:
            call.cancel()

    # ── sending, on gRPC's thread ────────────────────────────────────────────────────────────────

    def _requests(self) -> Iterator[bytes]:
        yield encode_request(
            ChunkRequest(
                worker_id=self._hello.worker_id,
                manifest_digest=self._hello.digest,
                nonce=self._hello.nonce,
                keepalive_ms=int(self._hello.keepalive_s * 1000),
            )
        )
        while not self._closed:
            try:
                said = self._outbox.get(timeout=WATCH_S)
            except queue.Empty:
                self._watch()
                continue
            if said is None:
                return
            yield encode_request(said)

    def _watch(self) -> None:
        silence_s = piece_receiver.SILENCE_S if self._welcomed else CONNECT_S
        waiting = not self._welcomed or self._receiver.waiting
        if waiting and time.monotonic() - self._heard_s > silence_s:
            self._silent = True
            self._call.cancel()

    # ── receiving ────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            with self._pull.receiving(lambda: self._closed), self._channel() as channel:
                self._receive(channel)
        finally:
            self._receiver.drop_piece()
            self._outbox.put(None)

    def _channel(self) -> grpc.Channel:
        options = list(_OPTIONS)
        if self._pull.pacer.paced:  # buffer no more than the TCP transport does
            options += [
                ("grpc.http2.lookahead_bytes", self._pull.pacer.buffer_bytes),
                ("grpc.http2.bdp_probe", 0),
            ]
        if self._tls is None:
            return grpc.insecure_channel(self._pull.source.address, options)
        ca, cert, key = self._tls.read()
        options.append(("grpc.ssl_target_name_override", worker_host_name(self._pull.key)))
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        return grpc.secure_channel(self._pull.source.address, credentials, options)

    def _receive(self, channel: grpc.Channel) -> None:
        method = channel.stream_stream(METHOD)
        with self._lock:
            if self._closed:
                return
            self._heard_s = time.monotonic()
            call = self._call = method(self._requests())
        try:
            for raw in call:
                self._heard_s = time.monotonic()
                self._hear(decode_data(raw))
        except grpc.RpcError as error:
            raise self._failure(call) from error
        finally:
            call.cancel()
        raise PeerLost("the peer closed the stream", where=self._pull.key)

    def _hear(self, said: ChunkData) -> None:
        if not self._welcomed:
            self._welcome(said)
        elif said.waiting:
            self._receiver.report_waiting()
        elif said.data:
            self._take(said)
        else:
            raise InvalidFrame("an empty message", where=self._pull.key)

    def _welcome(self, said: ChunkData) -> None:
        answer = self._pull.answer(self._token, self._hello, said.nonce, said.proof)
        with self._lock:
            self._welcomed = True
            self._outbox.put(ChunkRequest(proof=answer))
            for asked in self._backlog:
                self._outbox.put(asked)
            self._backlog.clear()

    def _take(self, said: ChunkData) -> None:
        manifest = self._pull.staging.manifest
        if said.piece >= manifest.piece_count:
            raise InvalidFrame("a piece beyond the model", got=said.piece, where=self._pull.key)
        piece = manifest.piece_of(said.piece)
        at = said.offset - piece.stream_offset
        if self._arriving != said.piece:
            self._receiver.begin_piece(said.piece, piece.length)
            self._arriving, self._expected = said.piece, 0
        if at != self._expected:
            raise InvalidFrame("bytes out of order", got=at, wanted=self._expected)
        self._receiver.write_block(said.data)
        self._expected += len(said.data)
        if said.checksum:
            self._arriving = -1
            if self._receiver.end_piece() is not None:
                self._outbox.put(ChunkRequest(first_piece=said.piece, corrupt=True))
            self._receiver.flush()

    def _failure(self, call: Any) -> PacelineError:
        where, details = self._pull.key, call.details()
        if self._silent:
            return PeerLost("the peer went silent", where=where)
        code = call.code()
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return AccessDenied("the peer refused", got=details, where=where)
        if self._welcomed:
            return PeerLost("the peer refused", got=f"{details} ({code.name})", where=where)
        address = self._pull.source.address
        if refusal := diagnose_refusal(address, self._tls, self._pull.key, CONNECT_S):
            return refusal
        return PeerLost(
            "no stream from the peer",
            got=f"{details} ({code.name})",
            where=where,
        )
