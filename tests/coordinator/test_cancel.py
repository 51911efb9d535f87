"""Cancel at random instants: cancelled, nothing left behind, nothing published once acknowledged.

Real drivers with sockets and disks in this process under the real state machine; each instant is
drawn from a seed: so many milliseconds after the plan, or when somebody holds so many pieces, up to
the very moment of publishing. Then real agent processes under a real coordinator, over REST.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from paceline.coordinator.state import (
    Answer,
    Cancel,
    CoordinatorSettings,
    CoordinatorState,
    Create,
    FetchLanes,
    HeartbeatReceived,
    Register,
    Tick,
)
from paceline.errors import Conflict, PacelineError
from paceline.manifest import build_manifest, verify_directory
from paceline.relay import HeartbeatBuilder
from paceline.schemas import CreateDeployment, RegisterWorker, WorkerStatus
from tests.support.local_fleet import LocalFleet

NAMES = ["node-0", "node-1", "node-2"]
SIZE = 600_000
LINK_MBIT = 40.0  # 0.12 s
PATIENCE_S = 20.0


class Controlled:
    """A fleet of drivers, and the coordinator that they beat to."""

    def __init__(self, root: Path) -> None:
        self.fleet = LocalFleet(root / "nodes", NAMES, link_mbit=LINK_MBIT)
        self.root = root / "nodes"
        self.sources = root / "sources"
        self.state = CoordinatorState(CoordinatorSettings(beat_s=0.1, lost_after_beats=100))
        self.reports: dict[str, HeartbeatBuilder] = {}

    def start(self) -> None:
        for name, driver in self.fleet.drivers.items():
            self.reports[name] = HeartbeatBuilder(name, driver)
            call = RegisterWorker(
                worker_id=name,
                hostname="h",
                rack="r",
                available_storage=10**12,
                address=driver.server.address,
                link_mbit=LINK_MBIT,
            )
            self.ask(Register(call=call))

    def ask(self, event):
        effects = self.state.handle(event, time.monotonic())
        return next((each.record for each in effects if isinstance(each, Answer)), None)

    def create(self, deployment_id: str) -> None:
        """Begin to bring a model that shares nothing with the ones before."""
        self.version = deployment_id
        source = self.sources / deployment_id
        source.mkdir(parents=True)
        (source / "weights.bin").write_bytes(Random(deployment_id).randbytes(SIZE))
        self.manifest = build_manifest(
            source, model_id="m", version=self.version, link_mbit=80, piece_bytes=65_536
        )
        call = CreateDeployment(
            model_id="m",
            version=self.version,
            source_url=str(source),
            target_workers=tuple(NAMES),
            topology="chain",
        )
        self.ask(Create(deployment_id=deployment_id, call=call, manifest=self.manifest))

    def round(self) -> None:
        """Let every agent beat once, and do what it hears."""
        for name, report in self.reports.items():
            driver = self.fleet.drivers[name]
            answer = self.ask(HeartbeatReceived(beat=report.beat(10**12)))
            report.mark_acknowledged()
            for command in answer.commands:
                if command.kind == "cancel":
                    driver.cancel(command.deployment_id)
                    continue
                try:
                    event = FetchLanes(deployment_id=command.deployment_id, worker_id=name)
                    driver.deploy(self.ask(event), self.manifest)
                except PacelineError:
                    assert self.state.deployment_state(command.deployment_id).final, (
                        "lanes were to be had"
                    )
        self.ask(Tick())
        time.sleep(0.002)  # the drivers' threads share this interpreter

    def held(self, deployment_id: str) -> int:
        return max(
            part.pieces_held for part in self.state.deployment_state(deployment_id).parts.values()
        )

    def final(self, name: str) -> Path:
        return self.root / name / "store/models/m" / self.version

    def published(self) -> set[str]:
        return {name for name in NAMES if self.final(name).exists()}

    def leftovers(self) -> list[Path]:
        """Return the files outside ``models``; directories may be deleted meanwhile."""
        return [
            Path(directory) / file
            for name in NAMES
            for directory, _, files in os.walk(self.root / name / "store")
            if "models" not in Path(directory).relative_to(self.root / name).parts
            for file in files
            if file != ".lock"
        ]


@pytest.fixture
def controlled(tmp_path: Path) -> Iterator[Controlled]:
    made = Controlled(tmp_path)
    with made.fleet:
        made.start()
        yield made


@pytest.mark.parametrize("seed", [0, pytest.param(10, marks=pytest.mark.nightly)])
def test_at_random_instants_nothing_is_left_or_published_later(controlled, seed):
    cancelled = 0
    for number in range(seed, seed + 10):
        random = Random(number)
        d = f"v{number}"
        controlled.create(d)
        pieces = random.randint(0, controlled.manifest.piece_count)
        until_s = time.monotonic() + random.uniform(0.0, 0.25)
        by_pieces = random.random() < 0.6
        while controlled.held(d) < pieces if by_pieces else time.monotonic() < until_s:
            controlled.round()
        try:
            controlled.ask(Cancel(deployment_id=d))
        except Conflict:
            assert controlled.published() == set(NAMES), "too late: it is complete everywhere"
            continue
        cancelled += 1
        end_s = time.monotonic() + PATIENCE_S
        while controlled.state.unstopped(d):
            controlled.round()
            assert time.monotonic() < end_s, "the cancel is never confirmed"
        shown = controlled.published()  # this is when DELETE is answered
        moved = {n: each.received_bytes for n, each in controlled.fleet.drivers.items()}
        assert controlled.state.deployment_state(d).deployment.status.value == "cancelled"
        for _ in range(5):
            controlled.round()
            time.sleep(0.01)
        assert controlled.published() == shown, f"seed {number}: published after the cancel"
        still = {n: each.received_bytes for n, each in controlled.fleet.drivers.items()}
        assert still == moved, f"seed {number}: a stream goes on"
        for driver in controlled.fleet.drivers.values():
            statuses = [each.status for each in driver.beats() if each.deployment_id == d]
            assert WorkerStatus.RECEIVING not in statuses
        end_s = time.monotonic() + PATIENCE_S
        while controlled.leftovers():
            assert time.monotonic() < end_s, f"seed {number}: left {controlled.leftovers()}"
            time.sleep(0.01)
        for name in shown:
            verify_directory(controlled.final(name), controlled.manifest)
    assert cancelled >= 5, "most instants must come before the end"
