"""A fleet in one process: N drivers over loopback sockets, for whoever hands them their lanes.

For tests and benchmarks that want to steer; ``onecall.distribute`` is the whole deployment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.errors import DeploymentFailed, NotReady
from paceline.manifest import Manifest
from paceline.relay import DirectoryReader, RangeReader, RelayDriver
from paceline.relay.protocol import SessionLimits
from paceline.relay.store import Store
from paceline.relay.transport import TcpTransport
from paceline.schemas import DeploymentBeat, Receipt, WorkerLanes, WorkerStatus


def open_directory(url: str) -> RangeReader:
    """Return a reader of the model in the local directory ``url``."""
    return DirectoryReader(Path(url))


class LocalFleet:
    """Drivers ``names`` with their stores below ``root``; use it as a context manager."""

    def __init__(
        self,
        root: Path,
        names: list[str],
        *,
        link_mbit: float | None = None,
        limits: SessionLimits | None = None,
        open_source: Callable[[str], RangeReader] = open_directory,
        token: str = "local",
    ) -> None:
        self.drivers = {
            name: RelayDriver(
                worker_id=name,
                store=Store(root / name / "store"),
                transport=TcpTransport(token),
                open_source=open_source,
                link_mbit=link_mbit,
                limits=limits,
            )
            for name in names
        }

    def __enter__(self) -> LocalFleet:
        for driver in self.drivers.values():
            driver.start()
        return self

    def __exit__(self, *_: object) -> None:
        for driver in self.drivers.values():
            driver.stop()

    @property
    def addresses(self) -> dict[str, str]:
        """Return where each driver serves."""
        return {name: driver.server.address for name, driver in self.drivers.items()}

    def deploy(self, manifest: Manifest, lanes: Mapping[str, WorkerLanes]) -> None:
        """Hand every driver its lanes."""
        for name, mine in lanes.items():
            self.drivers[name].deploy(mine, manifest)

    def beat(self, name: str, deployment_id: str) -> DeploymentBeat | None:
        """Return what ``name`` reports about the deployment."""
        beats = self.drivers[name].beats()
        return next((beat for beat in beats if beat.deployment_id == deployment_id), None)

    def receipts(
        self, deployment_id: str, names: list[str] | None = None, timeout_s: float = 60.0
    ) -> dict[str, Receipt]:
        """Wait until ``names`` (all) are complete and return their receipts.

        Raises DeploymentFailed as soon as one fails, NotReady after ``timeout_s``.
        """
        end = time.monotonic() + timeout_s
        receipts: dict[str, Receipt] = {}
        for name in names or list(self.drivers):
            driver = self.drivers[name]
            in_time = driver.wait(
                lambda beats: _ended(beats, deployment_id), end - time.monotonic()
            )
            beat = self.beat(name, deployment_id)
            if not in_time or beat is None:
                raise NotReady("not complete in time", got=beat, where=name, wanted=timeout_s)
            if beat.receipt is None:
                raise DeploymentFailed("a worker failed", got=beat.failure, where=name)
            receipts[name] = beat.receipt
        return receipts


def _ended(beats: list[DeploymentBeat], deployment_id: str) -> bool:
    final = (WorkerStatus.COMPLETE, WorkerStatus.FAILED, WorkerStatus.VERIFICATION_FAILED)
    return any(b.deployment_id == deployment_id and b.status in final for b in beats)
