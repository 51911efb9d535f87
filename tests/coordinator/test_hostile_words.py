"""What a worker says that cannot be so: it is refused, and spoils nothing for anybody else."""

import contextlib
import json

import pytest
from pydantic import ValidationError

from paceline.api import SnapshotReader
from paceline.api.pages import _snapshot
from paceline.coordinator.state import HeartbeatReceived, Register
from paceline.errors import InvalidInput, PacelineError
from paceline.schemas import Heartbeat, LeaderView, RegisterWorker
from paceline.telemetry import FleetMetrics, MomentBuilder
from tests.coordinator.conftest import PIECE, PIECES

HUGE = 10**400  # no float, no 64 bits
ENTRY = {"epoch": 1, "status": "receiving", "pieces_held": 2, "bytes_held": 2 * PIECE}
EDGE = {"source": "node-0", "reader": "node-1"}
RECEIVING = {"chunks_received": [0]}


def spoken(world, deployment_id, **entry):
    """node-1 beats about its deployment, as bytes that come in by the port."""
    said = {
        "worker_id": "node-1",
        "status": "receiving",
        "deployments": [{"deployment_id": deployment_id, **ENTRY, **entry}],
    }
    beat = Heartbeat.model_validate_json(json.dumps(said))
    return world.give(HeartbeatReceived(beat=beat, at=world.now_s))


def everything(world) -> str:
    """All that anybody can ask for; whoever asks must get an answer."""
    state = world.state
    text = [FleetMetrics(lambda: _snapshot(state)).text().decode()]
    looks = SnapshotReader(_Stand(state), lambda: LeaderView(epoch=1))
    moments = MomentBuilder()
    for _ in range(2):
        look = looks.take(set())
        text.append(moments.take(look).model_dump_json())
        world.now_s += 1
    for run in state.deployments():
        text.append(state.view(run.deployment_id).model_dump_json())
        text += [each.model_dump_json() for each in state.progress(run.deployment_id)]
    text += [each.model_dump_json() for each in state.fleet.workers()]
    return "\n".join(text)


class _Stand:
    def __init__(self, state) -> None:
        self._state = state

    def read(self, question):
        return question(self._state)

    def now(self) -> float:
        return 1e9


@pytest.fixture
def moving(world):
    world.register("node-0", "node-1")
    deployment_id = world.create("node-0", "node-1")
    world.wait(1.0)
    for each in ("node-0", "node-1"):
        world.lanes(deployment_id, each)
        world.receive(deployment_id, each, 2)
    return deployment_id


IMPOSSIBLE = {
    "more pieces than there are": {"pieces_held": PIECES + 1},
    "pieces beyond any number": {"pieces_held": HUGE},
    "more bytes than there are": {"bytes_held": PIECES * PIECE + 1},
    "bytes beyond any number": {"bytes_held": HUGE},
    "a chunk below the first": {"chunks_received": [-1]},
    "a chunk beyond the last": {"chunks_received": [0, 1, 2, 4]},
    "a chunk that a bitmap of it would fill the memory": {"chunks_received": [10**15]},
    "a chunk twice": {"chunks_received": [0, 0, 0, 0]},
    "bytes from the origin beyond any number": {"origin_bytes": HUGE},
    "an edge with bytes beyond any number": {"edges": [EDGE | {"bytes": HUGE}]},
    "an edge with pieces beyond any number": {"edges": [EDGE | {"pieces": HUGE}]},
    "an edge that was busy for ever": {"edges": [EDGE | {"busy_s": 1e308}]},
    "a lost source that is nobody here": {"lost_sources": ["node-9"]},
    "a lost source that is another origin": {"lost_sources": ["origin:s3://elsewhere/x"]},
    "a corrupt source that is nobody here": {"corrupt_sources": ["x" * 3000]},
    "an epoch beyond any number": {"epoch": HUGE},
    "a status of no deployment": {"status": "sleeping"},
}


@pytest.mark.parametrize("entry", IMPOSSIBLE.values(), ids=list(IMPOSSIBLE))
def test_what_cannot_be_so_is_refused_and_changes_nothing(world, moving, entry):
    before = everything(world)
    told = len(world.told)
    world.now_s -= 2
    with pytest.raises((InvalidInput, ValidationError)):
        spoken(world, moving, **entry)
    assert everything(world) == before
    assert len(world.told) == told


def test_one_impossible_word_takes_the_whole_beat_along(world, moving):
    """What the same beat says of another deployment is not taken either."""
    other = world.create("node-0", "node-1", version="v2")
    said = {
        "worker_id": "node-1",
        "status": "receiving",
        "deployments": [
            {"deployment_id": moving, **ENTRY, "pieces_held": 5, "bytes_held": 5 * PIECE},
            {"deployment_id": other, **ENTRY, "pieces_held": PIECES + 1},
        ],
    }
    with pytest.raises(InvalidInput):
        world.give(HeartbeatReceived(beat=Heartbeat.model_validate(said), at=world.now_s))
    assert world.state.deployment_state(moving).parts["node-1"].pieces_held == 2


def test_receipt_while_receiving_is_kept_before_it_is_answered(world, moving):
    """A beat that says two things at once is not a calm one: its receipt must be committed."""
    receipt = world.receipt(moving, "node-1")
    said = world.entry(moving, "node-1", PIECES, receipt=receipt)
    beat = Heartbeat(worker_id="node-1", status="receiving", deployments=(said,))
    assert not world.state.agents.needs_no_commit(beat)


def test_receipt_counts_nothing_beyond_any_number(world, moving):
    """Receipts go into tables and metrics, which end at 63 bits or at floats."""
    receipt = world.receipt(moving, "node-1").model_dump()
    for field in ("received_bytes", "origin_bytes", "sent_bytes", "corrupt_pieces"):
        with pytest.raises(ValidationError):
            spoken(world, moving, status="complete", receipt=receipt | {field: HUGE})


def test_sources_are_told_a_few_at_a_time(make_world):
    """A worker that gives up everybody at once does not fill the outbox with one beat."""
    world = make_world()
    names = [f"node-{number}" for number in range(200)]
    world.register(*names)
    deployment_id = world.create(*names, topology="chain")
    world.wait(1.0)
    lost = tuple(names[2:])
    told = []
    for _ in range(8):
        before = len(world.told)
        spoken(world, deployment_id, pieces_held=0, bytes_held=0, lost_sources=lost)
        told.append(len(world.told) - before)
    assert max(told) <= 64
    assert sum(told) == len(lost), "each of them once, in the end"
    assert told[-1] == 0


@pytest.mark.parametrize(
    "more",
    [
        {"link_mbit": 1e308},
        {"link_mbit": 5e-324},
        {"incarnation": HUGE},
        {"pid": -1},
    ],
    ids=str,
)
def test_registration_beyond_any_machine_stops_nobody(world, more):
    """Whatever one worker says of itself, plans are made and everybody is answered."""
    world.register("node-0")
    call = {
        "worker_id": "node-1",
        "hostname": "h",
        "rack": "r",
        "available_storage": 1,
        "address": "127.0.0.1:1",
    }
    with contextlib.suppress(ValidationError, PacelineError):
        made = RegisterWorker.model_validate_json(json.dumps(call | more))
        world.give(Register(call=made, at=world.now_s))
        world.incarnations["node-1"] = made.incarnation
    for version, topology in enumerate(("auto", "chain", "mesh", "tree-of-chains", "direct"), 1):
        world.create("node-0", "node-1", version=f"v{version}", topology=topology, max_failed=0.5)
        world.wait(1.0)
    world.wait(70.0)
    assert everything(world)
