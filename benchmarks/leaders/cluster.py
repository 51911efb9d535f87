"""An installation to break: three replicas, agents that relay, and an etcd that others started.

Each replica is a real ``paceline coordinator`` process on a port of its own, each agent a real
``paceline agent``. Whatever is started here is ended here, by its pid.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.client import CoordinatorClient
from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.manifest import build_manifest, write_manifest
from paceline.schemas import EPOCH_HEADER, LEADER_HEADER

PACELINE = (sys.executable, "-m", "paceline.cli.main")
READY_S = 60.0


@dataclass
class Cluster:
    """Three replicas and some agents in one state directory."""

    state: Path
    runtime: Runtime
    prefix: tuple[str, ...] = ()  # put before each replica's argv: a namespace, a shim
    environment: dict[str, str] = field(default_factory=dict)  # of replicas and agents, added
    replicas: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def urls(self) -> tuple[str, ...]:
        """Return where the replicas listen."""
        return self.runtime.endpoints.coordinator_urls

    def client(self, timeout_s: float = 10.0, *, patience_s: float = 0.0) -> CoordinatorClient:
        """Return a client of whoever leads."""
        return CoordinatorClient.of(self.runtime, timeout_s, patience_s=patience_s)

    def name_of(self, url: str) -> str:
        """Return the replica that listens at ``url``."""
        return f"r{self.urls.index(url)}"

    def start_replica(self, name: str) -> None:
        """Start (or start again) one replica."""
        url = self.urls[int(name[1:])]
        argv = [
            *self.prefix, *PACELINE, "coordinator", "--state", str(self.state),
            "--port", url.rpartition(":")[2], "--replica-id", name, "--advertise", url,
        ]  # fmt: skip
        with (self.state / f"{name}.err").open("ab") as errors:
            self.replicas[name] = subprocess.Popen(
                argv, stdout=errors, stderr=errors, env=os.environ | self.environment
            )

    def start_agent(self, name: str, limit_mbit: float) -> None:
        """Start one agent whose port carries so much each way."""
        argv = [
            *PACELINE, "agent", "--state", str(self.state), "--worker-id", name,
            "--rack", "r0", "--limit-mbit", str(limit_mbit), "--link-mbit", str(limit_mbit),
        ]  # fmt: skip
        with (self.state / f"{name}.err").open("ab") as errors:
            self.agents[name] = subprocess.Popen(
                argv, stdout=errors, stderr=errors, env=os.environ | self.environment
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a replica's process a signal."""
        self.replicas[name].send_signal(number)

    def reap(self, name: str) -> None:
        """Take note of a replica that was killed."""
        self.replicas.pop(name).wait(30)

    def ask(self, name: str, path: str = "/healthz", timeout_s: float = 2.0) -> Said | None:
        """Return what one replica says by itself, without redirects; None where it is silent."""
        return ask(self.urls[int(name[1:])], "GET", path, token=self.token, timeout_s=timeout_s)

    @property
    def token(self) -> str:
        """Return what opens every route."""
        return self.runtime.secrets.coordinator_token

    def leader(self, without: Sequence[str] = ()) -> tuple[str, int]:
        """Return the replica that leads and its epoch, as the others see it too."""
        until_s = time.monotonic() + READY_S
        while time.monotonic() < until_s:
            for name in sorted(self.replicas):
                said = None if name in without else self.ask(name)
                if said is not None and said.leader == self.urls[int(name[1:])]:
                    return name, said.epoch
            time.sleep(0.05)
        raise AssertionError(f"nobody leads; logs are in {self.state}")

    def await_ready(self) -> None:
        """Return once every replica leads or follows, and all name the same leader."""
        until_s = time.monotonic() + READY_S
        while time.monotonic() < until_s:
            said = [self.ask(name, "/readyz") for name in self.replicas]
            if all(each is not None and each.status == 200 and each.leader for each in said):
                found = {(each.leader, each.epoch) for each in said if each is not None}
                if len(found) == 1:
                    return
            time.sleep(0.1)
        raise AssertionError(f"replicas are not ready: {said}; logs are in {self.state}")

    def close(self) -> None:
        """End every process."""
        living = [*self.replicas.values(), *self.agents.values()]
        for each in living:
            with contextlib.suppress(ProcessLookupError):
                each.send_signal(signal.SIGCONT)
                each.terminate()
        for each in living:
            try:
                each.wait(15)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait(15)


@dataclass(frozen=True)
class Said:
    """One replica's own answer."""

    status: int
    epoch: int
    leader: str


def ask(
    url: str,
    method: str,
    path: str,
    *,
    token: str,
    body: bytes | None = None,
    timeout_s: float = 2.0,
) -> Said | None:
    """Return what the replica at ``url`` answers, following nothing; None where nothing comes."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return Said(
        answer.status,
        int(answer.headers.get(EPOCH_HEADER, 0)),
        answer.headers.get(LEADER_HEADER, ""),
    )


def make_model(directory: Path, version: str, size: int) -> str:
    """Write a model of ``size`` bytes that shares nothing with others; return its URL."""
    directory.mkdir(parents=True)
    (directory / "model.bin").write_bytes(os.urandom(size))
    write_manifest(directory, build_manifest(directory, model_id="m", version=version, link_mbit=8))
    return str(directory)


@contextlib.contextmanager
def cluster(
    state: Path,
    etcd_endpoints: Sequence[str],
    *,
    replicas: int = 3,
    lease_s: float = 3.0,
    prefix: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    control: Mapping[str, object] | None = None,
) -> Iterator[Cluster]:
    """Yield a ready cluster without agents; at the end nothing of it runs.

    ``control`` are further settings of the profile, such as another progress or audit store.
    """
    state.mkdir(parents=True, exist_ok=True)
    urls = tuple(f"http://127.0.0.1:{port}" for port in free_ports(replicas))
    profile = Profile.model_validate(
        {
            "name": "failover",
            "relay": {"beat_s": 0.5, "deadline_s": 36_000},
            "control": {
                "coordination": "etcd",
                "etcd_endpoints": list(etcd_endpoints),
                "etcd_prefix": f"/paceline/{secrets.token_hex(4)}",
                "replicas": replicas,
                "lease_s": lease_s,
                **(control or {}),
            },
        }
    )
    runtime = Runtime(
        profile=profile,
        state_dir=state,
        endpoints=Endpoints(coordinator_url=urls[0], coordinator_urls=urls),
        secrets=Secrets(coordinator_token=secrets.token_hex(16)),
    )
    save_runtime(runtime)
    made = Cluster(state, runtime, prefix, environment or {})
    try:
        for number in range(replicas):
            made.start_replica(f"r{number}")
        made.await_ready()
        yield made
    finally:
        made.close()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on at this moment."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in held]
    for each in held:
        each.close()
    return ports
