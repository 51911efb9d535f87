"""The event stream: what a watcher gets, what a slow one loses, and that nothing is said twice."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable

import pytest

from paceline.api import event_stream as stream
from paceline.api.event_stream import EventStream, StreamHub, Watcher
from paceline.api.pages import _leader
from paceline.cli.event_following import Follower, Lost
from paceline.coordinator.notifier import EventRing
from paceline.coordinator.state.messages import FetchLanes, HeartbeatReceived
from paceline.errors import AccessDenied, NotFound, ServiceUnavailable
from paceline.schemas.calls import DeploymentBeat, Heartbeat
from paceline.schemas.events import (
    Dropped,
    Event,
    EventItem,
    EventName,
    LeaderView,
    Missed,
    Moment,
    StreamItem,
)
from paceline.schemas.records import WorkerStatus
from tests.api.conftest import FakeAgent, creation, make_model
from tests.coordinator.conftest import World
from tests.coordinator.leader.conftest import Three, three  # noqa: F401
from tests.coordinator.leader.test_replica import CALL, registration

DEADLINE_S = 20.0


class Stand:
    """A coordinator without threads and stores: a world's state and a ring of events."""

    def __init__(self, first: int = 1) -> None:
        self.world = World()
        self.ring = EventRing()
        self.seq = first - 1
        self.stopping = False
        self.reads = 0

    def read(self, question):
        self.reads += 1
        return question(self.world.state)

    def events(self, after: int):
        return self.ring.after(after)

    def now(self) -> float:
        return 1e9

    def happens(self, name: EventName = EventName.WORKER_LOST, **more: object) -> int:
        self.seq += 1
        self.ring.extend([Event(seq=self.seq, name=name, at=self.now(), **more)])
        return self.seq


class Reader:
    """One connection as the server would carry it; ``stuck`` takes nothing more."""

    def __init__(self, hub: StreamHub, watcher: Watcher, for_s: float | None = None) -> None:
        self.items: list[object] = []
        self.ids: list[int] = []
        self.ended = False
        self.stuck = asyncio.Event()
        self.stuck.set()
        self._hanging = asyncio.Event()
        self._task = asyncio.ensure_future(
            EventStream(hub, watcher, for_s)({}, self._receive, self._send)
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
        hub = hub_of(stand)
        reader = Reader(hub, await hub.join(None, None))
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
        assert hub.watching == 0

    run(story)


def test_nobody_watching_costs_nothing() -> None:
    async def story() -> None:
        stand = Stand()
        hub = hub_of(stand)
        reader = Reader(hub, await hub.join(None, None))
        await reader.until(lambda: len(reader.items) > 2)
        await reader.leave()
        await asyncio.sleep(3 * stream.NEWS_S)
        reads = stand.reads
        await asyncio.sleep(2 * stream.FRAME_S)
        assert stand.reads == reads

    run(story)


def test_who_comes_back_hears_everything_after_what_it_heard_once() -> None:
    async def story() -> None:
        stand = Stand()
        for _ in range(2500):  # more than a page of the ring
            stand.happens()
        hub = hub_of(stand)
        reader = Reader(hub, await hub.join(None, 7))
        stand.happens()
        await reader.until(lambda: 2501 in reader.ids)
        assert reader.ids == list(range(8, 2502))
        assert not reader.of(Missed)
        await reader.leave()

    run(story)


def test_what_is_no_longer_held_is_told_to_be_missing() -> None:
    async def story() -> None:
        stand = Stand(first=500)
        stand.happens()
        hub = hub_of(stand)
        reader = Reader(hub, await hub.join(None, 20))
        await reader.until(lambda: reader.ids)
        assert reader.of(Missed) == [Missed(after=20, first=500)]
        await reader.leave()

    run(story)


def test_one_deployment_alone_hears_of_itself_and_its_workers() -> None:
    async def story() -> None:
        stand = Stand()
        stand.world.register("node-0", "node-1")
        d, other = stand.world.create("node-0"), stand.world.create("node-1", version="v2")
        hub = hub_of(stand)
        reader = Reader(hub, await hub.join(d, None))
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
        await hub.close()

    run(story)


def test_a_burst_of_events_drops_nobody() -> None:
    async def story() -> None:
        stand = Stand()
        hub = hub_of(stand)
        reader = Reader(hub, await hub.join(None, None))
        await reader.until(lambda: reader.items)
        for _ in range(2000):  # a rack that goes down
            stand.happens()
        await reader.until(lambda: len(reader.ids) == 2000)
        await reader.leave()

    run(story)


def test_a_slow_reader_is_dropped_with_the_reason_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "MOST_QUEUED", 40)

    async def story() -> None:
        stand = Stand()
        hub = hub_of(stand)
        slow = Reader(hub, await hub.join(None, None))
        quick = Reader(hub, await hub.join(None, None))
        await slow.until(lambda: slow.items)
        slow.stuck.clear()
        for number in range(3 * stream.MOST_QUEUED):
            stand.happens()
            if number % 30 == 0:
                await asyncio.sleep(2 * stream.NEWS_S)
        await quick.until(lambda: len(quick.ids) == 3 * stream.MOST_QUEUED)
        slow.stuck.set()
        await slow.end()
        assert slow.ended
        (why,) = slow.of(Dropped)
        assert "too slow" in why.reason
        assert hub.watching == 1
        assert hub.dropped == 1
        await quick.leave()

    run(story)


def test_a_reader_that_takes_nothing_at_all_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SEND_DEADLINE_S", 0.2)

    async def story() -> None:
        hub = hub_of(Stand())
        reader = Reader(hub, await hub.join(None, None))
        await reader.until(lambda: reader.items)
        reader.stuck.clear()
        await reader.end()
        assert hub.watching == 0

    run(story)


def test_too_many_watchers_are_refused_not_served_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_WATCHERS", 2)

    async def story() -> None:
        hub = hub_of(Stand())
        readers = [Reader(hub, await hub.join(None, None)) for _ in range(2)]
        with pytest.raises(ServiceUnavailable, match="too many"):
            await hub.join(None, None)
        await readers[0].until(lambda: readers[0].items)
        await readers[0].leave()
        await hub.join(None, None)
        await hub.close()

    run(story)


def test_a_coordinator_that_stops_says_so() -> None:
    async def story() -> None:
        stand = Stand()
        hub = hub_of(stand)
        reader = Reader(hub, await hub.join(None, None))
        await reader.until(lambda: reader.items)
        stand.stopping = True
        await reader.end()
        assert "stops" in reader.of(Dropped)[0].reason
        assert reader.ended

    run(story)


def test_silence_is_broken_by_comments_and_the_time_asked_for_ends_it() -> None:
    async def story() -> None:
        hub = hub_of(Stand())
        reader = Reader(hub, await hub.join(None, None), for_s=0.3)
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
    leader.handle(registration())
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
        reader = Reader(hub, await hub.join(made, 0))

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


def test_every_kind_of_item_reads_back_as_it_was_written() -> None:
    for item in (Missed(after=1, first=3), Dropped(reason="x")):
        assert StreamItem.model_validate(json.loads(item.model_dump_json())).root == item
