"""A real coordinator process, and agents that are played by the test over real REST."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.api import create_app
from paceline.client import CoordinatorClient
from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.manifest import Manifest, build_manifest, write_manifest
from paceline.schemas import (
    CreateDeployment,
    DeploymentBeat,
    Heartbeat,
    Receipt,
    RegisterWorker,
    WorkerLanes,
    WorkerStatus,
)
from tests.support.coordinator import Forked

with warnings.catch_warnings():
    # Starlette asks for a successor of httpx that the lock does not carry yet.
    warnings.simplefilter("ignore", UserWarning)
    from starlette.testclient import TestClient

BASE = "http://127.0.0.1"
PROCESS = """
import sys
from pathlib import Path
from paceline.config import load_runtime
from paceline.api.app import serve
runtime = load_runtime(Path(sys.argv[1]))
sys.exit(serve(runtime, "127.0.0.1", int(sys.argv[2]), int(sys.argv[3])))
"""


# A test may be refused, and may call, as often as it likes; what the limits do has its own tests.
PATIENT = {"failures_per_minute": 1e9, "calls_per_s": 1e9}


def make_runtime(state_dir: Path, **relay: object) -> Runtime:
    """An installation with nothing in it but a token."""
    profile = Profile.model_validate({"relay": {"beat_s": 0.2, **relay}, "security": PATIENT})
    secret = Secrets(coordinator_token=secrets.token_hex(16))
    return Runtime(profile=profile, state_dir=state_dir, endpoints=Endpoints(), secrets=secret)


def make_model(
    state_dir: Path, version: str = "v1", size: int = 256 * 1024
) -> tuple[str, Manifest]:
    """A directory with a model and its manifest, below the state directory; its path is the URL."""
    directory = state_dir / "sources" / version
    directory.mkdir(parents=True)
    (directory / "model.bin").write_bytes(version.encode() * (size // len(version)))
    manifest = build_manifest(directory, model_id="m", version=version, link_mbit=80)
    write_manifest(directory, manifest)
    return str(directory), manifest


@contextlib.contextmanager
def app_client(runtime: Runtime, **more: object) -> Iterator[TestClient]:
    """The app of ``runtime`` within this process; ``owner`` and ``agents`` are its tokens."""
    app = create_app(runtime, **more)
    with TestClient(app, BASE, raise_server_exceptions=False) as client:
        client.owner = runtime.secrets.coordinator_token
        client.agents = runtime.secrets.agents_token
        yield client


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    """The app of an installation with one model; a call carries no token by itself."""
    state_dir = tmp_path_factory.mktemp("rest") / "state"
    with app_client(make_runtime(state_dir)) as client:
        client.source_url, _ = make_model(state_dir)
        yield client


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def call(rest, method, path, token, **more):
    """Call ``rest`` with ``token``; None: without one."""
    return rest.request(method, path, headers=bearer(token), **more)


@dataclass
class Served:
    """One coordinator process; start it again on the same port after a kill."""

    runtime: Runtime
    process: subprocess.Popen[bytes] | Forked | None = None
    url: str = ""
    under: tuple[str, ...] = ()  # a command line that starts the one after it

    def start(self) -> None:
        save_runtime(self.runtime)
        port = self.url.rsplit(":", 1)[1] if self.url else "0"
        if not self.under:
            self.process = Forked(self.runtime.state_dir, int(port))
            assert self.process.line, self.process.communicate()[0]
            self.url = json.loads(self.process.line)["url"]
            return
        reader, writer = os.pipe()
        argv = [*self.under, sys.executable, "-c", PROCESS]
        argv += [str(self.runtime.state_dir), port, str(writer)]
        self.process = subprocess.Popen(
            argv, pass_fds=[writer], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        os.close(writer)
        with os.fdopen(reader) as ready:
            line = ready.readline()
        assert line, self.process.communicate()[0]
        self.url = json.loads(line)["url"]

    def client(self) -> CoordinatorClient:
        return CoordinatorClient(self.url, self.runtime.secrets.coordinator_token)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, bytes]:
        process, self.process = self.process, None
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
        return process.returncode, out


@contextlib.contextmanager
def running(runtime):
    """Yield a coordinator that serves ``runtime`` in a new state directory; it is killed."""
    server = Served(runtime)
    runtime.state_dir.mkdir()
    server.start()
    yield server
    if server.process is not None:
        with contextlib.suppress(ProcessLookupError):
            server.end(signal.SIGKILL)


@pytest.fixture
def served(tmp_path):
    """A running coordinator."""
    with running(make_runtime(tmp_path / "state")) as server:
        yield server


@dataclass
class FakeAgent:
    """Says what an agent would say, and moves no bytes: each beat it holds some pieces more."""

    client: CoordinatorClient
    worker_id: str
    incarnation: int = 1
    per_beat: int = 2
    lanes: dict[str, WorkerLanes] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    active: str = ""

    def register(self) -> None:
        self.client.register(
            RegisterWorker(
                worker_id=self.worker_id,
                hostname="h",
                rack=f"rack-{int(self.worker_id.rsplit('-', 1)[1]) % 2}",
                available_storage=10**9,
                address=f"127.0.0.1:{20000 + self.incarnation}",
                incarnation=self.incarnation,
                link_mbit=80,
            )
        )

    def beat(self, manifest: Manifest) -> list[str]:
        """Beat once and obey; return the kinds of the commands."""
        entries = tuple(self._entry(d, manifest) for d in self.lanes if d not in self.cancelled)
        status = WorkerStatus.RECEIVING if entries else WorkerStatus.IDLE
        answer = self.client.heartbeat(
            Heartbeat(
                worker_id=self.worker_id,
                status=status,
                incarnation=self.incarnation,
                bandwidth_in=1e6,
                deployments=entries,
            )
        )
        if not answer.go_on:
            self.incarnation += 1
            self.register()
        for command in answer.commands:
            if command.kind == "fetch_lanes":
                self.lanes[command.deployment_id] = self.client.lanes(
                    command.deployment_id, self.worker_id
                )
            elif command.kind == "cancel":
                self.cancelled.add(command.deployment_id)
            else:
                self.active = command.deployment_id
        return [each.kind for each in answer.commands]

    def _entry(self, deployment_id: str, manifest: Manifest) -> DeploymentBeat:
        total = manifest.piece_count
        held = min(total, self.held.get(deployment_id, 0) + self.per_beat)
        self.held[deployment_id] = held
        done = held == total
        receipt = Receipt(
            deployment_id=deployment_id,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            model_id=manifest.model_id,
            version=manifest.version,
            manifest_digest=manifest.digest,
            path="/models",
            total_bytes=manifest.total_size,
            received_bytes=manifest.total_size,
            origin_bytes=0,
            reused_bytes=0,
            reused_pieces=0,
            refetched_bytes=0,
            sent_bytes=0,
            corrupt_pieces=0,
            seconds=0.1,
        )
        return DeploymentBeat(
            deployment_id=deployment_id,
            epoch=self.lanes[deployment_id].epoch,
            status=WorkerStatus.COMPLETE if done else WorkerStatus.RECEIVING,
            pieces_held=held,
            bytes_held=manifest.total_size * held // total,
            receipt=receipt if done else None,
            activated=self.active == deployment_id,
        )


def creation(url: str, targets: list[str], **more: object) -> CreateDeployment:
    """The call that brings the test's model to ``targets``."""
    fields = {"model_id": "m", "version": "v1", "source_url": url, "target_workers": targets}
    return CreateDeployment.model_validate(fields | more)
