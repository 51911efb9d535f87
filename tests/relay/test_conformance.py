"""What every transport between workers promises: one suite, TCP and gRPC, plain and mutual TLS."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import PacelineError, PeerLost, PortInUse
from paceline.relay.protocol import Extent, PieceRejected, SourceFailed
from paceline.relay.transport import (
    GrpcTransport,
    Pacer,
    TcpTransport,
    TlsSettings,
    Transport,
    issue_identity,
    make_authority,
)
from tests.relay.kit import until
from tests.relay.peers import Heard, Pair, Proxy

TOKEN = "cluster-token"
KINDS = ["tcp", "tcp+mtls", "grpc", "grpc+mtls"]
# Each transport, and each with and without TLS, once: for what does not depend on their pairing.
CROSSED = pytest.mark.parametrize("kind", ["tcp+mtls", "grpc"], indirect=True)

Make = Callable[..., Transport]


def transport(kind: str, token: str, tls: TlsSettings | None) -> Transport:
    made = GrpcTransport if kind.startswith("grpc") else TcpTransport
    return made(token, tls)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> object:
    return make_authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def make(kind: str, authority: object, tmp_path: Path) -> Make:
    """Return what makes the transport of a worker, with its own identity where there is TLS."""

    def made(worker_id: str, token: str = TOKEN) -> Transport:
        tls = None
        if kind.endswith("mtls"):
            tls = issue_identity(authority, worker_id, tmp_path / "identities")  # type: ignore
        return transport(kind, token, tls)

    return made


@pytest.fixture
def pair(make: Make, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, make)
    yield made
    made.close()


def test_every_requested_piece_arrives_and_matches_the_manifest(pair: Pair) -> None:
    theirs, mine = pair.open()
    pair.hold_all(theirs)
    heard = Heard()
    pair.reader.pull(mine, pair.address, heard).request(pair.everything())
    assert sorted(heard.wait_pieces(pair.manifest.piece_count)) == list(range(*pair.everything()))
    assert mine.all_verified
    for index in range(*pair.everything()):
        assert pair.arrived(mine, index) == pair.data(index)
    assert pair.reader.counters.received_bytes == pair.manifest.total_size
    assert pair.reader.counters.refetched_bytes == 0


@CROSSED
def test_a_parked_stream_goes_on_the_moment_a_piece_is_verified(pair: Pair) -> None:
    theirs, mine = pair.open()
    heard = Heard()
    pair.reader.pull(mine, pair.address, heard).request(Extent(0, 4))
    heard.wait_alive(3)  # it hears that the source waits too
    assert heard.pieces() == []
    pair.hold(theirs, 2)  # whatever is verified first is served first
    assert heard.wait_pieces(1) == [2]
    pair.hold(theirs, 0, 1, 3)
    assert sorted(heard.wait_pieces(4)) == [0, 1, 2, 3]


def test_a_revoked_reader_is_served_no_more_even_midway(
    pair: Pair,
) -> None:
    theirs, mine = pair.open()
    pair.hold(theirs, 0)
    heard, again = Heard(), Heard()
    stream = pair.reader.pull(mine, pair.address, heard)
    stream.request(Extent(0, 4))
    assert heard.wait_pieces(1) == [0]
    pair.source.transport.barred.replace(["node-1"])
    refused = heard.failure()
    pair.hold(theirs, 1, 2, 3)
    assert "taken back" in str(refused)
    assert heard.pieces() == [0], "nothing came after it"
    pair.reader.pull(mine, pair.address, again).request(Extent(1, 4))
    assert "taken back" in str(again.failure())
    pair.source.transport.barred.replace(["node-7"])  # it joined again; another one is out
    back = Heard()
    pair.reader.pull(mine, pair.address, back).request(Extent(1, 4))
    assert sorted(back.wait_pieces(3)) == [1, 2, 3]


@CROSSED
def test_what_is_not_verified_is_never_sent(pair: Pair) -> None:
    theirs, mine = pair.open()
    data, piece = memoryview(pair.data(1)), pair.manifest.piece_of(1)
    assert theirs.claim(1)  # written, not judged yet
    theirs.write(theirs.descriptor(piece.file_index), data, piece.file_offset)
    heard = Heard()
    pair.reader.pull(mine, pair.address, heard).request(Extent(1, 2))
    heard.wait_alive(4)
    assert heard.pieces() == []
    theirs.hold(piece)
    assert heard.wait_pieces(1) == [1]


def test_a_corrupt_piece_is_reported_checked_and_sent_again(pair: Pair) -> None:
    theirs, mine = pair.open()
    pair.hold(theirs, 3, rotten=True)
    pair.hold(theirs, 4)
    heard = Heard()
    stream = pair.reader.pull(mine, pair.address, heard)
    stream.request(Extent(3, 5))
    assert heard.wait_pieces(1, PieceRejected) == [3]
    assert heard.wait_pieces(1) == [4]
    assert 3 not in mine.verified
    assert pair.reader.counters.refetched_bytes == pair.manifest.piece_of(3).length
    until(lambda: pair.source.rotten == [(pair.manifest.digest, 3)])  # it read its disk again
    assert 3 not in theirs.verified
    pair.hold(theirs, 3)
    stream.request(Extent(3, 4))
    assert heard.wait_pieces(2) == [4, 3]
    assert pair.arrived(mine, 3) == pair.data(3)


@CROSSED
def test_a_peer_may_come_before_the_deployment_does(pair: Pair) -> None:
    mine = pair.reader.library.open(pair.manifest)
    heard = Heard()
    pair.reader.pull(mine, pair.address, heard).request(Extent(0, 1))
    heard.wait_alive(2)
    pair.hold(pair.source.library.open(pair.manifest), 0)
    assert heard.wait_pieces(1) == [0]


@CROSSED
def test_a_model_that_is_never_opened_is_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.relay.transport.serving.UNKNOWN_DIGEST_S", 0.3)
    mine = pair.reader.library.open(pair.manifest)
    heard = Heard()
    pair.reader.pull(mine, pair.address, heard).request(Extent(0, 1))
    assert isinstance(heard.failure(), PeerLost)
    assert heard.pieces() == []


@CROSSED
def test_a_source_that_gave_the_model_up_reports_it_at_once(pair: Pair) -> None:
    theirs, mine = pair.open()
    heard = Heard()
    pair.reader.pull(mine, pair.address, heard).request(Extent(0, 1))
    heard.wait_alive()
    theirs.give_up(True)
    assert "gave the model up" in str(heard.failure())


def test_who_does_not_know_the_token_gets_nothing(pair: Pair, make: Make) -> None:
    theirs, mine = pair.open()
    pair.hold_all(theirs)
    heard = Heard()
    stranger = make("node-1", token="guess")
    pair.reader.pull(mine, pair.address, heard, transport=stranger).request(Extent(0, 1))
    assert isinstance(heard.failure(), PacelineError)
    assert "token" in str(heard.failure())
    assert heard.pieces() == []
    assert mine.verified.count == 0


@CROSSED
def test_a_request_beyond_the_model_ends_the_stream(pair: Pair) -> None:
    theirs, mine = pair.open()
    pair.hold_all(theirs)
    heard = Heard()
    count = pair.manifest.piece_count
    pair.reader.pull(mine, pair.address, heard).request(Extent(0, count + 1))
    assert "beyond" in str(heard.failure())


@CROSSED
def test_a_new_request_resumes_a_stream_that_had_nothing_to_do(pair: Pair) -> None:
    theirs, mine = pair.open()
    pair.hold_all(theirs)
    heard = Heard()
    stream = pair.reader.pull(mine, pair.address, heard)
    for index in range(5):
        stream.request(Extent(index, index + 1))
        assert heard.wait_pieces(index + 1)[-1] == index


def test_a_chain_relays_while_it_receives(pair: Pair) -> None:
    theirs, mine = pair.open()
    last = pair.another("node-2")
    tail = last.library.open(pair.manifest)
    middle, end = Heard(), Heard()
    last.pull(tail, pair.reader.serve(), end, whom="node-1").request(pair.everything())
    pair.reader.pull(mine, pair.address, middle).request(pair.everything())
    pair.hold(theirs, 5)
    assert end.wait_pieces(1) == [5]  # before the middle has any other
    pair.hold(theirs, *(set(range(*pair.everything())) - {5}))
    end.wait_pieces(pair.manifest.piece_count)
    assert tail.all_verified


@pytest.mark.parametrize(("size", "piece_bytes"), [(3, 65_536), (5_000_000, 2 * 1024 * 1024)])
def test_pieces_of_one_byte_and_of_many_blocks_travel(
    make: Make, tmp_path: Path, size: int, piece_bytes: int
) -> None:
    pair = Pair(tmp_path, make, size=size, piece_bytes=piece_bytes)
    try:
        theirs, mine = pair.open()
        pair.hold_all(theirs)
        heard = Heard()
        pair.reader.pull(mine, pair.address, heard).request(pair.everything())
        heard.wait_pieces(pair.manifest.piece_count)
        assert mine.all_verified
        assert pair.arrived(mine, 0) == pair.data(0)
    finally:
        pair.close()


def test_an_abrupt_end_is_reported_and_leaves_no_claim(pair: Pair) -> None:
    theirs, mine = pair.open()
    proxy = Proxy(pair.address)
    try:
        heard = Heard()
        pair.reader.pull(mine, proxy.address, heard).request(Extent(0, 2))
        heard.wait_alive()
        proxy.cut()
        assert isinstance(heard.failure(), PeerLost)
        assert mine.claim(0)
    finally:
        proxy.close()
    pair.hold(theirs, 0)


def test_a_half_open_connection_is_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.relay.transport.piece_receiver.SILENCE_S", 0.6)
    _, mine = pair.open()
    proxy = Proxy(pair.address)
    try:
        heard = Heard()
        pair.reader.pull(mine, proxy.address, heard).request(Extent(0, 2))
        heard.wait_alive()
        proxy.silent.set()
        assert "silent" in str(heard.failure())
    finally:
        proxy.close()


@CROSSED
def test_close_returns_at_once_and_reports_nothing(pair: Pair) -> None:
    _, mine = pair.open()
    proxy = Proxy(pair.address)
    try:
        heard = Heard()
        stream = pair.reader.pull(mine, proxy.address, heard)
        stream.request(Extent(0, 2))
        heard.wait_alive()
        proxy.silent.set()  # nobody answers a farewell
        started_s = time.thread_time()
        stream.close()
        assert time.thread_time() - started_s < 1
        stream.request(Extent(2, 3))  # late, and harmless
        until(lambda: mine.claim(0))
        assert heard.of(SourceFailed) == []
    finally:
        proxy.close()


@CROSSED
def test_an_address_without_a_listener_is_a_failed_source(pair: Pair) -> None:
    _, mine = pair.open()
    heard = Heard()
    pair.reader.pull(mine, "127.0.0.1:1", heard).request(Extent(0, 2))
    assert isinstance(heard.failure(), PeerLost)


@CROSSED
def test_a_taken_port_is_named(pair: Pair) -> None:
    port = int(pair.address.rpartition(":")[2])
    with pytest.raises(PortInUse, match=str(port)):
        pair.reader.serve(port=port)


@CROSSED
def test_a_peer_port_may_be_an_ipv6_one(pair: Pair) -> None:
    theirs, mine = pair.open()
    pair.hold_all(theirs)
    pair.source.server.stop()
    address = pair.source.serve(host="::1")
    assert address.startswith("[::1]:")
    heard = Heard()
    pair.reader.pull(mine, address, heard).request(Extent(0, 2))
    assert sorted(heard.wait_pieces(2)) == [0, 1]


@CROSSED
def test_the_source_counts_what_an_edge_carried(pair: Pair) -> None:
    theirs, mine = pair.open()
    pair.hold(theirs, 0, 1)
    pair.hold(theirs, 2, rotten=True)
    heard = Heard()
    stream = pair.reader.pull(mine, pair.address, heard)
    stream.request(Extent(0, 3))
    heard.wait_pieces(2)
    heard.wait_pieces(1, PieceRejected)
    stream.request(Extent(7, 8))
    heard.wait_alive(2)  # by now the source has counted
    (sent,) = theirs.edges.tallies()
    assert (sent.source, sent.reader) == ("node-0", "node-1")
    assert sent.bytes == sum(pair.manifest.piece_of(index).length for index in range(3))
    assert sent.busy_s > 0


@CROSSED
def test_waiting_for_pieces_is_not_the_edges_time(pair: Pair) -> None:
    theirs, mine = pair.open()
    heard = Heard()
    pair.reader.pull(mine, pair.address, heard, keepalive_s=0.02).request(Extent(0, 1))
    heard.wait_alive(20)
    pair.hold(theirs, 0)
    heard.wait_pieces(1)
    until(lambda: bool(theirs.edges.tallies()))
    assert theirs.edges.tallies()[0].busy_s < 0.3  # it waited for 20 times 0.02 s


@CROSSED
def test_a_send_under_way_counts_as_busy_until_its_reader_leaves(
    make: Make, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, make, size=12_000_000, piece_bytes=4_194_304)
    try:
        theirs, mine = pair.open()
        pair.hold_all(theirs)
        reading = pair.reader.pull(mine, pair.address, Heard(), pacer=Pacer(8.0))
        reading.request(pair.everything())
        until(lambda: bool(theirs.edges.tallies()))

        def is_busier() -> bool:
            (first,) = theirs.edges.tallies()
            time.sleep(0.01)
            (second,) = theirs.edges.tallies()
            return first.bytes == second.bytes and first.busy_s < second.busy_s

        until(is_busier)
        reading.close()
        until(lambda: not is_busier())
        assert not is_busier()
    finally:
        pair.close()


@CROSSED
def test_a_slow_reader_holds_the_source_back(make: Make, tmp_path: Path) -> None:
    pair = Pair(tmp_path, make, size=12_000_000, piece_bytes=65_536)
    try:
        theirs, mine = pair.open()
        pair.hold_all(theirs)
        served = Pacer(None)
        pair.source.server.stop()
        heard = Heard()
        address = pair.source.serve(pacer=served)
        reading = pair.reader.pull(mine, address, heard, pacer=Pacer(8.0))
        reading.request(pair.everything())
        heard.wait_pieces(8)
        assert served.total_bytes < 11_000_000  # the rest waits on the source's disk, not in memory
        reading.close()
    finally:
        pair.close()


def test_nothing_is_left_behind(make: Make, tmp_path: Path) -> None:
    def once(name: str) -> None:
        pair = Pair(tmp_path / name, make)
        theirs, mine = pair.open()
        pair.hold_all(theirs)
        for _ in range(4):
            heard = Heard()
            stream = pair.reader.pull(mine, pair.address, heard)
            stream.request(Extent(0, 3))
            heard.wait_pieces(3)
            stream.close()
        pair.close()

    once("warm")  # what a library starts once in a process is not a leak
    threads, descriptors = settled()
    once("again")
    once("and-again")
    until(lambda: settled()[0] <= threads)
    until(lambda: settled()[1] <= descriptors)


def settled() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
