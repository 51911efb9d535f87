"""The peer protocol's frames: fixed 12-byte headers, small bounded payloads. No I/O.

::

    HELLO      client → server   version, manifest digest, nonce, keep-alive, worker id
    CHALLENGE  server → client   nonce, proof that the server knows the cluster's token
    PROOF      client → server   proof that the client knows it
    WELCOME    server → client   the stream is open
    REQUEST    client → server   first piece, count; any number of them, any time
    PIECE      server → client   piece, length; the bytes follow
    WAITING    server → client   alive, but none of the requested pieces is verified here yet
    CORRUPT    client → server   piece: what was sent does not match its digest
    ERROR      server → client   why the stream ends

Peers name a model by its digest and a piece by its number, never by path or URL. Proofs are
HMAC-SHA256 over both nonces, the digest, the id and the direction, so that neither a replay nor a
reflection passes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from dataclasses import dataclass
from enum import IntEnum

from paceline.errors import InvalidFrame
from paceline.wire.base import NAME

PROTOCOL_VERSION = 1
MAX_PAYLOAD = 1024  # of every frame but PIECE
MAX_PIECE_BYTES = 16 * 1024 * 1024
MAX_PIECES = 1 << 24
NONCE_BYTES = 32
PROOF_BYTES = 32

HEADER = struct.Struct(">3sBII")  # magic, kind, two numbers
_MAGIC = b"PCL"
_HELLO = struct.Struct(">HI32s32s")  # version, keep-alive in ms, digest, nonce; the id follows
_NAME = re.compile(NAME)


class Kind(IntEnum):
    """What a frame is; see the module's docstring."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REQUEST = 5
    PIECE = 6
    WAITING = 7
    CORRUPT = 8
    ERROR = 9


# A payload's length where the header's second number is one; PIECE's bytes are no payload.
_EXACT = {Kind.CHALLENGE: NONCE_BYTES + PROOF_BYTES, Kind.PROOF: PROOF_BYTES}
_FREE = {Kind.HELLO, Kind.ERROR}


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header; what ``first`` and ``second`` mean depends on the kind."""

    kind: Kind
    first: int
    second: int

    @property
    def payload_bytes(self) -> int:
        """Return how many payload bytes follow."""
        return self.second if self.kind in _FREE or self.kind in _EXACT else 0


@dataclass(frozen=True, slots=True)
class Hello:
    """Who calls, and for which model."""

    version: int
    keepalive_s: float
    digest: str
    nonce: bytes
    worker_id: str


def encode(kind: Kind, first: int = 0, second: int = 0) -> bytes:
    """Return the header of a frame without payload (or of a PIECE)."""
    return HEADER.pack(_MAGIC, kind, first, second)


def encode_payload(kind: Kind, payload: bytes) -> bytes:
    """Return a whole frame with a payload."""
    return HEADER.pack(_MAGIC, kind, 0, len(payload)) + payload


def decode(raw: bytes | bytearray | memoryview) -> Header:
    """Return the header in the 12 bytes ``raw``; raises InvalidFrame where a limit is passed."""
    if len(raw) != HEADER.size:
        raise _bad("header", f"{len(raw)} bytes", f"{HEADER.size} bytes")
    magic, number, first, second = HEADER.unpack(raw)
    if magic != _MAGIC:
        raise _bad("magic", magic, _MAGIC)
    try:
        kind = Kind(number)
    except ValueError as error:
        raise _bad("kind", number, "1 to 9") from error
    if kind in _FREE and second > MAX_PAYLOAD:
        raise _bad("payload", f"{second} bytes", f"at most {MAX_PAYLOAD}")
    if kind in _EXACT and second != _EXACT[kind]:
        raise _bad("payload", f"{second} bytes", f"{_EXACT[kind]}")
    if kind is Kind.PIECE and not 0 < second <= MAX_PIECE_BYTES:
        raise _bad("piece length", second, f"1 to {MAX_PIECE_BYTES}")
    if kind is Kind.REQUEST and not (second > 0 and first + second <= MAX_PIECES):
        raise _bad("request", f"{second} pieces from {first}", f"within {MAX_PIECES} pieces")
    return Header(kind, first, second)


def encode_hello(hello: Hello) -> bytes:
    """Return the frame that opens a stream."""
    fixed = _HELLO.pack(
        hello.version, int(hello.keepalive_s * 1000), bytes.fromhex(hello.digest), hello.nonce
    )
    return encode_payload(Kind.HELLO, fixed + hello.worker_id.encode())


def decode_hello(payload: bytes) -> Hello:
    """Return the caller's greeting; raises InvalidFrame where a field is not acceptable."""
    if len(payload) < _HELLO.size:
        raise _bad("hello", f"{len(payload)} bytes", f"at least {_HELLO.size}")
    version, keepalive_ms, digest, nonce = _HELLO.unpack_from(payload)
    if version != PROTOCOL_VERSION:
        raise _bad("protocol version", version, PROTOCOL_VERSION)
    name = payload[_HELLO.size :].decode("ascii", "replace")
    if not _NAME.fullmatch(name):
        raise _bad("worker id", repr(name[:40]), "a name")
    keepalive_s = min(10.0, max(0.02, keepalive_ms / 1000))
    return Hello(version, keepalive_s, digest.hex(), nonce, name)


def proof(token: str, side: str, hello: Hello, server_nonce: bytes) -> bytes:
    """Return what only a holder of the cluster's token can say on this stream, from ``side``."""
    said = b"|".join(
        (b"paceline-peer-1", side.encode(), hello.nonce, server_nonce, hello.digest.encode())
    )
    return hmac.new(token.encode(), said + b"|" + hello.worker_id.encode(), hashlib.sha256).digest()


def same(one: bytes, other: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(one, other)


def _bad(what: str, got: object, wanted: object) -> InvalidFrame:
    return InvalidFrame(f"bad {what} on the peer port", got=got, wanted=wanted)
