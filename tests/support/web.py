"""An HTTP server whose answers a test gives."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import urllib3


class Call(NamedTuple):
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Web:
    """A running server and what it received."""

    url: str = ""
    calls: list[Call] = field(default_factory=list)
    connections: int = 0


# Status, body and headers; None closes the connection without an answer.
Answer = tuple[int, bytes] | tuple[int, bytes, dict[str, str]] | None


@contextmanager
def serving(
    answer: Callable[[Call], Answer], tls: ssl.SSLContext | None = None, *, closes: bool = False
) -> Iterator[Web]:
    """Serve ``answer`` on loopback; with ``closes`` each connection carries one call."""
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            web.connections += 1

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            call = Call(self.command, self.path, self.headers, body)
            web.calls.append(call)
            self.close_connection = closes
            given = answer(call)
            if given is None:
                self.close_connection = True
                return
            status, raw, *more = given
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.end_headers()
            if call.method != "HEAD":
                self.wfile.write(raw)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64  # with 5, one of many callers at once waits for a second

        def handle_error(self, *_: object) -> None:
            """A client that gives up, or refuses the certificate, ends the connection."""

    with Server(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        web.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def asking_for(authorization: str, url: str) -> Iterator[Web]:
    """Serve what ``url`` serves, to callers whose header ``Authorization`` has this value."""
    pool = urllib3.PoolManager()
    hops = ("host", "authorization", "connection", "content-length", "transfer-encoding")

    def forward(call: Call) -> Answer:
        if call.headers.get("Authorization") != authorization:
            return 401, b"{}"
        kept = {name: value for name, value in call.headers.items() if name.lower() not in hops}
        given = pool.request(call.method, url + call.path, body=call.body, headers=kept,
                             decode_content=False, retries=False)  # fmt: skip
        kept = {name: value for name, value in given.headers.items() if name.lower() not in hops}
        return given.status, given.data, kept

    with serving(forward) as web:
        yield web
    pool.clear()
