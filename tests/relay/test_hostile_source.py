"""A source that knows the token and says anything at all: its stream ends, nothing else happens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.relay.protocol.extents import Extent
from paceline.relay.store.library import OpenModels
from paceline.relay.store.staging import Staging
from paceline.relay.store.store import Store
from paceline.relay.transport.contract import PullSpec, TransferCounters
from paceline.relay.transport.frames import Kind, encode, encode_payload
from paceline.relay.transport.pacing import Pacer
from paceline.relay.transport.tcp_server import TcpTransport
from paceline.schemas.plan import Source
from tests.relay.kit import manifest_of, write_model
from tests.relay.peers import Heard, let_in

TOKEN = "cluster-token"

numbers = st.one_of(st.integers(0, 20), st.integers(0, 2**32 - 1))
frames = st.one_of(
    st.builds(encode, st.sampled_from(list(Kind)), numbers, numbers),
    st.builds(encode, st.just(Kind.PIECE), st.integers(0, 15), st.just(16_384)),
    st.builds(encode_payload, st.sampled_from([Kind.ERROR, Kind.HELLO]), st.binary(max_size=90)),
    st.binary(max_size=40),
    st.just(bytes(16_384)),
)


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staging]:
    root: Path = tmp_path_factory.mktemp("hostile")
    store = Store(root / "store")
    library = OpenModels(store)
    yield library.open(manifest_of(write_model(root / "model", 200_000)))
    library.close()
    store.close()


def hostile(listener: socket.socket, said: list[bytes]) -> None:
    """Let one caller in, then say ``said`` and hang up."""
    sock, _ = listener.accept()
    with sock, suppress(OSError, PacelineError):
        channel = let_in(sock, TOKEN)
        for frame in said:
            channel.send(frame)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


@settings(max_examples=80, deadline=None)
@given(st.lists(frames, max_size=12))
def test_whatever_a_source_says_its_stream_just_ends(staging: Staging, said: list[bytes]) -> None:
    heard = Heard()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=hostile, args=(listener, said), daemon=True)
        server.start()
        port = listener.getsockname()[1]
        asked = PullSpec(
            source=Source(kind="worker", worker_id="hostile", address=f"127.0.0.1:{port}"),
            stream=1,
            worker_id="me",
            staging=staging,
            pacer=Pacer(None),
            counters=TransferCounters(),
            keepalive_s=0.1,
            report=heard,
        )
        stream = TcpTransport(TOKEN).pull(asked)
        stream.request(Extent(0, 10))
        assert isinstance(heard.failure(), PacelineError)
        stream.thread.join(20)
        server.join(20)
    assert not stream.thread.is_alive()
    assert staging.verified.count == 0
    assert staging.writers == {}
