"""Wire format of the parameter server: frames of a small JSON head and a raw body.

    magic "PLW1" · kind 1 byte · head length 4 bytes · body length 8 bytes · head · body

Lengths are checked before the bytes are read; a body contains numbers as the head describes, never
an object. Each read and write has the socket's deadline. A caller first sends ``HELLO`` with the
gang's secret key; it travels in clear text on the gang's network.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from pydantic import ValidationError

from paceline.errors import AccessDenied, InvalidFrame, PeerLost
from paceline.training.strategies.port import Address, Array, BatchReport

MAGIC = b"PLW1"
HEADER = struct.Struct(">4sBIQ")
MAX_HEAD_BYTES = 1024 * 1024
MAX_HELLO_BYTES = 4096  # of a frame before the key is verified
MAX_BODY_BYTES = 8 << 30  # callers pass a smaller bound that fits the model
DTYPES = {"float32": "<f4", "float64": "<f8"}


class FrameKind(IntEnum):
    """Type of a frame; arrows: → to the server, ← from it."""

    HELLO = 1  # → role, worker (its share), key
    WELCOME = 2  # ← how many updates the share has, and where its data continue
    PULL = 3
    WEIGHTS = 4  # ← version; body: weights
    PUSH = 5  # → sequence, base, report; body: gradient
    ANSWER = 6  # ← the version that it made
    STATE = 7  # leader → standby: everything; body: safetensors
    UPDATE = 8  # leader → standby: one applied gradient
    FOLLOWED = 9  # standby → leader: it is applied there too
    BEAT = 10
    NOT_LEADING = 11  # try another server
    REFUSED = 12  # a permanent error
    RELEASED = 13  # leader → standby: all work is done


@dataclass(frozen=True)
class Frame:
    """One message."""

    kind: FrameKind
    head: dict[str, Any] = field(default_factory=dict)
    body: bytes | bytearray | memoryview = b""


def send(connection: socket.socket, frame: Frame) -> None:
    """Write ``frame``; raises PeerLost at the socket's deadline or where the peer is gone."""
    head = json.dumps(frame.head, separators=(",", ":")).encode()
    assert len(head) <= MAX_HEAD_BYTES, "our own heads are small"
    body = memoryview(frame.body).cast("B")
    start = HEADER.pack(MAGIC, frame.kind, len(head), len(body)) + head
    try:
        connection.sendall(start)
        if len(body):
            connection.sendall(body)
    except (OSError, ValueError) as error:
        raise PeerLost("peer went away while a frame was sent", got=error) from error


def receive(
    connection: socket.socket,
    max_body_bytes: int = MAX_BODY_BYTES,
    *,
    max_head_bytes: int = MAX_HEAD_BYTES,
    within_s: float | None = None,
) -> Frame:
    """Return the next frame; all of it must arrive ``within_s`` (None: no total limit).

    Raises PeerLost at the socket's deadline (of each read), after ``within_s``, or where the peer
    is gone; InvalidFrame for bytes that are no frame of ours or a head or body above its limit.
    """
    until = None if within_s is None else time.monotonic() + within_s
    start = _exactly(connection, HEADER.size, until)
    magic, kind, head_bytes, body_bytes = HEADER.unpack(start)
    if magic != MAGIC:
        raise InvalidFrame("not our protocol", got=bytes(magic), wanted=MAGIC)
    if head_bytes > max_head_bytes or body_bytes > max_body_bytes:
        raise InvalidFrame(
            "frame is too large",
            got=f"head {head_bytes}, body {body_bytes} bytes",
            wanted=f"≤ {max_head_bytes} and ≤ {max_body_bytes}",
        )
    try:
        parsed = json.loads(bytes(_exactly(connection, head_bytes, until)))
        found = FrameKind(kind)
    except (ValueError, RecursionError) as error:
        raise InvalidFrame("frame cannot be read", got=str(error)[:200]) from error
    if not isinstance(parsed, dict):
        raise InvalidFrame("frame's head is no object", got=type(parsed).__name__)
    return Frame(found, parsed, _exactly(connection, body_bytes, until))


def array_frame(kind: FrameKind, numbers: Array, **head: Any) -> Frame:
    """Return a frame whose body is a flat array of float32 or float64."""
    dtype = str(numbers.dtype)
    assert dtype in DTYPES and numbers.ndim == 1, "one flat array of floats travels"
    little = np.ascontiguousarray(numbers, dtype=DTYPES[dtype])
    return Frame(kind, {**head, "dtype": dtype}, memoryview(little.data))


def array_of(frame: Frame, count: int, dtype: str) -> Array:
    """Return the numbers in a frame's body; raises InvalidFrame for another count or dtype."""
    size = np.dtype(DTYPES[dtype]).itemsize * count
    if frame.head.get("dtype") != dtype or len(frame.body) != size:
        raise InvalidFrame(
            "frame holds other numbers",
            got=f"{len(frame.body)} bytes of {frame.head.get('dtype')}",
            wanted=f"{count} x {dtype}, {size} bytes",
        )
    return np.frombuffer(frame.body, dtype=DTYPES[dtype])


def integer_of(frame: Frame, name: str) -> int:
    """Return the non-negative integer ``name`` of a frame's head; raises InvalidFrame without."""
    value = frame.head.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidFrame("frame's head lacks a number", got=repr(value)[:100], wanted=name)
    return value


def report_of(frame: Frame) -> BatchReport:
    """Return the report in a frame's head; raises InvalidFrame without."""
    try:
        return BatchReport.model_validate(frame.head.get("report"))
    except ValidationError as error:
        raise InvalidFrame("report of a gradient cannot be read", got=error) from error


def connect(address: Address, timeout_s: float, hello: dict[str, Any]) -> socket.socket:
    """Return a connection to a server on which HELLO was sent; raises PeerLost without an answer.

    Each later read and write has the deadline ``timeout_s``.
    """
    try:
        connection = socket.create_connection(address, timeout=timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise PeerLost("parameter server does not answer", got=error, where=address) from error
    try:
        send(connection, Frame(FrameKind.HELLO, hello))
    except PeerLost:
        connection.close()
        raise
    return connection


def find_leader(
    addresses: Iterable[Address],
    hello: dict[str, Any],
    wanted: FrameKind,
    timeout_s: float,
    max_body_bytes: int = 0,
) -> tuple[socket.socket, Frame]:
    """Return a connection to the first server that answers ``hello`` with a ``wanted`` frame, and
    that frame. Raises PeerLost, with the last reason, where none does.
    """
    lost = PeerLost("no parameter server is known")
    for address in addresses:
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(connect(address, timeout_s, hello))
                frame = receive(connection, max_body_bytes)
            except PeerLost as error:
                lost = error
                continue
            if frame.kind is wanted:
                stack.pop_all()
                return connection, frame
            lost = PeerLost("parameter server does not lead", got=frame.kind.name, where=address)
    raise lost


def receive_hello(connection: socket.socket, key: str, within_s: float) -> Frame:
    """Return the HELLO of a caller that has the gang's key.

    Before that the caller may send at most ``MAX_HELLO_BYTES`` and take at most ``within_s``.
    Raises AccessDenied without the key, and the errors of ``receive``.
    """
    hello = receive(connection, 0, max_head_bytes=MAX_HELLO_BYTES, within_s=within_s)
    sent = hello.head.get("key")
    if hello.kind is not FrameKind.HELLO or not isinstance(sent, str):
        raise AccessDenied("a caller of the parameter server sent no HELLO", got=hello.kind.name)
    if not hmac.compare_digest(sent.encode(), key.encode()):
        raise AccessDenied("a caller of the parameter server has another key")
    return hello


def _exactly(connection: socket.socket, count: int, until: float | None) -> bytearray:
    found = bytearray(count)
    view, got = memoryview(found), 0
    try:
        while got < count:
            if until is not None:
                if (left := until - time.monotonic()) <= 0:
                    raise PeerLost("peer is too slow", got=f"{got} of {count} bytes")
                connection.settimeout(left)
            read = connection.recv_into(view[got:])
            if read == 0:
                raise PeerLost("peer closed the connection", got=f"{got} of {count} bytes")
            got += read
    except OSError as error:
        raise PeerLost("peer is silent or gone", got=error) from error
    return found
