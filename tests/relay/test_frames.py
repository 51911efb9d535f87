"""Bytes on the peer port: what is ours is read back, anything else is InvalidFrame."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from paceline.errors import InvalidFrame
from paceline.relay.transport import (
    HEADER,
    MAX_PAYLOAD,
    Hello,
    Kind,
    decode,
    decode_hello,
    encode,
    encode_hello,
    encode_payload,
    proof,
)

HELLO = Hello(1, 0.25, "ab" * 32, b"n" * 32, "node-0")


def test_a_hello_is_read_back() -> None:
    raw = encode_hello(HELLO)
    header = decode(raw[: HEADER.size])
    assert header.kind is Kind.HELLO
    assert decode_hello(raw[HEADER.size :][: header.payload_bytes]) == HELLO


@given(st.integers(0, 2**24 - 2), st.integers(1, 1))
def test_requests_and_pieces_are_read_back(first: int, count: int) -> None:
    for kind in (Kind.REQUEST, Kind.PIECE):
        header = decode(encode(kind, first, count))
        assert (header.kind, header.first, header.second) == (kind, first, count)
        assert header.payload_bytes == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1",
        encode(Kind.PIECE, 0, 0),
        encode(Kind.PIECE, 0, 2**31),
        encode(Kind.REQUEST, 2**24, 1),
        encode(Kind.REQUEST, 0, 0),
        encode(Kind.CHALLENGE, 0, 65),
        encode(Kind.ERROR, 0, MAX_PAYLOAD + 1),
    ],
)
def test_limits_are_checked_before_memory_is_taken(raw: bytes) -> None:
    with pytest.raises(InvalidFrame):
        decode(raw)


def test_a_proof_is_good_for_one_side_of_one_stream_of_one_peer() -> None:
    said = proof("token", "client", HELLO, b"s" * 32)
    other = Hello(1, 0.25, "ab" * 32, b"n" * 32, "node-1")
    assert said != proof("token", "server", HELLO, b"s" * 32)
    assert said != proof("other", "client", HELLO, b"s" * 32)
    assert said != proof("token", "client", HELLO, b"t" * 32)
    assert said != proof("token", "client", other, b"s" * 32)
    assert encode_payload(Kind.PROOF, said)[: HEADER.size] == encode(Kind.PROOF, 0, 32)
