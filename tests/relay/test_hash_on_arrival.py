"""Each piece is verified as soon as it has arrived: nothing waits for the network unhashed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.relay.protocol import Extent, PieceRejected
from paceline.relay.transport import Kind, PlainChannel, TcpTransport, encode, read_frame
from tests.relay.peers import Heard, Pair, let_in

TOKEN = "cluster-token"


class Speaker:
    """A source that lets one reader in and sends what it is told, when it is told."""

    def __init__(self, root: Path) -> None:
        self.pair = Pair(root, lambda _worker_id: TcpTransport(TOKEN), size=300_000)
        self.staging = self.pair.reader.library.open(self.pair.manifest)
        self.heard = Heard()
        self.first = 3  # of a shard
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            self.stream = self.pair.reader.pull(self.staging, address, self.heard)
            self.stream.request(Extent(self.first, self.first + 8))
            sock, _ = listener.accept()
        self.channel: PlainChannel = let_in(sock, TOKEN)
        read_frame(self.channel, float("inf"), Kind.REQUEST)

    def frame(self, number: int, *, wrong: bool = False) -> bytes:
        """Return a whole piece, counted from the first that is asked for."""
        data = self.pair.data(self.first + number)
        return encode(Kind.PIECE, self.first + number, len(data)) + (
            bytes(len(data)) if wrong else data
        )

    def close(self) -> None:
        self.channel.close()
        self.pair.close()


@pytest.fixture
def speaker(tmp_path: Path) -> Iterator[Speaker]:
    made = Speaker(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("cut", [0, 5, 12, 1000])
def test_a_piece_is_verified_while_the_next_has_not_arrived(speaker: Speaker, cut: int) -> None:
    speaker.channel.send(speaker.frame(0) + speaker.frame(1)[:cut])
    speaker.heard.wait_pieces(1)  # nothing more comes before this
    speaker.channel.send(speaker.frame(1)[cut:] + speaker.frame(2, wrong=True))
    speaker.heard.wait_pieces(2)
    header, _ = read_frame(speaker.channel, float("inf"), Kind.CORRUPT)
    assert header.first == speaker.first + 2
    assert speaker.heard.pieces(PieceRejected) == [speaker.first + 2]


def test_pieces_that_arrived_before_a_stream_broke_count(speaker: Speaker) -> None:
    speaker.channel.send(speaker.frame(0) + speaker.frame(1) + bytes(12))  # and no frame
    assert speaker.heard.failure() is not None
    assert sorted(speaker.heard.pieces()) == [speaker.first, speaker.first + 1]
    assert speaker.staging.writers == {}
