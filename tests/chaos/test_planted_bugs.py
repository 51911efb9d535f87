"""The worlds of chaos catch protocol bugs: some planted by hand, some by a mutation tool.

A harness that finds nothing proves little unless it finds what is there. Each bug is planted in the
production classes, and the first few dozen worlds have to break a promise because of it.
"""

from __future__ import annotations

import difflib
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import libcst
import pytest
from mutmut.mutation.file_mutation import Mutation, create_mutations, deep_replace

from paceline.relay.protocol import pull_state as flights
from paceline.relay.protocol import pulling, session
from paceline.relay.protocol import side_requests as asking
from paceline.relay.protocol.events import Resumed, SessionAction, SessionEvent
from paceline.relay.protocol.extents import Extent
from paceline.relay.protocol.pull_state import PullState
from paceline.relay.protocol.pulling import Puller
from paceline.relay.protocol.recovery import Repairs
from paceline.relay.protocol.session import RelaySession
from paceline.relay.protocol.source_selection import OriginBudget, SourceStream
from paceline.schemas.plan import WorkerLanes
from tests.chaos.world import play
from tests.support.memory_fleet import fleet

WORLDS = 60
Plant = Callable[[pytest.MonkeyPatch], None]


def caught() -> str:
    """Play worlds until one breaks a promise and return which; "" where none does."""
    for seed in range(WORLDS):
        try:
            play(seed)
        except AssertionError as error:
            return str(error)
    return ""


# ── by hand: what goes wrong in protocols ────────────────────────────────────────────────────────


def forwards_what_is_not_verified(patch: pytest.MonkeyPatch) -> None:
    honest = RelaySession._reject

    def hasty(
        self: RelaySession,
        key: str,
        stream: int,
        extent: Extent,
        now_s: float,
        actions: list[SessionAction],
    ) -> None:
        honest(self, key, stream, extent, now_s, actions)
        self._pull.hold(extent, now_s)

    patch.setattr(RelaySession, "_reject", hasty)


def forgets_what_was_in_flight(patch: pytest.MonkeyPatch) -> None:
    def forget(self: PullState, feed: SourceStream, extent: Extent) -> None:
        for work, part in self.works.parts(extent):
            self.drop_from(feed, work, part)

    patch.setattr(PullState, "want_again", forget)


def spends_more_than_its_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OriginBudget, "left_bytes", property(lambda _self: 1 << 60))


def believes_news_of_streams_it_gave_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PullState, "feed", lambda self, key, _stream: self.feeds.get(key))


def completes_before_all_is_durable(patch: pytest.MonkeyPatch) -> None:
    honest = RelaySession._go_on

    def hasty(self: RelaySession, now_s: float, actions: list[SessionAction]) -> None:
        for run in self._verified:
            self._durable.add(run)
        honest(self, now_s, actions)

    patch.setattr(RelaySession, "_go_on", hasty)


def goes_back_to_older_lanes(patch: pytest.MonkeyPatch) -> None:
    honest = RelaySession._assign

    def forgetful(
        self: RelaySession,
        lanes: WorkerLanes,
        read: int,
        now_s: float,
        actions: list[SessionAction],
    ) -> None:
        self._lanes = None
        honest(self, lanes, read, now_s, actions)

    patch.setattr(RelaySession, "_assign", forgetful)


def waits_for_silent_sources_for_ever(patch: pytest.MonkeyPatch) -> None:
    def never(self: Puller, now_s: float, _actions: list[SessionAction]) -> None:
        self.checked_s = now_s

    patch.setattr(Puller, "check_deadlines", never)


def drops_a_corrupt_piece_and_never_asks_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Repairs, "rejected", lambda *_arguments: [])


def believes_others_dead_for_its_own_sleep(patch: pytest.MonkeyPatch) -> None:
    honest = RelaySession.handle

    def sleepy(self: RelaySession, event: SessionEvent, now_s: float) -> list[SessionAction]:
        if isinstance(event, Resumed):
            event = replace(event, slept_s=0.0)
        return honest(self, event, now_s)

    patch.setattr(RelaySession, "handle", sleepy)


BY_HAND: list[Plant] = [
    forwards_what_is_not_verified,
    forgets_what_was_in_flight,
    spends_more_than_its_budget,
    believes_news_of_streams_it_gave_up,
    completes_before_all_is_durable,
    goes_back_to_older_lanes,
    waits_for_silent_sources_for_ever,
    drops_a_corrupt_piece_and_never_asks_again,
    believes_others_dead_for_its_own_sleep,
]


@pytest.mark.parametrize("plant", BY_HAND, ids=lambda plant: plant.__name__)
def test_a_typical_protocol_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert caught(), f"no promise was broken in {WORLDS} worlds although it {plant.__name__}"


# ── by a tool: one small change to the source ────────────────────────────────────────────────────

SOURCES = {"asking": asking, "flights": flights, "pulling": pulling, "session": session}
# module, function, what stands there, what the tool makes of it
MUTANTS = [
    (
        "asking",
        "ask",
        "self._choice.budget.spent_bytes += self._pieces.bytes_of(extent)",
        "self._choice.budget.spent_bytes = self._pieces.bytes_of(extent)",
    ),
    ("flights", "drop_from", "work.asked_pieces -= part.size", "work.asked_pieces += part.size"),
    ("pulling", "lose", "not feed.waiting", "feed.waiting"),
    (
        "session",
        "_assign",
        "lanes.epoch <= self.epoch or self._over",
        "lanes.epoch <= self.epoch and self._over",
    ),
    ("session", "_go_on", "== self._pieces.count", "!= self._pieces.count"),
]


@cache
def mutants_of(module: str) -> tuple[libcst.Module, list[Mutation]]:
    """Return the parsed source of a production module, and every mutation the tool makes of it."""
    path = Path(SOURCES[module].__file__ or "")
    tree, mutations, *_ = create_mutations(path.name, path.read_text())
    return tree, mutations


def mutate(module: str, function: str, before: str, after: str) -> tuple[str, str]:
    """Return the source of ``module`` as it is and with exactly one mutation."""

    def says(node: libcst.CSTNode, code: str) -> bool:
        return libcst.Module([]).code_for_node(node).strip() == code

    tree, mutations = mutants_of(module)
    chosen = [
        each
        for each in mutations
        if each.contained_by_top_level_function is not None
        and each.contained_by_top_level_function.name.value == function
        and says(each.original_node, before)
        and says(each.mutated_node, after)
    ]
    assert chosen, f"the tool makes no such mutant of {module}.{function}: choose another one"
    mutated = deep_replace(tree, chosen[0].original_node, chosen[0].mutated_node)
    assert isinstance(mutated, libcst.Module)
    return tree.code, mutated.code


def load(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Run ``source`` as the module ``name``, which only this test imports."""
    made = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)  # dataclasses look their module up
    exec(compile(source, f"<mutant of {name}>", "exec"), made.__dict__)
    return made


@pytest.mark.parametrize(
    ("module", "function", "before", "after"), MUTANTS, ids=lambda part: part[:24]
)
def test_a_mutant_of_the_session_is_caught(
    module: str, function: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, mutated = mutate(module, function, before, after)
    changed = load(f"mutant_of_{module}", mutated, monkeypatch)
    if module == "asking":
        monkeypatch.setattr(pulling, "RequestSender", changed.RequestSender)
    elif module == "flights":
        monkeypatch.setattr(pulling, "PullState", changed.PullState)
    elif module == "pulling":
        monkeypatch.setattr(session, "Puller", changed.Puller)
    else:
        monkeypatch.setattr(fleet, "RelaySession", changed.RelaySession)
    diff = "\n".join(difflib.unified_diff(source.splitlines(), mutated.splitlines(), lineterm=""))
    assert diff, "the mutant is no mutant"
    assert caught(), f"no promise was broken in {WORLDS} worlds by this mutant:\n{diff}"
