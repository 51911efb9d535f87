"""A reader sleeps while a slow link fills its buffer, and never on a fast one."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from paceline.relay.transport import MAX_SLEEP_S, PlainChannel, ReadCoalescer, sockets

BLOCK = 64 * 1024
BUFFER = 1024 * 1024  # what the kernel takes before it holds the sender up
SMALL = 64 * 1024


class Link:
    """A clock, and a socket buffer that fills with time."""

    def __init__(self, rate: float) -> None:
        self.rate, self.now_s, self.slept_s = rate, 0.0, 0.0
        self.buffered, self.filled_at_s, self.wakes, self.holds = 0.0, 0.0, 0, BUFFER

    def sleep(self, seconds: float) -> None:
        assert seconds <= MAX_SLEEP_S
        self.slept_s += seconds
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s

    def read(self, count: int) -> None:
        """Take ``count`` bytes, one wake-up a segment of those that were not there yet."""
        self.buffered += (self.now_s - self.filled_at_s) * self.rate
        self.buffered = min(self.buffered, self.holds)
        if (missing := count - self.buffered) > 0:
            self.wakes += int(missing // 1448) + 1
            self.now_s += missing / self.rate
            self.buffered += missing
        self.filled_at_s = self.now_s
        self.buffered -= count


def blocks(
    link: Link, reader: ReadCoalescer, count: int, block: int = BLOCK, held: int = 0
) -> float:
    """Read so many blocks; return their bytes per second."""
    since_s = link.now_s
    for _ in range(count):
        began_s = link.monotonic()
        if wait_s := reader.wait_s(block, held):
            reader.sleep(wait_s)
        read_s = link.monotonic()
        link.read(block)
        reader.read(block, began_s, link.monotonic() - read_s, held)
    return count * block / (link.now_s - since_s)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    made = Link(6e6)
    monkeypatch.setattr(sockets, "time", made)
    return made


def test_few_wake_ups_and_the_whole_rate_on_a_slow_link(link: Link) -> None:
    reader = ReadCoalescer()
    blocks(link, reader, 5)
    link.wakes = 0
    assert blocks(link, reader, 100) == pytest.approx(6e6, rel=0.01)
    assert link.wakes < 100 * BLOCK / 1448 / 5


def test_no_rest_on_a_fast_link(link: Link) -> None:
    link.rate = 1e9
    blocks(link, ReadCoalescer(), 100)
    assert link.slept_s == 0


@pytest.mark.parametrize("before", [0.2e6, 6e6])
def test_a_link_that_becomes_faster_is_followed_at_once(link: Link, before: float) -> None:
    reader = ReadCoalescer()
    link.rate = before
    blocks(link, reader, 20)
    link.rate = 100e6
    blocks(link, reader, 60)
    since_s = link.now_s
    blocks(link, reader, 1000)
    assert link.now_s - since_s < 1.05 * 1000 * BLOCK / 100e6


def test_a_pause_of_the_sender_is_made_up_for(link: Link) -> None:
    reader = ReadCoalescer()
    blocks(link, reader, 20)
    reader.read(BLOCK, link.now_s - 5.0, 5.0)  # it had nothing for five seconds
    since_s = link.now_s
    blocks(link, reader, 100)
    assert link.now_s - since_s < 1.02 * 100 * BLOCK / 6e6


@pytest.mark.parametrize("rate", [12e6, 100e6, 1e9])
def test_a_sleep_that_outlasts_the_buffer_is_no_rate(link: Link, rate: float) -> None:
    reader, link.holds = ReadCoalescer(), SMALL
    blocks(link, reader, 20, 4 * SMALL, SMALL)
    link.rate = rate
    blocks(link, reader, 60, 4 * SMALL, SMALL)
    assert blocks(link, reader, 100, 4 * SMALL, SMALL) > 0.9 * rate


def test_a_peer_that_the_kernel_stops_is_read_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(sockets, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    size = 20_000_000
    with socket.create_server(("127.0.0.1", 0)) as server:
        sending = socket.create_connection(server.getsockname())
        receiving, _ = server.accept()
    with sending, receiving:
        receiving.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        channel = PlainChannel(receiving)
        channel._coalescer._per_byte_s = 1 / 4e6  # as after a slow beginning
        thread = threading.Thread(target=sending.sendall, args=(bytes(size),))
        thread.start()
        view, done = memoryview(bytearray(4 * SMALL)), 0
        while done < size:
            due = min(len(view), size - done)
            done += channel.read(view[:due], due, 0)
        thread.join()
    assert sum(slept) < 1.0, "at 4 MB/s these are five seconds"


def test_several_sleeps_of_one_read_are_probed_together(link: Link) -> None:
    """As over TLS, which takes what has gathered and sleeps again until the view is full."""
    reader, view, link.holds = ReadCoalescer(), 8 * SMALL, SMALL
    round_trip_s = 0.001  # until a sender that was stopped goes on

    def read_one() -> None:
        began_s, missing, blocked_s = link.now_s, view, 0.0
        while missing:
            if wait_s := reader.wait_s(min(missing, SMALL)):
                reader.sleep(wait_s)
            woke_s, take = link.now_s, min(missing, SMALL)
            stopped = (link.now_s - link.filled_at_s) * link.rate >= SMALL
            link.read(take)
            blocked_s = max(blocked_s, link.now_s - woke_s + (round_trip_s if stopped else 0))
            link.now_s = link.filled_at_s = link.now_s + (round_trip_s if stopped else 0)
            missing -= take
        reader.read(view, began_s, blocked_s)

    for rate in (3e6, 100e6):
        link.rate = rate
        for _ in range(100):
            read_one()
    since_s = link.now_s
    for _ in range(100):
        read_one()
    assert 100 * view / (link.now_s - since_s) > 0.5 * SMALL / round_trip_s
