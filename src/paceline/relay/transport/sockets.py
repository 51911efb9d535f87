"""Blocking socket I/O with deadlines: the channel contract, plain channels, read coalescing.

A *channel* is a connected socket, plain or with TLS (``tls``). Timeouts of plain channels are set
in the kernel (SO_RCVTIMEO), so that one ``recv`` with MSG_WAITALL fills a whole block of a fast
link; on a slow one a read takes what has gathered meanwhile (read coalescing, below).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
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

MAX_SLEEP_S = 0.02  # below the 40 ms after which the kernel sends a delayed ACK
FIRST_SLEEP_S = 0.004  # a sender's window grows with its round trips, and a sleep is one:
SLEEP_GROWTH = 1.05  # per read; at 30 ms from the start a chain of four took 0.6 s longer
MIN_SLEEP_S = 0.0005  # a shorter sleep costs more than it saves
SLEEP_SHARE = 0.95  # of the expected time; the read itself waits for the rest
BLOCKED_S = 0.0004  # a read that took longer waited for the link
# While the reader sleeps, a full buffer stops the sender, and the rate is then what the sleeps make
# it. Half a sleep tells: as many bytes in less time are a faster link.
PROBE_EVERY = 10  # sleeps
PROBE_AGAIN = 2  # after a probe that found the link faster
PROBE_GAIN = 1.4  # so much faster
MEAN_OF = 4  # reads
LEAST_BYTES = 16 * 1024  # less is not worth a sleep


def held_bytes(sock: socket.socket) -> int:
    """Return about how much the kernel keeps for a reader before it stops the sender; 0 where the
    socket is closed.
    """
    with suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 3  # the rest is overhead
    return 0


class ReadCoalescer:
    """Estimates how long one reader's next bytes take, and sleeps for it. For one thread."""

    def __init__(self) -> None:
        self._per_byte_s = 0.0  # 0: unknown, or too fast for a sleep
        self._longest_s = FIRST_SLEEP_S
        self._slept_s = 0.0  # before the next read
        self._mean_s = 0.0  # seconds a byte took of late, in reads after a sleep
        self._until_probe = PROBE_EVERY

    def wait_s(self, missing: int, held: int = 0) -> float:
        """Return how long ``missing`` bytes take to arrive, or the ``held`` ones that the kernel
        keeps (0: unknown); 0 where that is not worth a sleep.
        """
        if 0 < held < missing:
            missing = held
        wait_s = self._per_byte_s * missing * SLEEP_SHARE
        return wait_s if missing >= LEAST_BYTES and wait_s >= MIN_SLEEP_S else 0.0

    def sleep(self, wait_s: float) -> bool:
        """Sleep for ``wait_s``, or as long as is allowed now; return whether that was all of it."""
        slept_s = min(wait_s, self._longest_s)
        if not self._slept_s:  # the first sleep of this read
            self._longest_s = min(MAX_SLEEP_S, SLEEP_GROWTH * self._longest_s)
            self._until_probe -= 1
        if self._until_probe <= 0:
            slept_s /= 2
        self._slept_s = slept_s
        time.sleep(slept_s)
        return wait_s <= slept_s

    def read(self, count: int, began_s: float, blocked_s: float, held: int = 0) -> None:
        """Update the estimate: ``count`` bytes were awaited since ``began_s`` (monotonic clock),
        the last ``blocked_s`` of it in the read itself.

        ``held``: bytes that the kernel keeps before it stops the sender (0: unknown).
        """
        if count < LEAST_BYTES:
            self._slept_s = 0.0
            return
        seen = (time.monotonic() - began_s) / count
        if count > held > 0:  # at least the rest came within the read, however long the sleep
            seen = min(seen, blocked_s / (count - held))
        if self._slept_s and self._slept_too_long(seen):
            return
        if blocked_s < BLOCKED_S:
            self._per_byte_s *= 0.5 if self._per_byte_s * count > MAX_SLEEP_S else 0.9
            return
        # Grow at most twofold, so that a pause of the sender does not count as a rate.
        self._per_byte_s = min(seen, 2 * self._per_byte_s) if self._per_byte_s else seen

    def _slept_too_long(self, seen: float) -> bool:
        """Return whether half a sleep has just shown that; if so, the next ones are as short."""
        slept_s, self._slept_s = self._slept_s, 0.0
        if self._until_probe > 0:
            self._mean_s += (seen - self._mean_s) / MEAN_OF if self._mean_s else seen
            return False
        if seen * PROBE_GAIN >= self._mean_s:
            self._until_probe = PROBE_EVERY
            return False
        self._until_probe = PROBE_AGAIN
        self._longest_s, self._mean_s = max(slept_s, MIN_SLEEP_S), seen
        self._per_byte_s = seen if slept_s > MIN_SLEEP_S else 0.0
        return True


IO_TIMEOUT_S = 10.0  # the longest any single read or write may make no progress at all


class Channel(ABC):
    """A connection, which owns its socket: one thread reads, any may send frames or shut it."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.readable_poll = select.poll()
        self.readable_poll.register(sock, select.POLLIN)
        self._coalescer = ReadCoalescer()
        self._measured_s = 0.0  # since when bytes are counted for the next estimate; 0: not yet
        self._measured_bytes = 0
        self._blocked_s = 0.0  # the longest wait for the link in the last ``_read``

    _sleeps_inside = False  # whether ``_read`` of a whole view sleeps where nothing has arrived

    @abstractmethod
    def _read(self, view: memoryview, whole: bool) -> int:
        """Return how many bytes were read, all of ``view`` if ``whole``; 0 after a timeout."""

    def read(self, view: memoryview, due: int, begun: int) -> int:
        """Receive some bytes into ``view`` and return how many; 0 after a timeout. Raises PeerLost
        when the peer closes or resets.

        ``due`` bytes are expected, of which ``begun`` belong to a piece that is being sent. Where
        the link is slow, they gather first; where it is fast, the call waits for ``begun``.
        """
        expected = min(due, len(view))
        large = begun >= len(view)
        # Part of a large piece, or the rest of a small one where several would not gather anyway.
        if large and self._sleeps_inside:
            whole = True
        elif wait_s := self._coalescer.wait_s(expected):
            whole = self._coalescer.sleep(wait_s) and large
        else:
            whole = begun > 0
        if whole:
            view = view[:begun]
        self._blocked_s = 0.0
        got = self._read(view, whole)
        now_s = time.monotonic()
        self._measured_bytes += got
        if not self._measured_s:  # the time before the first bytes is not the link's
            self._measured_s, self._measured_bytes = now_s, 0
        elif self._measured_bytes >= LEAST_BYTES:
            # A view that was filled at once was waiting: the link is faster than its estimate.
            blocked_s = self._blocked_s if got == len(view) else MAX_SLEEP_S
            self._coalescer.read(self._measured_bytes, self._measured_s, blocked_s)
            self._measured_s, self._measured_bytes = now_s, 0
        return got

    def receive(self, view: memoryview, deadline_s: float) -> None:
        """Fill ``view``; raises PeerLost when the peer closes, resets, or misses the deadline."""
        done = 0
        while done < len(view):
            done += self._read(view[done:], whole=True)
            if done < len(view) and time.monotonic() > deadline_s:
                raise PeerLost("the peer went silent", got=f"{done} bytes", wanted=len(view))

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Send all of ``data``."""

    @abstractmethod
    def send_file(self, descriptor: int, offset: int, count: int, header: bytes, more: bool) -> int:
        """Send ``header``, then up to ``count`` bytes of a file, and return how many; 0 at its end.

        With ``more``, it may be sent together with the next call's bytes.
        """

    def readable(self, wait_s: float) -> bool:
        """Wait up to ``wait_s`` for data; return whether there is any."""
        return bool(self.readable_poll.poll(wait_s * 1000))

    def shut(self) -> None:
        """Shut the connection down and wake threads blocked on it; the owner closes it."""
        shutdown_socket(self.socket)

    def close(self) -> None:
        self.socket.close()


class PlainChannel(Channel):
    """A channel without TLS; see Channel."""

    def __init__(self, sock: socket.socket, timeout_s: float = IO_TIMEOUT_S) -> None:
        super().__init__(sock)
        sock.setblocking(True)
        timeout = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def _read(self, view: memoryview, whole: bool) -> int:
        began_s = time.monotonic()
        try:
            got = self.socket.recv_into(view, 0, socket.MSG_WAITALL if whole else 0)
            self._blocked_s = time.monotonic() - began_s
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise broken(error) from error
        if got == 0:
            raise PeerLost("the peer closed the connection")
        return got

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise broken(error) from error

    def send_file(
        self,
        descriptor: int,
        offset: int,
        count: int,
        header: bytes,
        more: bool,  # noqa: ARG002 (the kernel joins what waits)
    ) -> int:
        try:
            if header:  # in one segment with the first bytes
                self.socket.sendall(header, socket.MSG_MORE)
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


def shutdown_socket(sock: socket.socket) -> None:
    """Shut ``sock`` down and wake threads blocked on it; the owner closes it."""
    with suppress(OSError):
        # Not sock.shutdown: on a TLS socket that would let a thread in recv see raw records.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


TAKES_NOTHING = "the peer takes nothing"


def broken(error: OSError) -> PeerLost:
    """Return the PeerLost for an error of a connected socket; a blocking one has timed out."""
    if isinstance(error, BlockingIOError):
        return PeerLost(TAKES_NOTHING, got="no progress within the socket's time limit")
    return PeerLost("the connection broke", got=error.strerror or error)
