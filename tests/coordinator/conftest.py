"""A world without sockets: the state machine, a clock turned by hand, agents that are values."""

import hashlib
from dataclasses import dataclass, field

import pytest

from paceline.coordinator.state.messages import (
    Activate,
    Answer,
    Cancel,
    Create,
    EmitEvent,
    FetchLanes,
    HeartbeatReceived,
    Register,
    Rollback,
    Tick,
)
from paceline.coordinator.state.settings import CoordinatorSettings
from paceline.coordinator.state.state import CoordinatorState
from paceline.manifest import Chunk, FileEntry, Manifest
from paceline.schemas.calls import CreateDeployment, DeploymentBeat, Heartbeat, RegisterWorker
from paceline.schemas.events import EventName
from paceline.schemas.records import Receipt, WorkerStatus

PIECES = 8
PIECE = 1024


def small_manifest(version: str = "v1", model_id: str = "m") -> Manifest:
    """A model of 8 pieces in 4 chunks, with digests of nothing in particular."""
    digest = hashlib.sha256(version.encode()).hexdigest()
    chunks = tuple(Chunk(index, index * 2 * PIECE, 2 * PIECE, digest) for index in range(4))
    file = FileEntry("model.bin", PIECES * PIECE, digest, (digest,) * PIECES)
    return Manifest.of(
        model_id=model_id,
        version=version,
        piece_bytes=PIECE,
        chunk_bytes=2 * PIECE,
        files=(file,),
        chunks=chunks,
    )


@dataclass
class World:
    """Drives one CoordinatorState; remembers what it told and kept."""

    patience: CoordinatorSettings = field(
        default_factory=lambda: CoordinatorSettings(
            beat_s=0.5, return_grace_s=60.0, deadline_s=600.0
        )
    )
    now_s: float = 1000.0
    made: int = 0

    def __post_init__(self) -> None:
        self.state = CoordinatorState(self.patience)
        self.told: list[EmitEvent] = []
        self.kept: list[object] = []
        self.incarnations: dict[str, int] = {}
        self.silent: set[str] = set()

    def give(self, event):
        effects = self.state.handle(event, self.now_s)
        self.told += [each for each in effects if isinstance(each, EmitEvent)]
        self.kept += [each for each in effects if not isinstance(each, EmitEvent | Answer)]
        return next((each.record for each in effects if isinstance(each, Answer)), None)

    def tick(self):
        self.give(Tick(at=self.now_s))

    def wait(self, seconds: float, *, beating: bool = True):
        """Let time pass in ticks; whoever is not silent beats each half second."""
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s += 0.25
            if beating and round(self.now_s / 0.25) % 2 == 0:
                for worker_id in self.incarnations.keys() - self.silent:
                    self.beat(worker_id)
            self.tick()

    def register(self, *workers: str, incarnation: int | None = None, rack: str = ""):
        for worker_id in workers:
            number = incarnation or self.incarnations.get(worker_id, 0) + 1
            call = RegisterWorker(
                worker_id=worker_id,
                hostname="h",
                rack=rack or "r0",
                available_storage=1,
                address=f"127.0.0.1:{1000 + number}",
                incarnation=number,
                link_mbit=80,
            )
            self.give(Register(call=call))
            self.incarnations[worker_id] = number
            self.silent.discard(worker_id)

    def beat(self, worker_id: str, *entries: DeploymentBeat, incarnation: int | None = None):
        number = incarnation or self.incarnations[worker_id]
        status = entries[0].status if entries else WorkerStatus.IDLE
        beat = Heartbeat(
            worker_id=worker_id, status=status, incarnation=number, deployments=entries
        )
        return self.give(HeartbeatReceived(beat=beat, at=self.now_s))

    def create(self, *targets: str, key: str | None = None, version: str = "v1", **more):
        self.made += 1
        call = CreateDeployment(
            model_id="m", version=version, source_url="s3://b/m", target_workers=targets, **more
        )
        event = Create(
            deployment_id=f"dep-{self.made}",
            call=call,
            manifest=small_manifest(version),
            key=key,
            body_digest=call.model_dump_json(),
            at=self.now_s,
        )
        return self.give(event).deployment_id

    def lanes(self, deployment_id: str, worker_id: str):
        return self.give(FetchLanes(deployment_id=deployment_id, worker_id=worker_id))

    def cancel(self, deployment_id: str):
        return self.give(Cancel(deployment_id=deployment_id))

    def activate(self, deployment_id: str, *ready: str, **more):
        """Ask for the switch; whoever is ``ready`` shows at once that it holds the version."""
        answer = self.give(Activate(deployment_id=deployment_id, at=self.now_s, **more))
        self.show(deployment_id, *ready)
        return answer

    def show(self, deployment_id: str, *workers: str, **more):
        """Let workers say that they hold a version, and a tick pass."""
        if workers:
            self.finish(deployment_id, *workers, **more)
            self.tick()

    def roll_back(self, deployment_id: str):
        return self.give(Rollback(deployment_id=deployment_id, at=self.now_s))

    def switch(self, deployment_id: str):
        return self.state.switch_of(deployment_id)

    def entry(self, deployment_id: str, worker_id: str, pieces: int = 0, **more) -> DeploymentBeat:
        plan = self.state.run(deployment_id).plan
        fields = {
            "deployment_id": deployment_id,
            "epoch": plan.epoch if plan else 0,
            "status": WorkerStatus.RECEIVING,
            "pieces_held": pieces,
            "bytes_held": pieces * PIECE,
            "chunks_received": tuple(range(pieces // 2)),
        } | more
        return DeploymentBeat(**fields)

    def receive(self, deployment_id: str, worker_id: str, pieces: int, **more):
        return self.beat(worker_id, self.entry(deployment_id, worker_id, pieces, **more))

    def receipt(self, deployment_id: str, worker_id: str, **more) -> Receipt:
        deployment = self.state.run(deployment_id).deployment
        fields = {
            "deployment_id": deployment_id,
            "worker_id": worker_id,
            "incarnation": self.incarnations[worker_id],
            "model_id": deployment.model_id,
            "version": deployment.version,
            "manifest_digest": deployment.manifest_digest,
            "path": "/models",
            "total_bytes": deployment.total_bytes,
            "received_bytes": 0,
            "origin_bytes": 0,
            "reused_bytes": 0,
            "reused_pieces": 0,
            "refetched_bytes": 0,
            "sent_bytes": 0,
            "corrupt_pieces": 0,
            "seconds": 0.0,
        } | more
        return Receipt(**fields)

    def finish(self, deployment_id: str, *workers: str, **more):
        answers = []
        for worker_id in workers:
            fields = {
                "status": WorkerStatus.COMPLETE,
                "receipt": self.receipt(deployment_id, worker_id),
            } | more
            answers.append(self.receive(deployment_id, worker_id, PIECES, **fields))
        return answers

    def status(self, deployment_id: str) -> str:
        return self.state.run(deployment_id).deployment.status.value

    def epoch(self, deployment_id: str) -> int:
        return self.state.run(deployment_id).deployment.epoch

    def names(self, name: EventName) -> list[EmitEvent]:
        return [each for each in self.told if each.name is name]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def make_world():
    return World


@pytest.fixture
def make_manifest():
    return small_manifest
