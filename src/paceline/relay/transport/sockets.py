"""Blocking reads and writes with a deadline each: the plain channel, and what both ends share.

A *channel* is a connected socket with whatever protects it; ``tls`` has the other kind. Plain
timeouts are set in the kernel (SO_RCVTIMEO), so that one ``recv`` with MSG_WAITALL fills a whole
sub-block, most of which has gathered by then (``lull``).
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from paceline.errors import InvalidFrame, PeerLost
from paceline.relay.transport.frames import HEADER, Header, Kind, decode
from paceline.relay.transport.pacing import Pacer

# Letting bytes gather before they are read: few wake-ups, few acknowledgements.
#
# On a link that is slower than this process every segment would wake the reader, and each read
# makes the kernel acknowledge: with 8 hosts at 50 Mbit/s that cost a third of the CPU, and
# acknowledgements took 2.5 % of links that carry the model in both directions. A reader sleeps for
# about as long as its next block takes instead; SO_RCVLOWAT cannot do that, because below its mark
# the kernel acknowledges every other segment. On fast links it never sleeps. It knows no sockets.

LONGEST_S = 0.03  # below the 40 ms after which the kernel acknowledges by itself
SHORTEST_S = 0.0005  # a shorter sleep costs more than it saves
SHARE = 0.95  # of the expected time: the rest is waited for in the read
BLOCKED_S = 0.0004  # a read that took longer has waited for the link
LEAST_BYTES = 16 * 1024  # less is not worth a sleep


class Lull:
    """How long one reader's next bytes take; one thread uses it."""

    def __init__(self) -> None:
        self._per_byte_s = 0.0  # 0: not known, or faster than is worth a sleep

    def rests(self, count: int) -> bool:
        """Return whether ``count`` bytes take so long that a sleep is worth it, were none here."""
        return count >= LEAST_BYTES and self._per_byte_s * count * SHARE >= SHORTEST_S

    def sleep(self, missing: int) -> bool:
        """Sleep while ``missing`` bytes come, and return whether the rest of them is close."""
        if missing < LEAST_BYTES:
            return True
        wait_s = self._per_byte_s * missing * SHARE
        if wait_s >= SHORTEST_S:
            time.sleep(min(wait_s, LONGEST_S))
        return wait_s <= LONGEST_S

    def read(self, count: int, began_s: float, blocked_s: float) -> None:
        """Learn from ``count`` bytes that were awaited since ``began_s`` (of the monotonic clock),
        the last ``blocked_s`` of it in the read itself.
        """
        if count < LEAST_BYTES:
            return
        if blocked_s < BLOCKED_S:
            self._per_byte_s *= 0.5 if self._per_byte_s * count > LONGEST_S else 0.9
            return
        seen = (time.monotonic() - began_s) / count
        # A pause of the sender is no rate.
        self._per_byte_s = min(seen, 2 * self._per_byte_s) if self._per_byte_s else seen


IO_TIMEOUT_S = 10.0  # the longest any single read or write may make no progress at all


class Channel(Protocol):
    """A connection: one thread reads, any may send whole frames, any may shut it."""

    @property
    def socket(self) -> socket.socket:
        """Return the socket that owns the descriptor."""
        ...

    def receive(
        self, view: memoryview, deadline_s: float, on_some: Callable[[], None] | None = None
    ) -> None:
        """Fill ``view``; raises PeerLost when the peer closes, resets, or is late.

        ``on_some`` is called when a timeout passed and something, if not all, arrived meanwhile.
        """
        ...

    def send(self, data: bytes, more: bool = False) -> None:
        """Send all of ``data``; with ``more``, it may leave together with what follows."""
        ...

    def send_file(self, descriptor: int, offset: int, count: int) -> int:
        """Send up to ``count`` bytes of a file and return how many; 0 at its end."""
        ...

    def readable(self, wait_s: float) -> bool:
        """Wait for something to read; return whether there is."""
        ...

    def waiting(self) -> int:
        """Return how many bytes can be received without waiting, at least about."""
        ...

    def shut(self) -> None:
        """Wake whoever reads or writes now; the owner closes."""
        ...

    def close(self) -> None:
        """Free the descriptor."""
        ...


class PlainChannel:
    """A socket as it is; see Channel."""

    def __init__(self, sock: socket.socket, timeout_s: float = IO_TIMEOUT_S) -> None:
        self._sock = sock
        self._lull = Lull()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        sock.setblocking(True)
        timeout = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    @property
    def socket(self) -> socket.socket:
        """Return the socket; see Channel."""
        return self._sock

    def receive(
        self, view: memoryview, deadline_s: float, on_some: Callable[[], None] | None = None
    ) -> None:
        """Fill ``view``; see Channel."""
        done, began_s, read_s = 0, time.monotonic(), 0.0
        while done < len(view):
            try:
                close, left = True, len(view) - done
                if self._lull.rests(left):  # else what has gathered is not worth a system call
                    close = self._lull.sleep(left - waiting_bytes(self._sock))
                read_s = time.monotonic()
                flags = socket.MSG_WAITALL if close else 0
                got = self._sock.recv_into(view[done:], 0, flags)
            except (BlockingIOError, InterruptedError):
                got = -1
            except OSError as error:
                raise broken(error) from error
            if got == 0:
                raise PeerLost("the peer closed the connection")
            done += max(got, 0)
            if on_some is not None and got > 0 and done < len(view):
                on_some()
            if done < len(view) and time.monotonic() > deadline_s:
                raise PeerLost("the peer went silent", got=f"{done} bytes", wanted=len(view))
        self._lull.read(len(view), began_s, time.monotonic() - read_s)

    def send(self, data: bytes, more: bool = False) -> None:
        """Send all of ``data``; see Channel."""
        try:
            self._sock.sendall(data, socket.MSG_MORE if more else 0)
        except OSError as error:
            raise broken(error) from error

    def send_file(self, descriptor: int, offset: int, count: int) -> int:
        """Send from the page cache without copying; see Channel."""
        try:
            return os.sendfile(self._sock.fileno(), descriptor, offset, count)
        except OSError as error:
            raise broken(error) from error

    def readable(self, wait_s: float) -> bool:
        """Wait for something to read; see Channel."""
        return bool(self._poll.poll(wait_s * 1000))

    def waiting(self) -> int:
        """Return what the kernel has for us; see Channel."""
        return waiting_bytes(self._sock)

    def shut(self) -> None:
        """Wake whoever reads or writes; see Channel."""
        shut(self._sock)

    def close(self) -> None:
        """Free the descriptor."""
        self._sock.close()


def configure(sock: socket.socket, pacer: Pacer) -> None:
    """Send small frames at once, and keep buffers modest where the link is paced."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if pacer.paced:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, pacer.buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, pacer.buffer_bytes)


def read_frame(channel: Channel, deadline_s: float, *expected: Kind) -> tuple[Header, bytes]:
    """Return the next frame and its payload; raises InvalidFrame unless it is ``expected``."""
    raw = bytearray(HEADER.size)
    channel.receive(memoryview(raw), deadline_s)
    header = decode(raw)
    payload = bytearray(header.payload_bytes)
    channel.receive(memoryview(payload), deadline_s)
    if header.kind is Kind.ERROR and Kind.ERROR not in expected:
        raise PeerLost("the peer refused", got=payload.decode("utf-8", "replace"))
    if expected and header.kind not in expected:
        wanted = " or ".join(kind.name for kind in expected)
        raise InvalidFrame("unexpected frame", got=header.kind.name, wanted=wanted)
    return header, bytes(payload)


def waiting_bytes(sock: socket.socket) -> int:
    """Return how many bytes the kernel has for ``sock`` that nobody has read."""
    told = fcntl.ioctl(sock, termios.FIONREAD, bytes(4))
    return int.from_bytes(told, sys.byteorder)


def shut(sock: socket.socket) -> None:
    """Wake whoever reads or writes ``sock`` now; the owner closes it."""
    with suppress(OSError):
        # Not sock.shutdown: of a TLS socket that would let a thread in recv see raw records.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def broken(error: OSError) -> PeerLost:
    """Return what an error of a connected socket means."""
    return PeerLost("the connection broke", got=error.strerror or error)
