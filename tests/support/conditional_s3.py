"""An S3 server with conditional writes for tests: a proxy before rclone, which ignores them.

``mode``: ``honour`` refuses ``If-None-Match: *`` where the object is there (412), ``deny`` refuses
the header itself (501), ``ignore`` passes everything on, ``google`` refuses what Google's storage
refuses of S3's protocol: checksum headers, chunked payloads and deletes of several objects.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from paceline.storage import ObjectStore
from tests.support.rclone import RcloneS3

Mode = Literal["honour", "deny", "ignore", "google"]


@contextmanager
def conditional_s3(s3: RcloneS3, mode: Mode = "honour") -> Iterator[ConditionalS3]:
    """Start a proxy before ``s3`` on a free loopback port and stop it at the end."""
    server = ConditionalS3(s3, mode)
    threading.Thread(target=server.serve_forever, name="conditional-s3", daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class ConditionalS3(ThreadingHTTPServer):
    """Forwards each request; conditional writes of one server are decided one by one."""

    daemon_threads = True

    def __init__(self, s3: RcloneS3, mode: Mode) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.s3, self.mode = s3, mode
        self.lock = threading.Lock()
        self.puts: list[tuple[str, bool]] = []  # path, whether it was conditional

    def store(self) -> ObjectStore:
        """Return a store that talks to this server."""
        return ObjectStore(
            endpoint_url=f"http://127.0.0.1:{self.server_port}",
            access_key=self.s3.access_key,
            secret_key=self.s3.secret_key,
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ConditionalS3

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        conditional = self.command == "PUT" and self.headers.get("If-None-Match") == "*"
        if self.command == "PUT":
            self.server.puts.append((urlsplit(self.path).path, conditional))
        if self.server.mode == "google" and self._is_foreign():
            self._error(400, "InvalidArgument")
        elif not conditional or self.server.mode in ("ignore", "google"):
            self._answer(*self._asked(body))
        elif self.server.mode == "deny":
            self._error(501, "NotImplemented")
        else:
            with self.server.lock:
                path = unquote(urlsplit(self.path).path).lstrip("/")
                if (self.server.s3.root / path).exists():
                    self._error(412, "PreconditionFailed")
                else:
                    self._answer(*self._asked(body))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward

    def _is_foreign(self) -> bool:
        names = [name.lower() for name in self.headers]
        return (
            any(each.startswith(("x-amz-checksum-", "x-amz-sdk-checksum")) for each in names)
            or "aws-chunked" in self.headers.get("Content-Encoding", "")
            or (self.command == "POST" and "delete" in parse_qs(urlsplit(self.path).query, True))
        )

    def _asked(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        target = http.client.HTTPConnection(urlsplit(self.server.s3.endpoint_url).netloc)
        try:  # the Host header is signed: it stays the caller's
            target.request(self.command, self.path, body, dict(self.headers))
            answer = target.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            target.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length")
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, [], f"<Error><Code>{code}</Code></Error>".encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""
