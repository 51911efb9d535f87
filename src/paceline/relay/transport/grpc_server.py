"""The gRPC transport and its server: ``ChunkTransfer`` of chunk_transfer.proto.

Two threads per stream, one sends and one reads the peer's requests. A message is produced only
after the previous one was sent, so that a slow peer costs the memory of one message and never of
the model. Workers greet and prove the cluster's token as over TCP; a basic peer, which uses only
the proto's three basic fields, receives whole chunks. The client side is in ``grpc_client``.
"""

from __future__ import annotations

import hmac
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import grpc

from paceline.errors import (
    AccessDenied,
    InvalidFrame,
    NotFound,
    PacelineError,
    PeerLost,
    PortInUse,
    ServiceUnavailable,
)
from paceline.manifest import Piece
from paceline.relay.protocol import Extent
from paceline.relay.store import Staging
from paceline.relay.transport import serving
from paceline.relay.transport.contract import ServeSpec, Transport
from paceline.relay.transport.frames import (
    MAX_DATA,
    MAX_REQUEST,
    METHOD,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    WAITING,
    ChunkRequest,
    Hello,
    decode_request,
    encode_challenge,
    encode_data,
)
from paceline.relay.transport.grpc_client import GrpcPullStream
from paceline.relay.transport.serving import (
    HANDSHAKE_TIMEOUT_S,
    MAX_STREAMS,
    PLACES,
    CorruptReport,
    PeerMessage,
    PeerServer,
)
from paceline.relay.transport.tls import (
    TlsSettings,
    admission_of,
    peer_ids,
    valid_name,
    wrong_identity,
)
from paceline.schemas import SHA256_HEX

log = logging.getLogger(__name__)

SPARE_THREADS = 16  # for calls that are ending
UNREAD_REQUESTS = 1024  # beyond it the peer's requests wait in the network
BASIC_KEEPALIVE_S = 0.25
BASIC = "basic"  # the name of all peers that present the cluster's token and no worker id
_DIGEST = re.compile(SHA256_HEX)
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a taken port is an error
    ("grpc.max_receive_message_length", MAX_REQUEST),
    # A connection without a stream takes no thread; this bounds its TLS and HTTP/2 handshake.
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
_CODES = (
    (AccessDenied, grpc.StatusCode.PERMISSION_DENIED),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (InvalidFrame, grpc.StatusCode.INVALID_ARGUMENT),
    (PeerLost, grpc.StatusCode.UNAVAILABLE),
    (ServiceUnavailable, grpc.StatusCode.UNAVAILABLE),
)


class GrpcServer(PeerServer["_Call"]):
    """Listens on a port and serves the models that ``spec.find`` returns."""

    def __init__(self, transport: GrpcTransport, spec: ServeSpec) -> None:
        super().__init__(transport, spec, lambda call: call.end_connection())
        self.tls = transport.tls is not None
        most = MAX_STREAMS + PLACES + SPARE_THREADS
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="peer-serve")
        self._server = grpc.server(self._threads, options=_OPTIONS, maximum_concurrent_rpcs=most)
        handler = grpc.stream_stream_rpc_method_handler(
            lambda requests, context: _Call(self, requests, context).run()
        )
        service, method = METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        host = spec.host
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        where = f"{host}:{spec.port}"
        try:
            bound = self._bind(where, transport.tls)
        except RuntimeError as error:
            self._threads.shutdown(wait=False)
            raise PortInUse(
                "the peer port cannot be bound",
                got=error,
                where=where,
                do="Stop what listens there, or take port 0.",
            ) from error
        self.address = f"{host}:{bound}"

    def _bind(self, where: str, tls: TlsSettings | None) -> int:
        if tls is None:
            return int(self._server.add_insecure_port(where))
        ca, cert, key = tls.read()
        credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
        return int(self._server.add_secure_port(where, credentials))

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self.stopping.set()
        self.pending_handshakes.close()
        self._server.stop(None).wait(5.0)
        self._threads.shutdown(wait=False)


class _Call:
    """One stream: the peer's messages, and the messages for it."""

    def __init__(
        self, server: GrpcServer, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> None:
        self._server = server
        self._admission = ""  # of the peer's certificate
        self._requests = requests
        self._context = context
        self._said: queue.Queue[ChunkRequest | PacelineError | None] = queue.Queue(UNREAD_REQUESTS)
        self._over = threading.Event()
        self._ended = False  # the peer sends no more requests
        self._began_s = time.monotonic()

    def run(self) -> Iterator[bytes]:
        """Yield the messages for the peer; the call's status carries the reason of the end."""
        self._context.add_callback(self._over.set)
        listener = threading.Thread(target=self._listen, name="peer-listen", daemon=True)
        listener.start()
        who = "a peer"
        self._server.pending_handshakes.enter(self, time.monotonic())
        try:
            first = self._next(self._until_authenticated_s)
            if first is None:
                raise PeerLost("the peer did not say who it is")
            if first.worker_id or first.nonce:
                who = first.worker_id
                yield from self._serve_worker(first)
            else:
                yield from self._serve_basic(first)
        except (PacelineError, OSError) as error:
            level = logging.DEBUG if isinstance(error, PeerLost) else logging.INFO
            log.log(level, "stream of %s ended: %s", who, error)
            codes = (code for kind, code in _CODES if isinstance(error, kind))
            self._context.set_code(next(codes, grpc.StatusCode.INTERNAL))
            self._context.set_details(str(error)[:500])
        finally:
            self._over.set()
            self._server.pending_handshakes.leave(self)

    def end_connection(self) -> None:
        """End a call that has not authenticated; from any thread."""
        self._over.set()
        with suppress(queue.Full):
            self._said.put_nowait(PeerLost("others called meanwhile"))

    @property
    def _until_authenticated_s(self) -> float:
        return self._began_s + HANDSHAKE_TIMEOUT_S - time.monotonic()

    @contextmanager
    def _seated(self, reader: str) -> Iterator[None]:
        if not self._server.pending_handshakes.leave(self):
            raise PeerLost("others called meanwhile")
        with self._server.slots.taken(reader, MAX_STREAMS, shared=reader == BASIC):
            yield

    # ── messages from the peer ───────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        said: ChunkRequest | PacelineError | None
        try:
            for raw in self._requests:
                try:
                    said = decode_request(raw)
                except InvalidFrame as error:
                    said = error
                if not self._tell(said) or isinstance(said, PacelineError):
                    return
        except grpc.RpcError:
            log.debug("a peer hung up")
        self._tell(None)

    def _tell(self, said: ChunkRequest | PacelineError | None) -> bool:
        while not self._over.is_set():
            try:
                self._said.put(said, timeout=0.5)
            except queue.Full:
                continue
            return True
        return False

    def _next(self, wait_s: float) -> ChunkRequest | None:
        """Return the next message, or None if none arrives in time or the peer sends no more."""
        end_s = time.monotonic() + wait_s
        while not self._ended:
            if self._over.is_set() or self._server.stopping.is_set():
                raise PeerLost("the stream is over")
            left_s = end_s - time.monotonic()
            try:
                said = (
                    self._said.get(timeout=min(left_s, 0.5))
                    if left_s > 0
                    else self._said.get(block=False)
                )
            except queue.Empty:
                if left_s <= 0:
                    return None
                continue
            if isinstance(said, PacelineError):
                raise said
            if said is not None:
                return said
            self._ended = True
        return None

    def _asked(self, wait_s: float) -> Iterator[PeerMessage]:
        while (said := self._next(wait_s)) is not None:
            wait_s = 0.0
            if said.corrupt:
                yield CorruptReport(said.first_piece)
            elif said.piece_count:
                yield Extent(said.first_piece, said.first_piece + said.piece_count)
            else:
                raise InvalidFrame("a request for nothing", got="piece_count 0", wanted="1 or more")

    # ── authentication ───────────────────────────────────────────────────────────────────────────

    def _certified(self) -> str | None:
        """Return the worker id of the peer's certificate, or None if the port is plain."""
        if not self._server.tls:
            return None
        found = self._context.auth_context().get("x509_subject_alternative_name", ())
        names = [name.decode("utf-8", "replace") for name in found]
        ids = peer_ids(names)
        if len(ids) != 1:
            raise AccessDenied("the peer's certificate names no worker", got=names)
        self._admission = admission_of(names)
        return ids[0]

    def _greet(self, first: ChunkRequest) -> Iterator[bytes]:
        if not (
            valid_name(first.worker_id)
            and _DIGEST.match(first.manifest_digest)
            and len(first.nonce) == NONCE_BYTES
        ):
            raise InvalidFrame("bad greeting", got=first.worker_id[:40], where="gRPC")
        certified = self._certified()
        if certified is not None and certified != first.worker_id:
            raise wrong_identity(certified, first.worker_id)
        self._server.barred.require(first.worker_id, self._admission)
        hello = Hello(PROTOCOL_VERSION, 0.0, first.manifest_digest, first.nonce, first.worker_id)
        nonce, own_proof = self._server.challenge(hello)
        yield encode_challenge(nonce, own_proof)
        answer = self._next(self._until_authenticated_s)
        self._server.check_proof(hello, nonce, answer.proof if answer else b"")

    def _basic_reader(self) -> str:
        """Return the name of a peer without a greeting; raises AccessDenied without a proof."""
        certified = self._certified()
        if certified is not None:
            self._server.barred.require(certified, self._admission)
            return certified
        metadata = dict(self._context.invocation_metadata())
        said = str(metadata.get("authorization", "")).removeprefix("Bearer ")
        if not hmac.compare_digest(said.encode(), self._server.token.encode()):
            raise AccessDenied(
                "a peer without a greeting must prove who it is",
                wanted="a certificate, or `authorization: Bearer TOKEN` metadata",
            )
        return BASIC

    # ── messages to the peer ─────────────────────────────────────────────────────────────────────

    def _serve_worker(self, first: ChunkRequest) -> Iterator[bytes]:
        yield from self._greet(first)
        keepalive_s = min(10.0, max(0.02, first.keepalive_ms / 1000))
        with self._seated(first.worker_id):
            for staging in self._server.await_model(
                first.manifest_digest, keepalive_s, self._over.is_set
            ):
                if staging is None:
                    yield WAITING
                    continue
                with staging.serving():
                    yield from self._send_pieces(staging, first.worker_id, keepalive_s)

    def _send_pieces(self, staging: Staging, reader: str, keepalive_s: float) -> Iterator[bytes]:
        peer = self._server.stream(staging, reader, keepalive_s, self._admission)
        with closing(peer.runs(self._asked)) as runs:
            for run in runs:
                if run is None:
                    yield WAITING
                    continue
                for index in range(*run):
                    piece = staging.manifest.piece_of(index)
                    for at, data, last in self._blocks(staging, piece):
                        yield encode_data(
                            data,
                            chunk_id=piece.chunk_id,
                            checksum=piece.digest if last else "",
                            piece=index,
                            offset=piece.stream_offset + at,
                        )
                        peer.carried(len(data), last=False)
                peer.carried(0, last=True)

    def _serve_basic(self, first: ChunkRequest) -> Iterator[bytes]:
        reader = self._basic_reader()
        with self._seated(reader):
            for staging in self._server.await_model(
                first.manifest_digest, BASIC_KEEPALIVE_S, self._over.is_set
            ):
                if staging is None:
                    continue  # basic peers do not understand WAITING
                with staging.serving():
                    request: ChunkRequest | None = first
                    while request is not None:
                        yield from self._send_chunk(staging, reader, request.chunk_id)
                        request = self._next(serving.IDLE_S)

    def _send_chunk(self, staging: Staging, reader: str, chunk_id: int) -> Iterator[bytes]:
        """Yield a chunk's bytes in order, each piece as soon as it is verified."""
        manifest = staging.manifest
        if chunk_id >= len(manifest.chunks):
            raise NotFound("no such chunk", got=chunk_id, wanted=f"0 to {len(manifest.chunks) - 1}")
        chunk, pieces = manifest.chunks[chunk_id], manifest.chunk_pieces(chunk_id)
        for index in pieces:
            self._await_piece(staging, index)
            piece, since_s = manifest.piece_of(index), time.monotonic()
            for at, data, last in self._blocks(staging, piece):
                whole = last and index == pieces[-1]
                yield encode_data(
                    data,
                    chunk_id=chunk_id,
                    checksum=chunk.checksum if whole else "",
                    piece=index,
                    offset=piece.stream_offset + at,
                )
            busy_s = time.monotonic() - since_s
            staging.edges.carried(self._server.spec.worker_id, reader, piece.length, busy_s)

    def _await_piece(self, staging: Staging, index: int) -> None:
        with staging.requests() as queue:
            queue.add(Extent(index, index + 1))
            while queue.next(1, BASIC_KEEPALIVE_S) is None:
                if self._over.is_set() or staging.closed or staging.is_abandoned:
                    digest = staging.manifest.digest
                    raise NotFound("this worker gave the model up", got=digest[:12])

    def _blocks(self, staging: Staging, piece: Piece) -> Iterator[tuple[int, bytes, bool]]:
        """Yield ``(offset in the piece, bytes, whether they are its last)``."""
        pacer = self._server.spec.pacer
        block = pacer.block_bytes if pacer.paced else MAX_DATA
        descriptor = staging.descriptor(piece.file_index)
        for at in range(0, piece.length, block):
            count = min(block, piece.length - at)
            data = os.pread(descriptor, count, piece.file_offset + at)
            if len(data) != count:
                raise PeerLost("a file became shorter while it was served")
            yield at, data, at + count == piece.length
            pacer.take(count)


class GrpcTransport(Transport):
    """``ChunkTransfer`` streams; see Transport."""

    name = "grpc"
    server_type, stream_type = GrpcServer, GrpcPullStream

    def reload(self) -> bool:
        if self.tls is None:
            return True
        self.tls.context(server=True)
        return False  # each stream reads them; the server keeps the credentials it started with
