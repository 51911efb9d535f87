"""After a spare replaced a source that is alive, its readers go back to it, once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.coordinator import CoordinatorSettings
from paceline.errors import PeerLost
from paceline.relay.protocol import (
    Extent,
    Failback,
    Fetch,
    LanesAssigned,
    PieceRejected,
    PieceVerified,
    RelaySession,
    SessionAction,
    SessionLimits,
    SourceAlive,
    SourceFailed,
    Tick,
)
from paceline.schemas import Topology
from paceline.simulation import Fault, simulate
from tests.relay.kit import lanes, paper_manifest, worker
from tests.simulation.kit import scenario

MANIFEST = paper_manifest(400)
LIMITS = SessionLimits(window_bytes=8 * 1024, window_pieces=8)
STEP_S = 0.1  # in which the spare brings one piece


class Reader:
    """One session that reads from the spare ``far``, piece by piece, while ``up`` is away."""

    def __init__(self, held: int = 0) -> None:
        self.relay = RelaySession(
            worker_id="me", manifest=MANIFEST, held=range(held), limits=LIMITS, seed=1
        )
        self.now_s = 0.0
        self.owed: dict[str, list[tuple[int, int]]] = {"up": [], "far": []}  # stream, piece
        self.asked: dict[str, list[float]] = {"up": [], "far": []}  # when
        self.take(self.relay.handle(LanesAssigned(lanes("me", MANIFEST, worker("up"), FAR)), 0))
        stream = self.owed["up"][0][0]
        self.owed["up"].clear()
        self.asked["up"].clear()
        self.take(self.relay.handle(SourceFailed("up", stream, PeerLost("refused")), 0))

    def take(self, actions: list[SessionAction]) -> None:
        for action in actions:
            if isinstance(action, Fetch):
                key = action.source.key
                self.asked[key].append(self.now_s)
                self.owed[key] += [(action.stream, piece) for piece in range(*action.extent)]

    def arrive(self, key: str) -> None:
        stream, piece = self.owed[key].pop(0)
        event = PieceVerified(key, stream, Extent(piece, piece + 1))
        self.take(self.relay.handle(event, self.now_s))

    def step(self) -> None:
        """Let the spare send one piece, and ``up`` say that it lives where it owes something."""
        self.now_s += STEP_S
        if self.owed["far"]:
            self.arrive("far")
        if self.owed["up"]:
            alive = SourceAlive("up", self.owed["up"][0][0])
            self.take(self.relay.handle(alive, self.now_s))
        deadline_s = self.relay.deadline_s()
        if deadline_s is not None and deadline_s <= self.now_s:
            self.take(self.relay.handle(Tick(), self.now_s))

    def until_asked(self, most_s: float = 100.0) -> None:
        """Go on until ``up`` is asked for something."""
        end_s = self.now_s + most_s
        while not self.owed["up"]:
            self.step()
            assert self.now_s < end_s, "nobody asked the planned source again"


FAR = worker("far")


def test_two_pieces_on_the_side_lead_back_to_a_source_that_keeps_up() -> None:
    reader = Reader()
    for _ in range(2):
        reader.until_asked()
        assert len(reader.owed["up"]) == 1
        for _ in range(5):
            reader.step()
        reader.arrive("up")
    asked_far = len(reader.asked["far"])
    for _ in range(20):
        reader.step()
    assert len(reader.owed["up"]) > 1, "the window goes to the planned source again"
    assert reader.owed["far"] == [], "what was in flight from the spare came from there"
    assert len(reader.asked["far"]) == asked_far


def test_the_planned_source_is_not_asked_at_once() -> None:
    reader = Reader()
    reader.until_asked()
    assert LIMITS.return_s <= reader.asked["up"][0] < LIMITS.return_s + 1


@pytest.mark.parametrize(
    ("held", "late"),
    [
        pytest.param(0, (10, 40), id="falls further behind"),
        pytest.param(0, (54, 54), id="so far behind that it would be given up again"),
        pytest.param(300, (33, 33), id="as far behind as half of what is missing"),
    ],
)
def test_a_source_that_is_not_worth_waiting_for_is_not_gone_back_to(
    held: int, late: tuple[int, int]
) -> None:
    reader = Reader(held)
    for steps in late:
        reader.until_asked()
        for _ in range(steps):
            reader.step()
        assert len(reader.owed["up"]) == 1
        reader.arrive("up")
    asked_far = len(reader.asked["far"])
    for _ in range(10):
        reader.step()
    assert reader.owed["up"] == []
    assert len(reader.asked["far"]) > asked_far


def test_probes_in_vain_come_later_each_time() -> None:
    reader = Reader()
    while reader.now_s < 35:
        reader.step()
        if len(reader.owed["up"]) > 1:
            raise AssertionError("one piece at a time")
        if reader.owed["up"] and reader.now_s - reader.asked["up"][-1] > 8.5:
            reader.owed["up"].clear()  # given up by now
    waits = [later - at for at, later in pairwise(reader.asked["up"])]
    assert 2 <= len(reader.asked["up"]) <= 3
    assert all(wait_s >= LIMITS.return_s * 4 for wait_s in waits)
    assert reader.relay.verified.count > 300, "and nothing waits for them"


def test_a_corrupt_probe_is_fetched_from_the_spare() -> None:
    reader = Reader()
    reader.until_asked()
    stream, piece = reader.owed["up"].pop()
    bad = PieceRejected("up", stream, Extent(piece, piece + 1))
    reader.take(reader.relay.handle(bad, reader.now_s))
    for _ in range(20):
        reader.step()
    assert piece in reader.relay.verified


def test_at_the_end_nobody_waits_for_a_probe() -> None:
    reader = Reader()
    while reader.relay.verified.count < MANIFEST.piece_count - LIMITS.return_pieces - 10:
        reader.owed["up"].clear()  # its probes stay unanswered
        reader.step()
    for _ in range(LIMITS.return_pieces + 20):
        reader.owed["up"].clear()
        reader.step()
    assert reader.relay.verified.count == MANIFEST.piece_count


def test_a_planned_source_that_takes_over_owes_its_probe() -> None:
    reader = Reader()
    reader.until_asked()
    stream, piece = reader.owed["up"][0]
    lost = SourceFailed("far", reader.owed["far"][0][0], PeerLost("refused"))
    reader.owed["far"].clear()
    reader.take(reader.relay.handle(lost, reader.now_s))  # it delivered: opened again at once
    again = SourceFailed("far", reader.owed["far"][0][0], PeerLost("refused"))
    reader.owed["far"].clear()
    reader.take(reader.relay.handle(again, reader.now_s))
    assert (stream, piece) in reader.owed["up"]
    pieces = [number for _, number in reader.owed["up"]]
    assert len(pieces) == len(set(pieces)) > 1, "asked once"


# ── fleets ───────────────────────────────────────────────────────────────────────────────────────


def hurt(topology: Topology, victim: str, monkeypatch: pytest.MonkeyPatch, *, back: bool) -> float:
    """Return how long a simulated fleet takes of which one pauses, unseen by the coordinator."""
    fault = Fault(at_s=5.0, worker=victim, kind="freeze", for_s=2.5)
    slow_to_notice = CoordinatorSettings(beat_s=2.0, deadline_s=1e6)
    with monkeypatch.context() as patch:
        if not back:
            patch.setattr(Failback, "due_s", lambda *_: None)
        report = simulate(
            scenario(8, 400, topology=topology, settings=slow_to_notice, faults=(fault,))
        )
    assert report.violations == ()
    assert report.survivors_complete
    return report.seconds


@pytest.mark.parametrize(
    ("topology", "victim", "gain"),
    [
        (Topology.CHAIN, "node-3", 0.7),
        pytest.param(Topology.MESH, "node-3", 1.01, marks=pytest.mark.nightly),
    ],
)
def test_simulated_fleets_gain_as_much_and_none_loses(
    topology: Topology, victim: str, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stayed_s = hurt(topology, victim, monkeypatch, back=False)
    assert hurt(topology, victim, monkeypatch, back=True) <= gain * stayed_s


@pytest.mark.parametrize("topology", [Topology.CHAIN, Topology.MESH])
def test_without_faults_nobody_is_asked_on_the_side(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a spare stood in")

    monkeypatch.setattr(Failback, "record_spare", never)
    assert simulate(scenario(8, 60, topology=topology)).violations == ()
