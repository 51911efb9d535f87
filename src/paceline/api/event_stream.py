"""Server-sent events of ``GET /events/stream``.

Each connection reads the coordinator's events by itself. One hub a process takes the snapshots of
the state for all of them, only while there are watchers: at most every ``SNAPSHOT_INTERVAL_S``, and
less often if a snapshot takes more than 1/``COST_SHARE`` of the time. Nothing is queued: a reader
that is slow receives the newest state next, and a ``missed`` item if events it has not read are no
longer held. ``telemetry.watch_items`` computes the Moments; ``schemas.events`` defines the items.
It works on a standby as on the leader, because it only reads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.coordinator import Caller, Coordinator, CoordinatorState, sees
from paceline.coordinator.state import DeploymentState
from paceline.errors import PacelineError, ServiceUnavailable
from paceline.schemas import (
    Deployment,
    Dropped,
    Event,
    EventItem,
    EventName,
    Failure,
    LeaderView,
    Missed,
    Moment,
    WorkerStatus,
)
from paceline.telemetry import (
    DeploymentSnapshot,
    MomentBuilder,
    PartSnapshot,
    StateSnapshot,
    of_deployment,
)

log = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_S = 0.5  # between two snapshots
COST_SHARE = 20  # a snapshot takes at most 1/20 of the time
SHOWN_FINAL = 20  # newest finished deployments in a snapshot
SHOWN_FINAL_PARTS = 20_000  # most worker parts of these
POLL_S = 0.1  # between two looks of a connection for something new
HEARTBEAT_S = 3.0  # without a message, then a comment keeps the connection alive
RETRY_MS = 1000  # before a browser reconnects
MOST_WATCHERS = 200


class SnapshotReader:
    """Takes snapshots of the coordinator's state; used by one thread at a time."""

    def __init__(self, coordinator: Coordinator, leader: Callable[[], LeaderView]) -> None:
        self._coordinator, self._leader = coordinator, leader
        self._ended: dict[str, DeploymentSnapshot] = {}

    def take(self, wanted: set[str]) -> StateSnapshot:
        """Return a snapshot: all running deployments, the newest finished ones, and ``wanted``."""
        leader = self._leader()
        snapshot = self._coordinator.read(lambda state: self._seen(state, wanted, leader))
        shown = {each.deployment.deployment_id: each for each in snapshot.deployments}
        self._ended = {
            key: each
            for key, each in shown.items()
            if each.deployment.status.is_final and each.activation != "switching"
        }
        return snapshot

    def _seen(self, state: CoordinatorState, wanted: set[str], leader: LeaderView) -> StateSnapshot:
        """Copy the state into a snapshot; runs under the coordinator's lock."""
        every = state.deployments()
        shown, room = set(wanted), SHOWN_FINAL_PARTS
        for each in reversed([each for each in every if each.status.is_final][-SHOWN_FINAL:]):
            room -= len(each.target_workers)
            if room >= 0:
                shown.add(each.deployment_id)
        newest: dict[str, int] = {}
        for each in every:
            number = state.deployment_state(each.deployment_id).persisted.number
            newest[each.model_id] = max(newest.get(each.model_id, 0), number)
        deployments = [
            self._deployment(state, each, newest[each.model_id])
            for each in every
            if not each.status.is_final or each.deployment_id in shown
        ]
        return StateSnapshot(
            at=self._coordinator.now(),
            now_s=time.monotonic(),
            leader=leader,
            deployments=deployments,
            workers=state.fleet.workers(),
            beat_s=state.fleet.beat_interval_s(),
        )

    def _deployment(
        self, state: CoordinatorState, deployment: Deployment, newest: int
    ) -> DeploymentSnapshot:
        run = state.deployment_state(deployment.deployment_id)
        activation = _activation(run, newest)
        ended = self._ended.get(deployment.deployment_id)
        if ended and ended.deployment == deployment and ended.activation == activation:
            return ended  # a finished deployment does not change: reuse the copy
        planned = () if run.plan is None else run.plan.workers
        upstream = {each.worker_id: each.lanes[0].source.key for each in planned if each.lanes}
        everything = tuple(range(deployment.total_chunks))
        parts = {}
        for worker_id, part in run.parts.items():
            alive = state.fleet.alive(worker_id)
            status, failure = part.status, part.failure
            verified = part.receipt is not None
            if not verified and failure is None and not alive:
                lost = "its agent is silent" if part.incarnation else "it has not registered"
                status, failure = WorkerStatus.FAILED, Failure(code="WorkerLost", message=lost)
            parts[worker_id] = PartSnapshot(
                status=status,
                alive=alive,
                chunks=everything if verified else part.chunks,
                bytes_held=part.bytes_held,
                upstream=upstream.get(worker_id),
                standing=run.standing_of(worker_id).value,
                verified=verified,
                activated=part.activated,
                failure=failure,
            )
        return DeploymentSnapshot(deployment, parts, activation)


def _activation(run: DeploymentState, newest: int) -> Literal["none", "switching", "active"]:
    """Return the run's activation; the ``newest`` activation number of a model is active."""
    if run.persisted.switch is not None and run.persisted.switch.open:
        return "switching"
    return "active" if 0 < run.persisted.number == newest else "none"


@dataclass(eq=False)
class Watcher:
    """One connection: its filter, and what was sent to it."""

    deployment_id: str | None
    after: int  # sequence number of the last event sent
    targets: frozenset[str] = frozenset()
    since: float = 0.0  # worker events before this time (seconds since the Unix epoch) are not sent
    moment: int = -1  # number of the last Moment sent
    caller: Caller | None = None  # None: everything is shown


class StreamHub:
    """Snapshots and Moments for all watchers of this process; runs in one event loop."""

    def __init__(self, coordinator: Coordinator, leader: Callable[[], LeaderView]) -> None:
        self.coordinator = coordinator
        self._snapshots = SnapshotReader(coordinator, leader)
        self._moments = MomentBuilder()
        self._watchers: set[Watcher] = set()
        self._lock = asyncio.Lock()
        self._changed: Moment | None = None
        self._number = 0  # of the newest Moment
        self._messages: dict[tuple[bool, str | None], bytes] = {}  # of the newest Moment
        self._due_s = 0.0  # when the next snapshot is taken
        self._has_new = False  # a watcher that no snapshot was taken for

    async def join(
        self, deployment_id: str | None, after: int | None, caller: Caller | None = None
    ) -> Watcher:
        """Return a new watcher that starts after event ``after`` (None: from now on), and gets what
        ``caller`` may see.

        Raises NotFound for an unknown deployment, ServiceUnavailable beyond MOST_WATCHERS.
        """
        targets, since = frozenset[str](), 0.0
        if deployment_id is not None:
            # On a thread: the state is locked during a write to the store, which may hang.
            record = await run_in_threadpool(
                self.coordinator.read,
                lambda state: state.deployment_state(deployment_id).deployment,
            )
            targets, since = frozenset(record.target_workers), record.started_at
        if len(self._watchers) >= MOST_WATCHERS:
            raise ServiceUnavailable(
                "too many watch this replica",
                wanted=f"at most {MOST_WATCHERS}",
                do="Watch another replica, or come back.",
            )
        last = self.coordinator.events(2**62).last
        start = last if after is None else min(after, last)
        watcher = Watcher(deployment_id, start, targets, since, caller=caller)
        self._watchers.add(watcher)
        self._has_new = True
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher."""
        self._watchers.discard(watcher)

    def events(self, watcher: Watcher) -> Iterator[bytes]:
        """Yield the events that ``watcher`` has not read, and a Missed item for discarded ones."""
        while True:
            found = self.coordinator.events(watcher.after)
            if found.first > watcher.after + 1:
                yield _message(Missed(after=watcher.after, first=found.first))
            for event in found.events:
                if _matches(event, watcher):
                    yield _message(EventItem(event=event), event.seq)
            at_end = not found.events or found.last <= watcher.after
            watcher.after = found.last  # lower than before if a new store numbers them from 1
            if at_end:
                return

    async def moment(self, watcher: Watcher) -> bytes | None:
        """Return the changes since the watcher's last Moment, or everything if it missed one.

        None if it has the newest. A snapshot that is due is taken first.
        """
        # A reader that disconnects must not release the lock while a thread still works.
        return await asyncio.shield(asyncio.ensure_future(self._next_moment(watcher)))

    async def _next_moment(self, watcher: Watcher) -> bytes | None:
        clock = asyncio.get_running_loop().time
        async with self._lock:
            if (began_s := clock()) >= self._due_s or self._has_new:
                self._due_s, self._has_new = began_s + SNAPSHOT_INTERVAL_S, False
                # On a thread: 10,000 workers take about 0.3 s, and this loop serves heartbeats too.
                await asyncio.to_thread(self._take, {each.deployment_id for each in self._watchers})
                self._due_s = max(self._due_s, clock() + COST_SHARE * (clock() - began_s))
            if self._number in (0, watcher.moment):
                return None
            key = (watcher.moment != self._number - 1, watcher.deployment_id)
            if key not in self._messages:
                self._messages[key] = await asyncio.to_thread(self._encoded, *key, watcher.targets)
            watcher.moment = self._number
            return self._messages[key]

    def _take(self, wanted: set[str | None]) -> None:
        self._changed = self._moments.take(self._snapshots.take({each for each in wanted if each}))
        self._number += 1
        self._messages = {}

    def _encoded(self, full: bool, deployment_id: str | None, targets: frozenset[str]) -> bytes:
        moment = self._moments.whole() if full else self._changed
        assert moment is not None
        if deployment_id is not None:
            moment = of_deployment(moment, deployment_id, targets)
        return _message(moment)


class EventStream(StreamingResponse):
    """One reader's HTTP response, until the reader disconnects or the coordinator stops.

    The connection's read deadline (``api.limits``) ends a reader that takes nothing.
    """

    def __init__(self, hub: StreamHub, watcher: Watcher, longest_s: float | None = None) -> None:
        self._hub, self._watcher, self._longest_s = hub, watcher, longest_s
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._messages(), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the reader disconnects or the stream ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._hub.leave(self._watcher)

    async def _messages(self) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        until_s = math.inf if self._longest_s is None else sent_s + self._longest_s
        yield f"retry: {RETRY_MS}\n\n".encode()
        while not self._hub.coordinator.stopping:
            for message in self._hub.events(self._watcher):
                yield message
                sent_s = clock()
            try:
                moment = await self._hub.moment(self._watcher)
            except PacelineError as error:
                log.warning("nothing to show: %s", error)  # the store is unavailable; watchers wait
                moment = None
            if moment is not None:
                yield moment
                sent_s = clock()
            elif clock() - sent_s >= HEARTBEAT_S:
                yield b": still here\n\n"
                sent_s = clock()
            if clock() >= until_s:
                yield _message(Dropped(reason="the time that was asked for is over"))
                return
            await asyncio.sleep(min(POLL_S, max(0.0, until_s - clock())))
        yield _message(Dropped(reason="the coordinator stops"))


def is_shown(event: Event, caller: Caller | None) -> bool:
    """Return whether ``caller`` may see the event: of a job, one bound to no other team."""
    if caller is None or event.name is not EventName.JOB_CHANGED:
        return True
    return sees(caller, event.data.get("team"), event.data.get("project"))


def _matches(event: Event, watcher: Watcher) -> bool:
    if not is_shown(event, watcher.caller):
        return False
    if watcher.deployment_id is None:
        return True
    if event.deployment_id is not None:
        return event.deployment_id == watcher.deployment_id
    return event.worker_id in watcher.targets and event.at >= watcher.since


def _message(item: Moment | EventItem | Missed | Dropped, number: int | None = None) -> bytes:
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {item.kind}\ndata: {item.model_dump_json()}\n\n".encode()
