"""Small simulated fleets catch protocol bugs that are planted in the session.

A harness that finds nothing proves little unless it finds what is there. Each bug is planted in the
production classes, and one of a few fleets with one fault each has to break an invariant by it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest

from paceline.coordinator import CoordinatorSettings
from paceline.relay.protocol import (
    Extent,
    LanesAssigned,
    OriginBudget,
    PieceRejected,
    PieceVerified,
    Puller,
    PullState,
    RelaySession,
    Repairs,
    SessionAction,
    SessionEvent,
    SourceFailed,
    SourceSelector,
    SourceStream,
    pull_state,
    pulling,
    session,
)
from paceline.schemas import Source, Topology
from paceline.simulation import Fault, Scenario, simulate, streams
from tests.simulation.kit import scenario

Plant = Callable[[pytest.MonkeyPatch], None]
MESSAGES = (PieceVerified, PieceRejected, SourceFailed, LanesAssigned)


# A coordinator that plans only once: what a session does not recover by itself stays undone.
AWAY = CoordinatorSettings(beat_s=300.0, deadline_s=1e6)
SLOWER = (
    1.25  # times as long as without the bug: also a broken invariant (I7), virtual times are exact
)


def fleets() -> list[Scenario]:
    """Return chains of five, each with corrupt pieces or one fault."""
    kill, silence = (Fault(at_s=2.0, worker="node-2", kind=kind) for kind in ("kill", "silence"))
    alone = {"topology": Topology.CHAIN, "settings": AWAY}
    return [
        scenario(5, 60, corrupt=0.2, seed=1, topology=Topology.CHAIN),
        *(scenario(5, 60, faults=(fault,), **alone) for fault in (kill, silence)),
    ]


@pytest.fixture(scope="module")
def healthy_s() -> list[float]:
    """The virtual seconds that each fleet takes without a planted bug."""
    reports = [simulate(each) for each in fleets()]
    assert [each.violations for each in reports] == [()] * len(reports)
    return [each.seconds for each in reports]


def caught(healthy_s: list[float]) -> str:
    """Simulate until an invariant is broken and return which; "" where none is."""
    for each, well_s in zip(fleets(), healthy_s, strict=True):
        report = simulate(each)
        if report.violations:
            return report.violations[0]
        if report.seconds > SLOWER * well_s:
            return f"I7 {report.seconds:.1f} s instead of {well_s:.1f}"
    return ""


def test_messages_that_arrive_twice_or_again_later_change_nothing(
    healthy_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = RelaySession.handle
    earlier: WeakKeyDictionary[RelaySession, SessionEvent] = WeakKeyDictionary()

    def twice(self: RelaySession, event: SessionEvent, now_s: float) -> list[SessionAction]:
        actions = handle(self, event, now_s)
        if isinstance(event, MESSAGES):
            actions += handle(self, event, now_s)
            if (old := earlier.get(self)) is not None:
                actions += handle(self, old, now_s)
            earlier[self] = event
        return actions

    monkeypatch.setattr(RelaySession, "handle", twice)
    assert caught(healthy_s) == ""


def test_the_short_way_of_a_session_decides_what_the_long_way_does(
    healthy_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = RelaySession.handle

    def long_way(self: RelaySession, event: SessionEvent, now_s: float) -> list[SessionAction]:
        self._due_s = float("-inf")  # a deadline may be due: everything is looked at
        return handle(self, event, now_s)

    monkeypatch.setattr(RelaySession, "handle", long_way)
    reports = [simulate(each) for each in fleets()]
    assert [each.seconds for each in reports] == pytest.approx(healthy_s, rel=1e-3)
    assert [each.violations for each in reports] == [()] * len(reports)


# ── by hand: what goes wrong in protocols ────────────────────────────────────────────────────────


def forwards_what_is_not_verified(patch: pytest.MonkeyPatch) -> None:
    honest = RelaySession._reject

    def hasty(self: RelaySession, key: str, stream: int, extent: Extent, *more: object) -> None:
        honest(self, key, stream, extent, *more)  # type: ignore[arg-type]
        self._pull.state.record_verified(extent, 0.0)

    patch.setattr(RelaySession, "_reject", hasty)


def forgets_what_was_in_flight(patch: pytest.MonkeyPatch) -> None:
    def forget(self: PullState, stream: SourceStream, extent: Extent) -> None:
        for task, part in self.tasks.parts(extent):
            self.drop_from(stream, task, part)

    patch.setattr(PullState, "requeue", forget)


def spends_more_than_its_budget(patch: pytest.MonkeyPatch) -> None:
    def origin_first(_self: SourceSelector, source: Source, _work: object) -> int:
        return 0 if source.kind == "origin" else 1

    patch.setattr(OriginBudget, "left_bytes", 1 << 60)
    patch.setattr(SourceSelector, "failures", origin_first)


def completes_before_all_is_durable(patch: pytest.MonkeyPatch) -> None:
    honest = RelaySession._advance

    def hasty(self: RelaySession, now_s: float, actions: list[SessionAction]) -> None:
        for run in self.verified:
            self._durable.add(run)
        honest(self, now_s, actions)

    patch.setattr(RelaySession, "_advance", hasty)


def waits_for_silent_sources_for_ever(patch: pytest.MonkeyPatch) -> None:
    def never(self: Puller, now_s: float, _actions: list[SessionAction]) -> None:
        self.checked_s = now_s

    patch.setattr(Puller, "check_deadlines", never)


def drops_a_corrupt_piece_and_never_asks_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Repairs, "rejected", lambda *_arguments: [])


def never_chooses_a_source_for_a_repair(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Repairs, "choose", lambda *_arguments: None)


def counts_corrupt_pieces_as_durable(patch: pytest.MonkeyPatch) -> None:
    honest = RelaySession._reject

    def believing(self: RelaySession, key: str, stream: int, extent: Extent, *more: object) -> None:
        honest(self, key, stream, extent, *more)  # type: ignore[arg-type]
        self._durable.add(extent)
        self.verified.add(extent)

    patch.setattr(RelaySession, "_reject", believing)


BY_HAND: list[Plant] = [
    forwards_what_is_not_verified,
    forgets_what_was_in_flight,
    spends_more_than_its_budget,
    completes_before_all_is_durable,
    waits_for_silent_sources_for_ever,
    drops_a_corrupt_piece_and_never_asks_again,
    never_chooses_a_source_for_a_repair,
    counts_corrupt_pieces_as_durable,
]


@pytest.mark.nightly
@pytest.mark.parametrize("plant", BY_HAND, ids=lambda plant: plant.__name__)
def test_a_typical_protocol_bug_is_caught(
    plant: Plant, healthy_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert caught(healthy_s), f"no invariant was broken although the session {plant.__name__}"


# ── one small change to the source ───────────────────────────────────────────────────────────────

# module, its class, who uses it, what stands there once, what stands there instead
MUTANTS = [
    (pull_state, "PullState", pulling,
     "task.requested_pieces -= part.size", "task.requested_pieces += part.size"),
    (session, "RelaySession", streams, "== self.pieces.count", "!= self.pieces.count"),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "name", "user", "before", "after"), MUTANTS, ids=[each[1] for each in MUTANTS]
)
def test_a_mutant_of_the_session_is_caught(
    module: types.ModuleType,
    name: str,
    user: types.ModuleType,
    before: str,
    after: str,
    healthy_s: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = types.ModuleType("mutant")  # only this test imports it
    monkeypatch.setitem(sys.modules, "mutant", changed)  # dataclasses look their module up
    source = Path(module.__file__ or "").read_text()
    assert before in source, "choose another mutant"
    source = source.replace(before, after, 1)
    exec(compile(source, "<mutant>", "exec"), changed.__dict__)
    monkeypatch.setattr(user, name, changed.__dict__[name])
    assert caught(healthy_s), f"no invariant was broken by {name} with {after}"
