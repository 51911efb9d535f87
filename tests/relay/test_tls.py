"""Mutual TLS between workers: each wrong credential is a named error, and no byte passes."""

from __future__ import annotations

import datetime
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import AccessDenied, InvalidInput, PacelineError, PeerLost
from paceline.relay.protocol import Extent
from paceline.relay.transport import (
    HEADER,
    Authority,
    GrpcTransport,
    Kind,
    TcpTransport,
    TlsSettings,
    Transport,
    decode,
    issue_identity,
    make_authority,
)
from tests.relay.peers import Heard, Pair

TOKEN = "cluster-token"
WRAPPED = ["tcp", "grpc"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("ca"))


Issue = Callable[..., TlsSettings]


@pytest.fixture
def issue(authority: Authority, tmp_path: Path) -> Issue:
    def issued(worker_id: str, **how: object) -> TlsSettings:
        return issue_identity(authority, worker_id, tmp_path / "identities", **how)  # type: ignore

    return issued


@pytest.fixture(params=WRAPPED)
def over(request: pytest.FixtureRequest) -> Callable[[TlsSettings | None], Transport]:
    def made(tls: TlsSettings | None) -> Transport:
        return (GrpcTransport if request.param == "grpc" else TcpTransport)(TOKEN, tls)

    return made


Over = Callable[[TlsSettings | None], Transport]


@pytest.fixture
def pair(over: Over, issue: Issue, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, lambda worker_id: over(issue(worker_id)))
    yield made
    made.close()


def refusal(pair: Pair, transport: Transport, whom: str = "node-0") -> PacelineError:
    """Return why ``transport`` gets nothing from the pair's source."""
    theirs, mine = pair.open()
    if not theirs.all_verified:
        pair.hold_all(theirs)
    heard = Heard()
    stream = pair.reader.pull(mine, pair.address, heard, transport=transport, whom=whom)
    stream.request(Extent(0, 1))
    error: PacelineError = heard.failure()
    assert heard.pieces() == []
    assert mine.verified.count == 0
    assert pair.reader.counters.received_bytes == 0
    return error


def test_a_certificate_of_another_worker_is_refused_by_the_source(
    pair: Pair, over: Over, issue: Issue
) -> None:
    assert "another worker" in str(refusal(pair, over(issue("node-2"))))


def test_a_source_with_the_certificate_of_another_worker_is_left(pair: Pair) -> None:
    error = refusal(pair, pair.reader.transport, whom="node-3")
    assert isinstance(error, AccessDenied)
    assert error.wanted == "node-3"


def test_a_certificate_of_another_authority_is_refused(
    pair: Pair, over: Over, authority: Authority, tmp_path: Path
) -> None:
    theirs = issue_identity(make_authority(tmp_path / "other"), "node-1", tmp_path / "wrong")
    # It trusts the cluster but is not trusted by it,
    half = TlsSettings(ca=authority.cert, cert=theirs.cert, key=theirs.key)
    error = refusal(pair, over(half))
    assert isinstance(error, AccessDenied)
    # or does not even trust it.
    error = refusal(pair, over(theirs))
    assert isinstance(error, AccessDenied)
    assert "certificate" in str(error)


def test_an_expired_certificate_is_refused(pair: Pair, over: Over, issue: Issue) -> None:
    long_ago = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    error = refusal(pair, over(issue("node-1", valid_from=long_ago, valid_days=30)))
    assert isinstance(error, AccessDenied)
    assert "expired" in str(error).lower()


def test_an_expired_source_is_left(over: Over, issue: Issue, tmp_path: Path) -> None:
    long_ago = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    how = {"node-0": {"valid_from": long_ago, "valid_days": 30}}
    pair = Pair(tmp_path, lambda worker_id: over(issue(worker_id, **how.get(worker_id, {}))))
    try:
        error = refusal(pair, pair.reader.transport)
        assert isinstance(error, AccessDenied)
        assert "expired" in str(error)
    finally:
        pair.close()


def test_a_plain_worker_gets_nothing_from_a_tls_port(pair: Pair, over: Over) -> None:
    assert "TLS" in str(refusal(pair, over(None)))


def test_a_tls_worker_takes_nothing_from_a_plain_port(
    over: Over, issue: Issue, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, lambda _: over(None))
    try:
        error = refusal(pair, over(issue("node-1")))
        assert isinstance(error, AccessDenied)
        assert "TLS" in str(error)
    finally:
        pair.close()


def test_an_older_tls_is_refused(issue: Issue, tmp_path: Path) -> None:
    pair = Pair(tmp_path, lambda worker_id: TcpTransport(TOKEN, issue(worker_id)))
    try:
        context = issue("node-1").context(server=False)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        host, _, port = pair.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            with pytest.raises(ssl.SSLError, match=r"(?i)version"):
                context.wrap_socket(sock)
    finally:
        pair.close()


def test_a_plain_caller_of_a_tls_port_is_told_so_in_its_own_protocol(
    issue: Issue, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, lambda worker_id: TcpTransport(TOKEN, issue(worker_id)))
    try:
        error = refusal(pair, TcpTransport(TOKEN))
        assert isinstance(error, PeerLost)
        assert "peer_tls" in str(error)
    finally:
        pair.close()


def test_garbage_on_a_tls_port_ends_its_own_connection_only(issue: Issue, tmp_path: Path) -> None:
    pair = Pair(tmp_path, lambda worker_id: TcpTransport(TOKEN, issue(worker_id)))
    try:
        host, _, port = pair.address.rpartition(":")
        for said in (b"\x16\x03\x01\xff\xff" + bytes(300), b"GET / HTTP/1.1\r\n\r\n", b"\x00"):
            with socket.create_connection((host, int(port)), timeout=10) as sock:
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                while data := sock.recv(4096):
                    if data.startswith(b"PCL"):
                        assert decode(data[: HEADER.size]).kind is Kind.ERROR
        theirs, mine = pair.open()
        pair.hold_all(theirs)
        heard = Heard()
        pair.reader.pull(mine, pair.address, heard).request(Extent(0, 1))
        assert heard.wait_pieces(1) == [0]
    finally:
        pair.close()


def test_keys_are_readable_by_their_owner_only(authority: Authority, issue: Issue) -> None:
    issued = issue("node-1")
    for path in (authority.key, authority.cert, issued.key, issued.cert):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", "a/b", "node 1", "-x", "n" * 200])
def test_an_identity_needs_a_worker_id(issue: Issue, name: str) -> None:
    with pytest.raises(InvalidInput, match="worker id"):
        issue(name)


def test_the_longest_worker_id_gets_an_identity(over: Over, issue: Issue) -> None:
    assert over(issue("n" * 128)).name


def test_a_missing_or_broken_file_is_named(over: Over, issue: Issue, tmp_path: Path) -> None:
    good = issue("node-1")
    with pytest.raises(InvalidInput, match="nowhere"):
        over(TlsSettings(ca=good.ca, cert=tmp_path / "nowhere.pem", key=good.key))
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    with pytest.raises(InvalidInput, match="credentials"):
        over(TlsSettings(ca=good.ca, cert=broken, key=good.key))
    with pytest.raises(InvalidInput, match="credentials"):
        over(TlsSettings(ca=good.ca, cert=good.cert, key=issue("node-2").key))
    with pytest.raises(InvalidInput, match="authority"):
        issue_identity(Authority(cert=broken, key=broken), "node-1", tmp_path)
