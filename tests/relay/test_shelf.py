"""Pieces that are here already are hashed together, and nothing waits for the network unhashed."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline import hashing
from paceline.relay.protocol.events import PieceRejected
from paceline.relay.protocol.extents import Extent
from paceline.relay.store.library import OpenModels
from paceline.relay.store.staging import Staging
from paceline.relay.store.store import Store
from paceline.relay.transport import intake as shelf
from paceline.relay.transport.contract import PullSpec, TransferCounters
from paceline.relay.transport.frames import Kind, encode
from paceline.relay.transport.intake import BufferPool
from paceline.relay.transport.pacing import MAX_BLOCK, Pacer
from paceline.relay.transport.sockets import PlainChannel, read_frame, waiting_bytes
from paceline.relay.transport.tcp_server import TcpTransport
from paceline.schemas.plan import Source
from tests.relay.kit import manifest_of, write_model
from tests.relay.peers import Heard, let_in

TOKEN = "cluster-token"
PIECES = 8  # of 16 KiB, all in one file


class Speaker:
    """A source that lets one caller in and sends what it is told, when it is told."""

    def __init__(self, root: Path) -> None:
        self.store = Store(root / "store")
        self.library = OpenModels(self.store)
        model = write_model(root / "model", 300_000)
        self.manifest = manifest_of(model)
        self.staging: Staging = self.library.open(self.manifest)
        files = [model / file.path for file in self.manifest.files]
        self.stream = b"".join(path.read_bytes() for path in files)
        self.heard = Heard()
        self.first = next(iter(self.manifest.file_pieces(len(files) - 2)))  # of a shard
        self._listener = socket.create_server(("127.0.0.1", 0))

    def pull(self, pacer: Pacer | None = None) -> PlainChannel:
        """Ask for pieces and return the source's end of the stream."""
        port = self._listener.getsockname()[1]
        asked = PullSpec(
            source=Source(kind="worker", worker_id="speaker", address=f"127.0.0.1:{port}"),
            stream=1,
            worker_id="me",
            staging=self.staging,
            pacer=pacer or Pacer(None),
            counters=TransferCounters(),
            keepalive_s=0.1,
            report=self.heard,
        )
        self.asking = TcpTransport(TOKEN).pull(asked)
        self.asking.request(Extent(self.first, self.first + PIECES))
        sock, _ = self._listener.accept()
        channel = let_in(sock, TOKEN)
        read_frame(channel, float("inf"), Kind.REQUEST)
        return channel

    def frame(self, number: int, *, wrong: bool = False) -> bytes:
        """Return a whole piece, counted from the first that is asked for."""
        piece = self.manifest.piece_of(self.first + number)
        data = self.stream[piece.stream_offset :][: piece.length]
        return encode(Kind.PIECE, piece.index, piece.length) + (bytes(len(data)) if wrong else data)

    def close(self) -> None:
        """End everything."""
        self.asking.close()
        self.asking.thread.join(20)
        self._listener.close()
        self.library.close()
        self.store.close()


@pytest.fixture
def speaker(tmp_path: Path) -> Iterator[Speaker]:
    made = Speaker(tmp_path)
    yield made
    made.close()


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pieces were hashed side by side, each time; by hashlib where there are no lanes."""
    seen: list[int] = []

    def update_each(work: list[tuple[hashing.Hash, hashing.Bytes]]) -> None:
        seen.append(len(work))
        for each, data in work:
            each.update(data)

    monkeypatch.setattr(hashing, "LANES", 4)
    monkeypatch.setattr(hashing, "sha256", hashlib.sha256)
    monkeypatch.setattr(hashing, "update_each", update_each)
    return seen


def all_here(monkeypatch: pytest.MonkeyPatch, sent: threading.Event) -> None:
    """Let the first look at what has arrived wait until everything has been sent."""

    def waiting(channel: PlainChannel) -> int:
        assert sent.wait(20)
        return waiting_bytes(channel.socket)

    monkeypatch.setattr(PlainChannel, "waiting", waiting)


def test_pieces_that_are_here_are_hashed_side_by_side(
    speaker: Speaker, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = threading.Event()
    all_here(monkeypatch, sent)
    channel = speaker.pull()
    channel.send(b"".join(speaker.frame(number, wrong=number == 2) for number in range(PIECES)))
    sent.set()
    speaker.heard.wait_pieces(PIECES - 1)
    header, _ = read_frame(channel, float("inf"), Kind.CORRUPT)
    assert header.first == speaker.first + 2
    assert speaker.heard.pieces(PieceRejected) == [speaker.first + 2]
    assert max(widths) == 4
    assert sum(widths) == PIECES
    channel.close()


@pytest.mark.parametrize("cut", [0, 5, 12, 1000])
def test_a_piece_is_judged_while_the_next_has_not_come(
    speaker: Speaker, widths: list[int], cut: int
) -> None:
    channel = speaker.pull()
    channel.send(speaker.frame(0) + speaker.frame(1)[:cut])
    speaker.heard.wait_pieces(1)  # nothing more comes before this
    channel.send(speaker.frame(1)[cut:])
    speaker.heard.wait_pieces(2)
    assert sum(widths) == 2
    channel.close()


def test_what_came_before_a_stream_broke_counts(
    speaker: Speaker, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = threading.Event()
    all_here(monkeypatch, sent)
    channel = speaker.pull()
    channel.send(speaker.frame(0) + speaker.frame(1) + bytes(12))  # and no frame
    sent.set()
    assert speaker.heard.failure() is not None
    speaker.asking.thread.join(20)
    assert sorted(speaker.heard.pieces()) == [speaker.first, speaker.first + 1]
    assert speaker.staging.writers == {}
    channel.close()


def test_a_paced_stream_keeps_nothing(
    speaker: Speaker, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = threading.Event()
    all_here(monkeypatch, sent)
    channel = speaker.pull(Pacer(1000))
    channel.send(b"".join(speaker.frame(number) for number in range(PIECES)))
    sent.set()
    speaker.heard.wait_pieces(PIECES)
    assert set(widths) == {1}
    channel.close()


def in_blocks(made: BufferPool) -> int:
    count = 0
    while made.has_room:
        made.room(1)
        count += 1
    return count


@pytest.mark.parametrize(
    ("lanes", "pacer", "count"),
    [
        (4, lambda: Pacer(None), shelf.PLACES),
        (4, lambda: Pacer(1000), 1),
        (1, lambda: Pacer(None), 1),
    ],
)
def test_a_shelf_has_more_than_one_block_only_where_that_helps(
    monkeypatch: pytest.MonkeyPatch, lanes: int, pacer: Callable[[], Pacer], count: int
) -> None:
    monkeypatch.setattr(hashing, "LANES", lanes)
    assert in_blocks(BufferPool(pacer())) == count


def test_a_place_that_was_given_back_is_whole_again() -> None:
    made = BufferPool(Pacer(None))
    count = in_blocks(made)
    made = BufferPool(Pacer(None))
    small = made.room(3)
    small[:] = b"abc"
    made.take_back([small])
    longest = made.block_bytes(1 << 30)
    large = made.room(longest)
    assert len(large) == longest
    made.take_back([large])
    assert in_blocks(made) == count


def test_blocks_are_large_only_where_so_much_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "LANES", 4)
    free, paced = BufferPool(Pacer(None)), BufferPool(Pacer(1000))
    large = free.block_bytes(1 << 30)
    assert large > MAX_BLOCK
    assert free.block_bytes(large - 1) == MAX_BLOCK
    assert paced.block_bytes(1 << 30) == Pacer(1000).block_bytes
