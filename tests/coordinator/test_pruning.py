"""Nothing grows for ever: lost workers are forgotten, and beats leave nothing behind.

What is left of closed deployments is in ``test_switching``.
"""

import tracemalloc

import pytest

from paceline.coordinator.state import CoordinatorSettings, CoordinatorState, HeartbeatReceived
from paceline.errors import Conflict, ServiceUnavailable
from paceline.schemas import EventName, Heartbeat
from tests.coordinator.stores.effects import expected


def test_long_lost_workers_are_forgotten_unless_a_deployment_names_them(make_world):
    """Where each start of an agent has a name of its own, the dead do not pile up."""
    world = make_world(
        settings=CoordinatorSettings(
            kept_lost_s=3600.0, kept_closed=0, kept_closed_s=0.0, deadline_s=1e6
        )
    )
    world.register("node-0", "node-1")
    d = world.create("node-0", "node-1", "named")
    pods = [f"pod-{number}" for number in range(90)]
    world.register(*pods, "named")
    for each in (*pods, "named", "node-1"):
        world.beat(each)
        world.silent.add(each)
    world.wait(61)
    everybody = {"node-0", "node-1", "named", *pods}
    assert workers(world) == everybody, "lost, and remembered for a while"
    world.register("node-1")
    world.now_s += 3600
    world.state.fleet.discount_gap(3600, world.now_s)
    world.wait(3 * 61)
    assert workers(world) == {"node-0", "node-1", "named"}
    told = [each.worker_id for each in world.names(EventName.WORKER_FORGOTTEN)]
    assert sorted(told) == sorted(pods)
    kept = {each.worker_id for each in expected(world.kept).workers}
    assert kept == workers(world), "and not in the store either"
    world.cancel(d)
    world.wait(2 * 61)
    assert workers(world) == {"node-0", "node-1"}
    world.register("pod-3")
    assert world.state.fleet.alive("pod-3"), "it may come back"


def test_the_dead_do_not_slow_down_the_beats_of_the_living(make_world):
    world = make_world(settings=CoordinatorSettings(beat_s=0.5, beats_per_second=10.0))
    names = [f"node-{number}" for number in range(30)]
    world.register(*names)
    assert world.state.fleet.beat_interval_s() == 3.0
    world.silent.update(names[5:])
    world.wait(30)
    assert world.state.fleet.beat_interval_s() == 0.5
    world.register(*names[:10])
    assert world.state.fleet.beat_interval_s() == 1.0
    world.state = CoordinatorState.restore(expected(world.kept), world.now_s, world.settings)
    assert world.state.fleet.beat_interval_s() == 1.0, "also after a change of leaders"


def test_what_is_kept_does_not_grow_with_beats(world):
    """A deployment of hours: each beat replaces what the one before said."""
    world.register("node-0", "node-1")
    d = world.create("node-0", "node-1")
    world.wait(1.0)
    for each in ("node-0", "node-1"):
        world.lanes(d, each)

    def beats(count, begin):
        for number in range(begin, begin + count):
            world.now_s += 0.01
            for name, other in (("node-0", "node-1"), ("node-1", "node-0")):
                edges = [
                    {"source": name, "reader": other, "bytes": number, "busy_s": number / 100},
                    {"source": other, "reader": name, "pieces": number},
                ]
                said = {
                    "worker_id": name,
                    "status": "receiving",
                    "number": number,
                    "deployments": [
                        world.entry(d, name, 2).model_dump() | {"edges": edges, "origin_bytes": 1}
                    ],
                }
                event = HeartbeatReceived(beat=Heartbeat.model_validate(said), at=world.now_s)
                world.state.handle(event, world.now_s)

    beats(200, 1)
    grown = []
    tracemalloc.start()
    try:
        beats(50, 1_000)
        for begin in (2_000, 3_000, 4_000):
            before, _ = tracemalloc.get_traced_memory()
            beats(1_000, begin)
            grown.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    # Other threads of this process allocate, too: the least of three counts.
    assert min(grown) < 20_000, "20 bytes a beat would be 86 MB a day for 50 workers"


def workers(world) -> set[str]:
    return {each.worker_id for each in world.state.fleet.workers()}


def test_there_are_so_many_workers_and_no_more(make_world):
    """A token of the whole fleet may be as many workers as it likes: not for ever."""
    world = make_world(settings=CoordinatorSettings(workers_at_most=3))
    world.register("node-0", "node-1", "node-2")
    with pytest.raises(Conflict, match="too many workers"):
        world.register("node-3")
    assert len(workers(world)) == 3
    world.register("node-1")
    assert world.state.fleet.alive("node-1"), "who is known may come again"


def test_there_are_so_many_deployments_under_way_and_no_more(make_world):
    world = make_world(settings=CoordinatorSettings(open_at_most=2))
    first = world.create("node-0", key="k")
    world.create("node-0")
    with pytest.raises(ServiceUnavailable, match="too many deployments"):
        world.create("node-0")
    assert len(world.state.deployments()) == 2
    assert world.create("node-0", key="k") == first, "the same call again is no new one"
    world.cancel(first)
    world.create("node-0")


def test_cancels_from_before_a_change_of_leaders_are_forgotten_too(make_world):
    """Whether a worker stopped is not kept: a new leader has to hear it again, of each of them."""
    world = make_world(settings=CoordinatorSettings(kept_closed=0, kept_closed_s=0.0))
    world.register("node-0", "node-1")
    made = [world.create("node-0", "node-1", version=f"v{n}") for n in range(30)]
    world.wait(1.0)
    for d in made:
        world.cancel(d)
    world.state = CoordinatorState.restore(expected(world.kept), world.now_s, world.settings)
    world.wait(8 * 61)
    assert world.state.deployments() == []
