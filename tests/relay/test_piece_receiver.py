"""What arrives: the first whole copy of a piece wins, and two writers never mix their bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import InvalidFrame, PeerLost, StorageFailed
from paceline.relay.protocol import (
    Extent,
    LocalFailed,
    PieceRejected,
    PieceVerified,
    SourceAlive,
    SourceFailed,
)
from paceline.relay.store import Committer, OpenModels, Staging, Store
from paceline.relay.transport import (
    CorruptReport,
    Pacer,
    PieceReceiver,
    PullSpec,
    RevokedWorkers,
    ServedStream,
    TransferCounters,
)
from paceline.schemas import Source
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

    def receiver(self, name: str, heard: Heard) -> PieceReceiver:
        made = PieceReceiver(self.pull(name, heard))
        made.add_request(Extent(0, 4))
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


def finish(receiver: PieceReceiver) -> None:
    assert receiver.end_piece() is None, "the piece matches its digest"
    receiver.flush()


def test_a_hedged_piece_is_taken_from_whoever_has_it_whole_first(shelf: Shelf) -> None:
    slow, fast = Heard(), Heard()
    first, second = shelf.receiver("slow", slow), shelf.receiver("fast", fast)
    data = shelf.data(1)
    first.begin_piece(1, len(data))
    first.write_block(data[:100])
    second.begin_piece(1, len(data))
    second.write_block(data)
    finish(second)
    assert 1 in shelf.staging.verified
    first.write_block(
        memoryview(bytes(len(data) - 100))
    )  # whatever the loser still brings is dropped
    finish(first)
    assert shelf.on_disk(1) == data
    assert (slow.pieces(), fast.pieces()) == ([1], [1])
    assert shelf.counters.refetched_bytes == len(data)


def test_a_hedge_that_comes_later_is_dropped(shelf: Shelf) -> None:
    first, second = shelf.receiver("a", Heard()), shelf.receiver("b", Heard())
    data = shelf.data(0)
    for receiver in (first, second):
        receiver.begin_piece(0, len(data))
    first.write_block(data)
    finish(first)
    second.write_block(data)
    finish(second)
    assert shelf.counters.refetched_bytes == len(data)


def test_a_corrupt_hedge_takes_nothing_over(shelf: Shelf) -> None:
    good, bad = Heard(), Heard()
    first, second = shelf.receiver("good", good), shelf.receiver("bad", bad)
    data = shelf.data(0)
    for receiver in (first, second):
        receiver.begin_piece(0, len(data))
    first.write_block(data[:10])
    second.write_block(memoryview(bytes(len(data))))
    assert second.end_piece() == 0
    first.write_block(data[10:])
    finish(first)
    assert (good.pieces(), bad.pieces(PieceRejected)) == ([0], [0])
    assert shelf.on_disk(0) == data


def test_a_hedge_goes_on_where_the_first_writer_is_gone(shelf: Shelf) -> None:
    first, second = shelf.receiver("gone", Heard()), shelf.receiver("here", Heard())
    data = shelf.data(0)
    for receiver in (first, second):
        receiver.begin_piece(0, len(data))
    first.write_block(data[:10])
    first.drop_piece()  # its connection broke
    second.write_block(data)
    finish(second)
    assert shelf.on_disk(0) == data


def test_a_corrupt_first_writer_leaves_the_piece_to_its_hedge(shelf: Shelf) -> None:
    first, second = shelf.receiver("bad", Heard()), shelf.receiver("good", Heard())
    data = shelf.data(0)
    for receiver in (first, second):
        receiver.begin_piece(0, len(data))
    first.write_block(memoryview(bytes(len(data))))
    assert first.end_piece() == 0
    second.write_block(data)
    finish(second)
    assert shelf.on_disk(0) == data


def test_many_streams_with_the_same_piece_leave_one_right_copy(shelf: Shelf) -> None:
    data, count = shelf.data(2), 6
    heard = [Heard() for _ in range(count)]
    start = threading.Barrier(count)

    def bring(number: int) -> None:
        receiver = shelf.receiver(f"w{number}", heard[number])
        wrong = number % 3 == 2
        start.wait()
        receiver.begin_piece(2, len(data))
        for at in range(0, len(data), 1000):
            block = data[at : at + 1000]
            receiver.write_block(memoryview(bytes(len(block))) if wrong else block)
        receiver.end_piece()
        receiver.flush()

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
    receiver, data = shelf.receiver("a", heard), shelf.data(3)
    for _ in range(2):
        receiver.begin_piece(3, len(data))
        receiver.write_block(data)
        finish(receiver)
    assert heard.pieces() == [3, 3]
    with pytest.raises(InvalidFrame, match="not requested"):
        receiver.begin_piece(4, len(shelf.data(4)))


def test_bytes_of_an_unfinished_piece_are_a_source_that_moves(shelf: Shelf) -> None:
    heard = Heard()
    receiver, data = shelf.receiver("a", heard), shelf.data(3)
    receiver.report_alive()
    receiver.begin_piece(3, len(data))
    receiver.write_block(data[:5])
    assert [event.moving for event in heard.of(SourceAlive)] == [False, True]
    with pytest.raises(InvalidFrame, match="beyond"):
        receiver.write_block(memoryview(bytes(len(data))))
    with pytest.raises(InvalidFrame, match="early"):
        receiver.end_piece()
    receiver.drop_piece()
    assert shelf.staging.claim(3)


def test_requests_are_served_in_the_order_they_were_made(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = shelf.staging
    heard = Heard()
    receiver = shelf.receiver("a", heard)
    receiver.add_request(Extent(0, shelf.manifest.piece_count))
    for index in range(10):
        receiver.begin_piece(index, len(shelf.data(index)))
        receiver.write_block(shelf.data(index))
        finish(receiver)
    serving = ServedStream(
        worker_id="node-0",
        reader="me",
        staging=staging,
        keepalive_s=0.01,
        on_disk_corruption=lambda *_: None,
        barred=RevokedWorkers(),
    )
    said = [[Extent(6, 12), Extent(0, 2), Extent(7, 9)], [Extent(4, 5)], [CorruptReport(0)], []]
    runs = serving.runs(lambda _wait_s: said.pop(0) if said else [])
    # Seven and eight were wanted already; ten is not here yet and holds nobody up.
    monkeypatch.setattr("paceline.relay.transport.serving.READ_INTERVAL_S", 0.0)
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
    committer = Committer(shelf.staging, heard)
    committer.start()
    committer.wake()
    heard.wait(bool)
    (failed,) = heard.of(LocalFailed)
    assert isinstance(failed.error, StorageFailed)
    assert "planted" in str(failed.error)
