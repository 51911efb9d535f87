"""A server that misbehaves on purpose, on a real socket, in front of the real client."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import pytest

from paceline.errors import PermanentError, ServiceUnavailable, SourceChanged, StorageFull
from paceline.storage import ObjectStore, client, client as patience

DATA = bytes(range(256)) * 400
Answer = Callable[[BaseHTTPRequestHandler, int, int, int], None]


class Quiet(ThreadingHTTPServer):
    """A server whose handlers may break off without a traceback on the terminal."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[ObjectStore, list[str]]]:
    """Yield a store on a server that answers each GET by ``answer(handler, n, first, last)``."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            wanted = self.headers["Range"].removeprefix("bytes=")
            asked.append(wanted)
            first, last = map(int, wanted.split("-"))
            answer(self, len(asked), first, last)

        def log_message(self, *_: object) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        yield ObjectStore(endpoint_url=url, access_key="a", secret_key="b"), asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def send(
    handler: BaseHTTPRequestHandler,
    first: int,
    last: int,
    *,
    etag: str = "e",
    cut: int = 0,
    total: int = len(DATA),
) -> None:
    """Answer a range as S3 does; ``cut`` breaks the connection that many bytes early."""
    handler.send_response(206)
    handler.send_header("ETag", f'"{etag}"')
    handler.send_header("Content-Range", f"bytes {first}-{last}/{total}")
    handler.send_header("Content-Length", str(last - first + 1))
    handler.end_headers()
    handler.wfile.write(DATA[first : last + 1 - cut])
    handler.close_connection = bool(cut)


def refuse(handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def read(store: ObjectStore, size: int | None = None) -> bytes:
    into = bytearray(50_000)
    store.read_range_into("s3://bucket/key", 1000, memoryview(into), etag="e", size=size)
    return bytes(into)


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "BACKOFF_S", 0.001)
    monkeypatch.setattr(client, "MAX_ATTEMPTS", 1)


def test_a_body_cut_midway_goes_on_where_it_stopped() -> None:
    with serving(lambda h, n, a, b: send(h, a, b, cut=20_000 if n == 1 else 0)) as (store, asked):
        assert read(store) == DATA[1000:51_000]
    assert asked == ["1000-50999", "31000-50999"]


def test_a_body_that_is_always_short_is_service_unavailable() -> None:
    with serving(lambda h, n, a, b: send(h, a, b, cut=b - a + 1)) as (store, asked):
        with pytest.raises(ServiceUnavailable, match=f"0 read.*{patience.MAX_RETRIES} times"):
            read(store)
    assert len(asked) == patience.MAX_RETRIES


@pytest.mark.parametrize(
    ("status", "code"), [(503, "SlowDown"), (429, "TooManyRequests"), (500, "InternalError")]
)
def test_a_server_that_never_answers_is_asked_the_configured_times(status: int, code: str) -> None:
    with serving(lambda h, n, a, b: refuse(h, status, code)) as (store, asked):
        with pytest.raises(ServiceUnavailable, match=f"{code}.*{patience.MAX_RETRIES} times"):
            read(store)
    assert len(asked) == patience.MAX_RETRIES


def test_the_budget_ends_the_attempts_whatever_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "RETRY_BUDGET_S", 0.0)
    with serving(lambda h, n, a, b: refuse(h, 503, "SlowDown")) as (store, asked):
        with pytest.raises(ServiceUnavailable, match="1 times"):
            read(store)
    assert len(asked) == 1


def test_progress_fills_the_budget_up_again() -> None:
    def a_little(handler: BaseHTTPRequestHandler, n: int, first: int, last: int) -> None:
        send(handler, first, last, cut=max(0, last - first + 1 - 2000))

    with serving(a_little) as (store, asked):
        assert read(store) == DATA[1000:51_000]
    assert len(asked) == 25  # far more than patience.ATTEMPTS


def test_arriving_bytes_are_reported_before_the_range_is_complete() -> None:
    told: list[int] = []
    into = bytearray(50_000)
    with serving(lambda h, n, a, b: send(h, a, b, cut=20_000 if n == 1 else 0)) as (store, _):
        for filled in store.stream_range("s3://bucket/key", 1000, memoryview(into), etag="e"):
            told.append(filled)
            assert into[:filled] == DATA[1000 : 1000 + filled]
    assert told[-1] == 50_000
    assert 30_000 in told  # what came before the cut, and again after the failed attempt


def test_a_silent_server_is_left_for_a_new_connection_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "QUICK_TIMEOUT_S", 0.2)
    over = threading.Event()

    def frozen_twice(handler: BaseHTTPRequestHandler, n: int, first: int, last: int) -> None:
        if n == 1:  # before it says a word
            over.wait(10)
        elif n == 3:  # in the middle of its answer
            send(handler, first, last, cut=(last - first + 1) // 2)
            handler.wfile.flush()
            over.wait(10)
        else:
            send(handler, first, last, cut=30_000 if n == 2 else 0)

    told: list[tuple[str, float]] = []
    into = bytearray(50_000)
    with serving(frozen_twice) as (store, asked):
        for _ in store.stream_range(
            "s3://bucket/key",
            1000,
            memoryview(into),
            etag="e",
            on_socket=lambda sock: sock.settimeout(0.2),
            on_failed=lambda error, silent_s: told.append((error.where or "", silent_s)),
        ):
            pass
        over.set()
    assert into == DATA[1000:51_000]
    assert len(asked) == len(told) + 1 == 4
    assert all("s3://bucket/key on http://127.0.0.1" in where for where, _ in told)
    assert told[0][1] >= 0.2


@pytest.mark.parametrize("seed", range(4))
def test_a_server_on_a_bad_day_is_read_whole(seed: int) -> None:
    draw = Random(seed)

    def bad_day(handler: BaseHTTPRequestHandler, n: int, first: int, last: int) -> None:
        match draw.randrange(4):
            case 0:
                refuse(handler, *draw.choice([(503, "SlowDown"), (429, "Throttling")]))
            case 1:
                handler.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                os.close(handler.connection.detach())  # a reset
            case 2:
                send(handler, first, last, cut=draw.randrange(1, last - first + 2))
            case _:
                send(handler, first, last, cut=max(0, last - first + 1 - draw.randrange(1, 30_000)))

    with serving(bad_day) as (store, asked):
        assert read(store) == DATA[1000:51_000]
    assert len(asked) > 1


def test_a_version_is_asked_for_by_its_id() -> None:
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler, n: int, first: int, last: int) -> None:
        asked.append(handler.path)
        asked.append(str(handler.headers["If-Match"]))
        send(handler, first, last)

    with serving(answer) as (store, _):
        into = memoryview(bytearray(10))
        store.read_range_into("s3://bucket/key", 0, into, etag="e", version_id="v7")
    assert "versionId=v7" in asked[0]
    assert asked[1] == '"e"'


def test_another_etag_midway_is_source_changed() -> None:
    def answer(handler: BaseHTTPRequestHandler, n: int, first: int, last: int) -> None:
        send(handler, first, last, cut=20_000 if n == 1 else 0, etag="e" if n == 1 else "f")

    with serving(answer) as (store, _):
        with pytest.raises(SourceChanged, match="ETag f"):
            read(store)


def test_another_total_size_is_source_changed() -> None:
    with serving(lambda h, n, a, b: send(h, a, b, total=len(DATA) + 1)) as (store, _):
        assert read(store) == DATA[1000:51_000]
        with pytest.raises(SourceChanged, match=str(len(DATA) + 1)):
            read(store, size=len(DATA))


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (412, "PreconditionFailed", SourceChanged),
        (503, "SlowDown", ServiceUnavailable),
        (500, "InternalError", ServiceUnavailable),
        (429, "TooManyRequests", ServiceUnavailable),
        (507, "InsufficientStorage", StorageFull),
        (400, "InvalidArgument", PermanentError),
    ],
)
def test_each_refusal_has_its_error(status: int, code: str, error: type[Exception]) -> None:
    with serving(lambda h, n, a, b: refuse(h, status, code)) as (store, _):
        with pytest.raises(error, match=code):
            read(store)


def test_a_server_that_recovers_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ATTEMPTS", 3)

    def answer(handler: BaseHTTPRequestHandler, n: int, first: int, last: int) -> None:
        if n < 3:
            refuse(handler, 503, "SlowDown")
        else:
            send(handler, first, last)

    with serving(answer) as (store, asked):
        assert read(store) == DATA[1000:51_000]
    assert len(asked) == 3


def test_a_server_that_ignores_the_range_is_not_believed() -> None:
    def answer(handler: BaseHTTPRequestHandler, n: int, first: int, last: int) -> None:
        handler.send_response(200)
        handler.send_header("ETag", '"e"')
        handler.send_header("Content-Length", str(len(DATA)))
        handler.end_headers()
        handler.wfile.write(DATA)

    with serving(answer) as (store, _):
        with pytest.raises(PermanentError, match="ignored the range"):
            read(store)
