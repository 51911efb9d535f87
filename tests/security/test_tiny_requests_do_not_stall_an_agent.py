"""An authenticated peer cannot stall an agent: the work per received byte and per turn is bounded.

Work is counted in executed lines, not in seconds: twice the requests cost about twice the lines.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest

from paceline.errors import InvalidFrame
from paceline.relay.protocol import Extent, SourceAlive
from paceline.relay.store import OpenModels, Staging, Store
from paceline.relay.transport import (
    METHOD,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    ChunkRequest,
    CorruptReport,
    GrpcTransport,
    Hello,
    Kind,
    PeerMessage,
    PlainChannel,
    RevokedWorkers,
    ServedStream,
    TcpTransport,
    decode_data,
    decode_request,
    encode,
    encode_hello,
    encode_payload,
    encode_request,
    proof,
    read_frame,
    serving as bounds,
)
from tests.relay.kit import paper_manifest
from tests.relay.peers import Heard, Pair, let_in

TOKEN = "cluster-token"
PIECES = 6_000  # as many requests of 12 bytes: 72 KB
HANG_S = 25.0  # these requests took about 100 s


# ── the session: work, counted ───────────────────────────────────────────────────────────────────


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    """A model of which no piece is verified yet."""
    store = Store(tmp_path / "store")
    library = OpenModels(store)
    yield library.open(paper_manifest(PIECES))
    library.close()
    store.close()


def verify(staging: Staging, index: int) -> None:
    assert staging.claim(index)
    staging.hold(staging.manifest.piece_of(index))


def serving(staging: Staging) -> ServedStream:
    return ServedStream(
        worker_id="node-0",
        reader="hostile",
        staging=staging,
        keepalive_s=0.0,
        on_disk_corruption=lambda *_: None,
        barred=RevokedWorkers(),
    )


def lines(work: Callable[[], object]) -> int:
    """Return how many lines of Python ``work`` executes."""
    count = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


PATTERNS: dict[str, Callable[[int], list[PeerMessage]]] = {
    "descending": lambda n: [Extent(at, at + 1) for at in reversed(range(n))],
    "alternating": lambda n: [Extent(at, at + 1) for at in range(0, 2 * n, 2)],
    "alternating, descending": lambda n: [Extent(2 * at, 2 * at + 1) for at in reversed(range(n))],
    "from both ends": lambda n: [Extent(at % PIECES, at % PIECES + 1) for i in range(n // 2)
                                 for at in (2 * i, PIECES - 2 - 2 * i)],
    "duplicate": lambda n: [Extent(7, 8)] * n,
    "overlapping": lambda n: [Extent(at, at + 50) for at in range(0, 2 * n, 2)],
    "overlapping holes": lambda n: [
        *(Extent(at, at + 1) for at in range(0, 2 * n, 2)), Extent(0, PIECES), Extent(0, PIECES)],
    "maximal": lambda n: [Extent(0, PIECES)] * n,
    "complaints": lambda n: [Extent(0, 1), *map(CorruptReport, range(n))],
}  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_work_is_linear_in_the_requests(
    pattern: str, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "READ_INTERVAL_S", 0.0)

    def work(count: int) -> int:
        left = iter(PATTERNS[pattern](count))
        ended = False

        def asked(_wait_s: float) -> Iterator[PeerMessage]:
            nonlocal ended
            yield from left
            ended = True

        def run() -> None:
            runs = serving(staging).runs(asked)
            while not ended:
                assert next(runs) is None  # nothing is verified
            runs.close()

        return lines(run)

    assert work(800) < 3 * work(400)


def test_a_verified_piece_costs_no_more_with_more_parked_requests(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "READ_INTERVAL_S", 0.0)

    def work(count: int, index: int) -> int:
        said = [[Extent(2 * at, 2 * at + 1)] for at in reversed(range(count))]
        runs = serving(staging).runs(lambda _wait_s: said.pop() if said else [])
        while said:
            assert next(runs) is None

        def verified() -> None:
            verify(staging, index)
            assert next(runs) == Extent(index, index + 1)
            assert next(runs) is None  # a look at a queue of which nothing is verified

        done = lines(verified)
        runs.close()
        return done

    assert work(1600, 1000) < 1.5 * work(200, 200)


def test_a_peer_that_never_stops_asking_is_sent_its_pieces(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "READ_INTERVAL_S", 0.0)
    verify(staging, 5)
    read, said = 0, chain([Extent(0, 10)], repeat(Extent(6, 10)))

    def asked(_wait_s: float) -> Iterator[PeerMessage]:
        nonlocal read
        for each in said:
            read += 1
            assert read <= 5_000, "the turn does not end"
            yield each

    runs = serving(staging).runs(asked)
    assert next(runs) == Extent(5, 6)
    assert read <= bounds.MAX_FRAMES_PER_READ
    assert next(runs) is None


def test_complaints_without_end_leave_pauses(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(bounds.time, "sleep", pauses.append)
    left = iter([CorruptReport(3)] * (3 * bounds.MAX_FRAMES_PER_READ))
    runs = serving(staging).runs(lambda _wait_s: left)
    with pytest.raises(Exception, match="asks for nothing"):
        next(runs)
    assert pauses == [bounds.READ_INTERVAL_S] * 3


def test_too_many_separate_runs_end_the_stream(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "READ_INTERVAL_S", 0.0)
    most = bounds.MOST_RUNS
    wide = OpenModels(Store(staging.directory.parent.parent / "wide"))
    try:
        model = wide.open(paper_manifest(2 * most + 4))
        asked = iter([Extent(at, at + 1) for at in range(0, 2 * most + 4, 2)])
        runs = serving(model).runs(lambda _wait_s: asked)
        with pytest.raises(InvalidFrame, match=f"got {most + 1}, wanted at most {most}"):
            for _ in range(most):
                next(runs)
    finally:
        wide.close()


# ── the transports ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["tcp", "grpc"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    kind = GrpcTransport if request.param == "grpc" else TcpTransport
    made = Pair(tmp_path, lambda _: kind(TOKEN), size=PIECES * 1024, piece_bytes=1024)
    made.kind = request.param  # type: ignore[attr-defined]
    yield made
    made.close()


def hello(pair: Pair, worker_id: str) -> Hello:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return Hello(PROTOCOL_VERSION, 0.05, pair.manifest.digest, nonce, worker_id)


def greeted(pair: Pair) -> tuple[socket.socket, PlainChannel]:
    """Return a connection of an authenticated peer over TCP."""
    host, _, port = pair.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=HANG_S)
    channel, said = PlainChannel(sock, HANG_S), hello(pair, "hostile")
    until_s = time.monotonic() + HANG_S
    channel.send(encode_hello(said))
    _, theirs = read_frame(channel, until_s, Kind.CHALLENGE)
    answer = proof(TOKEN, "client", said, theirs[:NONCE_BYTES])
    channel.send(encode_payload(Kind.PROOF, answer))
    read_frame(channel, until_s, Kind.WELCOME)
    return sock, channel


def first_piece_over_tcp(pair: Pair, requests: list[Extent]) -> int:
    sock, channel = greeted(pair)
    with sock:
        channel.send(b"".join(encode(Kind.REQUEST, each.first, each.size) for each in requests))
        while True:
            header, _ = read_frame(channel, time.monotonic() + HANG_S, Kind.WAITING, Kind.PIECE)
            if header.kind is Kind.PIECE:
                return header.first


def first_piece_over_grpc(pair: Pair, requests: list[Extent]) -> int:
    said, answers = hello(pair, "hostile"), []

    def messages() -> Iterator[bytes]:
        yield encode_request(
            ChunkRequest(
                worker_id=said.worker_id,
                manifest_digest=said.digest,
                nonce=said.nonce,
                keepalive_ms=50,
            )
        )
        while not answers:
            time.sleep(0.01)
        yield encode_request(ChunkRequest(proof=answers[0]))
        for each in requests:
            yield encode_request(ChunkRequest(first_piece=each.first, piece_count=each.size))
        time.sleep(HANG_S)  # the stream stays open; its end cancels this thread's use

    with grpc.insecure_channel(pair.address) as channel:
        call = channel.stream_stream(METHOD)(messages(), timeout=HANG_S)
        for raw in call:
            got = decode_data(raw)
            if got.nonce:
                answers.append(proof(TOKEN, "client", said, got.nonce))
            elif got.data:
                call.cancel()
                return got.piece
    raise AssertionError("the stream ended")


def test_descending_single_requests_are_answered(pair: Pair) -> None:
    theirs, mine = pair.open()
    requests = [Extent(at, at + 1) for at in reversed(range(PIECES))]
    heard = Heard()
    pair.hold(theirs, 0, 1)  # one was requested last: all others have been looked at by then
    first = first_piece_over_tcp if pair.kind == "tcp" else first_piece_over_grpc  # type: ignore
    assert first(pair, requests) in (0, 1)
    pair.reader.pull(mine, pair.address, heard).request(Extent(0, 2))
    assert sorted(heard.wait_pieces(2)) == [0, 1]


def test_one_peer_leaves_places_to_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.relay.transport.serving.MAX_STREAMS_PER_PEER", 2)
    theirs, mine = pair.open()
    pair.hold(theirs, 0)
    streams = []
    for _ in range(2):
        held = Heard()
        streams.append(pair.reader.pull(mine, pair.address, held, calls_itself="greedy"))
        streams[-1].request(Extent(1, 2))
        held.wait_alive()
    refused, welcome, again = Heard(), Heard(), Heard()
    pair.reader.pull(mine, pair.address, refused, calls_itself="greedy").request(Extent(0, 1))
    assert "too many streams of one peer" in str(refused.failure())
    pair.reader.pull(mine, pair.address, welcome, calls_itself="modest").request(Extent(0, 1))
    assert welcome.wait_pieces(1) == [0]
    streams[0].close()
    until_s = time.monotonic() + HANG_S
    while not again.pieces():  # the source notices that the stream has ended
        assert time.monotonic() < until_s
        again = Heard()
        pair.reader.pull(mine, pair.address, again, calls_itself="greedy").request(Extent(0, 1))
        again.wait(lambda events: any(not isinstance(each, SourceAlive) for each in events))


# ── the messages ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("decode", [decode_request, decode_data])
def test_a_message_of_tiny_fields_is_refused_early(decode: Callable[[bytes], object]) -> None:
    tiny = b"\x78\x01" * 2_000  # field 15, which nothing knows

    def refused() -> None:
        with pytest.raises(InvalidFrame, match="more than 64 fields"):
            decode(tiny)

    assert lines(refused) < 5_000  # all of them: 30,000
    decode(b"\x78\x01" * 60)


def test_a_source_that_only_waits_is_reported_at_a_bounded_rate(tmp_path: Path) -> None:
    pair = Pair(tmp_path, lambda _: TcpTransport(TOKEN))
    try:
        _, mine = pair.open()
        heard = Heard()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            stream = pair.reader.pull(mine, address, heard, whom="hostile", keepalive_s=5.0)
            stream.request(Extent(0, 4))
            sock, _ = listener.accept()
            with sock:
                channel = let_in(sock, TOKEN)
                channel.send(encode(Kind.WAITING) * 5_000)
                channel.send(encode(Kind.WELCOME))  # out of place: it ends the stream
                assert isinstance(heard.failure(), InvalidFrame)
        assert heard.alive() <= 40
    finally:
        pair.close()
