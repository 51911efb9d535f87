"""The peer port on real sockets: who gets in, what is served, what is refused."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from paceline.errors import PeerLost
from paceline.manifest import Manifest
from paceline.relay.store.library import OpenModels
from paceline.relay.store.staging import Staging
from paceline.relay.store.store import Store
from paceline.relay.transport.frames import (
    HEADER,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Header,
    Hello,
    Kind,
    decode,
    encode,
    encode_hello,
    encode_payload,
    proof,
)
from paceline.relay.transport.pacing import Pacer
from paceline.relay.transport.sockets import PlainChannel, read_frame
from paceline.relay.transport.tcp_server import TcpServer
from tests.relay.kit import manifest_of, write_model

TOKEN = "cluster-token"


class Port:
    """A served store and a way to speak to it frame by frame."""

    def __init__(self, root: Path) -> None:
        self.model = write_model(root / "model", 200_000)
        self.manifest: Manifest = manifest_of(self.model)
        self.store = Store(root / "store")
        self.library = OpenModels(self.store)
        self.server = TcpServer(
            host="127.0.0.1",
            port=0,
            worker_id="node-0",
            token=TOKEN,
            find=self.library.find,
            pacer=Pacer(None),
        )
        self.server.start()

    def connect(self) -> socket.socket:
        host, port = self.server.address.split(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def welcomed(self, digest: str | None = None, token: str = TOKEN) -> socket.socket:
        sock = self.connect()
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = Hello(PROTOCOL_VERSION, 0.05, digest or self.manifest.digest, nonce, "me")
        sock.sendall(encode_hello(hello))
        _, payload = next_frame(sock)
        theirs = payload[:NONCE_BYTES]
        assert payload[NONCE_BYTES:] == proof(TOKEN, "server", hello, theirs)
        sock.sendall(encode_payload(Kind.PROOF, proof(token, "client", hello, theirs)))
        return sock

    def hold(self, staging: Staging, index: int) -> None:
        self.write(staging, index)
        staging.hold(self.manifest.piece_of(index))

    def write(self, staging: Staging, index: int) -> None:
        piece = self.manifest.piece_of(index)
        path = self.model / self.manifest.files[piece.file_index].path
        data = path.read_bytes()[piece.file_offset :][: piece.length]
        assert staging.claim(index)
        staging.write(staging.descriptor(piece.file_index), memoryview(data), piece.file_offset)


def next_frame(sock: socket.socket) -> tuple[Header, bytes]:
    return read_frame(PlainChannel(sock), time.monotonic() + 10, *Kind)


def take_piece(sock: socket.socket) -> tuple[int, bytes]:
    """Return the next piece, past any word that there is none yet."""
    while True:
        raw = bytearray(HEADER.size)
        PlainChannel(sock).receive(memoryview(raw), time.monotonic() + 10)
        header = decode(raw)
        if header.kind is Kind.PIECE:
            data = bytearray(header.second)
            PlainChannel(sock).receive(memoryview(data), time.monotonic() + 10)
            return header.first, bytes(data)
        assert header.kind in (Kind.WAITING, Kind.WELCOME)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    made = Port(tmp_path)
    yield made
    made.server.stop()
    made.library.close()
    made.store.close()


def test_a_piece_is_served_the_moment_it_is_verified_and_never_before(port: Port) -> None:
    staging = port.library.open(port.manifest)
    with port.welcomed() as sock:
        sock.sendall(encode(Kind.REQUEST, 0, 4))
        assert next_frame(sock)[0].kind is Kind.WELCOME
        assert next_frame(sock)[0].kind is Kind.WAITING
        assert next_frame(sock)[0].kind is Kind.WAITING
        port.hold(staging, 2)  # whatever is verified first is served first
        index, data = take_piece(sock)
        assert index == 2
        assert hashlib.sha256(data).hexdigest() == port.manifest.piece_of(2).sha256
        port.hold(staging, 0)
        assert take_piece(sock)[0] == 0


def test_a_peer_may_come_before_the_deployment_does(port: Port) -> None:
    with port.welcomed() as sock:
        sock.sendall(encode(Kind.REQUEST, 0, 1))
        assert next_frame(sock)[0].kind is Kind.WELCOME
        assert next_frame(sock)[0].kind is Kind.WAITING
        port.hold(port.library.open(port.manifest), 0)
        assert take_piece(sock)[0] == 0


def test_what_an_earlier_process_published_is_served(port: Port) -> None:
    staging = port.library.open(port.manifest)
    for index in range(port.manifest.piece_count):
        port.hold(staging, index)
    port.store.publish(staging)
    port.library.close()
    port.library._on_disk = {each.digest: each for each in port.store.versions()}
    with port.welcomed() as sock:
        sock.sendall(encode(Kind.REQUEST, 5, 1))
        assert take_piece(sock)[0] == 5


def test_who_does_not_know_the_token_gets_nothing(port: Port) -> None:
    port.library.open(port.manifest)
    with port.welcomed(token="guess") as sock:
        header, said = next_frame(sock)
        assert header.kind is Kind.ERROR
        assert b"token" in said


def test_a_request_beyond_the_model_ends_the_stream(port: Port) -> None:
    port.library.open(port.manifest)
    with port.welcomed() as sock:
        sock.sendall(encode(Kind.REQUEST, 0, port.manifest.piece_count + 1))
        assert next_frame(sock)[0].kind is Kind.WELCOME
        header, said = next_frame(sock)
        assert header.kind is Kind.ERROR
        assert b"beyond" in said


def test_garbage_ends_its_own_stream_only(port: Port) -> None:
    staging = port.library.open(port.manifest)
    port.hold(staging, 0)
    random = Random(3)
    for _ in range(60):
        with port.connect() as sock:
            if random.random() < 0.5:
                sock.sendall(encode(random.choice(list(Kind)), random.getrandbits(32), 40))
            sock.sendall(random.randbytes(random.randint(1, 200)))
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    with port.welcomed() as sock:
        sock.sendall(encode(Kind.REQUEST, 0, 1))
        assert take_piece(sock)[0] == 0


def test_a_cancelled_model_ends_its_streams(port: Port) -> None:
    staging = port.library.open(port.manifest)
    port.hold(staging, 0)
    with port.welcomed() as sock:
        sock.sendall(encode(Kind.REQUEST, 0, 2))
        assert take_piece(sock)[0] == 0
        port.library.discard(staging)
        with pytest.raises(PeerLost, match=r"clos|broke"):
            while True:
                next_frame(sock)


def test_streams_are_capped(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.relay.transport.tcp_server.MAX_STREAMS", 1)
    port.library.open(port.manifest)
    with port.welcomed() as first:
        assert next_frame(first)[0].kind is Kind.WELCOME
        with port.welcomed() as second:
            header, said = next_frame(second)
            assert header.kind is Kind.ERROR
            assert b"too many" in said


def test_the_sending_side_tells_what_an_edge_carried(port: Port) -> None:
    staging = port.library.open(port.manifest)
    with port.welcomed() as sock:
        sock.sendall(encode(Kind.REQUEST, 0, 2))
        assert next_frame(sock)[0].kind is Kind.WELCOME
        assert next_frame(sock)[0].kind is Kind.WAITING
        assert staging.edges.tallies() == ()  # waiting for a piece is not the edge's fault
        port.hold(staging, 1)
        _, data = take_piece(sock)
        port.hold(staging, 0)
        _, more = take_piece(sock)
        sock.sendall(encode(Kind.REQUEST, 5, 1))
        assert next_frame(sock)[0].kind is Kind.WAITING  # the server has counted by now
        (edge,) = staging.edges.tallies()
    assert (edge.source, edge.reader, edge.bytes) == ("node-0", "me", len(data) + len(more))
    assert 0 < edge.busy_s < 5


def test_without_descriptors_callers_wait_and_running_streams_go_on(port: Port) -> None:
    staging = port.library.open(port.manifest)
    port.hold(staging, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    late = socket.socket()
    with port.welcomed() as running, late:
        sock_numbers = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
        running.sendall(encode(Kind.REQUEST, 0, 3))
        assert take_piece(running)[0] == 0
        port.write(staging, 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(sock_numbers) + 1, hard))
        fillers = []
        try:
            with contextlib.suppress(OSError):
                while True:  # numbers below the limit that were free
                    fillers.append(os.open("/dev/null", os.O_RDONLY))
            host, _, number = port.server.address.rpartition(":")
            late.connect((host, int(number)))  # into the backlog
            nonce = secrets.token_bytes(NONCE_BYTES)
            hello = Hello(PROTOCOL_VERSION, 0.05, port.manifest.digest, nonce, "late")
            late.sendall(encode_hello(hello))
            staging.hold(port.manifest.piece_of(1))
            assert take_piece(running)[0] == 1  # it goes on
        finally:
            for each in fillers:
                os.close(each)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert next_frame(late)[0].kind is Kind.CHALLENGE  # and the late one's turn comes
        port.hold(staging, 2)
        assert take_piece(running)[0] == 2
