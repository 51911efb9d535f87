"""The event stream: what a watcher gets, what a slow one misses, and that nothing comes twice."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable

import pytest

from paceline.api import EventStream, StreamHub, event_stream as stream
from paceline.api.pages import _leader
from paceline.client import Follower, Lost
from paceline.coordinator import EventRing, notifier
from paceline.coordinator.notifier import MAX_PAGE
from paceline.coordinator.state import FetchLanes, HeartbeatReceived
from paceline.errors import AccessDenied, NotFound, ServiceUnavailable
from paceline.schemas import (
    DeploymentBeat,
    Dropped,
    Event,
    EventItem,
    EventName,
    Heartbeat,
    LeaderView,
    Missed,
    Moment,
    StreamItem,
    WorkerStatus,
)
from tests.api.conftest import FakeAgent, creation, make_model
from tests.coordinator.conftest import World
from tests.coordinator.leader.conftest import Three, three  # noqa: F401
from tests.coordinator.leader.test_replica import CALL, registered

DEADLINE_S = 20.0
SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}  # as uvicorn says


class Stand:
    """A coordinator without threads and stores: a world's state and a ring of events."""

    def __init__(self, first: int = 1) -> None:
        self.world = World()
        self.notify = EventRing()
        self.seq = first - 1
        self.stopping = False
        self.reads = 0

    def read(self, question):
        self.reads += 1
        return question(self.world.state)

    def events(self, after: int):
        return self.notify.after(after)

    def now(self) -> float:
        return 1e9

    def happens(self, name: EventName = EventName.WORKER_LOST, **more: object) -> int:
        self.seq += 1
        self.notify.extend([Event(seq=self.seq, name=name, at=self.now(), **more)])
        return self.seq


class Reader:
    """One connection as the server would carry it; ``stuck`` takes nothing more."""

    @classmethod
    async def join(cls, stand, deployment_id=None, after=None, for_s=None) -> Reader:
        hub = stand if isinstance(stand, StreamHub) else hub_of(stand)
        return cls(hub, await hub.join(deployment_id, after), for_s)

    def __init__(self, hub, watcher, for_s: float | None = None) -> None:
        self.items: list[object] = []
        self.ids: list[int] = []
        self.ended = False
        self.stuck = asyncio.Event()
        self.stuck.set()
        self._hanging = asyncio.Event()
        self._task = asyncio.ensure_future(
            EventStream(hub, watcher, for_s)(SCOPE, self._receive, self._send)
        )

    async def _receive(self):
        await self._hanging.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self.stuck.wait()
        body = message.get("body", b"").decode()
        self.ended |= message["type"] == "http.response.body" and not message.get("more_body")
        for block in body.split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
            if "id" in fields:
                self.ids.append(int(fields["id"]))
            if "data" in fields:
                item = StreamItem.model_validate_json(fields["data"]).root
                assert item.kind == fields["event"]
                self.items.append(item)

    def of(self, kind: type) -> list:
        return [each for each in self.items if isinstance(each, kind)]

    async def until(self, check: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not check():
                if self._task.done():
                    self._task.result()
                    assert check(), "the connection ended"
                await asyncio.sleep(0.01)

    async def leave(self) -> None:
        self._hanging.set()
        await asyncio.wait_for(self._task, DEADLINE_S)

    async def end(self) -> None:
        await asyncio.wait_for(self._task, DEADLINE_S)


def hub_of(stand: Stand) -> StreamHub:
    return StreamHub(stand, lambda: LeaderView(epoch=3))


def run(story) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


def test_it_begins_with_everything_and_goes_on_with_what_changes() -> None:
    async def story() -> None:
        stand = Stand()
        world = stand.world
        world.register("node-0", "node-1")
        d = world.create("node-0", "node-1")
        reader = await Reader.join(stand)
        await reader.until(lambda: reader.items)
        first = reader.items[0]
        assert isinstance(first, Moment)
        assert first.full
        assert first.leader.epoch == 3
        assert [each.worker_id for each in first.workers] == ["node-0", "node-1"]
        assert [each.worker_id for each in first.deployments[0].parts] == ["node-0", "node-1"]
        world.receive(d, "node-0", 4)
        await reader.until(lambda: any(each.deployments for each in reader.of(Moment)[1:]))
        (told,) = next(each for each in reader.of(Moment)[1:] if each.deployments).deployments
        assert [(each.worker_id, each.chunks) for each in told.parts] == [("node-0", ((0, 1),))]
        await reader.leave()

    run(story)


def test_nobody_watching_costs_nothing() -> None:
    async def story() -> None:
        stand = Stand()
        reader = await Reader.join(stand)
        await reader.until(lambda: len(reader.items) > 2)
        await reader.leave()
        await asyncio.sleep(3 * stream.POLL_S)
        reads = stand.reads
        await asyncio.sleep(2 * stream.SNAPSHOT_INTERVAL_S)
        assert stand.reads == reads

    run(story)


def test_who_comes_back_hears_everything_after_what_it_heard_once() -> None:
    async def story() -> None:
        stand = Stand()
        for _ in range(MAX_PAGE + 100):
            stand.happens()
        reader = await Reader.join(stand, after=7)
        last = stand.happens()
        await reader.until(lambda: last in reader.ids)
        assert reader.ids == list(range(8, last + 1))
        assert not reader.of(Missed)
        await reader.leave()

    run(story)


def test_a_reader_that_leaves_during_a_snapshot_disturbs_no_other() -> None:
    async def story() -> None:
        stand, busy = Stand(), threading.Lock()
        stand.world.register("node-0")
        reads = stand.read

        def alone(question):
            assert busy.acquire(blocking=False), "two snapshots at once"
            time.sleep(0.2)
            try:
                return reads(question)
            finally:
                busy.release()

        stand.read = alone
        hub = hub_of(stand)
        first = await Reader.join(hub)
        await asyncio.sleep(0.05)
        leaving = asyncio.ensure_future(first.leave())
        second = await Reader.join(hub)
        await leaving
        await second.until(lambda: second.of(Moment))
        await second.leave()

    run(story)


def test_a_store_that_is_away_at_the_first_snapshot_is_waited_for() -> None:
    async def story() -> None:
        stand = Stand()
        reads, failures = stand.read, iter([ServiceUnavailable("away")] * 2)

        def away(question):
            for error in failures:
                raise error
            return reads(question)

        stand.read = away
        reader = await Reader.join(stand)
        await reader.until(lambda: reader.of(Moment))
        await reader.leave()

    run(story)


def test_what_is_no_longer_held_is_told_to_be_missing() -> None:
    async def story() -> None:
        stand = Stand(first=500)
        stand.happens()
        reader = await Reader.join(stand, after=20)
        await reader.until(lambda: reader.ids)
        assert reader.of(Missed) == [Missed(after=20, first=500)]
        await reader.leave()

    run(story)


def test_one_deployment_alone_hears_of_itself_and_its_workers() -> None:
    async def story() -> None:
        stand = Stand()
        stand.world.register("node-0", "node-1")
        d, other = stand.world.create("node-0"), stand.world.create("node-1", version="v2")
        reader = await Reader.join(stand, d)
        stand.happens(worker_id="node-1")
        stand.happens(deployment_id=other)
        stand.happens(worker_id="node-0")
        stand.happens(deployment_id=d)
        await reader.until(lambda: len(reader.ids) == 2)
        assert reader.ids == [3, 4]
        await reader.until(lambda: reader.of(Moment))
        moment = reader.of(Moment)[0]
        assert [each.deployment_id for each in moment.deployments] == [d]
        assert [each.worker_id for each in moment.workers] == ["node-0"]
        await reader.leave()

    run(story)


def test_a_deployment_that_is_not_there_is_refused() -> None:
    async def story() -> None:
        with pytest.raises(NotFound):
            await hub_of(Stand()).join("dep-9", None)

    run(story)


def test_a_state_that_is_locked_holds_up_nobody_but_who_asks_for_it() -> None:
    """While the store is away a commit holds the state; beats go through the same loop."""

    async def story() -> None:
        stand, lock = Stand(), threading.Lock()
        d = stand.world.create("node-0")
        reads = stand.read

        def slowly(question):
            with lock:
                return reads(question)

        stand.read = slowly
        hub = hub_of(stand)
        with lock:
            joining = asyncio.ensure_future(hub.join(d, None))
            for _ in range(20):  # the loop goes on
                await asyncio.sleep(0.01)
            assert not joining.done()
        watcher = await joining
        assert watcher.targets == {"node-0"}

    run(story)


def test_a_slow_reader_gets_the_newest_state_and_the_others_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifier, "RING_EVENTS", 1_000)

    async def story() -> None:
        stand = Stand()
        world = stand.world
        world.register("node-0")
        d = world.create("node-0")
        hub = hub_of(stand)
        slow, quick = [await Reader.join(hub) for _ in range(2)]
        await slow.until(lambda: slow.items)
        slow.stuck.clear()
        seen = len(quick.of(Moment))
        for _ in range(1_010):  # more than the coordinator holds
            stand.happens()
        world.receive(d, "node-0", 4)
        await quick.until(lambda: any(each.deployments for each in quick.of(Moment)[1:]))
        # One may be on its way to the slow reader, and the next would be a change: two are missed.
        await quick.until(lambda: len(quick.of(Moment)) >= seen + 3)
        told = len(slow.items)
        slow.stuck.set()
        await slow.until(lambda: slow.ids and slow.ids[-1] == stand.seq)
        await slow.until(lambda: len(slow.of(Moment)) > 2)
        assert len(slow.of(Missed)) == 1
        (whole,) = [each for each in slow.items[told:] if isinstance(each, Moment) and each.full]
        assert whole.deployments[0].parts[0].chunks == ((0, 1),)
        for each in (slow, quick):
            await each.leave()

    run(story)


def test_too_many_watchers_are_refused_not_served_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_WATCHERS", 2)

    async def story() -> None:
        hub = hub_of(Stand())
        readers = [await Reader.join(hub) for _ in range(2)]
        with pytest.raises(ServiceUnavailable, match="too many"):
            await hub.join(None, None)
        await readers[0].until(lambda: readers[0].items)
        await readers[0].leave()
        await hub.join(None, None)
        await readers[1].leave()

    run(story)


def test_a_coordinator_that_stops_says_so() -> None:
    async def story() -> None:
        stand = Stand()
        reader = await Reader.join(stand)
        await reader.until(lambda: reader.items)
        stand.stopping = True
        await reader.end()
        assert "stops" in reader.of(Dropped)[0].reason
        assert reader.ended

    run(story)


def test_silence_is_broken_by_comments_and_the_time_asked_for_ends_it() -> None:
    async def story() -> None:
        reader = await Reader.join(Stand(), for_s=0.3)
        await reader.end()
        assert reader.ended
        assert reader.of(Moment)

    run(story)


# --- a real server, and the reader that `watch` uses


def follow(follower: Follower, until: Callable[[object], bool]) -> list:
    """Collect items until one of them is the last; a thread of its own must not be needed."""
    found, end_s = [], time.monotonic() + DEADLINE_S
    for item in follower.items():
        found.append(item)
        if until(item):
            return found
        assert time.monotonic() < end_s, found[-5:]
    raise AssertionError


def shows(status: str) -> Callable[[object], bool]:
    return lambda item: (
        isinstance(item, Moment) and any(each.status.value == status for each in item.deployments)
    )


def test_a_watcher_outlives_the_coordinator_and_misses_nothing(served) -> None:
    url, manifest = make_model(served.runtime.state_dir)
    client = served.client()
    agents = [FakeAgent(client, f"node-{index}", per_beat=1) for index in range(3)]
    for agent in agents:
        agent.register()
    d = client.create(creation(url, [each.worker_id for each in agents]), "key-1").deployment_id
    token = served.runtime.secrets.coordinator_token
    follower = Follower([served.url], token, deployment_id=d, after=0, patience_s=30)
    seen: list = []
    done = threading.Event()

    def read() -> None:
        seen.extend(follow(follower, shows("complete")))
        done.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for _ in range(2):
        for agent in agents:
            agent.beat(manifest)
    served.end(signal.SIGKILL)
    served.start()
    end_s = time.monotonic() + DEADLINE_S
    while not done.wait(0.02):
        assert time.monotonic() < end_s
        for agent in agents:
            agent.beat(manifest)
    numbers = [each.event.seq for each in seen if isinstance(each, EventItem)]
    assert numbers == sorted(set(numbers)), "no event twice, none out of order"
    held = [each for each in client.events(0).events if each.deployment_id == d]
    reached = [each.seq for each in held if each.seq <= numbers[-1]]
    assert numbers == [each for each in numbers if each in {e.seq for e in client.events(0).events}]
    assert set(reached) <= set(numbers), "no event of the deployment was missed"
    assert any(isinstance(each, Lost) for each in seen)
    fulls = [each for each in seen if isinstance(each, Moment) and each.full]
    assert len(fulls) >= 2, "after the break everything is told anew"


def test_strangers_and_unknown_deployments_are_refused_at_once(served) -> None:
    token = served.runtime.secrets.coordinator_token
    with pytest.raises(AccessDenied):
        next(Follower([served.url], "wrong").items())
    with pytest.raises(NotFound):
        next(Follower([served.url], token, deployment_id="dep-9").items())
    gone = Follower(["http://127.0.0.1:9"], token, patience_s=0.0)
    with pytest.raises(ServiceUnavailable, match="no coordinator answers"):
        list(gone.items())


def test_a_standby_streams_who_leads_who_has_what_and_what_happened(
    three: Three,  # noqa: F811
) -> None:
    leader = three.leader.coordinator
    leader.handle(registered())
    made = leader.create(CALL, "key-1").deployment_id
    leader.handle(FetchLanes(deployment_id=made, worker_id="node-0"))
    epoch = leader.read(lambda state: state.plan(made)).epoch
    entry = DeploymentBeat(
        deployment_id=made, epoch=epoch, status=WorkerStatus.RECEIVING, pieces_held=3,
        bytes_held=3072, chunks_received=(0,),
    )  # fmt: skip
    beat = Heartbeat(worker_id="node-0", status=WorkerStatus.RECEIVING, deployments=(entry,))
    leader.handle(HeartbeatReceived(beat=beat))
    three.follow_up()
    standby = three.standbys[0]

    async def story() -> None:
        coordinator = standby.coordinator
        hub = StreamHub(coordinator, lambda: _leader(coordinator, standby.url, "b"))
        reader = await Reader.join(hub, made, 0)

        def chunks() -> list[tuple[int, int]]:
            parts = [p for m in reader.of(Moment) for d in m.deployments for p in d.parts]
            return [run for part in parts for run in part.chunks]

        await reader.until(lambda: chunks() == [(0, 0)])
        await reader.until(lambda: reader.ids)
        said = reader.of(Moment)[0].leader
        assert (said.leads, said.leader_url, said.url) == (False, three.leader.url, standby.url)
        assert reader.of(EventItem)[0].event.name is EventName.DEPLOYMENT_CREATED
        await reader.leave()

    run(story)
