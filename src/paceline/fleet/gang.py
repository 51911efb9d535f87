"""Gangs: ranks that start together on several nodes and end together, whatever happens to one.

A rank is told RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
PACELINE_ATTEMPT and OMP_NUM_THREADS by its environment and the rest on standard input; it tells by
JSON lines. The gang is ended, everywhere and by process group, when a rank fails, when a node is
lost, when a rank has not said its first word by ``start_deadline_s`` or falls silent for
``silence_deadline_s``, at the deadline, on cancel, and when the caller dies (the lease, see
remote.py). The result names the rank at fault.

Nodes are claimed in one order before anything starts, so gangs neither interleave nor deadlock. The
rendezvous port stays reserved on rank 0's node: a server that sets SO_REUSEADDR (torch's does) can
still listen on it. Knows nothing of training: what runs is an argv.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import Cancelled, Conflict, InvalidInput, WorkerLost
from paceline.fleet import remote
from paceline.fleet.crew import Crew, Member
from paceline.fleet.remote import Order

log = logging.getLogger(__name__)

TICK_S = 0.25
LAUNCH_DEADLINE_S = 20.0
FAILURE_GRACE_S = 1.0  # ranks that wait in a collective for a dead one do not hear SIGTERM
SETTLE_S = 1.5  # which rank was really first is known once all nodes have answered again
CLAIM_RETRY_S = 0.2
CLAIM_DEADLINE_S = 10.0

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class GangMember:
    """A rank to start: on which node, as what, with which standard input."""

    worker_id: str
    rank: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    input_json: str = ""


@dataclass(frozen=True, kw_only=True)
class GangResult:
    """How a gang ended."""

    ok: bool  # every rank ended with 0
    exit_codes: dict[int, int | None]  # by rank; negative: by signal; None: lost with its node
    failed_rank: int | None = None
    failed_worker: str | None = None
    reason: str = ""
    stderr_tail: str = ""  # of the rank at fault


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """How a process ended."""

    exit_code: int  # negative: by that signal
    ended: Literal["exited", "deadline"]
    last_line: str | None  # of its standard output
    stderr_tail: str
    seconds: float


def run_process(
    fleet: Any,
    member: GangMember,
    on_event: OnEvent | None,
    deadline_s: float,
    cancel: threading.Event | None,
    grace_s: float,
) -> ProcessResult:
    """Run one process; see `Fleet.run_process`."""
    began = time.monotonic()
    crew = Crew(fleet, _members(fleet, [member], member.env, None))
    (process,) = crew.members
    ended: Literal["exited", "deadline"] = "exited"
    grace = grace_s
    try:
        crew.start(LAUNCH_DEADLINE_S)
        while not process.over:
            _deliver(crew.follow(TICK_S), on_event)
            _check_cancel(cancel, member.worker_id)
            if time.monotonic() - began > deadline_s and not process.over:
                ended = "deadline"
                break
        if process.lost:
            raise WorkerLost(
                "the process was lost with its node", got=process.lost, where=member.worker_id
            )
    finally:
        crew.end(grace)
    code = process.news.exit_code
    return ProcessResult(
        exit_code=-9 if code is None else code,
        ended=ended,
        last_line=process.last_line,
        stderr_tail=process.news.stderr_tail,
        seconds=time.monotonic() - began,
    )


def run_gang(
    fleet: Any,
    members: Sequence[GangMember],
    *,
    on_event: OnEvent | None,
    start_deadline_s: float,
    silence_deadline_s: float,
    attempt: int,
    deadline_s: float | None,
    cancel: threading.Event | None,
    grace_s: float,
) -> GangResult:
    """Run a gang; see `Fleet.run_gang`."""
    _check(members)
    began = time.monotonic()
    gang_id = f"gang-{uuid.uuid4().hex[:12]}"
    ranked = sorted(members, key=lambda each: each.rank)
    crew = Crew(fleet, _members(fleet, ranked, {}, gang_id))
    with _claimed(fleet, gang_id, crew.members, start_deadline_s, cancel) as rendezvous:
        for member, asked in zip(crew.members, ranked, strict=True):
            surroundings = _surroundings(crew.members, member, rendezvous, attempt)
            _set_environment(member, {**surroundings, **asked.env})
        fault: Fault | None = None
        grace = grace_s  # whatever interrupts us
        try:
            crew.start(LAUNCH_DEADLINE_S)
            started = time.monotonic()
            silence = (start_deadline_s, silence_deadline_s)
            while fault is None and not all(each.over for each in crew.members):
                _deliver(crew.follow(TICK_S), on_event)
                _check_cancel(cancel, gang_id)
                now = time.monotonic()
                fault = _failed(crew) or _late(now - began, deadline_s)
                if fault is None and _silent(crew, now - started, *silence):
                    # Judge by fresh news of all, not by what some said a moment ago.
                    _settle(crew, on_event, now)
                    fault = _failed(crew) or _silent(crew, now - started, *silence)
            fault = fault or _failed(crew)
            if fault is not None and fault.member is not None and fault.member.over:
                _settle(crew, on_event, time.monotonic())
                fault = _failed(crew) or fault
            grace = FAILURE_GRACE_S
        finally:
            hanging = [fault.member] if fault and fault.member and not fault.member.over else []
            crew.end(grace, dump_stacks=hanging)
    return _result(crew, fault)


@dataclass(frozen=True)
class Fault:
    """Why a gang has to end."""

    member: Member | None
    what: str


def _failed(crew: Crew) -> Fault | None:
    failed = [each for each in crew.members if each.lost or each.news.exit_code not in (None, 0)]
    if not failed:
        return None

    def blame(member: Member) -> tuple[int, float]:
        # A killed rank takes the others down with it: a lost node or a signal comes before an exit
        # code, then the earliest counts.
        violent = bool(member.lost) or (member.news.exit_code or 0) < 0
        return (0 if violent else 1, 0.0 if member.lost else member.ended_at)

    first = min(failed, key=blame)
    if first.lost:
        return Fault(first, f"was lost with its node: {first.lost}")
    code = first.news.exit_code or 0
    return Fault(first, f"was killed by signal {-code}" if code < 0 else f"exited with {code}")


def _silent(
    crew: Crew, running_s: float, start_deadline_s: float, silence_deadline_s: float
) -> Fault | None:
    living = [each for each in crew.members if not each.over]
    mute = [each for each in living if not each.news.spoke]
    if mute and running_s > start_deadline_s:
        return Fault(_likeliest(mute), f"said nothing within {start_deadline_s:.0f} s of its start")
    hanging = [
        each for each in living if each.news.spoke and each.news.silent_s > silence_deadline_s
    ]
    if not hanging:
        return None
    # One frozen rank silences all that wait for it: blame a stopped one, else the one silent
    # longest.
    guilty = _likeliest([each for each in living if each.news.spoke])
    state = " (it is stopped)" if guilty.news.stopped else ""
    return Fault(guilty, f"hung: no line for {guilty.news.silent_s:.1f} s{state}")


def _likeliest(members: Sequence[Member]) -> Member:
    return max(members, key=lambda each: (each.news.stopped, each.news.silent_s))


def _settle(crew: Crew, on_event: OnEvent | None, since: float) -> None:
    """Follow until every living rank's node has answered a question asked after ``since``."""
    deadline = since + SETTLE_S
    rounds = dict.fromkeys(crew.members, 0)
    seen = {each: each.seen for each in crew.members}
    while (left := deadline - time.monotonic()) > 0 and any(
        not each.over and rounds[each] < 2 for each in crew.members
    ):
        _deliver(crew.follow(min(left, TICK_S)), on_event)
        for each in crew.members:  # the first answer may be to a question asked before
            if each.seen != seen[each]:
                seen[each] = each.seen
                rounds[each] += 1


def _late(running_s: float, deadline_s: float | None) -> Fault | None:
    if deadline_s is None or running_s <= deadline_s:
        return None
    return Fault(None, f"the gang was not done within {deadline_s:.0f} s")


def _result(crew: Crew, fault: Fault | None) -> GangResult:
    codes = {each.rank: each.news.exit_code for each in crew.members}
    if fault is None:
        return GangResult(ok=True, exit_codes=codes)
    if fault.member is None:
        return GangResult(ok=False, exit_codes=codes, reason=fault.what)
    member = fault.member
    tail = member.news.stderr_tail.strip()
    words = tail.rsplit("\n", 1)[-1].strip()[:300]
    reason = f"rank {member.rank} on {member.worker_id} {fault.what}"
    log.warning("gang ended reason=%s", reason)
    return GangResult(
        ok=False,
        exit_codes=codes,
        failed_rank=member.rank,
        failed_worker=member.worker_id,
        reason=f"{reason}: {words}" if words else reason,
        stderr_tail=tail,
    )


def _check(members: Sequence[GangMember]) -> None:
    ranks = sorted(each.rank for each in members)
    if not members or ranks != list(range(len(members))):
        raise InvalidInput("gang's ranks do not count up from 0", got=ranks)


def _members(
    fleet: Any, members: Sequence[GangMember], env: Mapping[str, str], gang_id: str | None
) -> list[Member]:
    addresses = fleet._await_nodes([each.worker_id for each in members], 15.0)
    token = gang_id or f"process-{uuid.uuid4().hex[:12]}"
    return [
        Member(
            worker_id=each.worker_id,
            rank=each.rank,
            address=addresses[each.worker_id],
            order=Order(
                process_id=f"{token}-{each.rank}",
                argv=tuple(each.argv),
                env=dict(env),
                input_json=each.input_json,
                directory=str(fleet.runtime.node_dir(each.worker_id) / "work"),
                gang_id=gang_id,
            ),
        )
        for each in members
    ]


def _set_environment(member: Member, env: Mapping[str, str]) -> None:
    order = member.order
    member.order = Order(
        process_id=order.process_id,
        argv=order.argv,
        env=dict(env),
        input_json=order.input_json,
        directory=order.directory,
        gang_id=order.gang_id,
    )


def _surroundings(
    members: Sequence[Member], member: Member, rendezvous: tuple[str, int], attempt: int
) -> dict[str, str]:
    local = [each for each in members if each.worker_id == member.worker_id]
    return {
        "RANK": str(member.rank),
        "WORLD_SIZE": str(len(members)),
        "LOCAL_RANK": str(local.index(member)),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "MASTER_ADDR": rendezvous[0],
        "MASTER_PORT": str(rendezvous[1]),
        "PACELINE_ATTEMPT": str(attempt),
        "PACELINE_NODE": member.worker_id,
        "OMP_NUM_THREADS": "1",
    }


@contextlib.contextmanager
def _claimed(
    fleet: Any,
    gang_id: str,
    members: Sequence[Member],
    deadline_s: float,
    cancel: threading.Event | None,
    *,
    on_wait: Callable[[str], None] | None = None,
    rendezvous: bool = True,
) -> Iterator[tuple[str, int]]:
    """Hold the members' nodes, and a rendezvous port on rank 0's, for the time of the ``with``.

    Others that hold them are waited for, in one order, and named to ``on_wait``.
    """
    told: str | None = None
    nodes = dict(sorted((each.worker_id, each.address) for each in members))
    deadline = time.monotonic() + deadline_s
    held: list[str] = []
    try:
        while len(held) < len(nodes):
            # Always in the same order, keeping what is held: so gangs cannot wait in a circle.
            for worker_id in [*held, *[each for each in nodes if each not in held]]:
                holder = _call(fleet, worker_id, nodes[worker_id], remote.claim, gang_id)
                if holder is not None:
                    break
                if worker_id not in held:
                    held.append(worker_id)
            else:
                break
            _check_cancel(cancel, gang_id)
            if time.monotonic() > deadline:
                raise Conflict(
                    "the node is taken by another gang",
                    got=holder,
                    wanted=f"free within {deadline_s:.0f} s",
                    where=worker_id,
                    do="Wait for the other job to end, or cancel it.",
                )
            if on_wait is not None and holder != told:
                told = holder
                on_wait(
                    f"waiting for {worker_id}: it is held by {holder} (at most {deadline_s:.0f} s)"
                )
            time.sleep(CLAIM_RETRY_S)
        if not rendezvous:
            yield "", 0
            return
        head = members[0]
        host = head.address.split("://", 1)[-1].rsplit(":", 1)[0]
        port = _call(fleet, head.worker_id, head.address, remote.reserve_rendezvous, gang_id, host)
        yield host, port
    finally:
        calls = fleet._calls(slot=False)
        for worker_id, address in nodes.items():
            calls.submit(worker_id, address, remote.release, gang_id)
        with contextlib.suppress(Exception):  # a claim lapses by itself
            calls.gather(CLAIM_DEADLINE_S)


def _call(fleet: Any, worker_id: str, address: str, fn: Callable[..., Any], *args: Any) -> Any:
    calls = fleet._calls(slot=False)
    calls.submit(worker_id, address, fn, *args)
    answer = calls.gather(CLAIM_DEADLINE_S)[worker_id]
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _check_cancel(cancel: threading.Event | None, where: str) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled("cancelled by the caller", where=where)


def _deliver(lines: Sequence[tuple[Member, str]], on_event: OnEvent | None) -> None:
    for member, line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            log.info("rank %d on %s: %s", member.rank, member.worker_id, line[:500])
        elif on_event is not None:
            on_event(event)
