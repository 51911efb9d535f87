"""Blocking socket I/O with deadlines: the channel contract, plain channels, read coalescing.

A *channel* is a connected socket, plain or with TLS (``tls``). Timeouts of plain channels are set
in the kernel (SO_RCVTIMEO), so that one ``recv`` with MSG_WAITALL fills a whole block, most of
which has arrived by then (read coalescing, below).
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
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from paceline.errors import InvalidFrame, PeerLost
from paceline.relay.transport.frames import HEADER, Header, Kind, decode
from paceline.relay.transport.pacing import Pacer

# Read coalescing: let bytes accumulate before they are read, for fewer wake-ups and ACKs.
#
# On a link that is slower than this process every segment would wake the reader, and each read
# makes the kernel acknowledge: with 8 hosts at 50 Mbit/s that cost a third of the CPU, and ACKs
# took 2.5 % of links that carry the model in both directions. Instead the reader sleeps for about
# the time that its next block takes. SO_RCVLOWAT cannot do that: below its mark the kernel
# acknowledges every other segment. On fast links the reader never sleeps.

MAX_SLEEP_S = 0.03  # below the 40 ms after which the kernel sends a delayed ACK
MIN_SLEEP_S = 0.0005  # a shorter sleep costs more than it saves
SLEEP_SHARE = 0.95  # of the expected time; the read itself waits for the rest
BLOCKED_S = 0.0004  # a read that took longer waited for the link
LEAST_BYTES = 16 * 1024  # less is not worth a sleep


class ReadCoalescer:
    """Estimates how long one reader's next bytes take, and sleeps for it. For one thread."""

    def __init__(self) -> None:
        self._per_byte_s = 0.0  # 0: unknown, or too fast for a sleep

    def rests(self, count: int) -> bool:
        """Return whether ``count`` bytes that have yet to arrive take long enough for a sleep."""
        return self._per_byte_s * count * SLEEP_SHARE >= MIN_SLEEP_S

    def sleep(self, missing: int) -> bool:
        """Sleep while ``missing`` bytes arrive; return whether the rest is due within LONGEST_S."""
        if missing < LEAST_BYTES:
            return True
        wait_s = self._per_byte_s * missing * SLEEP_SHARE
        if wait_s >= MIN_SLEEP_S:
            time.sleep(min(wait_s, MAX_SLEEP_S))
        return wait_s <= MAX_SLEEP_S

    def read(self, count: int, began_s: float, blocked_s: float) -> None:
        """Update the estimate: ``count`` bytes were awaited since ``began_s`` (monotonic clock),
        the last ``blocked_s`` of it in the read itself.
        """
        if count < LEAST_BYTES:
            return
        if blocked_s < BLOCKED_S:
            self._per_byte_s *= 0.5 if self._per_byte_s * count > MAX_SLEEP_S else 0.9
            return
        seen = (time.monotonic() - began_s) / count
        # Grow at most twofold, so that a pause of the sender does not count as a rate.
        self._per_byte_s = min(seen, 2 * self._per_byte_s) if self._per_byte_s else seen


IO_TIMEOUT_S = 10.0  # the longest any single read or write may make no progress at all


class Channel(ABC):
    """A connection: one thread reads, any thread may send whole frames or shut it. ``socket`` owns
    the descriptor.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.coalescer = ReadCoalescer()
        self.readable_poll = select.poll()
        self.readable_poll.register(sock, select.POLLIN)

    @abstractmethod
    def receive(
        self, view: memoryview, deadline_s: float, on_some: Callable[[], None] | None = None
    ) -> None:
        """Fill ``view``; raises PeerLost when the peer closes, resets, or misses the deadline.

        ``on_some`` is called after a timeout in which some bytes, but not all, have arrived.
        """

    @abstractmethod
    def send(self, data: bytes, more: bool = False) -> None:
        """Send all of ``data``; with ``more``, it may be sent together with the next data."""

    @abstractmethod
    def send_file(self, descriptor: int, offset: int, count: int) -> int:
        """Send up to ``count`` bytes of a file and return how many; 0 at its end."""

    def readable(self, wait_s: float) -> bool:
        """Wait up to ``wait_s`` for data; return whether there is any."""
        return bool(self.readable_poll.poll(wait_s * 1000))

    def shut(self) -> None:
        """Shut the connection down and wake threads blocked on it; the owner closes it."""
        shutdown_socket(self.socket)

    def close(self) -> None:
        """Free the descriptor."""
        self.socket.close()


class PlainChannel(Channel):
    """A channel without TLS; see Channel."""

    def __init__(self, sock: socket.socket, timeout_s: float = IO_TIMEOUT_S) -> None:
        super().__init__(sock)
        sock.setblocking(True)
        timeout = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def receive(
        self, view: memoryview, deadline_s: float, on_some: Callable[[], None] | None = None
    ) -> None:
        """Fill ``view``; see Channel."""
        done, began_s, read_s = 0, time.monotonic(), 0.0
        while done < len(view):
            try:
                close, left = True, len(view) - done
                # Else asking how much has arrived costs too much.
                if left >= LEAST_BYTES and self.coalescer.rests(left):
                    close = self.coalescer.sleep(left - waiting_bytes(self.socket))
                read_s = time.monotonic()
                flags = socket.MSG_WAITALL if close else 0
                got = self.socket.recv_into(view[done:], 0, flags)
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
        if len(view) >= LEAST_BYTES:
            self.coalescer.read(len(view), began_s, time.monotonic() - read_s)

    def send(self, data: bytes, more: bool = False) -> None:
        """Send all of ``data``; see Channel."""
        try:
            self.socket.sendall(data, socket.MSG_MORE if more else 0)
        except OSError as error:
            raise broken(error) from error

    def send_file(self, descriptor: int, offset: int, count: int) -> int:
        """Send from the page cache without copying; see Channel."""
        try:
            return os.sendfile(self.socket.fileno(), descriptor, offset, count)
        except OSError as error:
            raise broken(error) from error


def configure(sock: socket.socket, pacer: Pacer) -> None:
    """Set TCP_NODELAY and, where the link is paced, small buffers."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if pacer.paced:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, pacer.buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, pacer.buffer_bytes)


def read_frame(channel: Channel, deadline_s: float, *expected: Kind) -> tuple[Header, bytes]:
    """Return the next frame and its payload; raises InvalidFrame for an unexpected kind.

    An ERROR frame that is not expected raises PeerLost.
    """
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
    """Return how many bytes in the kernel's receive buffer of ``sock`` are unread."""
    answer = fcntl.ioctl(sock, termios.FIONREAD, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def shutdown_socket(sock: socket.socket) -> None:
    """Shut ``sock`` down and wake threads blocked on it; the owner closes it."""
    with suppress(OSError):
        # Not sock.shutdown: on a TLS socket that would let a thread in recv see raw records.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def broken(error: OSError) -> PeerLost:
    """Return the PeerLost for an error of a connected socket."""
    return PeerLost("the connection broke", got=error.strerror or error)
