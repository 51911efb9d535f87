"""A real object gateway (Ceph RGW) for tests: honours If-Match, keeps versions."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.storage import ObjectStore
from tests.support.servers import free_port

SCRIPT = Path(__file__).with_name("rgw-up.sh")
PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "uuidgen", "curl")


@dataclass(frozen=True)
class Gateway:
    """A running gateway: S3 and STS (role ``node``) at one URL, and the keys of its one user."""

    url: str
    access_key: str
    secret_key: str


@pytest.fixture(scope="session")
def rgw() -> Iterator[ObjectStore]:
    """Start a gateway on loopback and yield a store on it; skips where it is not installed.

    Tests that use it belong in the group "rgw": the gateway takes 20 s to start.
    """
    with gateway() as made:
        yield ObjectStore(
            endpoint_url=made.url, access_key=made.access_key, secret_key=made.secret_key
        )


@contextmanager
def gateway(address: str = "127.0.0.1", enter: Sequence[str] = ()) -> Iterator[Gateway]:
    """Start a gateway that listens on ``address``; ``enter`` is the prefix of a command that runs
    it elsewhere (a network namespace). Skips where it is not installed."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        reason = f"Ceph's gateway is not installed: {', '.join(missing)}"
        if "services" in os.environ.get("PACELINE_REQUIRE", "").split(","):
            pytest.fail(f"required but missing: {reason}")
        pytest.skip(reason)
    access, secret = secrets.token_hex(10), secrets.token_hex(20)
    with tempfile.TemporaryDirectory(prefix="paceline-rgw-") as scratch:
        place = Path(scratch, "rgw")
        try:
            port = _start(place, address, [*enter], access, secret)
            yield Gateway(f"http://{address}:{port}", access, secret)
        finally:
            subprocess.run(["bash", str(SCRIPT), "--stop", str(place)], check=False)


def _start(place: Path, address: str, enter: list[str], access: str, secret: str) -> int:
    """Start the gateway and return its port; tries other ports when another process took one."""
    reports = []
    for _ in range(3):
        port, monitor = free_port(), free_port()
        done = subprocess.run(
            [*enter, "bash", str(SCRIPT), place, f"{address}:{port}", str(monitor), access, secret],
            check=False,
            capture_output=True,
            text=True,
            timeout=110,
        )
        if done.returncode == 0:
            return port
        reports.append(f"exit {done.returncode}: {done.stdout[-500:]} {done.stderr[-1500:]}")
        subprocess.run(["bash", str(SCRIPT), "--stop", str(place)], check=False)
    raise RuntimeError("Ceph's gateway did not start:\n" + "\n".join(reports))
