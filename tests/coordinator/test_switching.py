"""The fleet switches together: forwards and back, with a quorum, and whoever was away follows."""

import pytest

from paceline.coordinator.state import CoordinatorSettings, CoordinatorState, RaiseBudget
from paceline.errors import Conflict, NotFound
from paceline.schemas import EventName, Failure, SwitchKind, SwitchPhase
from tests.coordinator.conftest import World
from tests.coordinator.stores.effects import expected
from tests.coordinator.test_state import commands, started

TWO = ("node-0", "node-1")
TWENTY = tuple(f"node-{number}" for number in range(20))


def complete(world, *workers, version="v1", **more):
    """Bring a version to all workers."""
    d = started(world, *workers, version=version, **more)
    world.finish(d, *workers)
    world.tick()
    assert world.status(d) == "complete"
    return d


def active(world, *workers, version="v1", **more):
    """Bring a version to all workers and have them switch to it."""
    d = complete(world, *workers, version=version, **more)
    world.activate(d, *workers)
    obey(world, d, *workers)
    assert world.switch(d).phase is SwitchPhase.SWITCHED
    return d


def obey(world, deployment_id, *workers):
    """Let workers hear that they shall switch to ``deployment_id``, and say that they did."""
    for worker_id in workers:
        kinds = {(each.kind, each.deployment_id) for each in world.beat(worker_id).commands}
        assert ("activate", deployment_id) in kinds
    world.show(deployment_id, *workers, activated=True)


def states(world, deployment_id):
    return {each.worker_id: each.state for each in world.switch(deployment_id).workers}


def test_only_a_complete_deployment_activates_with_one_report_at_the_end(world):
    d = started(world, *TWO)
    with pytest.raises(Conflict):
        world.activate(d)
    world.finish(d, *TWO)
    world.tick()
    assert commands(world.beat("node-0")) == []
    world.activate(d, *TWO)
    world.activate(d)
    for worker_id in TWO:
        assert world.names(EventName.DEPLOYMENT_ACTIVATED) == []
        assert commands(world.beat(worker_id)) == ["activate"]
        world.show(d, worker_id, activated=True)
    assert len(world.names(EventName.DEPLOYMENT_ACTIVATED)) == 1
    assert commands(world.beat("node-0")) == []
    assert all(each.activated for each in world.state.progress(d))
    assert states(world, d) == dict.fromkeys(TWO, "switched")


def test_no_worker_is_switched_before_a_quorum_is_ready(world):
    d = complete(world, *TWO)
    world.activate(d, "node-0")
    assert commands(world.beat("node-0")) == [], "ready, and nothing to do before the others are"
    assert commands(world.beat("node-1")) == ["fetch_lanes"], "which has it look at its disk"
    assert world.switch(d).phase is SwitchPhase.PREPARING
    assert states(world, d) == {"node-0": "ready", "node-1": "waiting"}
    world.show(d, "node-1")
    assert world.switch(d).phase is SwitchPhase.SWITCHING
    assert [commands(world.beat(each)) for each in TWO] == [["activate"]] * 2


def test_without_a_quorum_the_switch_is_refused_and_each_worker_reported(world):
    d = complete(world, *TWO)
    world.silent.add("node-1")
    world.wait(4)
    world.activate(d, "node-0")
    world.wait(30)
    assert world.switch(d).phase is SwitchPhase.PREPARING
    world.wait(1)
    view = world.switch(d)
    assert view.phase is SwitchPhase.REFUSED
    assert view.failure is not None and "node-1" in view.failure.message
    assert states(world, d)["node-1"] == "lost"
    (told,) = world.names(EventName.DEPLOYMENT_SWITCH_REFUSED)
    assert told.data["lost"] == ["node-1"]
    assert commands(world.beat("node-0")) == []
    world.register("node-1")
    assert commands(world.beat("node-1")) == [], "a refused switch reaches nobody later"


def test_a_quorum_does_not_wait_for_the_dead_who_follow_when_they_return(world):
    d = complete(world, *TWENTY)
    world.silent.add("node-19")
    world.wait(4)
    world.activate(d, *TWENTY[:-1])
    obey(world, d, *TWENTY[:-1])
    assert world.switch(d).phase is SwitchPhase.SWITCHED
    (told,) = world.names(EventName.DEPLOYMENT_ACTIVATED)
    assert told.data["workers"] == 19
    assert told.data["lost"] == ["node-19"]
    world.register("node-19")
    assert commands(world.beat("node-19")) == ["activate"]
    world.show(d, "node-19", activated=True)
    assert commands(world.beat("node-19")) == []
    assert states(world, d)["node-19"] == "switched"


def test_a_ready_quorum_waits_a_little_for_the_living(world):
    d = complete(world, *TWENTY)
    world.activate(d, *TWENTY[:-1])
    assert world.switch(d).phase is SwitchPhase.PREPARING
    world.wait(3.5)
    assert world.switch(d).phase is SwitchPhase.SWITCHING


def test_a_switch_without_its_quorum_is_reported_late_and_goes_on(world):
    d = complete(world, *TWO)
    world.activate(d, *TWO)
    obey(world, d, "node-0")
    world.wait(31)
    assert len(world.names(EventName.DEPLOYMENT_SWITCH_LATE)) == 1
    assert world.switch(d).phase is SwitchPhase.SWITCHING
    world.wait(31)
    assert len(world.names(EventName.DEPLOYMENT_SWITCH_LATE)) == 1
    obey(world, d, "node-1")
    assert world.switch(d).phase is SwitchPhase.SWITCHED


def test_a_worker_that_cannot_switch_is_named_with_its_reason(world):
    d = complete(world, *TWO)
    world.activate(d, *TWO)
    assert commands(world.beat("node-0")) == ["activate"]
    reason = Failure(code="NotFound", message="no such version here")
    world.show(d, "node-0", failure=reason)
    (worker,) = [each for each in world.switch(d).workers if each.worker_id == "node-0"]
    assert (worker.state, worker.failure) == ("failed", reason)
    assert commands(world.beat("node-0")) == ["activate"], "it is asked again"


def test_rollback_returns_to_the_version_before_and_moves_nothing(world):
    first, second = active(world, *TWO), active(world, *TWO, version="v2")
    epoch = world.epoch(first)
    world.roll_back(second)
    world.roll_back(second)
    for worker_id in TWO:
        kinds = [(each.kind, each.deployment_id) for each in world.beat(worker_id).commands]
        assert kinds == [("fetch_lanes", first)]
    world.show(first, *TWO)
    obey(world, first, *TWO)
    view = world.switch(second)
    assert (view.kind, view.phase) == (SwitchKind.ROLLBACK, SwitchPhase.SWITCHED)
    assert {each.version for each in view.workers} == {"v1"}
    assert all(each.activated for each in world.state.progress(first))
    assert not any(each.activated for each in world.state.progress(second))
    (told,) = world.names(EventName.DEPLOYMENT_ROLLED_BACK)
    assert (told.data["version"], told.data["to"], told.data["workers"]) == ("v2", "v1", 2)
    assert world.epoch(first) == epoch, "no new plan, no transfer"
    assert world.roll_back(second).success, "asked again: the answer was lost"


def test_rollback_needs_the_active_version_and_something_beneath(world):
    first = active(world, *TWO)
    with pytest.raises(Conflict, match="nothing was active before"):
        world.roll_back(first)
    second = active(world, *TWO, version="v2")
    with pytest.raises(Conflict, match="only the active version"):
        world.roll_back(first)
    staged = complete(world, *TWO, version="v3")
    with pytest.raises(Conflict, match="only the active version"):
        world.roll_back(staged)
    with pytest.raises(NotFound):
        world.switch(staged)
    assert world.roll_back(second).success


def test_each_worker_returns_to_what_it_had(world):
    left, right = active(world, "node-0"), active(world, "node-1")
    both = active(world, *TWO, version="v2")
    world.roll_back(both)
    world.show(left, "node-0")
    world.show(right, "node-1")
    obey(world, left, "node-0")
    obey(world, right, "node-1")
    assert world.switch(both).phase is SwitchPhase.SWITCHED


def test_late_worker_is_not_switched_back_to_a_superseded_version(world):
    first = complete(world, *TWO)
    second = complete(world, *TWO, version="v2")
    world.activate(first, *TWO)
    obey(world, first, "node-0")
    world.activate(second, *TWO)
    kinds = [(each.kind, each.deployment_id) for each in world.beat("node-1").commands]
    assert kinds == [("activate", second)]
    assert world.switch(first).phase is SwitchPhase.SUPERSEDED
    obey(world, second, *TWO)
    world.show(first, "node-0", activated=True)  # an old beat, or an agent's old word
    assert world.switch(second).phase is SwitchPhase.SWITCHED


def test_the_newer_of_two_requests_wins_before_any_worker_is_commanded(world):
    first = complete(world, *TWO)
    second = complete(world, *TWO, version="v2")
    world.activate(first, "node-0")
    world.activate(second, *TWO)
    assert world.switch(first).phase is SwitchPhase.REFUSED
    assert world.switch(second).phase is SwitchPhase.SWITCHING


def test_older_version_is_refused_unless_asked_for(world):
    active(world, *TWO, version="v10")
    with pytest.raises(Conflict, match="newer version is active"):
        world.create(*TWO, version="v9")
    with pytest.raises(Conflict):
        world.create("node-1", "node-2", version="v9")
    world.create("node-2", version="v9")
    asked = complete(world, *TWO, version="v9", allow_older=True)
    assert world.activate(asked, *TWO).success, "it was asked for already"


def test_staged_version_that_became_old_is_refused_unless_asked_for(world):
    staged = complete(world, *TWO, version="v1")
    active(world, *TWO, version="v2")
    with pytest.raises(Conflict, match="newer version is active"):
        world.activate(staged)
    assert world.activate(staged, allow_older=True).success


@pytest.mark.parametrize("moment", ["preparing", "switching", "missing", "back"])
def test_switch_survives_a_change_of_leaders(world, moment):
    first = active(world, *TWENTY)
    d = complete(world, *TWENTY, version="v2")
    here, goal = TWENTY, d
    if moment == "missing":
        world.silent.add("node-19")
        world.wait(4)
        here = TWENTY[:-1]
    world.activate(d, *(() if moment == "preparing" else here))
    if moment in ("missing", "back"):
        obey(world, d, *here)
    if moment == "back":
        world.roll_back(d)
        goal = first
    world.state = CoordinatorState.restore(expected(world.kept), world.now_s, world.settings)
    if moment == "missing":
        world.register("node-19")
        obey(world, d, "node-19")
        assert commands(world.beat("node-0")) == [], "who has switched is not asked again"
    else:
        world.show(goal, *TWENTY)
        obey(world, goal, *TWENTY)
        assert world.switch(d).phase is SwitchPhase.SWITCHED


def test_new_leader_restarts_nothing_and_waits_for_what_the_workers_say(world):
    nodes = ("node-0", "node-1", "node-2")
    d = started(world, *nodes)
    for worker_id in nodes:
        world.receive(d, worker_id, 8 if worker_id == "node-0" else 4, origin_bytes=100)
    world.tick()
    assert world.status(d) == "distributing"
    plan, told = world.state.plan(d), len(world.told)
    world.state = CoordinatorState.restore(expected(world.kept), world.now_s, world.settings)
    world.tick()
    assert world.status(d) == "distributing", "it did not fall back before anybody was heard"
    for worker_id in nodes:
        answer = world.receive(d, worker_id, 8 if worker_id == "node-0" else 5, origin_bytes=100)
        assert commands(answer) == []
        world.tick()
    assert world.state.plan(d) == plan
    assert world.status(d) == "distributing"
    assert len(world.told) == told, "nothing happened, and nothing is told"
    assert world.state.deployment_state(d).origin_bytes == 300


def test_new_leader_plans_for_who_returned_when_the_last_one_died(world):
    nodes = ("node-0", "node-1", "node-2")
    d = started(world, *nodes, topology="chain")
    world.register("node-1")
    world.state = CoordinatorState.restore(expected(world.kept), world.now_s, world.settings)
    for worker_id in nodes:
        world.beat(worker_id)
    world.tick()
    assert world.epoch(d) == 2
    lanes = world.lanes(d, "node-2")
    assert lanes.lanes[0].source.address == "127.0.0.1:1002"


def test_raised_budget_sets_a_stalled_deployment_going_again(world):
    d = started(world, *TWO)
    total = world.state.deployment_state(d).deployment.total_bytes
    over = total + 64 * 1024 * 1024 + 1
    world.receive(d, "node-0", 2, origin_bytes=over)
    world.tick()
    assert world.status(d) == "stalled"
    world.give(RaiseBudget(deployment_id=d, extra_bytes=10 * total, at=world.now_s))
    world.wait(0.5, beating=False)
    assert world.status(d) == "downloading"
    assert world.lanes(d, "node-0").origin_budget_bytes > total
    (told,) = world.names(EventName.BUDGET_RAISED)
    assert told.data["extra_bytes"] == 10 * total
    world.state = CoordinatorState.restore(expected(world.kept), world.now_s, world.settings)
    world.receive(d, "node-0", 3, origin_bytes=over)
    world.receive(d, "node-1", 3)
    world.tick()
    assert world.status(d) == "downloading", "the new budget survives a change of leaders"
    world.cancel(d)
    with pytest.raises(Conflict):
        world.give(RaiseBudget(deployment_id=d, extra_bytes=1))


def test_closed_deployments_are_forgotten_but_active_and_previous_stay(make_world):
    settings = CoordinatorSettings(kept_closed=3, kept_closed_s=100.0, kept_at_most=6)
    world: World = make_world(settings=settings)
    under = active(world, "node-0", version="v1")
    top = active(world, "node-0", version="v2", key="top")
    old = active(world, "other", version="v0")
    made = [world.create("node-0", version=f"v{3 + n}", key=f"k{n}") for n in range(10)]
    for d in made:
        world.cancel(d)
    world.beat("node-0"), world.beat("node-0")
    world.wait(61, beating=False)
    left = [each.deployment_id for each in world.state.deployments()]
    assert left == [under, top, old, *made[4:]], "of 13, the oldest 7 whatever their age"
    world.wait(61, beating=False)
    left = [each.deployment_id for each in world.state.deployments()]
    assert left == [under, top, old, *made[-3:]], "those that closed long ago"
    assert world.state.known_key("k0", "x") is None
    assert world.create("node-0", version="v3", key="k0") not in made
    names = world.names(EventName.DEPLOYMENT_FORGOTTEN)
    assert [each.deployment_id for each in names] == made[:7]
    kept = expected(world.kept)
    assert {each.deployment.deployment_id for each in kept.deployments} >= set(left)
    assert not {each.deployment.deployment_id for each in kept.deployments} & set(made[:7])
    assert all(each.deployment_id not in made[:7] for each in kept.keys)


def test_a_cancel_that_is_not_confirmed_is_not_forgotten(make_world):
    settings = CoordinatorSettings(kept_closed=0, kept_closed_s=0.0)
    world = make_world(settings=settings)
    d = started(world, "node-0")
    world.cancel(d)
    world.now_s += 100
    world.state.fleet.discount_gap(100, world.now_s)
    world.tick()
    assert world.status(d) == "cancelled"
    world.beat("node-0"), world.beat("node-0")
    world.wait(61)
    with pytest.raises(NotFound):
        world.status(d)


def test_a_new_leader_still_stops_deployments_cancelled_long_before(world):
    """A new leader announces the newest closed deployments only; who still moves another one is
    told, and who asks for the cancel again gets its answer.
    """
    world.register("node-0", "node-1")
    made = [world.create("node-0", "node-1", version=f"v{n}") for n in range(25)]
    world.wait(1.0)
    for d in made:
        world.cancel(d)
    world.state = CoordinatorState.restore(expected(world.kept), world.now_s, world.settings)
    oldest = made[0]
    assert world.state.unstopped(oldest) == ["node-0", "node-1"]
    for _ in range(3):
        world.beat("node-0"), world.beat("node-1")
    for _ in range(2):
        told = world.receive(oldest, "node-0", 2).commands
        assert ("cancel", oldest) in {(each.kind, each.deployment_id) for each in told}
    world.beat("node-0"), world.beat("node-0")
    assert world.state.unstopped(oldest) == ["node-1"], "it never said a word of it"
    world.cancel(oldest)
    world.beat("node-1"), world.beat("node-1")
    assert world.state.unstopped(oldest) == []
