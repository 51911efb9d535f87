"""An independent account of what a fleet was promised, and a machine that tries to break it.

The real driver (``Coordinator``) and state run on a store that is a list; the machine plays
callers, agents, two replicas, a store that writes and then times out, and messages that come twice
or late. What must hold is written down here a second time, without a line of production code:

- I4: an older incarnation's beat and an older leader's write change nothing;
- I5: a deployment that was acknowledged is there, once, whoever leads;
- I11: once a cancel is acknowledged, no agent publishes that deployment;
- I12: what is kept and what is waited for is bounded;
- a switch reaches nobody before a quorum holds the version; each agent is told to make active
  exactly what its own history of activations says, forwards and back.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.coordinator import Coordinator
from paceline.coordinator.state import (
    Activate,
    Answer,
    CoordinatorSettings,
    DropDeployment,
    EmitEvent,
    FetchLanes,
    HeartbeatReceived,
    LoadedState,
    PersistedState,
    Register,
    Rollback,
    SaveDeployment,
)
from paceline.coordinator.stores import Outbox, Term
from paceline.errors import (
    Cancelled as CancelledError,
    Conflict,
    DeploymentFailed,
    NotFound,
    PacelineError,
    ServiceUnavailable,
    StaleEpoch,
)
from paceline.schemas import (
    DeploymentBeat,
    Event,
    EventName,
    Heartbeat,
    WorkerStatus,
    base,
)
from tests.coordinator.conftest import (
    PIECE,
    PIECES,
    creation,
    receipt_of,
    registration,
    small_manifest,
)
from tests.coordinator.stores.effects import expected

FLEET = ("n0", "n1", "n2")
KEYS = st.sampled_from(["k0", "k1", "k2"])
VERSIONS = st.sampled_from(["v1", "v2", "v3"])
WORKERS = st.sampled_from(FLEET)
COUNTS = st.integers(1, 3)
LATE = st.sampled_from(["", "", "after"])
PATIENCE = CoordinatorSettings(
    beat_s=0.5,
    return_grace_s=20.0,
    deadline_s=120.0,
    switch_s=10.0,
    kept_closed=2,
    kept_closed_s=60.0,
    kept_at_most=4,
)
TICK_S = 0.25


class Ledger:
    """A coordination store in memory: effects in the order of their commits, and who leads."""

    backend = "a list"
    standbys = True

    def __init__(self) -> None:
        self.epoch = 0
        self.effects: list[object] = []
        self.present: dict[str, object] = {}  # deployments that are kept, with their manifests
        self.events: list[Event] = []
        self.fault = ""  # of the next commit: "before" it is written, or "after"
        self.frozen: set[int] = set()  # epochs of leaders that still believe in themselves
        self.writers: list[int] = []

    def elect(self, name: str) -> Term:
        self.epoch += 1
        return Term(self.epoch, name, f"http://{name}")

    def is_leading(self, term: Term) -> bool:
        return term.epoch == self.epoch or term.epoch in self.frozen

    def commit(self, term: Term, effects) -> list[Event]:
        kept = [each for each in effects if not isinstance(each, Answer)]
        if not kept:
            return []
        fault, self.fault = self.fault, ""
        if fault == "before":
            raise ServiceUnavailable("the store is away")
        if term.epoch != self.epoch:
            raise StaleEpoch("a newer coordinator leads")
        told = []
        for each in kept:
            if isinstance(each, EmitEvent):
                fields = (each.name, each.at, each.deployment_id, each.worker_id, each.data)
                names = ("name", "at", "deployment_id", "worker_id", "data")
                numbered = {"seq": len(self.events) + 1} | dict(zip(names, fields, strict=True))
                told.append(Event.model_validate(numbered))
                self.events.append(told[-1])
            else:
                self.effects.append(_frozen(each))
                if isinstance(each, SaveDeployment) and each.manifest is not None:
                    self.present[each.deployment.deployment_id] = each.manifest
                elif isinstance(each, DropDeployment):
                    del self.present[each.deployment_id]
                self.writers.append(term.epoch)
        if fault == "after":
            raise ServiceUnavailable("the store did not answer in time")
        return told

    def load(self, now_s: float) -> LoadedState:
        return expected(self.effects)

    def leader(self) -> Term | None:
        return None

    def outbox(self) -> Outbox:
        return Outbox(shipped=len(self.events), last=len(self.events))

    def events_after(self, seq: int, limit: int) -> list[Event]:
        return self.events[seq : seq + limit]


def _frozen(effect: object) -> object:
    """What was written, as it was then: later changes of live objects do not reach it."""
    if isinstance(effect, SaveDeployment):
        persisted = PersistedState.from_json(effect.persisted.to_json())
        return SaveDeployment(effect.deployment, persisted, effect.manifest)
    return effect


class Numbered:
    """Stands in for ``secrets``: ids in the order in which they were made."""

    def __init__(self) -> None:
        self._made = itertools.count()

    def token_hex(self, length: int) -> str:
        return f"{next(self._made):0{2 * length}x}"


class NoProgress:
    """A progress store that has lost everything."""

    def get(self, deployment_id: str) -> dict[str, object]:
        return {}

    def beats(self) -> dict[str, float]:
        return {}


@dataclass
class Agent:
    """One agent: what is on its disk, what its process knows, what it said before."""

    worker_id: str
    incarnation: int = 0
    running: bool = False
    number: int = 0
    published: set[str] = field(default_factory=set)  # on its disk, whatever happens
    active: str = ""  # likewise
    pieces: dict[str, int] = field(default_factory=dict)  # of what it was given lanes for
    epochs: dict[str, int] = field(default_factory=dict)
    activated: set[str] = field(default_factory=set)
    said: list[Heartbeat] = field(default_factory=list)

    def move(self, pieces: int) -> None:
        """Receive some pieces of everything that is under way, and publish what is whole."""
        for deployment_id in self.pieces:
            held = min(PIECES, self.pieces[deployment_id] + pieces)
            self.pieces[deployment_id] = held
            if held == PIECES:
                self.published.add(deployment_id)

    def entry(self, deployment_id: str, manifest) -> DeploymentBeat:
        whole = deployment_id in self.published
        held = PIECES if whole else self.pieces[deployment_id]
        digest = {"manifest_digest": manifest.digest, "total_bytes": manifest.total_size}
        name, number = self.worker_id, self.incarnation
        receipt = receipt_of(manifest, deployment_id, name, number, **digest) if whole else None
        return DeploymentBeat(
            deployment_id=deployment_id,
            epoch=self.epochs[deployment_id],
            status=WorkerStatus.COMPLETE if whole else WorkerStatus.RECEIVING,
            pieces_held=held,
            bytes_held=held * PIECE,
            chunks_received=tuple(range(held // 2)),
            receipt=receipt,
            activated=deployment_id in self.activated,
        )


class Fleet(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        # Ids that are drawn by chance would make the same steps another run.
        self.ids, base.secrets = base.secrets, Numbered()
        self.now_s = 1000.0
        self.store = Ledger()
        self.replicas = {name: self._replica() for name in ("a", "b")}
        self.leader = ""
        self.agents = {name: Agent(name) for name in FLEET}
        self.acknowledged: dict[str, str] = {}  # deployment → version, as the caller heard
        self.by_key: dict[str, tuple[str, str]] = {}  # key → deployment, body
        self.unsure: dict[str, tuple[str, int]] = {}  # keys whose call failed → version, targets
        self.cancelled: dict[str, set[str]] = {}  # acknowledged → who had published it by then
        self.final: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self.wanted: dict[str, str] = {}  # deployment → what was asked last,
        self.shown: dict[str, set[str]] = {}  # and who has shown since that it can
        self.began_s: dict[str, float] = {}
        self.history: dict[str, list[str]] = {name: [] for name in FLEET}  # newest last
        self.heard_events = 0

    def teardown(self) -> None:
        base.secrets = self.ids

    # --- plumbing --------------------------------------------------------------------------------

    def _replica(self) -> Coordinator:
        return Coordinator(
            self.store,
            progress=NoProgress(),
            audit=None,
            resolve_source=lambda url: (
                url,
                small_manifest(url.rpartition("/")[2], "other" if "other" in url else "m"),
            ),
            settings=PATIENCE,
            monotonic=lambda: self.now_s,
            wall=lambda: self.now_s,
        )

    @property
    def coordinator(self) -> Coordinator:
        return self.replicas[self.leader]

    def state(self):
        return self.coordinator.read(lambda state: state)

    def after_trouble(self) -> None:
        """Let the time pass in which a coordinator in trouble refuses everything."""
        self.now_s += 0.6

    def deployments(self) -> dict[str, object]:
        return {each.deployment_id: each for each in self.state().deployments()}

    def elect(self, name: str) -> None:
        term = self.store.elect(name)
        self.leader = name
        self.coordinator.lead(term)

    def tell(self, event):
        return self.coordinator.handle(event)

    def targets(self, deployment_id: str) -> tuple[str, ...]:
        return self.deployments()[deployment_id].target_workers

    def draw_deployment(self, data) -> str:
        return data.draw(st.sampled_from(sorted(self.deployments())))

    # --- callers ---------------------------------------------------------------------------------

    @initialize()
    def begin(self):
        self.elect("a")
        for name in FLEET:
            self.start(name)

    @rule(key=KEYS, version=VERSIONS, count=COUNTS, fault=st.sampled_from(["", "before", "after"]))
    def create(self, key, version, count, fault):
        body = f"{version} {count}"
        more = {"source_url": f"s3://b/{version}", "allow_older": True}
        call = creation(*FLEET[:count], version=version, **more)
        self.store.fault = fault
        try:
            made = self.coordinator.create(call, key).deployment_id
        except ServiceUnavailable:
            self.unsure.setdefault(key, (version, count))
            self.after_trouble()
            return
        except Conflict:
            known = self.by_key.get(key)
            assert known is None or known[1] != body, "the same request was refused"
            assert known is not None or key in self.unsure
            return
        finally:
            self.store.fault = ""
        self.unsure.pop(key, None)
        if key in self.by_key:
            assert self.by_key[key] == (made, body), "one key made two deployments"
        else:
            assert made not in self.acknowledged
        self.by_key[key] = (made, body)
        self.acknowledged[made] = version

    @precondition(lambda self: self.unsure)
    @rule(data=st.data())
    def caller_tries_again(self, data):
        key = data.draw(st.sampled_from(sorted(self.unsure)))
        self.create(key, *self.unsure[key], "")

    @precondition(lambda self: self.deployments())
    @rule(data=st.data())
    def cancel(self, data):
        deployment_id = self.draw_deployment(data)
        self.store.fault = data.draw(st.sampled_from(["", "before", "after"]))
        try:
            self.coordinator.cancel(deployment_id)
        except Conflict:
            assert self.deployments()[deployment_id].status.value == "complete"
        except ServiceUnavailable:
            self.after_trouble()
        finally:
            self.store.fault = ""
        self.look_for_acknowledged_cancels()

    @rule(version=VERSIONS, pieces=st.integers(0, 2))
    def begin_and_cancel_midway(self, version, pieces):
        key = f"midway-{len(self.acknowledged)}"
        self.create(key, version, 2, "")
        for agent in (self.agents["n0"], self.agents["n1"]):
            if agent.running:
                self.beat(agent)
                agent.move(pieces)
        self.coordinator.cancel(self.by_key[key][0])

    def look_for_acknowledged_cancels(self) -> None:
        """What ``DELETE`` would answer by now: everybody alive has stopped."""
        for deployment_id, each in self.deployments().items():
            if each.status.value != "cancelled" or deployment_id in self.cancelled:
                continue
            if not self.state().unstopped(deployment_id):
                published = {n for n, a in self.agents.items() if deployment_id in a.published}
                self.cancelled[deployment_id] = published

    @precondition(lambda self: self.deployments())
    @rule(data=st.data(), back=st.booleans())
    def switch(self, data, back):
        complete = sorted(d for d, e in self.deployments().items() if e.status.value == "complete")
        deployment_id = data.draw(st.sampled_from(complete or sorted(self.deployments())))
        kind = Rollback if back else Activate
        more = {} if back else {"allow_older": True}
        before = len(self.store.effects)
        try:
            self.tell(kind(deployment_id=deployment_id, **more))
        except Conflict:
            assert len(self.store.effects) == before, "refused, and yet something was written"
            return
        assert deployment_id in complete, "only what is complete can be activated"
        if len(self.store.effects) > before:
            self.ask(deployment_id, "back" if back else "on")
        self.hear_events()

    def ask(self, deployment_id: str, way: str) -> None:
        self.wanted[deployment_id], self.shown[deployment_id] = way, set()

    @rule(version=VERSIONS, count=st.sampled_from([3, 3, 2]), activate=st.booleans())
    def bring(self, version, count, activate):
        """A version comes to everybody, as it should; and is made active."""
        key = f"bring-{len(self.acknowledged)}"
        self.create(key, version, count, "")
        made = self.by_key.get(key)
        if made is None or made[0] not in self.deployments():
            return
        for name in self.targets(made[0]):
            if not self.agents[name].running:
                self.start(name)
        self.everybody_moves_and_beats()
        if activate and self.deployments()[made[0]].status.value == "complete":
            self.tell(Activate(deployment_id=made[0], allow_older=True))
            self.ask(made[0], "on")
            self.everybody_moves_and_beats()

    @rule(version=VERSIONS, absent=WORKERS)
    def switch_with_one_away(self, version, absent):
        self.bring(version, 3, False)
        made = list(self.acknowledged)[-1]
        if self.deployments()[made].status.value != "complete":
            return
        self.kill(absent)
        self.tell(Activate(deployment_id=made, allow_older=True))
        self.ask(made, "on")
        self.everybody_moves_and_beats()
        self.wait(4.0, "")

    @rule(count=st.integers(2, 3))
    def several_versions_and_back(self, count):
        for version in ("v1", "v2", "v3")[:count]:
            self.bring(version, 3, True)
        stack = self.history["n0"]
        if stack and self.deployments()[stack[-1]].status.value == "complete":
            self.back(stack[-1])

    @precondition(lambda self: any(self.history.values()))
    @rule(data=st.data())
    def roll_back(self, data):
        stack = data.draw(st.sampled_from([each for each in self.history.values() if each]))
        if self.deployments()[stack[-1]].status.value != "complete":
            return
        self.back(stack[-1])

    def back(self, deployment_id: str) -> None:
        try:
            self.tell(Rollback(deployment_id=deployment_id))
        except Conflict:
            return
        self.ask(deployment_id, "back")
        self.everybody_moves_and_beats()

    @rule(versions=st.lists(VERSIONS, min_size=1, max_size=4), often=st.integers(0, 3))
    def many_are_begun_and_cancelled(self, versions, often):
        if often:
            return
        for version in versions:
            more = {"model_id": "other", "source_url": f"s3://other/{version}"}
            call = creation("n2", version=version, allow_older=True, **more)
            made = self.coordinator.create(call, None).deployment_id
            self.acknowledged[made] = version
            self.coordinator.cancel(made)
        self.wait(70.0, "")

    # --- agents ----------------------------------------------------------------------------------

    @rule(worker=WORKERS)
    def start(self, worker):
        """An agent's process starts, or is restarted: all that it knew is what is on its disk."""
        agent = self.agents[worker]
        agent.incarnation += 1
        agent.running, agent.number = True, 0
        agent.pieces, agent.epochs, agent.activated = {}, {}, set()
        agent.said.clear()
        self.register(agent, agent.incarnation)

    def register(self, agent: Agent, incarnation: int) -> None:
        where = {"address": f"127.0.0.1:{1000 + incarnation}", "link_mbit": 80}
        call = registration(agent.worker_id, incarnation, **where)
        self.tell(Register(call=call, at=self.now_s))

    @rule(worker=WORKERS)
    def old_process_comes_back(self, worker):
        agent = self.agents[worker]
        if agent.incarnation < 2:
            return
        before = len(self.store.effects)
        try:
            self.register(agent, agent.incarnation - 1)
        except StaleEpoch:
            assert len(self.store.effects) == before
        else:
            raise AssertionError("an older incarnation registered")

    @rule(worker=WORKERS)
    def kill(self, worker):
        self.agents[worker].running = False

    @rule(worker=WORKERS, pieces=st.integers(0, PIECES))
    def move_and_beat(self, worker, pieces):
        agent = self.agents[worker]
        if agent.running:
            agent.move(pieces)
            self.beat(agent)

    @rule()
    def everybody_moves_and_beats(self):
        for _ in range(3):
            for agent in self.agents.values():
                if agent.running:
                    agent.move(PIECES)
                    self.beat(agent)
            self.tick()

    def beat(self, agent: Agent) -> None:
        agent.number += 1
        entries = tuple(agent.entry(each, self.manifest(each)) for each in agent.epochs)
        moving = any(each.status is WorkerStatus.RECEIVING for each in entries)
        beat = Heartbeat(
            worker_id=agent.worker_id,
            status=WorkerStatus.RECEIVING if moving else WorkerStatus.IDLE,
            incarnation=agent.incarnation,
            number=agent.number,
            deployments=entries,
        )
        agent.said = [*agent.said[-5:], beat]
        whole = {each.deployment_id for each in entries if each.receipt is not None}
        for deployment_id, shown in self.shown.items():
            if self.goal(agent.worker_id, deployment_id) in whole:
                shown.add(agent.worker_id)
        try:
            answer = self.take(beat)
        except ServiceUnavailable:
            self.after_trouble()
            return
        if not answer.go_on:
            agent.incarnation += 1
            agent.number = 0
            self.register(agent, agent.incarnation)
            return
        for command in answer.commands:
            self.obey(agent, command.kind, command.deployment_id)

    def take(self, beat: Heartbeat):
        event = HeartbeatReceived(beat=beat, at=self.now_s)
        return self.coordinator.try_decide(event) or self.coordinator.handle(event)

    def obey(self, agent: Agent, kind: str, deployment_id: str) -> None:
        self.hear_events()
        if kind == "cancel":
            agent.pieces.pop(deployment_id, None)
            agent.epochs.pop(deployment_id, None)
        elif kind == "fetch_lanes":
            try:
                lanes = self.tell(
                    FetchLanes(deployment_id=deployment_id, worker_id=agent.worker_id)
                )
            except (NotFound, CancelledError, DeploymentFailed):
                return
            agent.epochs[deployment_id] = lanes.epoch
            if deployment_id not in agent.published:
                agent.pieces.setdefault(deployment_id, 0)
        else:
            assert deployment_id in agent.published, "told to make active what it does not hold"
            stack = self.history[agent.worker_id]
            assert stack, "told to switch before any switch was decided"
            assert stack[-1] == deployment_id, f"told {deployment_id}, and its history says {stack}"
            agent.active = deployment_id
            agent.activated = {deployment_id}
            agent.epochs.setdefault(deployment_id, 1)

    def manifest(self, deployment_id: str):
        return self.store.present.get(deployment_id) or small_manifest()

    @precondition(lambda self: any(agent.said for agent in self.agents.values()))
    @rule(data=st.data())
    def message_comes_again_or_late(self, data):
        said = [beat for agent in self.agents.values() for beat in agent.said]
        beat = data.draw(st.sampled_from(said))
        # A leader that has heard nothing newer cannot know that a message is an old one.
        member = self.state().fleet._members.get(beat.worker_id)
        if member is None or (
            member.registered.incarnation == beat.incarnation and not member.number
        ):
            return
        before = (len(self.store.effects), self.seen())
        answer = self.take(beat)
        if beat.incarnation < member.registered.incarnation:
            assert answer.go_on is False
        assert (len(self.store.effects), self.seen()) == before, "a replayed beat changed something"

    def seen(self) -> object:
        state = self.state()
        return {d: [str(p) for p in state.progress(d)] for d in self.deployments()}

    # --- time and leaders ------------------------------------------------------------------------

    def tick(self) -> None:
        self.now_s += TICK_S
        self.coordinator.tick()
        self.hear_events()

    @rule(
        seconds=st.sampled_from([0.25, 1.0, 4.0, 25.0, 60.0]),
        fault=st.sampled_from(["", "", "after"]),
    )
    def wait(self, seconds, fault):
        """Time passes; who runs beats twice a second, and moves nothing."""
        self.store.fault = fault
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            try:
                self.tick()
            except ServiceUnavailable:
                self.after_trouble()
            if round(self.now_s / TICK_S) % 2 == 0:
                for agent in self.agents.values():
                    if agent.running:
                        self.beat(agent)
        self.store.fault = ""
        self.after_trouble()
        self.hear_events()  # of a commit whose answer was lost
        self.look_for_acknowledged_cancels()

    @rule(often=st.integers(0, 4))
    def a_deadline_passes(self, often):
        if not often:
            self.wait(170.0, "")

    @rule(frozen=st.booleans())
    def leader_changes(self, frozen):
        """The other replica leads; the old one is dead, or frozen and thawed afterwards."""
        before = {d: (e.status, e.epoch) for d, e in self.deployments().items()}
        old, old_epoch = self.coordinator, self.store.epoch
        self.elect("b" if self.leader == "a" else "a")
        after = {d: (e.status, e.epoch) for d, e in self.deployments().items()}
        assert after == before, "what was acknowledged changed with the leader"
        if frozen:
            self.store.frozen = {old_epoch}
            writes = len(self.store.effects)
            try:
                old.handle(Register(call=registration("n0", 99), at=self.now_s))
            except PacelineError:
                pass
            else:
                raise AssertionError("a leader of an older epoch was heard")
            self.store.frozen = set()
            assert len(self.store.effects) == writes, "a leader of an older epoch wrote"
        assert self.store.writers == sorted(self.store.writers)

    # --- what the committed events say -----------------------------------------------------------

    def hear_events(self) -> None:
        """Follow the history that was committed, and check each switch against the agents."""
        for event in self.store.events[self.heard_events :]:
            self.heard_events += 1
            d = event.deployment_id
            if event.name is EventName.DEPLOYMENT_SWITCHING:
                targets = self.targets(d)
                ready = self.shown.pop(d)
                assert ready >= set(targets), f"decided with only {ready} of {targets}"
                for name in targets:
                    stack = self.history[name]
                    if d in stack:
                        stack.remove(d)
                    if self.wanted[d] == "on":
                        stack.append(d)
            elif event.name in (EventName.DEPLOYMENT_ACTIVATED, EventName.DEPLOYMENT_ROLLED_BACK):
                for name in self.targets(d) if d in self.deployments() else ():  # else: forgotten
                    assert self.agents[name].active == self.history[name][-1], "told too early"
            elif event.name is EventName.DEPLOYMENT_FORGOTTEN:
                assert all(d not in stack[-2:] for stack in self.history.values()), "still needed"
                self.forgotten.add(d)
                self.by_key = {k: v for k, v in self.by_key.items() if v[0] != d}

    def goal(self, name: str, deployment_id: str) -> str | None:
        if self.wanted[deployment_id] == "on":
            return deployment_id
        stack = self.history[name]
        place = stack.index(deployment_id) if deployment_id in stack else 0
        return stack[place - 1] if place else None

    # --- what must hold after every step ---------------------------------------------------------

    @invariant()
    def every_acknowledged_deployment_is_there_once(self):
        if not self.leader:
            return
        there = [each.deployment_id for each in self.state().deployments()]
        assert len(there) == len(set(there))
        missing = self.acknowledged.keys() - set(there) - self.forgotten
        assert not missing, f"acknowledged and lost: {missing}"
        extra = set(there) - self.acknowledged.keys()
        assert len(extra) <= len(self.unsure), f"made twice: {extra}"
        assert self.store.present.keys() == set(there), "the state is not what was kept"

    @invariant()
    def nothing_is_published_after_an_acknowledged_cancel(self):
        for deployment_id, published in self.cancelled.items():
            now = {n for n, a in self.agents.items() if deployment_id in a.published}
            assert now == published, f"published after the cancel: {now - published}"
            assert all(agent.active != deployment_id for agent in self.agents.values())
        if self.leader:
            self.look_for_acknowledged_cancels()

    @invariant()
    def final_is_final(self):
        if not self.leader:
            return
        for each in self.state().deployments():
            status = each.status.value
            was = self.final.setdefault(each.deployment_id, status)
            if was in ("complete", "failed", "cancelled"):
                assert status == was
            self.final[each.deployment_id] = status
            if status == "complete":
                holders = {n for n in self.agents if each.deployment_id in self.agents[n].published}
                assert holders >= set(each.target_workers), "complete without its workers"

    @invariant()
    def everything_is_bounded(self):
        if not self.leader:
            return
        state = self.state()
        final = [e for e in state.deployments() if e.status.is_final]
        needed = {d for stack in self.history.values() for d in stack[-2:]}
        # Forgetting looks once a minute, and one at a time may have closed since.
        assert len(final) - len(needed) <= PATIENCE.kept_at_most + 3 + self.closed_lately()
        assert len(state._index.keys) <= len(state.deployments())
        for each in state.deployments():
            run = state.deployment_state(each.deployment_id)
            began_s = self.began_s.setdefault(each.deployment_id, self.now_s)
            if not each.status.is_final:
                age_s = self.now_s - began_s
                assert age_s <= PATIENCE.deadline_s + 40.0, "waits beyond its deadline"
            switch = run.persisted.switch
            if switch is not None and switch.phase.value == "preparing":
                assert self.now_s - switch.since_s <= PATIENCE.switch_s + 40.0

    def closed_lately(self) -> int:
        runs = [
            self.state().deployment_state(each.deployment_id) for each in self.state().deployments()
        ]
        return sum(
            run.persisted.closed_s is not None and self.now_s - run.persisted.closed_s < 140.0
            for run in runs
        )
