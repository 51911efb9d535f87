"""The gRPC messages: ours and the generated classes' are the same bytes' worth, nothing crashes."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_tools import protoc
from hypothesis import given, strategies as st

import paceline.relay.transport
from paceline.errors import InvalidFrame
from paceline.relay.transport import (
    MAX_DATA,
    MAX_REQUEST,
    METHOD,
    WAITING,
    ChunkData,
    ChunkRequest,
    GrpcTransport,
    decode_data,
    decode_request,
    encode_challenge,
    encode_data,
    encode_request,
    issue_identity,
    make_authority,
    worker_host_name,
)
from tests.relay.peers import Pair

PROTO = Path(paceline.relay.transport.__file__).parent / "chunk_transfer.proto"
TOKEN = "cluster-token"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Return the classes and stubs that protoc makes of our proto file."""
    where = str(tmp_path_factory.mktemp("generated"))
    arguments = [f"-I{PROTO.parent}", f"--python_out={where}", f"--grpc_python_out={where}"]
    assert protoc.main(["protoc", *arguments, PROTO.name]) == 0
    sys.path.insert(0, where)
    try:
        yield (
            importlib.import_module("chunk_transfer_pb2"),
            importlib.import_module("chunk_transfer_pb2_grpc"),
        )
    finally:
        sys.path.remove(where)


numbers = st.integers(0, 2**32 - 1)
names = st.text("abc-._0123456789", max_size=64)
requests = st.builds(
    ChunkRequest,
    chunk_id=st.integers(0, 2**31 - 1),
    manifest_digest=names,
    first_piece=numbers,
    piece_count=numbers,
    worker_id=names,
    corrupt=st.booleans(),
    keepalive_ms=numbers,
    nonce=st.binary(max_size=64),
    proof=st.binary(max_size=64),
)
FIELDS = ChunkRequest.__dataclass_fields__


@given(requests)
def test_a_request_is_what_protobuf_makes_of_it(
    generated: tuple[Any, Any], request_: ChunkRequest
) -> None:
    theirs = generated[0].ChunkRequest(**{name: getattr(request_, name) for name in FIELDS})
    assert encode_request(request_) == theirs.SerializeToString(deterministic=True)
    assert decode_request(theirs.SerializeToString()) == request_


@given(
    st.binary(max_size=2000), st.integers(0, 2**31 - 1), names, numbers, st.integers(0, 2**63 - 1)
)
def test_data_is_what_protobuf_reads(
    generated: tuple[Any, Any], data: bytes, chunk_id: int, checksum: str, piece: int, offset: int
) -> None:
    said = {"chunk_id": chunk_id, "checksum": checksum, "piece": piece, "offset": offset}
    raw = encode_data(data, **said)
    theirs = generated[0].ChunkData.FromString(raw)
    assert theirs == generated[0].ChunkData(data=data, **said)
    for each in (raw, theirs.SerializeToString()):
        assert decode_data(each) == ChunkData(data=memoryview(data), **said)


def test_the_short_messages_are_protobufs_too(generated: tuple[Any, Any]) -> None:
    kind = generated[0].ChunkData
    assert kind(waiting=True).SerializeToString() == WAITING
    assert decode_data(WAITING).waiting
    assert kind.FromString(encode_challenge(b"n" * 32, b"p" * 32)) == kind(
        nonce=b"n" * 32, proof=b"p" * 32
    )
    service = generated[0].DESCRIPTOR.services_by_name["ChunkTransfer"]
    assert f"/{service.full_name}/{service.methods[0].name}" == METHOD


def test_fields_of_a_later_version_are_skipped() -> None:
    extra = b"\x78\x05" + b"\x82\x01\x03abc" + b"\x8d\x01" + b"1234" + b"\x91\x01" + b"12345678"
    assert decode_request(extra + b"\x08\x07").chunk_id == 7
    assert decode_data(b"\x08\x07" + extra).chunk_id == 7


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x00",  # field 0
        b"\x0b",  # a group
        b"\x08",  # a number that does not come
        b"\x08" + b"\xff" * 10 + b"\x01",  # one that does not end
        b"\x12\x7f",  # a string beyond the message
        b"\x0a\x01a",  # chunk_id as a string
        b"\x10\x01",  # a digest as a number
        b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # chunk -1
        b"\x2a\x02\xc3\xa9",  # an id that is no name
        bytes(MAX_REQUEST + 1),
    ],
)
def test_limits_of_a_request(raw: bytes) -> None:
    with pytest.raises(InvalidFrame):
        decode_request(raw)


def test_data_of_a_message_is_bounded() -> None:
    with pytest.raises(InvalidFrame):
        decode_data(encode_data(bytes(MAX_DATA + 1)))


# ── peers that know only the three basic fields ──────────────────────────────────────────────────


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    authority = make_authority(tmp_path / "ca")
    made = Pair(
        tmp_path,
        lambda name: GrpcTransport(TOKEN, issue_identity(authority, name, tmp_path / "ids")),
        size=3_000_000,
        piece_bytes=1_500_000,
    )
    yield made
    made.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, lambda _: GrpcTransport(TOKEN))
    yield made
    made.close()


def with_certificate(pair: Pair, root: Path) -> grpc.Channel:
    ca, ids = (root / "ca/ca.pem").read_bytes(), root / "ids"
    key, cert = (ids / "node-1-key.pem").read_bytes(), (ids / "node-1.pem").read_bytes()
    return grpc.secure_channel(
        pair.address,
        grpc.ssl_channel_credentials(ca, key, cert),
        [("grpc.ssl_target_name_override", worker_host_name("node-0"))],
    )


def test_a_peer_of_three_fields_gets_whole_chunks_in_bounded_messages(
    generated: tuple[Any, Any], pair: Pair, tmp_path: Path
) -> None:
    messages, stubs = generated
    theirs, _ = pair.open()
    pair.hold_all(theirs)
    chunks = pair.manifest.chunks
    with with_certificate(pair, tmp_path) as channel:
        stub = stubs.ChunkTransferStub(channel)
        asked = [messages.ChunkRequest(chunk_id=chunk.chunk_id) for chunk in reversed(chunks)]
        got: dict[int, bytes] = {}
        ended: list[int] = []
        for said in stub.StreamChunks(iter(asked), timeout=20):
            assert 0 < len(said.data) <= MAX_DATA
            got[said.chunk_id] = got.get(said.chunk_id, b"") + said.data
            if said.checksum:
                ended.append(said.chunk_id)
                digest = hashlib.sha256(got[said.chunk_id]).hexdigest()
                assert said.checksum == digest == chunks[said.chunk_id].checksum
    assert ended == [chunk.chunk_id for chunk in reversed(chunks)]
    (edge,) = theirs.edges.tallies()
    assert (edge.reader, edge.bytes) == ("node-1", pair.manifest.total_size)


def test_a_basic_peer_waits_for_a_chunk_that_is_arriving(
    generated: tuple[Any, Any], pair: Pair, tmp_path: Path
) -> None:
    messages, stubs = generated
    theirs, _ = pair.open()
    with with_certificate(pair, tmp_path) as channel:
        call = stubs.ChunkTransferStub(channel).StreamChunks(
            iter([messages.ChunkRequest(chunk_id=0)]), timeout=20
        )
        pair.hold_all(theirs)
        data = b"".join(said.data for said in call)
    assert hashlib.sha256(data).hexdigest() == pair.manifest.chunks[0].checksum


def test_a_basic_peer_on_a_plain_port_shows_the_token(
    generated: tuple[Any, Any], plain: Pair
) -> None:
    messages, stubs = generated
    theirs, _ = plain.open()
    plain.hold_all(theirs)

    def ask(token: str, chunk_id: int = 0) -> bytes:
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        asked = iter([messages.ChunkRequest(chunk_id=chunk_id)])
        stub = stubs.ChunkTransferStub(channel)
        return b"".join(
            said.data for said in stub.StreamChunks(asked, timeout=20, metadata=metadata)
        )

    with grpc.insecure_channel(plain.address) as channel:
        wanted = plain.manifest.chunks[0].checksum
        assert hashlib.sha256(ask(TOKEN)).hexdigest() == wanted
        for token in ("", "guess"):
            with pytest.raises(grpc.RpcError, match="prove who it is"):
                ask(token)
        with pytest.raises(grpc.RpcError, match="no such chunk"):
            ask(TOKEN, len(plain.manifest.chunks))
