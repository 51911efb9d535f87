"""A coordinator and agents as real processes on loopback, started and killed one by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from paceline.client import CoordinatorClient
from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.manifest import Manifest, build_manifest, write_manifest
from paceline.schemas import (
    CreateDeployment,
    DeploymentView,
    Event,
    EventName,
    Topology,
    WorkerProgress,
)

_COORDINATOR = (
    "import sys; from pathlib import Path;"
    "from paceline.config import load_runtime; from paceline.api.app import serve;"
    "sys.exit(serve(load_runtime(Path(sys.argv[1])), '127.0.0.1', int(sys.argv[2]), 1))"
)


def until(what: Callable[[], object], why: str, timeout_s: float = 60.0) -> None:
    """Wait until ``what()`` is true."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, f"never came: {why}"
        time.sleep(0.05)


class Site:
    """One state directory with its processes; it kills only those it started."""

    def __init__(self, state: Path, link_mbit: float) -> None:
        state.mkdir()
        self.state, self.link_mbit = state, link_mbit
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._port = 0
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """Start it (again, on the port where agents look for it) and wait until it answers."""
        self._save_runtime()
        with (self.state / "coordinator.err").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _COORDINATOR, str(self.state), str(self._port)],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.processes["coordinator"] = process
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        process.stdout.close()
        self._port = int(url.rpartition(":")[2])
        self._save_runtime()
        self.client = CoordinatorClient(url, "t0ken")

    def _save_runtime(self) -> None:
        runtime = Runtime(
            profile=Profile(),
            state_dir=self.state,
            endpoints=Endpoints(coordinator_url=f"http://127.0.0.1:{self._port}"),
            secrets=Secrets(coordinator_token="t0ken"),
        )
        save_runtime(runtime)

    def start(self, name: str, module: str = "paceline.cli.main", **more: object) -> None:
        """Start an agent."""
        link = {"link_mbit": self.link_mbit, "limit_mbit": self.link_mbit}
        given = {"state": self.state, "worker_id": name, **link, **more}
        arguments = [f"--{option.replace('_', '-')}={value}" for option, value in given.items()]
        with (self.state / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, "agent", *arguments], stdout=log, stderr=log
            )

    def registered(self, *names: str) -> None:
        """Wait until these agents are there."""
        until(
            lambda: set(names) <= {w.worker_id for w in self.client.workers() if w.alive},
            f"{names} registered",
        )

    def incarnation(self, name: str) -> int:
        return next(w.incarnation for w in self.client.workers() if w.worker_id == name)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one of our processes."""
        os.kill(self.processes[name].pid, number)

    def kill(self, *names: str) -> None:
        """Kill processes, all of them at once, and wait until they are gone."""
        for name in names:
            self.processes[name].kill()
        for name in names:
            self.processes.pop(name).wait(10)

    def close(self) -> None:
        """Kill whatever still runs, frozen or not."""
        self.kill(*self.processes)

    # ── models and deployments ───────────────────────────────────────────────────────────────────

    def publish(self, version: str, size: int, piece_bytes: int = 16_384) -> Manifest:
        """Write a model of random bytes with its manifest, as the source of deployments."""
        directory = self.source(version)
        directory.mkdir(parents=True)
        (directory / "weights.bin").write_bytes(Random(version).randbytes(size))
        manifest = build_manifest(
            directory,
            model_id="m",
            version=version,
            link_mbit=1000,
            piece_bytes=piece_bytes,
            chunk_bytes=4 * piece_bytes,
        )
        write_manifest(directory, manifest)
        return manifest

    def source(self, version: str) -> Path:
        return self.state / "sources" / version

    def deploy(self, version: str, *targets: str, topology: str = "chain", **more: object) -> str:
        """Create a deployment and return its id."""
        call = CreateDeployment(
            model_id="m",
            version=version,
            source_url=str(self.source(version)),
            target_workers=targets,
            topology=Topology(topology),
            **more,
        )
        return self.client.create(call, f"{version}-{topology}").deployment_id

    def view(self, deployment_id: str) -> DeploymentView:
        return self.client.deployment(deployment_id)

    def part(self, deployment_id: str, name: str) -> WorkerProgress:
        parts = self.client.workers_of(deployment_id)
        return next(each for each in parts if each.worker_id == name)

    def complete(self, deployment_id: str, *names: str) -> None:
        """Wait until ``names`` (default: the deployment) are complete."""
        if names:
            until(
                lambda: set(names) <= set(self.view(deployment_id).workers_complete),
                f"{names} complete",
            )
        else:
            until(lambda: self.view(deployment_id).status == "complete", "all complete")

    def told(self, deployment_id: str, name: EventName) -> list[Event]:
        """Return what was told of a deployment, or of the fleet, so far."""
        found: list[Event] = []
        after = 0
        while page := self.client.events(after).events:
            found += page
            after = page[-1].seq
        mine = (None, deployment_id)
        return [each for each in found if each.name is name and each.deployment_id in mine]

    def final(self, name: str, version: str) -> Path:
        return self.state / "nodes" / name / "store/models/m" / version
