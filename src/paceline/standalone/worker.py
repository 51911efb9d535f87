"""One worker of a ``distribute`` call, and the coordinator that all of its workers call."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, TypeVar

from paceline.coordinator import CoordinatorSettings, CoordinatorState
from paceline.coordinator.state import (
    Answer,
    Event,
    FetchLanes,
    HeartbeatReceived,
    Register,
    SavePlan,
    Tick,
)
from paceline.relay import ControlLoop, RelayDriver
from paceline.relay.store import OriginReadCounts, Store, disk_errors
from paceline.relay.transport import TcpTransport
from paceline.schemas import (
    DeploymentBeat,
    Heartbeat,
    HeartbeatAnswer,
    Labels,
    Record,
    Registered,
    RegisterWorker,
    WorkerLanes,
    WorkerStatus,
)
from paceline.standalone.request import UNLIMITED_MBIT

if TYPE_CHECKING:
    from paceline.standalone.fleet import Fleet

# No call ends by a deadline, since links may be slow; and no worker is judged slow, since all share
# this machine.
SETTINGS = CoordinatorSettings(
    beat_s=0.2, beats_per_second=100.0, deadline_s=float("inf"), slow_s=float("inf")
)

Reply = TypeVar("Reply", bound=Record)


class LocalCoordinator:
    """The calls of nodes, answered by a state machine in this process; for one thread."""

    def __init__(self) -> None:
        self.state = CoordinatorState(SETTINGS)

    def tick(self) -> bool:
        """Pass the time; return whether there is a new plan."""
        now_s = time.monotonic()
        self.state.fleet.discount_gap(float("inf"), now_s)  # workers of this process are never lost
        effects = self.state.handle(Tick(at=time.time()), now_s)
        return any(isinstance(effect, SavePlan) for effect in effects)

    def decide(self, event: Event, reply: type[Reply]) -> Reply:
        """Return the answer to ``event``."""
        effects = self.state.handle(event, time.monotonic())
        answer = next(each.record for each in effects if isinstance(each, Answer))
        assert isinstance(answer, reply)
        return answer

    def register(self, call: RegisterWorker) -> Registered:
        return self.decide(Register(call=call, at=time.time()), Registered)

    def heartbeat(self, beat: Heartbeat, wait_s: float = 0.0) -> HeartbeatAnswer:  # noqa: ARG002
        return self.decide(HeartbeatReceived(beat=beat, at=time.time()), HeartbeatAnswer)

    def lanes(self, deployment_id: str, worker_id: str) -> WorkerLanes:
        event = FetchLanes(deployment_id=deployment_id, worker_id=worker_id)
        return self.decide(event, WorkerLanes)

    def manifest_bytes(self, deployment_id: str) -> bytes:
        return self.state.deployment_state(deployment_id).manifest_bytes


class Worker:
    """One worker: its store, its driver, and its exchanges with the coordinator."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        request, manifest = fleet.request, fleet.manifest
        self.name = request.names[number]
        directory = request.into / self.name
        self.store = Store(directory / "store", request.policy)
        try:
            with disk_errors(directory):  # no other process counts there: we hold the store's lock
                self._counts = OriginReadCounts(directory / "readings")
            if not fleet.resumes:  # the data of those reads is gone, so they no longer count
                self._counts.drop([fleet.deployment_id])
            self._reading = self._counts.of(fleet.deployment_id)
            self.driver = RelayDriver(
                worker_id=self.name,
                store=self.store,
                transport=TcpTransport(fleet.token),
                open_source=fleet.open_source,
                port=request.first_port + number if request.first_port else 0,
                link_mbit=request.link_mbit,
                seed=number,
                origin_reads=self._counts,
                on_change=self._report_now,
            )
        except BaseException:
            self.store.close()
            raise
        self.due_s = 0.0  # when to exchange a heartbeat next
        self._fleet = fleet
        self._control = ControlLoop(
            fleet.coordinator,
            self.driver,
            RegisterWorker(
                worker_id=self.name,
                hostname=self.name,
                rack=request.rack(number),
                available_storage=0,
                labels=Labels(host=self.name, rack=request.rack(number)),
                address=self.driver.server.address,
                link_mbit=request.link_mbit or UNLIMITED_MBIT,
                process=secrets.token_hex(8),
            ),
            lambda: self.driver.incarnation + 1,
            manifest=manifest,
        )
        self.driver.start()

    @property
    def read_bytes(self) -> int:
        """Return the bytes read from the source, in this call and in those that it resumes."""
        return self._reading.read_bytes

    def forget_reads(self) -> None:
        """Delete the count of what was read: the deployment is over."""
        self._counts.drop([self._fleet.deployment_id])

    def exchange(self) -> None:
        began_s = time.monotonic()
        self.due_s = float("inf")  # unless there is something to report meanwhile
        goes_on = self._control.exchange()
        self.due_s = min(self.due_s, began_s + self._control.interval_s if goes_on else 0.0)

    def _report_now(self) -> None:
        self.due_s = 0.0
        self._fleet.news.set()

    def beat(self) -> DeploymentBeat | None:
        wanted = self._fleet.deployment_id
        return next((b for b in self.driver.beats() if b.deployment_id == wanted), None)

    def report_disk(self) -> None:
        """Report the copy and the counts of earlier calls, before the first plan is made."""
        manifest = self._fleet.manifest
        stored = self.store.versions(manifest.model_id)
        holds = any(each.digest == manifest.digest for each in stored)
        beat = DeploymentBeat(
            deployment_id=self._fleet.deployment_id,
            epoch=0,
            status=WorkerStatus.RECEIVING,
            pieces_held=manifest.piece_count if holds else 0,
            bytes_held=manifest.total_size if holds else 0,
            chunks_received=tuple(range(len(manifest.chunks))) if holds else (),
            origin_bytes=self.read_bytes,
        )
        self._fleet.coordinator.heartbeat(
            Heartbeat(
                worker_id=self.name,
                status=WorkerStatus.RECEIVING,
                incarnation=self.driver.incarnation,
                deployments=(beat,),
            )
        )
