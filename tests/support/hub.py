"""A hub for tests: the parts of Hugging Face's API that an import uses, and a CDN on another port.

    python -m tests.support.hub DIRECTORY --host 10.0.0.1 --port 8000 [--token T]

Repositories are ``DIRECTORY/org/name``; a commit is the state of one when it is listed, ``main``
the newest. Files of ``LARGE`` bytes and more are in large file storage: their bytes come from the
CDN, at an address that is valid for a few requests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 4096
SIGNED_FOR = 5  # requests
BLOCK = 64 * 1024


@dataclass
class Hub:
    """A running hub, what it sent, and how it misbehaves."""

    root: Path
    token: str = ""
    url: str = ""
    cdn_url: str = ""
    sent: Counter[str] = field(default_factory=Counter)  # bytes of files, by path
    tokens_at_cdn: list[str] = field(default_factory=list)
    fails_after: int | None = None  # bytes of files; then 503
    corrupt: str = ""  # a file whose bytes differ from the listing
    redirect_to: str = ""  # instead of the CDN
    moved: dict[str, str] = field(default_factory=dict)  # old name → new name
    block_wait_s: float = 0.0
    _commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    _signed: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def sent_bytes(self) -> int:
        """Return how many bytes of files were sent."""
        return sum(self.sent.values())

    def commit(self, name: str) -> str:
        """Return the commit that ``main`` of a repository names."""
        place = self.root / name
        files = {
            str(path.relative_to(place)): path.read_bytes()
            for path in sorted(place.rglob("*"))
            if path.is_file()
        }
        commit = hashlib.sha1(
            b"".join(p.encode() + hashlib.sha256(d).digest() for p, d in files.items())
        ).hexdigest()
        self._commits[f"{name}@{commit}"] = files
        return commit

    def listing(self, name: str, revision: str) -> dict[str, object] | None:
        if not (self.root / name).is_dir():
            return None
        commit = self.commit(name)
        if revision not in ("main", commit):
            if f"{name}@{revision}" not in self._commits:
                return None
            commit = revision
        siblings = []
        for path, data in self._commits[f"{name}@{commit}"].items():
            sha1 = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            sibling: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": sha1}
            if len(data) >= LARGE:
                sha256 = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
            siblings.append(sibling)
        return {"_id": "1", "id": name, "sha": commit, "siblings": siblings, "private": False}

    def file(self, name: str, commit: str, path: str) -> bytes | None:
        data = self._commits.get(f"{name}@{commit}", {}).get(path)
        if data is not None and path == self.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        return data

    def sign(self) -> str:
        with self._lock:
            signature = secrets.token_hex(8)
            self._signed[signature] = SIGNED_FOR
            return signature

    def is_signed(self, signature: str) -> bool:
        with self._lock:
            self._signed[signature] = left = self._signed.get(signature, 0) - 1
            return left >= 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    is_cdn = False

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        path = unquote(parts.path)
        token = self.headers.get("Authorization", "")
        if self.is_cdn:
            if token:
                hub.tokens_at_cdn.append(token)
            if not hub.is_signed(parse_qs(parts.query).get("sig", [""])[0]):
                return self._plain(403, b"expired")
            name, commit, file = re.fullmatch(r"/(.+?)@([0-9a-f]{40})/(.+)", path).groups()  # type: ignore[union-attr]
            return self._send_file(hub.file(name, commit, file), file)
        if path == "/stats":
            return self._plain(200, json.dumps({"sent_bytes": hub.sent_bytes}).encode())
        if hub.token and token != f"Bearer {hub.token}":
            return self._plain(401, b"{}")
        if match := re.fullmatch(r"/api/models/(.+)/revision/([^/]+)", path):
            name = match[1]
            if name in hub.moved:
                to = f"/api/models/{hub.moved[name]}/revision/{match[2]}?{parts.query}"
                return self._redirect(307, to)
            found = hub.listing(name, match[2])
            return self._plain(404 if found is None else 200, json.dumps(found).encode())
        if match := re.fullmatch(r"/(.+?)/resolve/([0-9a-f]{40})/(.+)", path):
            data = hub.file(match[1], match[2], match[3])
            if data is not None and len(data) >= LARGE:
                where = hub.redirect_to or f"{hub.cdn_url}/{match[1]}@{match[2]}/{match[3]}"
                return self._redirect(302, f"{where}?sig={hub.sign()}")
            return self._send_file(data, match[3])
        return self._plain(404, b"{}")

    def _send_file(self, data: bytes | None, path: str) -> None:
        hub = self.hub
        if data is None:
            return self._plain(404, b"")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), int(asked[2])) if asked else (0, len(data) - 1)
        body = data[first : last + 1]
        if hub.fails_after is not None and hub.sent_bytes >= hub.fails_after:
            return self._plain(503, b"")
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for at in range(0, len(body), BLOCK):
            if hub.fails_after is not None and hub.sent_bytes >= hub.fails_after:
                self.close_connection = True
                return None
            time.sleep(hub.block_wait_s)
            try:
                self.wfile.write(body[at : at + BLOCK])
            except OSError:  # the reader has gone
                self.close_connection = True
                return None
            with hub._lock:
                hub.sent[path] += len(body[at : at + BLOCK])
        return None

    def _plain(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _redirect(self, status: int, where: str) -> None:
        self.send_response(status)
        self.send_header("Location", where)
        self.send_header("Content-Length", "0")
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Report nothing: a reader went away."""


@contextmanager
def serving_hub(
    root: Path, host: str = "127.0.0.1", port: int = 0, token: str = ""
) -> Iterator[Hub]:
    """Serve the repositories below ``root``; the CDN has the next port (or any)."""
    hub = Hub(root, token)
    servers = []
    for number, is_cdn in enumerate((False, True)):
        handler = type("Handler", (_Handler,), {"hub": hub, "is_cdn": is_cdn})
        server = _Server((host, port and port + number), handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    hub.url, hub.cdn_url = (f"http://{host}:{each.server_address[1]}" for each in servers)
    try:
        yield hub
    finally:
        for each in servers:
            each.shutdown()
            each.server_close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", default="")
    given = parser.parse_args()
    with serving_hub(given.root, given.host, given.port, given.token) as running:
        threading.Event().wait()
