"""The peer port's asking side over gRPC: one stream from one source, one thread that receives.

Messages are handed to ``intake``, which judges and writes them. gRPC reads what this side says from
a generator, on a thread of its own; the same generator notices when the source has gone silent.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from paceline.errors import (
    AccessDenied,
    InvalidFrame,
    PacelineError,
    PeerLost,
    StorageFailed,
    StorageFull,
)
from paceline.relay.disk.staging import Staging
from paceline.relay.session.events import LocalFailed, SourceFailed
from paceline.relay.session.extents import Extent
from paceline.relay.wires import intake
from paceline.relay.wires.chunks import (
    MAX_DATA,
    METHOD,
    ChunkData,
    ChunkRequest,
    decode_data,
    encode_request,
)
from paceline.relay.wires.counters import Counters
from paceline.relay.wires.frames import NONCE_BYTES, PROTOCOL_VERSION, Hello, proof, same
from paceline.relay.wires.intake import Intake
from paceline.relay.wires.pacing import Pacer
from paceline.relay.wires.tls import TlsSettings, diagnose, worker_host_name
from paceline.relay.wires.transport import Report
from paceline.wire.plan import Source

CONNECT_S = 3.0
WATCH_S = 0.25  # between two looks whether the source is still heard
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_DATA + 4096),
    ("grpc.use_local_subchannel_pool", 1),  # a connection a stream: closing one closes no other
    ("grpc.enable_retries", 0),  # the session decides what comes next
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class GrpcStream:
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
        report: Report,
        tls: TlsSettings | None,
    ) -> None:
        self._source = source
        self._stream = stream
        self._token = token
        self._tls = tls
        self._staging = staging
        self._pacer = pacer
        self._report = report
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._hello = Hello(
            PROTOCOL_VERSION, keepalive_s, staging.manifest.digest, nonce, worker_id
        )
        self._intake = Intake(
            source=source,
            stream=stream,
            worker_id=worker_id,
            staging=staging,
            pacer=pacer,
            counters=counters,
            keepalive_s=keepalive_s,
            report=report,
        )
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[ChunkRequest | None] = queue.SimpleQueue()
        self._backlog: list[ChunkRequest] = []  # until the source has proved itself
        self._call: Any = None
        self._arriving = -1
        self._heard_s = time.monotonic()
        self._welcomed = self._closed = self._silent = False
        self.thread = threading.Thread(
            target=self._run, name=f"pull-{source.key[:20]}", daemon=True
        )
        self.thread.start()

    def request(self, extent: Extent) -> None:
        """Ask for pieces; returns at once."""
        asked = ChunkRequest(first_piece=extent.first, piece_count=extent.size)
        with self._lock:
            self._intake.ask(extent)
            (self._outbox.put if self._welcomed else self._backlog.append)(asked)

    def close(self) -> None:
        """End the stream; returns at once."""
        with self._lock:
            self._closed = True
            call = self._call
        self._outbox.put(None)
        if call is not None:
            call.cancel()

    # ── what this side says, on gRPC's thread ────────────────────────────────────────────────────

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
        patience_s = intake.SILENCE_S if self._welcomed else CONNECT_S
        waiting = not self._welcomed or self._intake.waiting
        if waiting and time.monotonic() - self._heard_s > patience_s:
            self._silent = True
            self._call.cancel()

    # ── what the source says ─────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        key = self._source.key
        try:
            with self._staging.using(), self._channel() as channel:
                self._receive(channel)
        except (StorageFull, StorageFailed) as error:
            self._report(LocalFailed(error))
        except PacelineError as error:
            if not self._closed:
                self._report(SourceFailed(key, self._stream, error))
        finally:
            self._intake.drop()
            self._outbox.put(None)

    def _channel(self) -> grpc.Channel:
        options = list(_OPTIONS)
        if self._pacer.paced:  # no more unseen than the TCP transport allows
            options += [
                ("grpc.http2.lookahead_bytes", self._pacer.buffer_bytes),
                ("grpc.http2.bdp_probe", 0),
            ]
        if self._tls is None:
            return grpc.insecure_channel(self._source.address, options)
        ca, cert, key = self._tls.read()
        options.append(("grpc.ssl_target_name_override", worker_host_name(self._source.key)))
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        return grpc.secure_channel(self._source.address, credentials, options)

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
        raise PeerLost("the peer closed the stream", where=self._source.key)

    def _hear(self, said: ChunkData) -> None:
        if not self._welcomed:
            self._welcome(said)
        elif said.waiting:
            self._intake.alive()
        elif said.data:
            self._take(said)
        else:
            raise InvalidFrame("an empty message", where=self._source.key)

    def _welcome(self, said: ChunkData) -> None:
        if not same(said.proof, proof(self._token, "server", self._hello, said.nonce)):
            raise AccessDenied(
                "the peer does not know the cluster's token", where=self._source.address
            )
        answer = proof(self._token, "client", self._hello, said.nonce)
        with self._lock:
            self._welcomed = True
            self._outbox.put(ChunkRequest(proof=answer))
            for asked in self._backlog:
                self._outbox.put(asked)
            self._backlog.clear()

    def _take(self, said: ChunkData) -> None:
        manifest = self._staging.manifest
        if said.piece >= manifest.piece_count:
            raise InvalidFrame("a piece beyond the model", got=said.piece, where=self._source.key)
        piece = manifest.piece_of(said.piece)
        at = said.offset - piece.stream_offset
        if self._arriving != said.piece:
            self._intake.begin(said.piece, piece.length)
            self._arriving, self._expected = said.piece, 0
        if at != self._expected:
            raise InvalidFrame("bytes out of order", got=at, wanted=self._expected)
        self._intake.take(said.data)
        self._expected += len(said.data)
        if said.checksum:
            self._arriving = -1
            if not self._intake.end():
                self._outbox.put(ChunkRequest(first_piece=said.piece, corrupt=True))

    def _failure(self, call: Any) -> PacelineError:
        where, details = self._source.key, call.details()
        if self._silent:
            return PeerLost("the peer went silent", where=where)
        code = call.code()
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return AccessDenied("the peer refused", got=details, where=where)
        if self._welcomed:
            return PeerLost("the peer refused", got=f"{details} ({code.name})", where=where)
        address = self._source.address
        if refusal := diagnose(address, self._tls, self._source.key, CONNECT_S):
            return refusal
        return PeerLost(
            "no stream from the peer",
            got=f"{details} ({code.name})",
            where=where,
        )
