"""A transfer that stands still: the log says what it waits for, and no request is lost silently."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import PeerLost
from paceline.manifest import FileEntry
from paceline.relay import DirectoryReader, OnSocket
from paceline.relay.protocol import Extent, LanesAssigned, RelaySession
from paceline.relay.transport import PlainChannel, TcpTransport
from tests.relay.kit import (
    DEPLOYMENT,
    ORIGIN,
    lanes,
    manifest_of,
    paper_manifest,
    worker,
    write_model,
)
from tests.relay.peers import LONG_S, Heard, Pair
from tests.support.local_fleet import LocalFleet


class StoppedReader(DirectoryReader):
    """Delivers nothing until ``goes_on`` is set."""

    def __init__(self, directory: Path, goes_on: threading.Event) -> None:
        super().__init__(directory)
        self.goes_on = goes_on

    def stream(
        self, file: FileEntry, offset: int, view: memoryview, on_socket: OnSocket
    ) -> Iterator[int]:
        assert self.goes_on.wait(LONG_S)
        yield from super().stream(file, offset, view, on_socket)


def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> str:
    end_s = time.monotonic() + LONG_S
    while not (found := [each for each in caplog.messages if text in each]):
        assert time.monotonic() < end_s, caplog.messages
        time.sleep(0.01)
    return found[0]


def test_the_log_names_what_a_transfer_waits_for_and_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("paceline.relay.deployments.STALL_REPORT_S", 0.2)
    model = write_model(tmp_path / "model", 200_000)
    manifest, goes_on = manifest_of(model), threading.Event()
    with LocalFleet(
        tmp_path / "nodes", ["node-0"], open_source=lambda _url: StoppedReader(model, goes_on)
    ) as fleet:
        fleet.deploy(manifest, {"node-0": lanes("node-0", manifest, ORIGIN)})
        said = until_logged(caplog, "no piece for")
        goes_on.set()
        fleet.receipts(DEPLOYMENT)
    assert f"deployment={DEPLOYMENT} waits for piece 0 from {ORIGIN.key}" in said
    assert f"deployment={DEPLOYMENT}" in until_logged(caplog, "goes on after")
    assert sum("no piece for" in each for each in caplog.messages) == 1


def test_a_session_names_its_first_missing_piece_and_its_sources_age() -> None:
    manifest = paper_manifest(16)
    session = RelaySession(worker_id="me", manifest=manifest, held=range(3))
    session.handle(LanesAssigned(lanes("me", manifest, worker("node-0"))), 10.0)
    said = session.waits_for(10.75)
    assert said.startswith("piece 3 from node-0, whose last sign of life came 0.8 s ago")


def test_a_session_without_a_source_names_why() -> None:
    manifest = paper_manifest(16)
    session = RelaySession(worker_id="me", manifest=manifest)
    session.handle(LanesAssigned(lanes("me", manifest, ORIGIN, budget=0)), 10.0)
    said = session.waits_for(11.0)
    assert "piece 0, which is requested from no source" in said
    assert "the origin's budget is spent" in said


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, lambda _worker_id: TcpTransport("cluster-token"), size=12_000_000)
    yield made
    made.close()


def test_a_request_that_cannot_be_sent_ends_its_stream(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, mine = pair.open()
    pair.hold(theirs, 0)
    heard = Heard()
    stream = pair.reader.pull(mine, pair.address, heard)
    stream.request(Extent(0, 1))
    heard.wait_pieces(1)

    def takes_nothing(_channel: PlainChannel, _data: bytes) -> None:
        raise PeerLost("the peer takes nothing")

    with monkeypatch.context() as patched:
        patched.setattr(PlainChannel, "send", takes_nothing)
        stream.request(Extent(1, 2))
    assert "closed the connection" in str(heard.failure())


def test_the_log_names_a_reader_that_takes_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    impatient = functools.partial(PlainChannel, timeout_s=0.2)
    monkeypatch.setattr("paceline.relay.transport.tcp_server.PlainChannel", impatient)
    released = threading.Event()
    monkeypatch.setattr(
        "paceline.relay.transport.tcp_client.TcpPullStream._receive",
        lambda _stream, _channel: released.wait(LONG_S),
    )
    theirs, mine = pair.open()
    pair.hold_all(theirs)
    with caplog.at_level(logging.WARNING):
        pair.reader.pull(mine, pair.address, Heard()).request(pair.everything())
        said = until_logged(caplog, "the peer takes nothing")
    released.set()
    assert said.startswith("stream of node-1 ended")
