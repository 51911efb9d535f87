"""A reader rests while a slow link fills its buffer, and never on a fast one."""

from __future__ import annotations

import pytest

from paceline.relay.transport import MAX_SLEEP_S, ReadCoalescer, sockets as lull

BLOCK = 64 * 1024
BUFFER = 1024 * 1024  # what the kernel takes before it holds the sender up


class Link:
    """A clock, and a socket buffer that fills with time."""

    def __init__(self, rate: float) -> None:
        self.rate, self.now_s, self.slept_s = rate, 0.0, 0.0
        self.buffered, self.filled_at_s, self.wakes = 0.0, 0.0, 0

    def sleep(self, seconds: float) -> None:
        assert seconds <= MAX_SLEEP_S
        self.slept_s += seconds
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s

    def read(self, count: int) -> None:
        """Take ``count`` bytes, one wake-up a segment of those that were not there yet."""
        self.buffered += (self.now_s - self.filled_at_s) * self.rate
        self.buffered = min(self.buffered, BUFFER)
        if (missing := count - self.buffered) > 0:
            self.wakes += int(missing // 1448) + 1
            self.now_s += missing / self.rate
            self.buffered += missing
        self.filled_at_s = self.now_s
        self.buffered -= count


def blocks(link: Link, reader: ReadCoalescer, count: int) -> float:
    """Read so many blocks; return their bytes per second."""
    since_s = link.now_s
    for _ in range(count):
        began_s = link.monotonic()
        if wait_s := reader.wait_s(BLOCK):
            reader.sleep(wait_s)
        read_s = link.monotonic()
        link.read(BLOCK)
        reader.read(BLOCK, began_s, link.monotonic() - read_s)
    return count * BLOCK / (link.now_s - since_s)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    made = Link(6e6)
    monkeypatch.setattr(lull, "time", made)
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
