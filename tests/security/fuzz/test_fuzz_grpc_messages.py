"""Hostile bytes as gRPC messages: into both decoders, into a live stream of the port, and into a
stream that reads from a hostile source. Only named errors come out; the port goes on.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from hypothesis import given, settings, strategies as st

from paceline.errors import InvalidFrame, PacelineError
from paceline.relay.protocol import Extent
from paceline.relay.transport import (
    MAX_DATA,
    METHOD,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    ChunkRequest,
    GrpcTransport,
    Hello,
    decode_data,
    decode_request,
    encode_challenge,
    encode_data,
    encode_request,
    proof,
)
from tests.relay.peers import Heard, Pair

TOKEN = "cluster-token"
HANG_S = 15.0
NAMED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # longer than any request: gRPC itself refuses it
}

numbers = st.one_of(st.integers(0, 20), st.integers(0, 2**40))
requests = st.builds(
    lambda first, count, corrupt, chunk: encode_request(
        ChunkRequest(first_piece=first, piece_count=count, corrupt=corrupt, chunk_id=chunk)
    ),
    numbers,
    numbers,
    st.booleans(),
    numbers,
)
answers = st.builds(
    lambda data, piece, offset, checksum: encode_data(
        data, piece=piece, offset=offset, checksum=checksum
    ),
    st.binary(max_size=50),
    numbers,
    st.one_of(st.integers(0, 60_000), numbers),
    st.sampled_from(["", "a" * 64]),
)
fields = st.builds(
    lambda number, kind, raw: bytes([number << 3 & 0x7F | kind]) + raw,
    st.integers(0, 15),
    st.integers(0, 7),
    st.binary(max_size=12),
)
noise = st.one_of(st.binary(max_size=60), st.lists(fields, max_size=90).map(b"".join))


@pytest.mark.parametrize("decode", [decode_request, decode_data])
@settings(max_examples=25, deadline=None)
@given(raw=st.one_of(noise, requests, answers))
def test_a_decoder_returns_or_raises_an_invalid_frame(
    decode: Callable[[bytes], Any], raw: bytes
) -> None:
    with contextlib.suppress(InvalidFrame):
        decode(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x78\x01" * (MAX_DATA // 2),  # unknown numbers
        b"\x12\x00" * (MAX_DATA // 2),  # the same field, again and again
        b"".join(bytes([0x82 | n & 0x78, 1 + (n >> 4) & 0x7F, 0]) for n in range(2048))
        * (MAX_DATA // 3 // 2048),
        b"\x08" + b"\xff" * (MAX_DATA - 1),
        b"\x12\xff\xff\xff\x7f" + bytes(MAX_DATA - 5),
    ],
    ids=["numbers", "repeated", "distinct", "endless number", "beyond the end"],
)
def test_a_megabyte_of_the_worst_is_refused_in_little_memory(raw: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidFrame):
            decode_data(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


# ── the port ─────────────────────────────────────────────────────────────────────────────────────


class Errors(logging.Handler):
    """What gRPC's server logs of a handler that raised."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@pytest.fixture(scope="module")
def defects() -> Iterator[list[str]]:
    errors = Errors()
    logging.getLogger("grpc._server").addHandler(errors)
    before = threading.excepthook
    threading.excepthook = lambda args: errors.found.append(repr(args))
    yield errors.found
    threading.excepthook = before
    logging.getLogger("grpc._server").removeHandler(errors)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("grpc"), lambda _: GrpcTransport(TOKEN), size=300_000)
    theirs, _ = made.open()
    made.hold(theirs, 0, 1, 3, 5)
    yield made
    made.close()


@pytest.fixture(scope="module")
def channel(pair: Pair) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(pair.address) as made:
        yield made


def ended(channel: grpc.Channel, pair: Pair, said: list[bytes], *, greets: bool) -> Any:
    """Say ``said``, then what is no message; return the status that the stream ends with."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    hello = Hello(PROTOCOL_VERSION, 0.02, pair.manifest.digest, nonce, "hostile")
    proofs: list[bytes] = []

    def messages() -> Iterator[bytes]:
        if greets:
            yield encode_request(
                ChunkRequest(
                    worker_id="hostile", manifest_digest=hello.digest, nonce=nonce, keepalive_ms=20
                )
            )
            until_s = time.monotonic() + HANG_S
            while not proofs and time.monotonic() < until_s:
                time.sleep(0.002)
            yield encode_request(ChunkRequest(proof=proofs[0]))
        yield from said
        yield b"\x0b"

    call = channel.stream_stream(METHOD)(messages(), timeout=HANG_S)
    try:
        for raw in call:
            got = decode_data(raw)
            if got.nonce:
                proofs.append(proof(TOKEN, "client", hello, got.nonce))
    except grpc.RpcError as error:
        return error.code()
    return None


@settings(max_examples=15, deadline=None)
@given(st.lists(st.one_of(requests, noise), max_size=8))
def test_whatever_a_peer_says_its_stream_ends_by_name(
    channel: grpc.Channel, pair: Pair, defects: list[str], said: list[bytes]
) -> None:
    assert ended(channel, pair, said, greets=True) in NAMED
    assert not defects


@settings(max_examples=15, deadline=None)
@given(st.lists(st.one_of(requests, noise), min_size=1, max_size=4))
def test_whatever_a_stranger_says_it_is_turned_away(
    channel: grpc.Channel, pair: Pair, defects: list[str], said: list[bytes]
) -> None:
    assert ended(channel, pair, said, greets=False) in NAMED
    assert not defects


def test_the_port_goes_on_after_it_all(pair: Pair, defects: list[str]) -> None:
    mine = pair.reader.library.open(pair.manifest)
    heard = Heard()
    pair.reader.pull(mine, pair.address, heard).request(Extent(0, 4))
    assert sorted(heard.wait_pieces(3)) == [0, 1, 3]
    assert not defects


# ── a hostile source ─────────────────────────────────────────────────────────────────────────────


class Source:
    """Proves itself to each reader, and then says ``said``."""

    def __init__(self, digest: str) -> None:
        self.said: list[bytes] = []
        self.may_speak = threading.Event()
        self.may_speak.set()
        self.digest = digest
        self.server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = METHOD.strip("/").split("/")
        generic = grpc.method_handlers_generic_handler(service, {method: handler})
        self.server.add_generic_rpc_handlers((generic,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def _serve(self, requests: Iterator[bytes], _context: Any) -> Iterator[bytes]:
        first = decode_request(next(requests))
        hello = Hello(PROTOCOL_VERSION, 0.0, first.manifest_digest, first.nonce, first.worker_id)
        nonce = secrets.token_bytes(NONCE_BYTES)
        yield encode_challenge(nonce, proof(TOKEN, "server", hello, nonce))
        self.may_speak.wait(10)
        yield from self.said


@pytest.fixture(scope="module")
def source(pair: Pair) -> Iterator[Source]:
    made = Source(pair.manifest.digest)
    yield made
    made.server.stop(None).wait(5)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.one_of(answers, noise), max_size=8))
def test_whatever_a_source_says_its_stream_just_ends(
    pair: Pair, source: Source, defects: list[str], said: list[bytes]
) -> None:
    source.said = said
    node, heard = pair.reader, Heard()
    mine = node.library.open(pair.manifest)
    stream = node.pull(mine, source.address, heard, whom="hostile")
    stream.request(Extent(0, 10))
    assert isinstance(heard.failure(), PacelineError)
    stream.close()
    assert not [each for each in mine.writers if each not in (0, 1, 3)]
    assert not defects


def test_a_piece_that_is_left_for_another_keeps_no_claim(pair: Pair, source: Source) -> None:
    node, heard = pair.reader, Heard()
    mine = node.library.open(pair.manifest)
    starts = [pair.manifest.piece_of(index).stream_offset for index in (6, 7)]
    source.said = [
        encode_data(b"x", piece=6, offset=starts[0]),
        encode_data(b"x", piece=7, offset=starts[1]),
    ]
    source.may_speak.clear()  # an answer before its request would be refused as not requested
    stream = node.pull(mine, source.address, heard, whom="hostile")
    stream.request(Extent(6, 8))
    source.may_speak.set()
    assert "ended early" in str(heard.failure())
    stream.close()
    for index in (6, 7):
        assert mine.claim(index, wait_s=5.0)
        mine.release(index)
