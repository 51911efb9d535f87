"""Server-sent events of ``GET /events/stream``: one hub per process serves all its watchers.

The hub reads the coordinator's state only while there are watchers: at most every ``FRAME_S``, and
less often if a read takes more than 1/``COST_SHARE`` of the interval, so that many watchers cost
the coordinator what one costs. Each watcher has a bounded queue; a watcher that does not read is
disconnected with a reason and may resume with ``Last-Event-ID``. ``telemetry.watch_items`` computes
the Moments; ``schemas.events`` defines the items. It works on a standby as on the leader, because
it only reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.coordinator import CoordinatorState
from paceline.coordinator.state.deployment import DeploymentState
from paceline.errors import PacelineError, ServiceUnavailable
from paceline.schemas.calls import EventList
from paceline.schemas.events import Dropped, Event, EventItem, LeaderView, Missed, Moment
from paceline.schemas.plan import Plan
from paceline.schemas.records import Deployment, Failure, WorkerStatus
from paceline.telemetry import (
    DeploymentSnapshot,
    MomentBuilder,
    PartSnapshot,
    StateSnapshot,
    of_deployment,
)

# Snapshots of the state: only a copy is made under the coordinator's lock. A finished deployment is
# copied once, and the source of each worker once per plan.

SHOWN_FINAL = 20  # newest finished deployments in a snapshot
SHOWN_FINAL_PARTS = 20_000  # most worker parts of these

Answer = TypeVar("Answer")


class StateReader(Protocol):
    """The coordinator's interface that Looks needs."""

    def read(self, question: Callable[[CoordinatorState], Answer]) -> Answer: ...
    def now(self) -> float: ...


class SnapshotReader:
    """Takes snapshots of the coordinator's state; used by one thread at a time."""

    def __init__(self, coordinator: StateReader, leader: Callable[[], LeaderView]) -> None:
        self._coordinator, self._leader = coordinator, leader
        self._upstream: dict[tuple[str, int], dict[str, str]] = {}
        self._ended: dict[str, DeploymentSnapshot] = {}

    def take(self, wanted: set[str]) -> StateSnapshot:
        """Return a snapshot: all running deployments, the newest finished ones, and ``wanted``."""
        leader = self._leader()
        look = self._coordinator.read(lambda state: self._seen(state, wanted, leader))
        shown = {each.deployment.deployment_id: each for each in look.deployments}
        for key in [each for each in self._upstream if each[0] not in shown]:
            del self._upstream[key]
        self._ended = {key: each for key, each in shown.items() if _is_over(each)}
        return look

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
            number = state.run(each.deployment_id).memo.number
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
        run = state.run(deployment.deployment_id)
        activation = _activation(run, newest)
        ended = self._ended.get(deployment.deployment_id)
        if ended and ended.deployment == deployment and ended.activation == activation:
            return ended  # a finished deployment does not change: reuse the copy
        upstream = self._sources(deployment, run.plan)
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

    def _sources(self, deployment: Deployment, plan: Plan | None) -> dict[str, str]:
        """Return the source of each worker's first lane; computed once per plan."""
        key = (deployment.deployment_id, 0 if plan is None else plan.epoch)
        if key not in self._upstream:
            workers = () if plan is None else plan.workers
            self._upstream = {
                other: known for other, known in self._upstream.items() if other[0] != key[0]
            }
            self._upstream[key] = {
                each.worker_id: each.lanes[0].source.key for each in workers if each.lanes
            }
        return self._upstream[key]


def _activation(run: DeploymentState, newest: int) -> Literal["none", "switching", "active"]:
    """Return the run's activation; the ``newest`` activation number of a model is active."""
    if run.memo.switch is not None and run.memo.switch.open:
        return "switching"
    return "active" if 0 < run.memo.number == newest else "none"


def _is_over(seen: DeploymentSnapshot) -> bool:
    return seen.deployment.status.is_final and seen.activation != "switching"


log = logging.getLogger(__name__)

FRAME_S = 0.5  # between two snapshots
COST_SHARE = 20  # a snapshot takes at most 1/20 of the time
NEWS_S = 0.1  # between two reads of events
HEARTBEAT_S = 3.0  # without a message, then a comment keeps the connection alive
SEND_DEADLINE_S = 20.0  # a reader that takes longer for one message is disconnected
RETRY_MS = 1000  # before a browser reconnects
MOST_WATCHERS = 200
MOST_QUEUED = 4096  # messages queued for one reader
MOST_QUEUED_BYTES = 16 * 1024 * 1024


class EventSource(StateReader, Protocol):
    """The coordinator's interface that StreamHub needs."""

    @property
    def stopping(self) -> bool: ...
    def events(self, after: int) -> EventList: ...


@dataclass(eq=False)
class Watcher:
    """One reader: its filter and its queue of messages."""

    deployment_id: str | None = None
    after: int = 0  # sequence number of the last event sent from history
    live_from: int = 0  # events after this number arrive through the queue
    targets: frozenset[str] = frozenset()
    since: float = 0.0  # worker events before this time (seconds since the Unix epoch) are not sent
    fresh: bool = True  # it needs a full Moment before partial ones
    waiting: deque[bytes] = field(default_factory=deque)
    waiting_bytes: int = 0
    dropped: str = ""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, message: bytes) -> None:
        """Queue a message; a full queue ends the connection."""
        full = len(self.waiting) >= MOST_QUEUED
        if self.waiting and (full or self.waiting_bytes + len(message) > MOST_QUEUED_BYTES):
            self.drop(f"too slow: {len(self.waiting)} messages wait to be read")
            return
        self.waiting.append(message)
        self.waiting_bytes += len(message)
        self.news.set()

    def drop(self, reason: str) -> None:
        """Discard queued messages and end the connection after sending ``reason``."""
        if not self.dropped:
            self.dropped = reason
            self.waiting.clear()
            self.waiting.append(_message(Dropped(reason=reason)))
            self.news.set()

    async def next(self, timeout_s: float) -> bytes | None:
        """Return the next message, or None after ``timeout_s``."""
        if not self.waiting:
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), timeout_s)
        if not self.waiting:
            return None
        message = self.waiting.popleft()
        self.waiting_bytes -= len(message)
        return message


class StreamHub:
    """Sends events and Moments to all watchers of this process; runs in one event loop."""

    def __init__(self, coordinator: EventSource, leader: Callable[[], LeaderView]) -> None:
        self._coordinator = coordinator
        self._looks = SnapshotReader(coordinator, leader)
        self._watchers: set[Watcher] = set()
        self._moments = MomentBuilder()
        self._after = 0
        self._task: asyncio.Task[None] | None = None
        self.dropped = 0  # since this process began

    @property
    def watching(self) -> int:
        """Return the number of watchers."""
        return len(self._watchers)

    async def join(self, deployment_id: str | None, after: int | None) -> Watcher:
        """Return a new watcher that starts after event ``after`` (None: from now on).

        Raises NotFound for an unknown deployment, ServiceUnavailable beyond MOST_WATCHERS.
        """
        targets, since = frozenset[str](), 0.0
        if deployment_id is not None:
            # On a thread: the state is locked during a write to the store, which may hang.
            record = await run_in_threadpool(
                self._coordinator.read, lambda state: state.run(deployment_id).deployment
            )
            targets, since = frozenset(record.target_workers), record.started_at
        if len(self._watchers) >= MOST_WATCHERS:
            raise ServiceUnavailable(
                "too many watch this replica",
                wanted=f"at most {MOST_WATCHERS}",
                do="Watch another replica, or come back.",
            )
        if self._task is None or self._task.done():
            self._moments = MomentBuilder()
            self._after = self._coordinator.events(2**62).last
            self._task = asyncio.get_running_loop().create_task(self._serve())
        live_from = self._after
        watcher = Watcher(
            deployment_id=deployment_id,
            after=live_from if after is None else min(after, live_from),
            live_from=live_from,
            targets=targets,
            since=since,
        )
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher."""
        self._watchers.discard(watcher)

    async def close(self) -> None:
        """End every connection."""
        for each in list(self._watchers):
            each.drop("the coordinator stops")
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def past(self, watcher: Watcher) -> Iterator[bytes]:
        """Yield the events before the watcher joined, or a Missed item if some are discarded."""
        first, until = True, watcher.live_from
        while watcher.after < until:
            found = self._coordinator.events(watcher.after)
            if first and found.first > watcher.after + 1:
                yield _message(Missed(after=watcher.after, first=found.first))
            first = False
            for event in found.events:
                if event.seq > until:
                    break
                if _concerns(event, watcher):
                    yield _message(EventItem(event=event), event.seq)
            watcher.after = max(watcher.after + 1, min(found.last, until))

    async def _serve(self) -> None:
        clock = asyncio.get_running_loop().time
        next_look_s = 0.0
        while self._watchers:
            if self._coordinator.stopping:
                for each in list(self._watchers):
                    each.drop("the coordinator stops")
                return
            try:
                self._tell_events()
                began_s = clock()
                fresh = any(each.fresh for each in self._watchers)
                if began_s >= next_look_s or fresh:
                    await self._tell_moment()
                    next_look_s = clock() + max(FRAME_S, COST_SHARE * (clock() - began_s))
            except PacelineError as error:
                log.warning("nothing to show: %s", error)  # the store is unavailable; watchers wait
            except Exception:
                # A bug must not leave watchers connected without any message.
                log.exception("the stream broke")
                for each in list(self._watchers):
                    each.drop("the coordinator failed; its log says why")
                return
            await asyncio.sleep(NEWS_S)

    def _tell_events(self) -> None:
        while True:
            found = self._coordinator.events(self._after)
            for event in found.events:
                message = b""
                for each in self._watchers:
                    if _concerns(event, each):
                        message = message or _message(EventItem(event=event), event.seq)
                        each.put(message)
            if found.last <= self._after:
                self._after = found.last  # a new store numbers events from 1
                return
            self._after = found.last
            if not found.events:
                return

    async def _tell_moment(self) -> None:
        listeners = [(each, (each.fresh, each.deployment_id)) for each in self._watchers]
        targets = {each.deployment_id: each.targets for each in self._watchers}
        # On a thread: 10,000 workers take about 0.3 s, and this loop also serves heartbeats.
        said = await asyncio.to_thread(self._moment, {key for _, key in listeners}, targets)
        for each, key in listeners:
            each.fresh = False
            each.put(said[key])

    def _moment(
        self, wanted: set[tuple[bool, str | None]], targets: dict[str | None, frozenset[str]]
    ) -> dict[tuple[bool, str | None], bytes]:
        """Return one message per (fresh, deployment_id): full or changes, of one or all."""
        look = self._looks.take({each for _, each in wanted if each is not None})
        changed = self._moments.take(look)
        whole = self._moments.whole() if any(fresh for fresh, _ in wanted) else changed
        said = {}
        for fresh, deployment_id in wanted:
            moment = whole if fresh else changed
            if deployment_id is not None:
                moment = of_deployment(moment, deployment_id, targets[deployment_id])
            said[fresh, deployment_id] = _message(moment)
        return said


class EventStream(Response):
    """One reader's HTTP response, until the reader disconnects or is dropped."""

    media_type = "text/event-stream"

    def __init__(self, hub: StreamHub, watcher: Watcher, longest_s: float | None = None) -> None:
        self._hub, self._watcher, self._longest_s = hub, watcher, longest_s
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the reader disconnects, is dropped, or takes too long for a message."""
        del scope
        gone = asyncio.ensure_future(_left(receive))
        telling = asyncio.ensure_future(self._tell(send))
        try:
            await asyncio.wait({gone, telling}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.leave(self._watcher)
            for each in (gone, telling):
                each.cancel()
            results = await asyncio.gather(gone, telling, return_exceptions=True)
        broken = results[1]
        if isinstance(broken, Exception) and not isinstance(broken, OSError):
            raise broken

    async def _tell(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        until_s = None if self._longest_s is None else clock() + self._longest_s
        watcher = self._watcher
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await self._send(send, start)
        await self._body(send, f"retry: {RETRY_MS}\n\n".encode())
        for message in self._hub.past(watcher):
            await self._body(send, message)
        while True:
            wait_s = HEARTBEAT_S
            if until_s is not None:
                wait_s = min(wait_s, until_s - clock())
                if wait_s <= 0:
                    watcher.drop("the time that was asked for is over")
            next_message = await watcher.next(max(0.0, wait_s))
            await self._body(send, next_message or b": still here\n\n")
            if watcher.dropped and not watcher.waiting:
                self._hub.dropped += 1
                await self._send(send, {"type": "http.response.body", "body": b""})
                return

    async def _body(self, send: Send, body: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        try:
            await asyncio.wait_for(send(message), SEND_DEADLINE_S)
        except TimeoutError:
            self._watcher.drop("too slow: a message was not taken in time")
            raise ConnectionResetError("the reader does not read") from None


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _concerns(event: Event, watcher: Watcher) -> bool:
    if watcher.deployment_id is None:
        return True
    if event.deployment_id is not None:
        return event.deployment_id == watcher.deployment_id
    return event.worker_id in watcher.targets and event.at >= watcher.since


def _message(item: Moment | EventItem | Missed | Dropped, number: int | None = None) -> bytes:
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {item.kind}\ndata: {item.model_dump_json()}\n\n".encode()
