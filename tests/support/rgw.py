"""A real object gateway (Ceph RGW) for tests: honours If-Match, keeps versions."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.storage import ObjectStore

SCRIPT = Path(__file__).with_name("rgw-up.sh")
PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "uuidgen", "curl")


@contextmanager
def rgw() -> Iterator[ObjectStore]:
    """Start a gateway on loopback and yield a store on it; skips where it is not installed."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        reason = f"Ceph's gateway is not installed: {', '.join(missing)}"
        if "ceph" in os.environ.get("PACELINE_REQUIRE", "").split(","):
            pytest.fail(f"required but missing: {reason}")
        pytest.skip(reason)
    access, secret = secrets.token_hex(10), secrets.token_hex(20)
    port, monitor = _free_port(), _free_port()
    with tempfile.TemporaryDirectory(prefix="paceline-rgw-") as scratch:
        place = Path(scratch, "rgw")
        try:
            subprocess.run(
                ["bash", str(SCRIPT), str(place), str(port), str(monitor), access, secret],
                check=True,
                capture_output=True,
                timeout=110,
            )
            yield ObjectStore(
                endpoint_url=f"http://127.0.0.1:{port}", access_key=access, secret_key=secret
            )
        finally:
            subprocess.run(["bash", str(SCRIPT), "--stop", str(place)], check=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
