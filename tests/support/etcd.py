"""A real etcd cluster of three members on loopback, without and with TLS and passwords."""

from __future__ import annotations

import secrets
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.coordinator.stores.etcd import EtcdAccess, EtcdCoordination
from tests.support.servers import Server, answers, free_port, program

LEASE_S = 2.0  # the least that etcd grants with its own intervals


@dataclass
class EtcdCluster:
    """Three members; ``endpoints`` are where clients reach them."""

    members: list[Server]
    access: EtcdAccess

    def open(self, prefix: str | None = None, *, lease_s: float = LEASE_S) -> EtcdCoordination:
        """Return a store of its own, or on ``prefix``."""
        return EtcdCoordination(
            self.access, prefix or f"/tests/{secrets.token_hex(6)}", lease_s=lease_s
        )

    def restored(self) -> None:
        """Bring back whoever a test killed or froze."""
        for member in self.members:
            if member._process is None:
                member.launch()
            else:
                member.thaw()
        for member in self.members:
            member.wait_ready()


@contextmanager
def etcd_cluster(
    directory: Path,
    members: int = 3,
    *,
    access: EtcdAccess | None = None,
    extra: tuple[str, ...] = (),
) -> Iterator[EtcdCluster]:
    """Start a cluster whose data lies below ``directory``."""
    binary = program("etcd")
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    version = said.stdout.split()[2]
    scheme = "https" if extra else "http"
    names = [f"n{number}" for number in range(members)]
    ports = {name: (free_port(), free_port()) for name in names}
    peers = ",".join(f"{name}=http://127.0.0.1:{peer}" for name, (_, peer) in ports.items())
    started = []
    for name, (client, peer) in ports.items():
        place = directory / name
        place.mkdir(parents=True)
        url, peer_url = f"{scheme}://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        metrics = free_port()
        argv = [binary, "--name", name, "--data-dir", str(place / "data"), *extra]
        argv += ["--listen-client-urls", url, "--advertise-client-urls", url]
        argv += ["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
        argv += ["--initial-cluster", peers, "--initial-cluster-state", "new"]
        argv += ["--initial-cluster-token", "paceline-tests"]
        argv += ["--listen-metrics-urls", f"http://127.0.0.1:{metrics}", "--log-level", "warn"]
        argv += ["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"]
        started.append(
            Server(
                f"etcd {version} member {name}",
                argv,
                place,
                lambda port=metrics: _healthy(port),  # type: ignore[misc]
            )
        )
    endpoints = tuple(f"{scheme}://127.0.0.1:{client}" for client, _ in ports.values())
    try:
        for each in started:
            each.launch()
        for each in started:
            each.wait_ready()
        fields = {} if access is None else access.__dict__
        yield EtcdCluster(started, EtcdAccess(**{**fields, "endpoints": endpoints}))
    finally:
        for each in started:
            each.kill()


def _healthy(metrics_port: int) -> bool:
    if not answers(metrics_port):
        return False
    try:
        url = f"http://127.0.0.1:{metrics_port}/health"
        with urllib.request.urlopen(url, timeout=2) as answer:
            return b'"true"' in answer.read()
    except OSError:
        return False


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Yield this session's cluster; use a prefix of your own and leave its members alone."""
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster
