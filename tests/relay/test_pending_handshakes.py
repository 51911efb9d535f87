"""Connections that do not authenticate keep no peer out, and no handshake waits for them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from paceline.relay.transport import (
    METHOD,
    GrpcTransport,
    TcpTransport,
    TlsSettings,
    Transport,
    grpc_server,
    issue_identity,
    make_authority,
    serving as lobby,
    tcp_server as server,
)
from tests.relay.peers import Heard, Node, Pair

SILENT = server.MAX_STREAMS + 40
Make = Callable[[str], Transport]


# ── at the port ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def credentials(tmp_path: Path) -> Callable[[str], TlsSettings]:
    authority = make_authority(tmp_path / "tls")

    def of(worker_id: str) -> TlsSettings:
        issued = issue_identity(authority, worker_id, tmp_path / "tls")
        return TlsSettings(ca=authority.cert, cert=issued.cert, key=issued.key)

    return of


@pytest.fixture(params=["tcp+mtls", "grpc"])
def make(request: pytest.FixtureRequest, credentials: Callable[[str], TlsSettings]) -> Make:
    kind, _, protected = request.param.partition("+")

    def one(worker_id: str) -> Transport:
        tls = credentials(worker_id) if protected else None
        return TcpTransport("t", tls) if kind == "tcp" else GrpcTransport("t", tls)

    return one


@pytest.fixture
def pair(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    soon = ("grpc.server_handshake_timeout_ms", 500)
    options = [soon if each[0] == soon[0] else each for each in grpc_server._OPTIONS]
    assert soon in options
    monkeypatch.setattr(grpc_server, "_OPTIONS", tuple(options))
    made = Pair(tmp_path, make)
    yield made
    made.close()


def silent_callers(pair: Pair, stack: ExitStack) -> list[socket.socket]:
    host, _, port = pair.address.rpartition(":")
    return [
        stack.enter_context(socket.create_connection((host, int(port)), 10)) for _ in range(SILENT)
    ]


def ended(sock: socket.socket) -> bool:
    """Return whether the other side ended the connection, which may have said something first."""
    sock.settimeout(lobby.HANDSHAKE_TIMEOUT_S + 10)
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_more_silent_callers_than_there_are_places_keep_no_peer_out(pair: Pair) -> None:
    source, mine = pair.open()
    pair.hold_all(source)
    with ExitStack() as stack:
        silent = silent_callers(pair, stack)
        heard = Heard()
        stream = pair.reader.pull(mine, pair.address, heard)
        stream.request(pair.everything())
        heard.wait_pieces(pair.manifest.piece_count)
        assert ended(silent[0])


@pytest.mark.parametrize("make", ["tcp"], indirect=True)  # the others' are above and below
def test_who_is_silent_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "HANDSHAKE_TIMEOUT_S", 0.2)
    host, _, port = pair.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as quiet:
        assert ended(quiet)


def test_who_speaks_slowly_gains_no_time(
    tmp_path: Path, credentials: Callable[[str], TlsSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby, "HANDSHAKE_TIMEOUT_S", 0.3)
    node = Node(tmp_path, "node-0", TcpTransport("t", credentials("node-0")))
    try:
        host, _, port = node.serve().rpartition(":")
        with socket.create_connection((host, int(port)), 10) as sock:
            hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
            with pytest.raises(OSError):
                for byte in hello:  # each in time for a timeout of one step
                    sock.sendall(bytes([byte]))
                    time.sleep(0.02)
    finally:
        node.close()


def test_streams_that_say_nothing_keep_no_peer_out_of_grpc(tmp_path: Path) -> None:
    pair = Pair(tmp_path, lambda _worker_id: GrpcTransport("t"))
    source, mine = pair.open()
    pair.hold_all(source)
    channel = grpc.insecure_channel(pair.address)
    try:
        open_call = channel.stream_stream(METHOD)
        never = threading.Event()

        def says_nothing() -> Iterator[bytes]:
            never.wait(30)
            yield from ()

        calls = [open_call(says_nothing()) for _ in range(SILENT)]
        heard = Heard()
        stream = pair.reader.pull(mine, pair.address, heard)
        stream.request(pair.everything())
        heard.wait_pieces(pair.manifest.piece_count)
        with pytest.raises(grpc.RpcError) as refused:
            next(calls[0])
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        never.set()
        channel.close()
        pair.close()
