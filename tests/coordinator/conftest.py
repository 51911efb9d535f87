"""A world without sockets: the state machine, a clock turned by hand, agents that are values."""

import functools
import hashlib
from dataclasses import dataclass, field

import pytest

from paceline.coordinator.state import (
    Activate,
    Answer,
    Cancel,
    CoordinatorSettings,
    CoordinatorState,
    Create,
    EmitEvent,
    FetchLanes,
    HeartbeatReceived,
    Register,
    Rollback,
    Tick,
)
from paceline.manifest import Chunk, FileEntry, Manifest
from paceline.schemas import (
    CreateDeployment,
    DeploymentBeat,
    EventName,
    Heartbeat,
    Receipt,
    RegisterWorker,
    WorkerStatus,
)

PIECES = 8
PIECE = 1024


@functools.cache
def small_manifest(version: str = "v1", model_id: str = "m") -> Manifest:
    """A model of 8 pieces in 4 chunks, with digests of nothing in particular."""
    digest = hashlib.sha256(version.encode()).hexdigest()
    chunks = tuple(Chunk(index, index * 2 * PIECE, 2 * PIECE, digest) for index in range(4))
    file = FileEntry("model.bin", PIECES * PIECE, digest, (digest,) * PIECES)
    return Manifest(
        model_id=model_id,
        version=version,
        piece_bytes=PIECE,
        chunk_bytes=2 * PIECE,
        files=(file,),
        chunks=chunks,
    )


def registration(worker_id: str = "node-0", incarnation: int = 1, **more) -> RegisterWorker:
    fields = {
        "worker_id": worker_id,
        "hostname": "h",
        "rack": "r0",
        "available_storage": 1,
        "address": "127.0.0.1:1",
        "incarnation": incarnation,
    }
    return RegisterWorker(**(fields | more))


def creation(*targets: str, version: str = "v1", **more) -> CreateDeployment:
    fields = {"model_id": "m", "source_url": "s3://b/m"} | more
    return CreateDeployment(target_workers=targets, version=version, **fields)


def receipt_of(made, deployment_id: str, worker_id: str, incarnation: int, **more) -> Receipt:
    """The receipt of a worker that found everything on its disk; ``made`` names the model."""
    fields = {
        "deployment_id": deployment_id,
        "worker_id": worker_id,
        "incarnation": incarnation,
        "model_id": made.model_id,
        "version": made.version,
        "path": "/models",
        "total_bytes": PIECES * PIECE,
        "seconds": 0.0,
        **dict.fromkeys(("received_bytes", "origin_bytes", "reused_bytes", "reused_pieces"), 0),
        **dict.fromkeys(("refetched_bytes", "sent_bytes", "corrupt_pieces"), 0),
    }
    return Receipt(**(fields | more))


@dataclass
class World:
    """Drives one CoordinatorState; remembers what it told and kept."""

    settings: CoordinatorSettings = field(
        default_factory=lambda: CoordinatorSettings(
            beat_s=0.5, return_grace_s=60.0, deadline_s=600.0
        )
    )
    now_s: float = 1000.0
    made: int = 0

    def __post_init__(self) -> None:
        self.state = CoordinatorState(self.settings)
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
            address = f"127.0.0.1:{1000 + number}"
            self.register_as(worker_id, number, address=address, link_mbit=80, rack=rack or "r0")
            self.silent.discard(worker_id)

    def register_as(self, worker_id: str, number: int, **more):
        self.give(Register(call=registration(worker_id, number, **more)))
        self.incarnations[worker_id] = number

    def beat(self, worker_id: str, *entries: DeploymentBeat, incarnation: int | None = None):
        number = incarnation or self.incarnations[worker_id]
        status = entries[0].status if entries else WorkerStatus.IDLE
        beat = Heartbeat(
            worker_id=worker_id, status=status, incarnation=number, deployments=entries
        )
        return self.give(HeartbeatReceived(beat=beat, at=self.now_s))

    def create(self, *targets: str, key: str | None = None, version: str = "v1", **more):
        self.made += 1
        call = creation(*targets, version=version, **more)
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
        plan = self.state.deployment_state(deployment_id).plan
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
        made = self.state.deployment_state(deployment_id).deployment
        fields = {"manifest_digest": made.manifest_digest, "total_bytes": made.total_bytes} | more
        return receipt_of(made, deployment_id, worker_id, self.incarnations[worker_id], **fields)

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
        return self.state.deployment_state(deployment_id).deployment.status.value

    def epoch(self, deployment_id: str) -> int:
        return self.state.deployment_state(deployment_id).deployment.epoch

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
