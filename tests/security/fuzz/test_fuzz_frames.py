"""Hostile bytes on the peer port over TCP: into the decoder, and into a live, authenticated stream.

Nothing but a named error comes out, the connection is closed with it, and the port goes on. A
hostile source ends only the stream that reads from it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from paceline.errors import InvalidFrame, PacelineError
from paceline.relay.protocol import Extent
from paceline.relay.transport import (
    HEADER,
    MAX_PAYLOAD,
    MAX_PIECES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Kind,
    PlainChannel,
    TcpTransport,
    decode,
    decode_hello,
    encode,
    encode_hello,
    encode_payload,
    proof,
    read_frame,
)
from tests.relay.peers import Heard, Pair, let_in

TOKEN = "cluster-token"
HANG_S = 15.0

numbers = st.one_of(st.integers(0, 20), st.integers(0, 2**32 - 1))
frames = st.one_of(
    st.builds(encode, st.sampled_from(list(Kind)), numbers, numbers),
    st.builds(encode, st.just(Kind.REQUEST), st.integers(0, 20), st.integers(1, 20)),
    st.builds(encode, st.just(Kind.CORRUPT), st.integers(0, 20)),
    st.builds(encode_payload, st.sampled_from([Kind.ERROR, Kind.HELLO]), st.binary(max_size=90)),
    st.builds(lambda raw: b"PCL" + raw, st.binary(min_size=9, max_size=9)),
    st.binary(max_size=40),
)


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.binary(max_size=200), frames))
def test_a_decoder_returns_bounded_numbers_or_an_invalid_frame(raw: bytes) -> None:
    with contextlib.suppress(InvalidFrame):
        header = decode(raw[: HEADER.size])
        assert header.payload_bytes <= MAX_PAYLOAD
        if header.kind is Kind.REQUEST:
            assert header.first + header.second <= MAX_PIECES
    with contextlib.suppress(InvalidFrame):
        assert len(decode_hello(raw).worker_id) <= 128


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("frames"), lambda _: TcpTransport(TOKEN), size=300_000)
    theirs, _ = made.open()
    made.hold(theirs, 0, 1, 3, 5)
    yield made
    made.close()


@pytest.fixture(scope="module")
def defects() -> Iterator[list[str]]:
    """What threads died of meanwhile."""
    found: list[str] = []
    before, threading.excepthook = threading.excepthook, lambda args: found.append(repr(args))
    yield found
    threading.excepthook = before


def connected(pair: Pair) -> socket.socket:
    host, _, port = pair.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=HANG_S)


def greeted(pair: Pair) -> socket.socket:
    sock = connected(pair)
    channel = PlainChannel(sock, HANG_S)
    nonce = secrets.token_bytes(NONCE_BYTES)
    hello = Hello(PROTOCOL_VERSION, 0.02, pair.manifest.digest, nonce, "hostile")
    until_s = time.monotonic() + HANG_S
    channel.send(encode_hello(hello))
    _, theirs = read_frame(channel, until_s, Kind.CHALLENGE)
    answer = proof(TOKEN, "client", hello, theirs[:NONCE_BYTES])
    channel.send(encode_payload(Kind.PROOF, answer))
    read_frame(channel, until_s, Kind.WELCOME)
    return sock


def end_of(sock: socket.socket) -> bytes:
    """Return what comes until the other side closes; it has to."""
    said = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while data := sock.recv(65_536):
            said = (said + data)[-200_000:]
    return said


@settings(max_examples=15, deadline=None)
@given(st.lists(frames, max_size=12))
def test_whatever_a_peer_says_its_stream_ends_by_name(
    pair: Pair, defects: list[str], said: list[bytes]
) -> None:
    with greeted(pair) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"".join(said))
            # A wrong magic last: whatever came before, here the port knows what it was sent.
            sock.sendall(b"XXX" + bytes(9 + 1024))
        end = end_of(sock)
    assert not defects
    if b"PCL" + bytes([Kind.ERROR]) in end:  # a reset may overtake it
        assert b"peer port" in end or b"frame" in end or b"request" in end


@settings(max_examples=15, deadline=None)
@given(st.lists(frames, min_size=1, max_size=4))
def test_whatever_a_stranger_says_it_is_turned_away(
    pair: Pair, defects: list[str], said: list[bytes]
) -> None:
    with connected(pair) as sock:
        with contextlib.suppress(OSError):  # it may be closed already
            sock.sendall(b"".join(said))
            sock.shutdown(socket.SHUT_WR)
        end_of(sock)
    assert not defects


def test_the_port_goes_on_after_it_all(pair: Pair, defects: list[str]) -> None:
    mine = pair.reader.library.open(pair.manifest)
    heard = Heard()
    pair.reader.pull(mine, pair.address, heard).request(Extent(0, 4))
    assert sorted(heard.wait_pieces(3)) == [0, 1, 3]
    assert not defects
    with pytest.raises(PacelineError):
        decode(b"XXX" + bytes(9))


# ── a hostile source ─────────────────────────────────────────────────────────────────────────────

answers = st.one_of(
    frames,
    st.builds(encode, st.just(Kind.PIECE), st.integers(0, 15), st.just(16_384)),
    st.just(bytes(16_384)),
)


def hostile(listener: socket.socket, said: list[bytes]) -> None:
    """Let one caller in, then say ``said`` and hang up."""
    sock, _ = listener.accept()
    with sock, contextlib.suppress(OSError, PacelineError):
        channel = let_in(sock, TOKEN)
        for frame in said:
            channel.send(frame)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


@settings(max_examples=15, deadline=None)
@given(st.lists(answers, max_size=12))
def test_whatever_a_source_says_its_stream_just_ends(
    pair: Pair, defects: list[str], said: list[bytes]
) -> None:
    heard, node = Heard(), pair.reader
    mine = node.library.open(pair.manifest)
    before = mine.verified.count
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = threading.Thread(target=hostile, args=(listener, said), daemon=True)
        source.start()
        stream = node.pull(mine, f"127.0.0.1:{listener.getsockname()[1]}", heard, whom="hostile")
        stream.request(Extent(0, 10))
        assert isinstance(heard.failure(), PacelineError)
        stream.thread.join(HANG_S)  # type: ignore[attr-defined]
        source.join(HANG_S)
    assert mine.verified.count == before
    assert mine.writers == {}
    assert not defects
