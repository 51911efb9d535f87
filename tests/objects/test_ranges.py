"""A server that misbehaves on purpose, on a real socket, in front of the real client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline.errors import PermanentError, ServiceUnavailable, SourceChanged, StorageFull
from paceline.objects import ObjectStore, client, ranges

DATA = bytes(range(256)) * 400
Answer = Callable[[BaseHTTPRequestHandler, int, int, int], None]


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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
    monkeypatch.setattr(ranges, "BACKOFF_S", 0.001)
    monkeypatch.setattr(client, "MAX_ATTEMPTS", 1)


def test_a_body_cut_midway_goes_on_where_it_stopped() -> None:
    with serving(lambda h, n, a, b: send(h, a, b, cut=20_000 if n == 1 else 0)) as (store, asked):
        assert read(store) == DATA[1000:51_000]
    assert asked == ["1000-50999", "31000-50999"]


def test_a_body_that_is_always_short_is_service_unavailable() -> None:
    with serving(lambda h, n, a, b: send(h, a, b, cut=b - a + 1)) as (store, asked):
        with pytest.raises(ServiceUnavailable):
            read(store)
    assert len(asked) == ranges.ATTEMPTS


def test_a_server_that_never_answers_is_asked_no_more_often_than_configured() -> None:
    with serving(lambda h, n, a, b: refuse(h, 503, "SlowDown")) as (store, asked):
        with pytest.raises(ServiceUnavailable):
            read(store)
    assert len(asked) == client.MAX_ATTEMPTS


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
        with pytest.raises(ServiceUnavailable, match="ignored the range"):
            read(store)
