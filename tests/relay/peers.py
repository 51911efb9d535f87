"""Two ends of a transport on loopback, for the conformance suite: a served store and streams."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.manifest import Manifest
from paceline.relay.protocol import (
    Extent,
    PieceVerified,
    SessionEvent,
    SourceAlive,
    SourceFailed,
)
from paceline.relay.store import OpenModels, Staging, Store
from paceline.relay.transport import (
    Kind,
    Pacer,
    PlainChannel,
    PullSpec,
    PullStream,
    ServeSpec,
    TransferCounters,
    Transport,
    decode_hello,
    encode,
    encode_payload,
    proof,
    read_frame,
)
from paceline.schemas import Source
from tests.relay.kit import manifest_of, write_model

LONG_S = 20.0  # a bound of waiting for what must happen, never a measure


class Heard:
    """The events of one stream, as the session would be told."""

    def __init__(self) -> None:
        self.events: list[SessionEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: SessionEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, met: Callable[[list[SessionEvent]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: met(self.events), LONG_S), self.events[-5:]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def pieces(self, kind: type[Any] = PieceVerified) -> list[int]:
        return [piece for event in self.of(kind) for piece in range(*event.extent)]

    def wait_pieces(self, count: int, kind: type[Any] = PieceVerified) -> list[int]:
        self.wait(lambda _: len(self.pieces(kind)) >= count)
        return self.pieces(kind)

    def failure(self) -> Any:
        self.wait(lambda _: bool(self.of(SourceFailed)))
        return self.of(SourceFailed)[0].error

    def alive(self) -> int:
        return len(self.of(SourceAlive))

    def wait_alive(self, more: int = 1) -> None:
        before = self.alive()
        self.wait(lambda _: self.alive() >= before + more)


class Node:
    """One worker: its store, its open models and, once it serves, its peer port."""

    def __init__(self, root: Path, worker_id: str, transport: Transport) -> None:
        self.worker_id = worker_id
        self.transport = transport
        self.store = Store(root / worker_id)
        self.library = OpenModels(self.store)
        self.counters = TransferCounters()
        self.rotten: list[tuple[str, int]] = []
        self.streams: list[PullStream] = []
        self.server: Any = None

    def serve(self, pacer: Pacer | None = None, port: int = 0, host: str = "127.0.0.1") -> str:
        self.server = self.transport.serve(
            ServeSpec(
                host=host,
                port=port,
                worker_id=self.worker_id,
                find=self.library.find,
                pacer=pacer or Pacer(None),
                on_disk_corruption=lambda digest, piece: self.rotten.append((digest, piece)),
            )
        )
        self.server.start()
        return str(self.server.address)

    def pull(
        self,
        staging: Staging,
        address: str,
        heard: Heard,
        *,
        whom: str = "node-0",
        calls_itself: str | None = None,
        keepalive_s: float = 0.1,
        pacer: Pacer | None = None,
        transport: Transport | None = None,
    ) -> PullStream:
        asked = PullSpec(
            source=Source(kind="worker", worker_id=whom, address=address),
            stream=len(self.streams) + 1,
            worker_id=calls_itself or self.worker_id,
            staging=staging,
            pacer=pacer or Pacer(None),
            counters=self.counters,
            keepalive_s=keepalive_s,
            report=heard,
        )
        stream = (transport or self.transport).pull(asked)
        self.streams.append(stream)
        return stream

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        if self.server is not None:
            self.server.stop()
        self.library.close()
        self.store.close()


class Pair:
    """``source`` (node-0) serves, ``reader`` (node-1) pulls; both know the same model."""

    def __init__(
        self,
        root: Path,
        make: Callable[[str], Transport],
        *,
        size: int = 200_000,
        piece_bytes: int = 16_384,
    ) -> None:
        self.make = make
        self.root = root
        self.model = write_model(root / "model", size)
        self.manifest: Manifest = manifest_of(
            self.model, piece_bytes=piece_bytes, chunk_bytes=max(65_536, piece_bytes)
        )
        self.source = Node(root, "node-0", make("node-0"))
        self.reader = Node(root, "node-1", make("node-1"))
        self.nodes = [self.source, self.reader]
        self.address = self.source.serve()

    def another(self, worker_id: str) -> Node:
        self.nodes.append(Node(self.root, worker_id, self.make(worker_id)))
        return self.nodes[-1]

    def open(self) -> tuple[Staging, Staging]:
        return self.source.library.open(self.manifest), self.reader.library.open(self.manifest)

    def data(self, index: int) -> bytes:
        piece = self.manifest.piece_of(index)
        path = self.model / self.manifest.files[piece.file_index].path
        return path.read_bytes()[piece.file_offset :][: piece.length]

    def hold(self, staging: Staging, *indices: int, rotten: bool = False) -> None:
        """Make pieces verified; ``rotten`` ones lie on the disk with a flipped bit."""
        for index in indices:
            piece, data = self.manifest.piece_of(index), self.data(index)
            if rotten:
                data = bytes([data[0] ^ 1]) + data[1:]
            assert staging.claim(index)
            staging.write(staging.descriptor(piece.file_index), memoryview(data), piece.file_offset)
            staging.hold(piece)

    def hold_all(self, staging: Staging) -> None:
        self.hold(staging, *range(self.manifest.piece_count))

    def everything(self) -> Extent:
        return Extent(0, self.manifest.piece_count)

    def arrived(self, staging: Staging, index: int) -> bytes:
        piece = self.manifest.piece_of(index)
        file = staging.data / self.manifest.files[piece.file_index].path
        return file.read_bytes()[piece.file_offset :][: piece.length]

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class Proxy:
    """Passes bytes between a caller and ``target`` until it is told to go silent or to reset."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.silent = threading.Event()
        self._stopped = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self._target.rpartition(":")
            try:
                target = socket.create_connection((host, int(port)))
            except OSError:  # the target is gone: so is the caller
                caller.close()
                continue
            self._sockets += [caller, target]
            for one, other in ((caller, target), (target, caller)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65_536):
                while self.silent.is_set() and not self._stopped.is_set():
                    time.sleep(0.01)  # neither bytes nor an end: the half-open connection
                other.sendall(data)
        except OSError:
            pass
        for sock in (one, other):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def cut(self) -> None:
        """Break every connection at once."""
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self) -> None:
        self._stopped.set()
        self._listener.close()
        self.cut()
        for sock in self._sockets:
            sock.close()


def let_in(sock: socket.socket, token: str) -> PlainChannel:
    """Welcome the caller at ``sock`` as a peer's port does that knows ``token``."""
    channel = PlainChannel(sock, 5.0)
    hello = decode_hello(read_frame(channel, float("inf"), Kind.HELLO)[1])
    nonce = b"n" * 32
    channel.send(encode_payload(Kind.CHALLENGE, nonce + proof(token, "server", hello, nonce)))
    read_frame(channel, float("inf"), Kind.PROOF)
    channel.send(encode(Kind.WELCOME))
    return channel
