"""The TCP peer port at its limits: published models, cancels, too many streams, no descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from paceline.relay.protocol import Extent
from paceline.relay.transport import TcpTransport
from tests.relay.kit import until
from tests.relay.peers import Heard, Pair


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, lambda _worker_id: TcpTransport("cluster-token"))
    yield made
    made.close()


def test_what_an_earlier_process_published_is_served(pair: Pair) -> None:
    theirs, mine = pair.open()
    pair.hold_all(theirs)
    library, store = pair.source.library, pair.source.store
    store.publish(theirs)
    library.close()
    library._on_disk = {each.digest: each for each in store.versions()}
    heard = Heard()
    pair.reader.pull(mine, pair.address, heard).request(Extent(5, 6))
    assert heard.wait_pieces(1) == [5]


def test_a_cancelled_model_ends_its_streams(pair: Pair) -> None:
    theirs, mine = pair.open()
    pair.hold(theirs, 0)
    heard = Heard()
    pair.reader.pull(mine, pair.address, heard).request(Extent(0, 2))
    assert heard.wait_pieces(1) == [0]
    pair.source.library.discard(theirs)
    assert "closed" in str(heard.failure()) or "broke" in str(heard.failure())


def test_streams_are_capped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.relay.transport.tcp_server.MAX_STREAMS", 1)
    _, mine = pair.open()
    first, second = Heard(), Heard()
    pair.reader.pull(mine, pair.address, first).request(Extent(0, 1))
    first.wait_alive()
    pair.reader.pull(mine, pair.address, second).request(Extent(0, 1))
    assert "too many" in str(second.failure())


def test_without_descriptors_callers_wait_and_running_streams_go_on(pair: Pair) -> None:
    theirs, mine = pair.open()
    pair.hold(theirs, 0)
    running, late = Heard(), Heard()
    stream = pair.reader.pull(mine, pair.address, running)
    stream.request(Extent(0, 2))
    assert running.wait_pieces(1) == [0]
    for index in (1, 2):  # written now, verified later
        piece, data = pair.manifest.piece_of(index), memoryview(pair.data(index))
        assert theirs.claim(index)
        theirs.write(theirs.descriptor(piece.file_index), data, piece.file_offset)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    numbers = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(numbers) + 1, hard))
    fillers = []
    try:
        with contextlib.suppress(OSError):
            while True:  # numbers below the limit that were free
                fillers.append(os.open("/dev/null", os.O_RDONLY))
        pair.reader.pull(mine, pair.address, late).request(Extent(2, 3))
        for index in (1, 2):
            theirs.hold(pair.manifest.piece_of(index))
        assert running.wait_pieces(2) == [0, 1]  # it goes on
        assert late.events == []
    finally:
        for each in fillers:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert late.wait_pieces(1) == [2]


class RecordedPoll:
    """A poll object that records each call's time limit."""

    limits_ms: ClassVar[list[float | None]] = []

    def __init__(self) -> None:
        self._poll = select.poll()

    def register(self, sock: socket.socket, events: int) -> None:
        self._poll.register(sock, events)

    def poll(self, limit_ms: float | None) -> list[tuple[int, int]]:
        self.limits_ms.append(limit_ms)
        return self._poll.poll(limit_ms)


def test_an_idle_port_wakes_nothing_until_a_caller_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedPoll, "limits_ms", [])
    recorded = SimpleNamespace(poll=RecordedPoll, POLLIN=select.POLLIN)
    monkeypatch.setattr("paceline.relay.transport.tcp_server.select", recorded)
    monkeypatch.setattr("paceline.relay.transport.serving.HANDSHAKE_TIMEOUT_S", 0.3)
    with contextlib.closing(Pair(tmp_path, lambda _worker_id: TcpTransport("token"))) as pair:
        until(lambda: RecordedPoll.limits_ms == [None])
        host, _, port = pair.address.rpartition(":")
        with socket.create_connection((host, int(port))) as silent:
            until(lambda: len(RecordedPoll.limits_ms) == 2)
            assert silent.recv(1) == b""  # ended at its deadline
        until(lambda: RecordedPoll.limits_ms[-1] is None)
    assert 0 < (RecordedPoll.limits_ms[1] or 0) <= 300
    assert not pair.source.server._thread.is_alive()
