"""What arrives: the first whole copy of a piece wins, and two writers never mix their bytes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import hashing
from paceline.errors import InvalidFrame, PeerLost, StorageFailed
from paceline.relay.protocol.events import (
    LocalFailed,
    PieceRejected,
    PieceVerified,
    SourceAlive,
    SourceFailed,
)
from paceline.relay.protocol.extents import Extent
from paceline.relay.store.group_commit import Committer
from paceline.relay.store.library import OpenModels
from paceline.relay.store.staging import Staging
from paceline.relay.store.store import Store
from paceline.relay.transport.contract import PullSpec, RevokedWorkers, TransferCounters
from paceline.relay.transport.intake import PieceReceiver
from paceline.relay.transport.pacing import Pacer
from paceline.relay.transport.serving import CorruptReport, ServedStream
from paceline.schemas.plan import Source
from tests.relay.kit import manifest_of, write_model
from tests.relay.peers import Heard


class Shelf:
    """One store with an empty model, and streams that bring its pieces."""

    def __init__(self, root: Path) -> None:
        self.model = write_model(root / "model", 200_000)
        self.manifest = manifest_of(self.model)
        self.store = Store(root / "store")
        self.library = OpenModels(self.store)
        self.staging: Staging = self.library.open(self.manifest)
        self.counters = TransferCounters()

    def pull(self, name: str, heard: Heard) -> PullSpec:
        return PullSpec(
            source=Source(kind="worker", worker_id=name, address="nowhere:1"),
            stream=1,
            worker_id="me",
            staging=self.staging,
            pacer=Pacer(None),
            counters=self.counters,
            keepalive_s=0.0,
            report=heard,
        )

    def intake(self, name: str, heard: Heard) -> PieceReceiver:
        made = PieceReceiver(self.pull(name, heard))
        made.ask(Extent(0, 4))
        return made

    def data(self, index: int) -> memoryview:
        piece = self.manifest.piece_of(index)
        raw = (self.model / self.manifest.files[piece.file_index].path).read_bytes()
        return memoryview(raw)[piece.file_offset :][: piece.length]

    def on_disk(self, index: int) -> bytes:
        piece = self.manifest.piece_of(index)
        raw = (self.staging.data / self.manifest.files[piece.file_index].path).read_bytes()
        return raw[piece.file_offset :][: piece.length]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path)
    yield made
    made.library.close()
    made.store.close()


def test_a_hedged_piece_is_taken_from_whoever_has_it_whole_first(shelf: Shelf) -> None:
    slow, fast = Heard(), Heard()
    first, second = shelf.intake("slow", slow), shelf.intake("fast", fast)
    data = shelf.data(1)
    first.begin(1, len(data))
    first.take(data[:100])
    second.begin(1, len(data))
    second.take(data)
    assert second.end()
    assert 1 in shelf.staging.verified
    first.take(memoryview(bytes(len(data) - 100)))  # whatever the loser still brings is dropped
    assert first.end()
    assert shelf.on_disk(1) == data
    assert (slow.pieces(), fast.pieces()) == ([1], [1])
    assert shelf.counters.refetched_bytes == len(data)
    assert {edge.source: edge.pieces for edge in shelf.staging.edges.tallies()} == {"fast": 1}


def test_a_hedge_that_comes_later_is_dropped(shelf: Shelf) -> None:
    first, second = shelf.intake("a", Heard()), shelf.intake("b", Heard())
    data = shelf.data(0)
    for intake in (first, second):
        intake.begin(0, len(data))
    first.take(data)
    assert first.end()
    second.take(data)
    assert second.end()
    assert shelf.counters.refetched_bytes == len(data)


def test_a_corrupt_hedge_takes_nothing_over(shelf: Shelf) -> None:
    good, bad = Heard(), Heard()
    first, second = shelf.intake("good", good), shelf.intake("bad", bad)
    data = shelf.data(0)
    for intake in (first, second):
        intake.begin(0, len(data))
    first.take(data[:10])
    second.take(memoryview(bytes(len(data))))
    assert not second.end()
    first.take(data[10:])
    assert first.end()
    assert (good.pieces(), bad.pieces(PieceRejected)) == ([0], [0])
    assert shelf.on_disk(0) == data


def test_a_hedge_goes_on_where_the_first_writer_is_gone(shelf: Shelf) -> None:
    first, second = shelf.intake("gone", Heard()), shelf.intake("here", Heard())
    data = shelf.data(0)
    for intake in (first, second):
        intake.begin(0, len(data))
    first.take(data[:10])
    first.drop()  # its connection broke
    second.take(data)
    assert second.end()
    assert shelf.on_disk(0) == data


def test_a_corrupt_first_writer_leaves_the_piece_to_its_hedge(shelf: Shelf) -> None:
    first, second = shelf.intake("bad", Heard()), shelf.intake("good", Heard())
    data = shelf.data(0)
    for intake in (first, second):
        intake.begin(0, len(data))
    first.take(memoryview(bytes(len(data))))
    assert not first.end()
    second.take(data)
    assert second.end()
    assert shelf.on_disk(0) == data


def test_many_streams_with_the_same_piece_leave_one_right_copy(shelf: Shelf) -> None:
    data, count = shelf.data(2), 6
    heard = [Heard() for _ in range(count)]
    start = threading.Barrier(count)

    def bring(number: int) -> None:
        intake = shelf.intake(f"w{number}", heard[number])
        wrong = number % 3 == 2
        start.wait()
        intake.begin(2, len(data))
        for at in range(0, len(data), 1000):
            block = data[at : at + 1000]
            intake.take(memoryview(bytes(len(block))) if wrong else block)
        intake.end()

    threads = [threading.Thread(target=bring, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert 2 in shelf.staging.verified
    assert shelf.on_disk(2) == data
    assert shelf.staging.writers == {}


def test_a_piece_asked_twice_may_come_twice(shelf: Shelf) -> None:
    heard = Heard()
    intake, data = shelf.intake("a", heard), shelf.data(3)
    for _ in range(2):
        intake.begin(3, len(data))
        intake.take(data)
        assert intake.end()
    assert heard.pieces() == [3, 3]
    with pytest.raises(InvalidFrame, match="nobody asked"):
        intake.begin(4, len(shelf.data(4)))


def test_bytes_of_an_unfinished_piece_are_a_source_that_moves(shelf: Shelf) -> None:
    heard = Heard()
    intake, data = shelf.intake("a", heard), shelf.data(3)
    intake.alive()
    intake.begin(3, len(data))
    intake.take(data[:5])
    assert [event.moving for event in heard.of(SourceAlive)] == [False, True]
    with pytest.raises(InvalidFrame, match="beyond"):
        intake.take(memoryview(bytes(len(data))))
    with pytest.raises(InvalidFrame, match="early"):
        intake.end()
    intake.drop()
    assert shelf.staging.claim(3)


def judge_all(intake: PieceReceiver) -> list[int]:
    wrong: list[int] = []
    while intake.keeps:
        wrong += intake.judge()[0]
    return wrong


def keep(intake: PieceReceiver, index: int, data: memoryview) -> None:
    intake.begin(index, len(data))
    for at in range(0, len(data), 5000):
        intake.keep(data[at : at + 5000])
    intake.end_kept()


def test_pieces_that_are_kept_are_judged_together_and_each_for_itself(shelf: Shelf) -> None:
    heard = Heard()
    intake = shelf.intake("a", heard)
    for index in range(3):
        keep(intake, index, shelf.data(index))
    last = shelf.data(3)
    intake.begin(3, len(last))
    intake.keep(memoryview(bytes(len(last))))
    intake.end_kept()
    assert heard.pieces() == []
    assert judge_all(intake) == [3]
    assert (heard.pieces(), heard.pieces(PieceRejected)) == ([0, 1, 2], [3])
    assert [shelf.on_disk(index) for index in range(3)] == [shelf.data(each) for each in range(3)]
    assert shelf.staging.writers == {}
    assert shelf.staging.claim(3)


def test_a_piece_that_waits_for_its_verdict_may_be_taken_over(shelf: Shelf) -> None:
    slow, fast = Heard(), Heard()
    first, second = shelf.intake("slow", slow), shelf.intake("fast", fast)
    data = shelf.data(1)
    keep(first, 1, data)
    second.begin(1, len(data))
    second.take(data)
    assert second.end()
    assert judge_all(first) == []
    assert shelf.on_disk(1) == data
    assert {edge.source: edge.pieces for edge in shelf.staging.edges.tallies()} == {"fast": 1}


def test_what_was_kept_of_a_stream_that_ended_is_free_for_others(shelf: Shelf) -> None:
    intake = shelf.intake("gone", Heard())
    keep(intake, 0, shelf.data(0))
    intake.begin(1, len(shelf.data(1)))
    intake.keep(shelf.data(1)[:100])
    intake.drop()
    assert not intake.keeps
    assert shelf.staging.claim(0)
    assert shelf.staging.claim(1)
    assert shelf.staging.writers == {}


class Wrong:
    """A hash of an engine that is out of order."""

    def __init__(self) -> None:
        self._right = hashlib.sha256()

    def update(self, data: hashing.Bytes) -> None:
        self._right.update(data)

    def digest(self) -> bytes:
        return self._right.digest()[::-1]

    def hexdigest(self) -> str:
        return self.digest().hex()


def test_a_wrong_digest_of_ours_costs_nobody_its_name(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hashing, "sha256", Wrong)
    monkeypatch.setattr(hashing, "LANES", 4)
    monkeypatch.setattr(
        hashing, "update_each", lambda work: [each.update(data) for each, data in work]
    )
    heard, other = Heard(), Heard()
    intake, hedge = shelf.intake("honest", heard), shelf.intake("other", other)
    data = shelf.data(2)
    intake.begin(2, len(data))
    intake.take(data[:10])  # in the file
    hedge.begin(2, len(data))
    hedge.take(data)  # in memory
    assert hedge.end()
    intake.drop()
    keep(intake, 1, shelf.data(1))
    assert judge_all(intake) == []
    assert (heard.pieces(), other.pieces()) == ([1], [2])
    assert [edge.corrupt for edge in shelf.staging.edges.tallies()] == [0, 0]
    assert [shelf.on_disk(index) for index in (1, 2)] == [shelf.data(1), data]
    assert len([each for each in caplog.records if "wrong digest" in each.message]) == 2
    # And what is wrong is still found.
    intake.begin(3, len(shelf.data(3)))
    intake.take(memoryview(bytes(len(shelf.data(3)))))
    assert not intake.end()
    assert heard.pieces(PieceRejected) == [3]


def test_requests_are_served_in_the_order_they_were_made(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = shelf.staging
    heard = Heard()
    intake = shelf.intake("a", heard)
    intake.ask(Extent(0, shelf.manifest.piece_count))
    for index in range(10):
        intake.begin(index, len(shelf.data(index)))
        intake.take(shelf.data(index))
        assert intake.end()
    serving = ServedStream(
        worker_id="node-0",
        reader="me",
        staging=staging,
        keepalive_s=0.01,
        on_rotten=lambda *_: None,
        barred=RevokedWorkers(),
    )
    said = [[Extent(6, 12), Extent(0, 2), Extent(7, 9)], [Extent(4, 5)], [CorruptReport(0)], []]
    runs = serving.runs(lambda _wait_s: said.pop(0) if said else [])
    # Seven and eight were wanted already; ten is not here yet and holds nobody up.
    monkeypatch.setattr("paceline.relay.transport.serving.HEAR_S", 0.0)
    assert [next(runs) for _ in range(4)] == [Extent(6, 10), Extent(0, 2), Extent(4, 5), None]
    assert len(heard.of(PieceVerified)) == 10


def test_a_stream_that_a_defect_ended_is_reported_and_not_waited_for(shelf: Shelf) -> None:
    heard = Heard()

    def broken() -> None:
        with pull.receiving(lambda: False):
            raise TypeError("planted")

    pull = shelf.pull("node-0", heard)
    pull.start(broken).join(5)
    (failed,) = heard.of(SourceFailed)
    assert (failed.source_key, type(failed.error)) == ("node-0", PeerLost)
    assert "planted" in str(failed.error)


def test_a_defect_of_the_committer_fails_the_worker_and_is_no_silence(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("planted")

    heard = Heard()
    monkeypatch.setattr(shelf.staging, "commit", broken)
    monkeypatch.setattr(shelf.staging, "pending_bytes", 1 << 30)
    committer = Committer(shelf.staging, heard)
    committer.start()
    committer.look()
    heard.wait(bool)
    (failed,) = heard.of(LocalFailed)
    assert isinstance(failed.error, StorageFailed)
    assert "planted" in str(failed.error)
