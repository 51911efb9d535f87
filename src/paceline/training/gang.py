"""Gangs: ranks that start together on several nodes and end together, whatever happens to one.

``Gangs`` runs one attempt after another on nodes whose launchers (forkserver.py) stay warm between
them. A launcher reaches us through the port ``Nodes``: ``paceline.fleet`` implements it on Dask,
``local`` with plain subprocesses; neither is known here. An attempt is ended everywhere when a rank
fails, a node is lost, or a rank is late in its phase (start, step, checkpoint); the stacks of all
ranks are then asked for, and the result names the rank at fault. Knows nothing of training.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.errors import Cancelled, InvalidInput, NotReady, WorkerLost
from paceline.training.watch import STOPPED_EXIT

log = logging.getLogger(__name__)

TICK_S = 0.25
LAUNCH_DEADLINE_S = 30.0  # for a launcher to fork its ranks, all their imports done
READY_DEADLINE_S = 120.0  # for a launcher to import torch, on a machine that does other things too
END_DEADLINE_S = 15.0
NODE_SILENCE_S = 15.0  # a launcher beats twice a second; one that does not is frozen or cut off
STOPPED_S = 2.0  # a rank in state T for so long is frozen, not looked at by a debugger

OnLine = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Heard:
    """A line of a node's launcher or ranks, or that the node is lost."""

    worker_id: str
    line: Mapping[str, Any] = field(default_factory=dict)
    lost: str = ""


class Word(Protocol):
    """What ``Nodes`` hear: anything shaped like ``Heard``."""

    @property
    def worker_id(self) -> str: ...
    @property
    def line(self) -> Mapping[str, Any]: ...
    @property
    def lost(self) -> str: ...


class Nodes(Protocol):
    """Nodes that are ours for the time of a job, each with a launcher running."""

    def tell(self, worker_id: str, order: Mapping[str, Any]) -> None:
        """Send an order to the node's launcher; raises WorkerLost where there is none."""

    def hear(self, timeout_s: float) -> Sequence[Word]:
        """Return what was said, as soon as something was, and [] after ``timeout_s``."""

    def host(self, worker_id: str) -> str:
        """Return the address that the other nodes reach this one at."""

    def start(self, worker_id: str) -> bool:
        """Start a launcher where none runs (any more); return whether the node could be reached."""

    def drop(self, worker_id: str) -> None:
        """End the node's launcher by force: it does not answer."""


class Launcher(Protocol):
    """Gives nodes to a job."""

    def open_nodes(
        self,
        workers: Sequence[str],
        argv: Sequence[str],
        *,
        wait_s: float,
        cancel: threading.Event | None,
        on_wait: Callable[[str], None] | None,
    ) -> AbstractContextManager[Nodes]:
        """Hold ``workers`` with ``argv`` started on each; other gangs' nodes are waited for.

        Raises Conflict naming who holds them after ``wait_s``.
        """


@dataclass(frozen=True)
class GangMember:
    """A rank to start: on which node, as which spare (if one was kept warm for it)."""

    worker_id: str
    rank: int
    env: Mapping[str, str] = field(default_factory=dict)
    spare: str = ""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds that a rank may take: to its first step, for a step, to save or export."""

    start_s: float = 120.0
    step_s: float = 60.0
    checkpoint_s: float = 600.0

    def of(self, phase: str) -> float:
        """Return the deadline of ``phase``."""
        if phase == "step":
            return self.step_s
        return self.checkpoint_s if phase in ("saving", "exporting") else self.start_s


@dataclass(frozen=True, kw_only=True)
class GangResult:
    """How an attempt ended."""

    ok: bool  # every rank ended with 0
    exit_codes: Mapping[int, int | None]  # by rank; negative: by signal; None: lost with its node
    failed_rank: int | None = None
    failed_worker: str | None = None
    reason: str = ""
    hung: bool = False
    stderr: Mapping[int, str] = field(default_factory=dict)  # by rank, its end; stacks are in it
    preempted: frozenset[str] = frozenset()  # nodes whose owner takes them back
    lost: frozenset[str] = frozenset()  # nodes that cannot be reached any more

    @property
    def stderr_tail(self) -> str:
        """Return the last words of the rank at fault."""
        return "" if self.failed_rank is None else self.stderr.get(self.failed_rank, "")

    @property
    def stopped(self) -> bool:
        """Return whether the ranks stopped as asked, their state saved."""
        codes = [each for each in self.exit_codes.values() if each is not None]
        return bool(codes) and all(each in (0, STOPPED_EXIT) for each in codes) and not self.ok


@dataclass(eq=False)
class _Rank:
    member: GangMember
    state: Mapping[str, Any] = field(default_factory=dict)
    code: int | None = None
    order: int = 0  # in which they ended
    killed: bool = False  # by its launcher, after another had failed
    stderr: str = ""
    over: bool = False


@dataclass(frozen=True)
class _Fault:
    rank: _Rank | None
    what: str
    hung: bool = False


class Gangs:
    """Attempts on one set of nodes."""

    def __init__(
        self,
        nodes: Nodes,
        deadlines: Deadlines,
        *,
        cancel: threading.Event | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self._nodes = nodes
        self._deadlines = deadlines
        self._cancel = cancel
        self._grace_s = grace_s
        self.id = uuid.uuid4().hex[:12]
        self._ready: set[str] = set()
        self._beaten: dict[str, float] = {}
        self._preempted: set[str] = set()
        self._watch: Mapping[str, Any] | None = None
        self._ask: str = ""
        self.spares: dict[str, str] = {}  # name → worker, once it waits
        self._lost: set[str] = set()

    # -- nodes

    def watch_for_preemption(self, named: str, grace_s: float) -> None:
        """Have every node's launcher watch for a notice (see preemption.py)."""
        self._watch = {"do": "watch", "preemption": named, "grace_s": grace_s}

    def prepare(self, workers: Sequence[str], deadline_s: float = READY_DEADLINE_S) -> set[str]:
        """Return which of ``workers`` have a launcher that is ready; waits for those that start."""
        starting = set()
        for worker in dict.fromkeys(workers):
            if worker not in self._ready and self._nodes.start(worker):
                starting.add(worker)
                self._lost.discard(worker)
        until = time.monotonic() + deadline_s
        while not starting <= self._ready | self._lost and time.monotonic() < until:
            self._check_cancel()
            for heard in self._nodes.hear(TICK_S):
                self._note(heard)
        return self._ready & set(workers)

    def call_back(self, worker_id: str) -> bool:
        """Start a lost node's launcher again, where it can be; return whether it is ready now."""
        if worker_id in self._ready:
            return True
        if worker_id in self._lost and self._nodes.start(worker_id):
            self._lost.discard(worker_id)
        return False

    def stop_soon(self, why: str) -> None:
        """Have the attempt that runs save its state and end (from ``on_event``, any thread)."""
        self._ask = why

    def keep_spare(self, name: str, worker_id: str, env: Mapping[str, str], text: str) -> None:
        """Start a rank on ``worker_id`` that loads all it can and waits for a place."""
        order = {"do": "spare", "name": name, "env": dict(env), "input": text}
        try:
            self._nodes.tell(worker_id, order)
        except WorkerLost as error:
            log.warning("no spare on that node worker=%s why=%s", worker_id, error)
            return
        self.spares[name] = worker_id

    # -- an attempt

    def run_gang(
        self, members: Sequence[GangMember], text: str, attempt: int, on_event: OnLine | None
    ) -> GangResult:
        """Run a rank a member, each with ``text`` as its input; return how the gang ended.

        Raises Cancelled once ``cancel`` was set and every rank is gone.
        """
        ranks = {each.rank: _Rank(each) for each in sorted(members, key=lambda m: m.rank)}
        if not ranks or list(ranks) != list(range(len(members))):
            raise InvalidInput("gang's ranks do not count up from 0", got=sorted(ranks))
        self._ask = ""
        self._preempted.clear()
        attempted = _Attempt(self, ranks, attempt, on_event)
        try:
            fault = attempted.start(text) or attempted.follow()
        except BaseException:
            attempted.end(stacks=False, grace_s=0.0)
            raise
        if fault is not None:
            attempted.end(stacks=fault.hung, grace_s=0.0)
            fault = attempted.blame() or fault if not fault.hung else fault
        return attempted.result(fault)

    def _check_cancel(self) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled("cancelled by the caller", where="a gang of ranks")

    def _note(self, heard: Word) -> str:
        """Take in what concerns the node; return what kind of word it was."""
        worker, line = heard.worker_id, heard.line
        if heard.lost:
            self._ready.discard(worker)
            self._lost.add(worker)
            self.spares = {name: at for name, at in self.spares.items() if at != worker}
            return "lost"
        self._beaten[worker] = time.monotonic()
        kind = str(line.get("launcher", ""))
        if kind == "ready":
            self._ready.add(worker)
            if self._watch is not None:
                self._nodes.tell(worker, self._watch)
        elif kind == "preempted":
            log.warning("node is taken away worker=%s why=%s", worker, line.get("reason"))
            self._preempted.add(worker)
        elif kind == "spare":
            log.warning("spare ended name=%s code=%s", line.get("name"), line.get("code"))
            self.spares.pop(str(line.get("name")), None)
        return kind


class _Attempt:
    """One attempt: from its first order to its last word."""

    def __init__(
        self, gangs: Gangs, ranks: dict[int, _Rank], attempt: int, on_event: OnLine | None
    ) -> None:
        self._gangs = gangs
        self._nodes = gangs._nodes
        self._ranks = ranks
        self._attempt = attempt
        self._on_event = on_event
        self._workers = list(dict.fromkeys(each.member.worker_id for each in ranks.values()))
        self._begun: set[str] = set()
        self._over: set[str] = set()
        self._store: tuple[str, int] | None = None
        self._ended = 0
        self._stopping = False

    def start(self, text: str) -> _Fault | None:
        """Start all ranks; return why not, where one node could not."""
        ready = self._gangs.prepare(self._workers)
        if away := [each for each in self._workers if each not in ready]:
            self._mark_lost(away[0])
            return _Fault(self._first_on(away[0]), "could not be started: its node is away")
        head = self._workers[0]
        host = self._nodes.host(head)
        try:
            self._nodes.tell(head, {"do": "store", "host": host, "job": self._gangs.id})
            self._await(lambda: self._store is not None, "the rendezvous store")
            assert self._store is not None
            for worker in self._workers:
                mine = [each for each in self._ranks.values() if each.member.worker_id == worker]
                self._nodes.tell(worker, self._order(mine, text))
            self._await(lambda: self._begun >= set(self._workers), "its ranks")
        except (WorkerLost, NotReady) as error:
            lost = next((each for each in self._workers if each not in self._gangs._ready), head)
            return _Fault(self._first_on(lost), f"could not be started: {error.one_line()}")
        return None

    def follow(self) -> _Fault | None:
        """Follow the ranks to their end; return the fault that ended the gang, if one did."""
        stop_at: float | None = None
        while len(self._over) < len(self._workers):
            self._hear(TICK_S)
            if (fault := self._failed()) is not None:
                self._gangs._check_cancel()
                return fault
            cancel = self._gangs._cancel
            cancelled = cancel is not None and cancel.is_set()
            if (cancelled or self._gangs._ask) and not self._stopping:
                self._stopping = True
                grace = self._gangs._grace_s
                stop_at = time.monotonic() + grace + END_DEADLINE_S
                self._tell_all({"do": "stop", "grace_s": grace})
            if stop_at is not None and time.monotonic() > stop_at:
                self._gangs._check_cancel()
                return _Fault(None, "did not stop as asked")
            if not self._stopping and (fault := self._late()) is not None:
                return fault
        self._gangs._check_cancel()
        return self._failed()

    def end(self, *, stacks: bool, grace_s: float) -> None:
        """End every rank, and hear their last words; a launcher that is silent is ended too."""
        self._tell_all({"do": "stop", "grace_s": grace_s, "stacks": stacks})
        until = time.monotonic() + END_DEADLINE_S
        while len(self._over) < len(self._workers) and time.monotonic() < until:
            self._hear(TICK_S)
        for worker in self._workers:
            if worker not in self._over:
                log.warning("launcher does not answer worker=%s", worker)
                self._nodes.drop(worker)
                self._gangs._note(Heard(worker, lost="its launcher does not answer"))
                self._mark_lost(worker)

    def blame(self) -> _Fault | None:
        """Return the rank that failed first, by all that is known now."""
        return self._failed()

    def result(self, fault: _Fault | None) -> GangResult:
        """Return how it ended."""
        codes = {rank: each.code for rank, each in self._ranks.items()}
        stderr = {rank: each.stderr for rank, each in self._ranks.items() if each.stderr}
        lost = frozenset(self._workers) & self._gangs._lost
        if fault is None:
            return GangResult(ok=True, exit_codes=codes, stderr=stderr)
        reason, member = fault.what, None
        if fault.rank is not None:
            member = fault.rank.member
            reason = f"rank {member.rank} on {member.worker_id} {fault.what}"
            words = fault.rank.stderr.strip().rsplit("\n", 1)[-1].strip()[:300]
            if words and not fault.hung:
                reason = f"{reason}: {words}"
        log.warning("gang ended attempt=%d reason=%s", self._attempt, reason)
        return GangResult(
            ok=False,
            exit_codes=codes,
            failed_rank=None if member is None else member.rank,
            failed_worker=None if member is None else member.worker_id,
            reason=reason,
            hung=fault.hung,
            stderr=stderr,
            preempted=frozenset(self._gangs._preempted),
            lost=lost,
        )

    # -- what is heard

    def _order(self, mine: list[_Rank], text: str) -> dict[str, Any]:
        assert self._store is not None
        host, port = self._store
        ranks = []
        for local, each in enumerate(mine):
            member = each.member
            env = {
                "RANK": str(member.rank),
                "WORLD_SIZE": str(len(self._ranks)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(len(mine)),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "PACELINE_ATTEMPT": str(self._attempt),
                "PACELINE_NODE": member.worker_id,
                **member.env,
            }
            ranks.append({"rank": member.rank, "env": env, "spare": member.spare})
            self._gangs.spares.pop(member.spare, None)
        return {
            "do": "start",
            "attempt": self._attempt,
            "ranks": ranks,
            "host": host,
            "port": port,
            "input": text,
        }

    def _hear(self, timeout_s: float) -> None:
        for heard in self._nodes.hear(timeout_s):
            kind = self._gangs._note(heard)
            if heard.worker_id not in self._workers:
                continue
            if kind == "lost":
                self._mark_lost(heard.worker_id)
            else:
                self._take(kind, heard.worker_id, heard.line)

    def _take(self, kind: str, worker: str, line: Mapping[str, Any]) -> None:
        if not kind:
            if self._on_event is not None:
                self._on_event(dict(line))
        elif kind == "store":
            if line.get("port"):
                self._store = (str(line["host"]), int(line["port"]))
            else:
                raise NotReady("no rendezvous store", got=line.get("error"), where=worker)
        elif line.get("attempt") != self._attempt:
            return
        elif kind == "started":
            self._begun.add(worker)
        elif kind == "beat":
            for rank, state in line.get("ranks", {}).items():
                self._ranks[int(rank)].state = state
        elif kind == "ended":
            rank = self._ranks[int(line["rank"])]
            self._ended += 1
            rank.over, rank.order = True, self._ended
            rank.code, rank.killed = line["code"], bool(line.get("killed"))
            rank.stderr = str(line.get("stderr", ""))
        elif kind == "over":
            self._over.add(worker)

    def _mark_lost(self, worker: str) -> None:
        self._over.add(worker)
        for each in self._ranks.values():
            if each.member.worker_id == worker and not each.over:
                self._ended += 1
                each.over, each.order = True, self._ended

    # -- who is at fault

    def _failed(self) -> _Fault | None:
        failed = [each for each in self._ranks.values() if each.over and each.code != 0]
        failed = [each for each in failed if not each.killed] or failed
        if not failed or (
            all(each.code == STOPPED_EXIT for each in failed)
            and any(not each.over for each in self._ranks.values())
        ):
            return None  # those that stop as asked end by themselves

        def first(each: _Rank) -> tuple[int, int]:
            # A killed rank takes the others down with it: a lost node or a signal comes before an
            # exit code, that before having lost a peer, then the earliest counts.
            violent = each.code is None or each.code < 0
            return (0 if violent else 2 if each.code in (75, STOPPED_EXIT) else 1, each.order)

        guilty = min(failed, key=first)
        if guilty.code is None:
            return _Fault(guilty, "was lost with its node")
        if guilty.code < 0:
            return _Fault(guilty, f"was killed by signal {-guilty.code}")
        return _Fault(guilty, f"exited with {guilty.code}")

    def _late(self) -> _Fault | None:
        now = time.monotonic()
        for worker in self._workers:
            silent = now - self._gangs._beaten.get(worker, now)
            if worker not in self._over and silent > NODE_SILENCE_S:
                self._nodes.drop(worker)
                self._gangs._note(Heard(worker, lost="silent"))
                self._mark_lost(worker)
                return _Fault(self._first_on(worker), "was lost with its node: it fell silent")
        living = [each for each in self._ranks.values() if not each.over and each.state]
        if not any(self._is_late(each.state) for each in living):
            return None
        # One rank that hangs silences all that wait for it: a stopped one is to blame, then one
        # that does not even beat, then the one that got least far, then the one longest there.
        guilty = max(
            living,
            key=lambda each: (
                bool(each.state["stopped"]),
                each.state["silent_s"] > 3 * TICK_S + 2.0,
                -int(each.state["step"]),
                each.state["since_s"],
            ),
        )
        state = guilty.state
        phase, since = state["phase"], state["since_s"]
        how = " (it is stopped)" if state["stopped"] else ""
        limit = self._gangs._deadlines.of(phase)
        return _Fault(
            guilty,
            f"hung in phase {phase!r} at step {state['step']}: nothing for {since:.1f} s of "
            f"{limit:.0f}{how}",
            hung=True,
        )

    def _is_late(self, state: Mapping[str, Any]) -> bool:
        deadline = self._gangs._deadlines.of(state["phase"])
        late = state["running_s"] if state["phase"] == "starting" else state["since_s"]
        frozen = state["stopped"] and state["silent_s"] > min(STOPPED_S, deadline)
        return bool(frozen) or late > deadline or state["silent_s"] > deadline

    def _first_on(self, worker: str) -> _Rank:
        return next(each for each in self._ranks.values() if each.member.worker_id == worker)

    def _tell_all(self, order: Mapping[str, Any]) -> None:
        for worker in self._workers:
            if worker not in self._over:
                try:
                    self._nodes.tell(worker, order)
                except WorkerLost as error:
                    self._gangs._note(Heard(worker, lost=error.one_line()))
                    self._mark_lost(worker)

    def _await(self, true: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + LAUNCH_DEADLINE_S
        while not true():
            self._hear(TICK_S)
            self._gangs._check_cancel()
            if lost := [each for each in self._workers if each not in self._gangs._ready]:
                raise WorkerLost("a node was lost while the gang started", where=lost[0])
            if time.monotonic() > until:
                raise NotReady(f"a launcher did not start {what} in time", wanted=LAUNCH_DEADLINE_S)
