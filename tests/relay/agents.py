"""Agent processes of one state directory, started and killed one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.schemas import WorkerStatus
from tests.relay.fake_coordinator import TOKEN, FakeCoordinator

LINK_MBIT = 8.0  # of a model of 3 MB: three seconds to break things in
NAMES = ["node-0", "node-1", "node-2", "node-3"]


class Fleet:
    """Agent processes of one state directory; it kills only those it started."""

    def __init__(self, state: Path, coordinator: FakeCoordinator, **sections: object) -> None:
        """``sections`` are the profile's, beside [security] source_roots."""
        self.state, self.coordinator = state, coordinator
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        state.mkdir()
        security = {"source_roots": (str(state.parent),), **sections.pop("security", {})}  # type: ignore[dict-item]
        runtime = Runtime(
            profile=Profile.model_validate({"security": security, **sections}),
            state_dir=state,
            endpoints=Endpoints(coordinator_url=coordinator.url),
            secrets=Secrets(worker_token=TOKEN),
        )
        save_runtime(runtime)

    def start(self, name: str, *before: str, **more: str) -> subprocess.Popen[bytes]:
        link = {"link_mbit": LINK_MBIT, "limit_mbit": LINK_MBIT}
        given = {"state": self.state, "worker_id": name, **link, **more}
        arguments = [f"--{option.replace('_', '-')}={value}" for option, value in given.items()]
        with (self.state / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", "paceline.cli.main", "agent", *arguments],
                stdout=log,
                stderr=log,
            )
        self.processes[name] = process
        return process

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait(10)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(10)

    def pieces(self, name: str) -> int:
        beat = self.coordinator.beats.get(name)
        return beat.pieces_held if beat else 0

    def origin_bytes(self, name: str) -> int:
        beat = self.coordinator.beats.get(name)
        return beat.origin_bytes if beat else 0

    def is_complete(self, name: str) -> bool:
        beat = self.coordinator.beats.get(name)
        return beat is not None and beat.status is WorkerStatus.COMPLETE

    def final(self, name: str) -> Path:
        return self.state / "nodes" / name / "store/models/m/v1"
