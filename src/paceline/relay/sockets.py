"""Blocking socket reads and writes with a deadline each, shared by both ends of a stream.

Timeouts are set in the kernel (SO_RCVTIMEO), so that one ``recv`` with MSG_WAITALL fills a whole
sub-block: a system call a block, not one for each segment.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from paceline.errors import InvalidFrame, PeerLost
from paceline.relay.frames import HEADER, Header, Kind, decode
from paceline.relay.pacing import Pacer

IO_TIMEOUT_S = 10.0  # the longest any single read or write may make no progress at all
PACED_BUFFER = 128 * 1024  # what a paced socket may hold unseen; more would hide the pace


def configure(sock: socket.socket, pacer: Pacer, timeout_s: float = IO_TIMEOUT_S) -> None:
    """Set deadlines, no delay for small frames, and modest buffers where the link is paced."""
    sock.setblocking(True)
    timeout = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if pacer.paced:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACED_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PACED_BUFFER)


def receive(
    sock: socket.socket,
    view: memoryview,
    deadline_s: float,
    on_some: Callable[[], None] | None = None,
) -> None:
    """Fill ``view``; raises PeerLost when the peer closes, resets, or is late.

    ``on_some`` is called when a timeout passed and something, if not all, arrived meanwhile.
    """
    done = 0
    while done < len(view):
        try:
            got = sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
        except (BlockingIOError, InterruptedError):
            got = -1
        except OSError as error:
            raise PeerLost("the connection broke", got=error.strerror or error) from error
        if got == 0:
            raise PeerLost("the peer closed the connection")
        done += max(got, 0)
        if on_some is not None and got > 0 and done < len(view):
            on_some()
        if done < len(view) and time.monotonic() > deadline_s:
            raise PeerLost("the peer went silent", got=f"{done} bytes", wanted=len(view))


def send(sock: socket.socket, data: bytes) -> None:
    """Send all of a small frame; raises PeerLost."""
    try:
        sock.sendall(data)
    except OSError as error:
        raise PeerLost("the connection broke", got=error.strerror or error) from error


def read_frame(sock: socket.socket, deadline_s: float, *expected: Kind) -> tuple[Header, bytes]:
    """Return the next frame and its payload; raises InvalidFrame unless it is ``expected``."""
    raw = bytearray(HEADER.size)
    receive(sock, memoryview(raw), deadline_s)
    header = decode(raw)
    payload = bytearray(header.payload_bytes)
    receive(sock, memoryview(payload), deadline_s)
    if header.kind is Kind.ERROR and Kind.ERROR not in expected:
        raise PeerLost("the peer refused", got=payload.decode("utf-8", "replace"))
    if expected and header.kind not in expected:
        wanted = " or ".join(kind.name for kind in expected)
        raise InvalidFrame("unexpected frame", got=header.kind.name, wanted=wanted)
    return header, bytes(payload)


def shut(sock: socket.socket) -> None:
    """Wake whoever reads or writes ``sock`` now; the owner closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
