"""What the coordinator decides, event by event, under a clock that is turned by hand."""

import pytest

from paceline.coordinator.state import CoordinatorSettings, Create
from paceline.errors import (
    Cancelled,
    Conflict,
    DeploymentFailed,
    InvalidInput,
    NotFound,
    StaleEpoch,
)
from paceline.schemas import EventName, Failure, WorkerStatus
from tests.coordinator.conftest import creation

NODES = ("node-0", "node-1", "node-2", "node-3")


def started(world, *targets, **more):
    """Register the targets, create a deployment, and let everybody fetch lanes."""
    world.register(*targets)
    deployment_id = world.create(*targets, **more)
    for worker_id in targets:
        world.lanes(deployment_id, worker_id)
    world.tick()
    return deployment_id


def commands(answer):
    return [each.kind for each in answer.commands]


def test_deployment_passes_through_every_stage(world):
    world.register(*NODES)
    d = world.create(*NODES)
    assert world.status(d) == "init"
    assert commands(world.beat("node-0")) == ["fetch_lanes"]
    for worker_id in NODES:
        assert world.status(d) == "init"
        world.lanes(d, worker_id)
    world.tick()
    assert world.status(d) == "downloading"
    world.receive(d, "node-0", 8)
    world.tick()
    assert world.status(d) == "distributing"
    for worker_id in NODES:
        world.receive(d, worker_id, 8)
    world.tick()
    assert world.status(d) == "verifying"
    world.now_s += 2.0
    world.finish(d, *NODES)
    world.tick()
    assert world.status(d) == "complete"
    view = world.state.view(d)
    assert view.workers_complete == NODES
    assert view.progress == 1.0
    assert view.deployment.seconds is not None
    changes = [each.data["to"] for each in world.names(EventName.DEPLOYMENT_STATUS_CHANGED)]
    assert changes == ["downloading", "distributing", "verifying", "complete"]


def test_union_of_chunks_over_workers_counts_as_the_origin_read(world):
    d = started(world, "node-0", "node-1")
    world.receive(d, "node-0", 4, chunks_received=(0, 1))
    world.tick()
    assert world.status(d) == "downloading"
    world.receive(d, "node-1", 4, chunks_received=(2, 3))
    world.tick()
    assert world.status(d) == "distributing"


def test_targets_that_register_late_are_waited_for(world):
    world.register("node-0")
    d = world.create("node-0", "node-1")
    world.wait(5)
    assert world.status(d) == "init"
    with pytest.raises(NotFound):
        world.lanes(d, "node-0")
    world.register("node-1")
    world.tick()
    assert world.epoch(d) == 1
    assert world.lanes(d, "node-1").epoch == 1


def test_targets_that_never_register_fail_the_deployment_after_the_grace(world):
    world.register("node-0")
    d = world.create("node-0", "node-9")
    world.wait(59)
    assert world.status(d) == "init"
    world.wait(2)
    assert world.status(d) == "failed"
    failure = world.state.deployment_state(d).deployment.failure
    assert "node-9" in failure.message
    assert failure.code == "DeploymentFailed"


def test_seconds_count_from_the_plan_to_the_last_rename_not_to_its_beat(world):
    d = started(world, "node-0")
    world.now_s += 10
    world.finish(d, "node-0", receipt=world.receipt(d, "node-0", seconds=9.5))
    world.tick()
    assert world.state.deployment_state(d).deployment.seconds == pytest.approx(9.5)


def test_silent_worker_is_lost_and_the_survivors_are_replanned(world):
    d = started(world, *NODES)
    world.silent.add("node-1")
    world.wait(3.0)
    assert world.epoch(d) == 1
    world.wait(0.5)
    assert world.epoch(d) == 2
    plan = world.state.plan(d)
    assert [each.worker_id for each in plan.workers] == ["node-0", "node-2", "node-3"]
    assert [each.worker_id for each in world.names(EventName.WORKER_LOST)] == ["node-1"]
    assert commands(world.beat("node-2")) == ["fetch_lanes"]
    assert world.state.view(d).workers_failed == ("node-1",)


def test_a_peers_word_and_two_missed_beats_lose_a_worker_sooner(world):
    d = started(world, *NODES)
    world.silent.add("node-1")
    world.wait(0.5)
    world.receive(d, "node-2", 1, lost_sources=("node-1",))
    world.wait(0.75)
    assert world.epoch(d) == 2
    assert len(world.names(EventName.SOURCE_LOST)) == 1


def test_a_peers_word_against_a_beating_worker_changes_nothing(world):
    d = started(world, *NODES)
    for _ in range(6):
        world.receive(d, "node-2", 1, lost_sources=("node-1",))
        world.wait(0.5)
    assert world.epoch(d) == 1
    assert len(world.names(EventName.SOURCE_LOST)) == 1, "told once, however often repeated"


def test_returning_worker_is_planned_in_again_and_finishes(world):
    d = started(world, *NODES)
    world.silent.add("node-1")
    world.wait(4)
    world.finish(d, "node-0", "node-2", "node-3")
    world.tick()
    assert world.status(d) != "complete", "5 % of 4 workers is nobody: the dead one is waited for"
    world.register("node-1")
    world.tick()
    assert world.epoch(d) == 3
    assert "node-1" in [each.worker_id for each in world.state.plan(d).workers]
    assert commands(world.beat("node-1")) == ["fetch_lanes"]
    world.lanes(d, "node-1")
    world.finish(d, "node-1")
    world.tick()
    assert world.status(d) == "complete"
    assert [each.worker_id for each in world.names(EventName.WORKER_RETURNED)] == ["node-1"]


def test_dead_within_the_quorum_do_not_hold_up_the_rest_and_are_named(make_world):
    world = make_world()
    targets = tuple(f"node-{index}" for index in range(20))
    d = started(world, *targets)
    world.silent.add("node-7")
    world.wait(4)
    world.finish(d, *(each for each in targets if each != "node-7"))
    world.tick()
    assert world.status(d) == "complete"
    assert world.state.view(d).workers_failed == ("node-7",)
    dead = next(each for each in world.state.progress(d) if each.worker_id == "node-7")
    assert dead.status is WorkerStatus.FAILED
    assert dead.failure.code == "WorkerLost"


def test_29_percent_of_100_is_29_workers(make_world):
    world = make_world()
    world.register("w0")
    targets = tuple(f"w{index}" for index in range(100))
    d = world.create(*targets, max_failed=0.29)
    assert world.state.deployment_state(d).allowed_dead() == 29


def test_survivors_finish_before_a_lost_quorum_fails_the_deployment(world):
    d = started(world, *NODES)
    world.silent |= {"node-0", "node-1"}
    world.wait(80)
    assert world.status(d) == "downloading", "node-2 and node-3 still move"
    world.finish(d, "node-2", "node-3")
    world.tick()
    assert world.status(d) == "failed"
    assert world.state.view(d).workers_complete == ("node-2", "node-3")


def test_worker_that_gave_up_is_planned_out_and_named_with_its_reason(world):
    d = started(world, *NODES, max_failed=0.25)
    reason = Failure(code="StorageFull", message="no room")
    for _ in range(3):
        world.receive(d, "node-1", 2, status=WorkerStatus.FAILED, failure=reason)
        world.tick()
    assert world.epoch(d) == 2
    assert len(world.names(EventName.WORKER_FAILED)) == 1
    assert "node-1" not in [each.worker_id for each in world.state.plan(d).workers]
    world.finish(d, "node-0", "node-2", "node-3")
    world.tick()
    assert world.status(d) == "complete"
    assert world.state.view(d).workers_failed == ("node-1",)


def test_restart_clears_a_workers_own_failure(world):
    d = started(world, *NODES)
    reason = Failure(code="StorageFull", message="no room")
    world.receive(d, "node-1", 2, status=WorkerStatus.FAILED, failure=reason)
    world.tick()
    world.register("node-1")
    world.tick()
    assert world.state.view(d).workers_failed == ()
    world.finish(d, *NODES)
    world.tick()
    assert world.status(d) == "complete"


def test_older_incarnation_cannot_report_or_register(world):
    d = started(world, "node-0", "node-1")
    world.register("node-0", incarnation=5)
    answer = world.beat("node-0", world.entry(d, "node-0", 8), incarnation=1)
    assert answer.go_on is False
    assert world.state.deployment_state(d).parts["node-0"].pieces_held == 0
    with pytest.raises(StaleEpoch):
        world.register("node-0", incarnation=4)


def test_unknown_and_lost_workers_are_asked_to_register(world):
    world.incarnations["node-9"] = 1
    assert world.beat("node-9").go_on is False
    world.register("node-0")
    world.silent.add("node-0")
    world.wait(4)
    assert world.beat("node-0").go_on is False
    world.register("node-0", incarnation=1)
    assert world.beat("node-0").go_on is True, "frozen and thawed: the same process is welcome"


def test_two_processes_cannot_share_an_incarnation(world):
    world.register("node-0")
    with pytest.raises(StaleEpoch):
        world.register_as("node-0", 1, address="127.0.0.1:9")


def test_registering_twice_is_one_registration(world):
    d = started(world, "node-0", "node-1")
    world.register("node-0", incarnation=1)
    world.tick()
    assert world.epoch(d) == 1
    assert len(world.names(EventName.WORKER_REGISTERED)) == 2


def test_receipt_counts_even_where_the_worker_never_took_the_newest_lanes(world):
    d = started(world, "node-0", "node-1")
    world.register("node-1")
    world.tick()
    world.finish(d, "node-0", epoch=1)
    world.finish(d, "node-1")
    world.tick()
    assert world.status(d) == "complete"


@pytest.mark.parametrize(
    "change",
    [
        {"manifest_digest": "0" * 64},
        {"deployment_id": "dep-other"},
        {"worker_id": "node-1"},
        {"total_bytes": 1},
        {"incarnation": 99},
    ],
)
def test_receipt_that_does_not_match_is_a_failed_verification(world, change):
    d = started(world, "node-0", "node-1")
    world.finish(d, "node-0", receipt=world.receipt(d, "node-0").model_copy(update=change))
    world.tick()
    part = world.state.deployment_state(d).parts["node-0"]
    assert part.receipt is None
    assert part.status is WorkerStatus.VERIFICATION_FAILED
    assert part.failure.code == "CorruptData"


def test_worker_that_returns_without_its_model_takes_part_again(world):
    d = started(world, "node-0", "node-1")
    world.finish(d, "node-0")
    world.register("node-0")
    world.receive(d, "node-0", 0)
    world.tick()
    assert world.state.view(d).workers_complete == ()
    world.finish(d, "node-0", "node-1")
    world.tick()
    assert world.status(d) == "complete"


def test_dead_worker_that_had_finished_does_not_hold_up_the_rest(world):
    d = started(world, *NODES)
    world.finish(d, "node-0")
    world.silent.add("node-0")
    world.wait(4)
    assert world.epoch(d) == 2, "others must not be sent to a dead source"
    world.finish(d, "node-1", "node-2", "node-3")
    world.tick()
    assert world.status(d) == "complete"
    assert world.state.view(d).workers_complete == NODES


def test_origin_bytes_are_summed_over_incarnations_and_stall_at_the_fuse(world):
    d = started(world, *NODES)
    mib = 1024 * 1024
    world.receive(d, "node-0", 1, origin_bytes=40 * mib)
    world.tick()
    assert world.status(d) == "downloading"
    world.register("node-0")
    world.tick()
    world.receive(d, "node-0", 1, origin_bytes=40 * mib)
    world.tick()
    assert world.status(d) == "stalled"
    deployment = world.state.view(d).deployment
    assert deployment.failure.code == "OriginBudgetExceeded"
    assert deployment.origin_bytes == 80 * mib
    world.finish(d, *NODES)
    world.tick()
    assert world.status(d) == "complete", "who could finish without the origin did"


def test_direct_topology_has_no_fuse(world):
    d = started(world, *NODES, topology="direct")
    for worker_id in NODES:
        world.receive(d, worker_id, 1, origin_bytes=60 * 1024 * 1024)
    world.tick()
    assert world.status(d) == "downloading"


def short_of_budget(world, d, worker_id):
    reason = Failure(code="OriginBudgetExceeded", message="share spent")
    return world.receive(d, worker_id, 1, failure=reason)


def test_origin_bytes_of_one_process_count_once_over_its_incarnations(world):
    d = started(world, "node-0", "node-1")
    mib = 1024 * 1024
    for incarnation in (1, 2, 3):  # thought lost and back, but the same process: one counter
        world.register_as("node-0", incarnation + 1, pid=7)
        world.receive(d, "node-0", 1, origin_bytes=40 * mib)
    assert world.state.view(d).deployment.origin_bytes == 40 * mib


def test_a_restarted_container_counts_anew_with_the_same_pid_and_port(world):
    d = started(world, "node-0", "node-1")
    mib = 1024 * 1024
    for incarnation, process in ((1, "first"), (2, "second")):
        world.register_as("node-0", incarnation + 1, pid=7, process=process)
        world.receive(d, "node-0", 1, origin_bytes=10 * mib)
    assert world.state.view(d).deployment.origin_bytes == 20 * mib


def test_worker_out_of_origin_budget_gets_a_new_plan_before_a_stall(world):
    d = started(world, *NODES)
    for _ in range(8):
        world.wait(0.5, beating=False)
        for each in NODES:
            short_of_budget(world, d, "node-0") if each == "node-0" else world.beat(each)
    assert world.epoch(d) == 2
    assert world.status(d) == "downloading"
    world.receive(d, "node-0", 2)
    world.wait(20)
    assert world.epoch(d) == 2, "the new plan helped"


def test_a_seed_out_of_origin_budget_is_planned_for_at_once(world):
    d = started(world, *NODES, topology="chain")
    seed = world.state.plan(d).workers[0].worker_id
    other = next(each for each in NODES if each != seed)
    for waits, epoch in ((other, 1), (seed, 2)):  # an heir waits for the loss to be noticed
        for _ in range(3):
            world.wait(0.5, beating=False)
            short_of_budget(world, d, waits)
        world.tick()
        assert world.epoch(d) == epoch
        world.receive(d, waits, 2)


def test_worker_that_stays_out_of_origin_budget_stalls_until_it_is_fed(world):
    d = started(world, *NODES)
    for _ in range(40):
        world.wait(0.5, beating=False)
        for each in NODES:
            short_of_budget(world, d, "node-0") if each == "node-0" else world.beat(each)
    assert world.status(d) == "stalled"
    assert world.epoch(d) == 4, "rescues are bounded"
    view = world.state.view(d)
    assert view.workers_failed == ()
    assert view.deployment.failure.code == "OriginBudgetExceeded"
    world.receive(d, "node-0", 2)
    world.tick()
    assert world.status(d) == "downloading"
    assert world.state.deployment_state(d).deployment.failure is None


def test_deadline_fails_and_stops_the_workers(make_world):
    world = make_world(settings=CoordinatorSettings(deadline_s=30.0))
    d = started(world, "node-0", "node-1")
    world.finish(d, "node-0")
    world.wait(30)
    world.now_s += 0.1
    world.tick()
    assert world.status(d) == "failed"
    assert "node-1" in world.state.deployment_state(d).deployment.failure.message
    assert commands(world.receive(d, "node-1", 3)) == ["cancel"]
    assert commands(world.beat("node-0")) == []
    with pytest.raises(DeploymentFailed):
        world.lanes(d, "node-1")


def test_cancel_is_final_and_confirmed_by_a_beat_that_does_not_move(world):
    d = started(world, "node-0", "node-1")
    world.receive(d, "node-0", 2)
    world.cancel(d)
    world.cancel(d)
    assert world.status(d) == "cancelled"
    assert set(world.state.unstopped(d)) == {"node-0", "node-1"}
    assert commands(world.receive(d, "node-0", 2)) == ["cancel"]
    assert commands(world.receive(d, "node-0", 3)) == ["cancel"], "told again while it moves"
    assert commands(world.beat("node-0")) == []
    assert world.state.unstopped(d) == ["node-1"]
    world.silent.add("node-1")
    world.wait(4)
    assert world.state.unstopped(d) == []
    assert len(world.names(EventName.DEPLOYMENT_STATUS_CHANGED)) == 2


def test_nothing_is_accepted_after_a_cancel(world):
    d = started(world, "node-0", "node-1")
    world.cancel(d)
    with pytest.raises(Cancelled):
        world.lanes(d, "node-0")
    world.finish(d, "node-0", "node-1")
    world.wait(5)
    assert world.status(d) == "cancelled"
    assert world.state.view(d).workers_complete == ()
    with pytest.raises(Conflict):
        world.activate(d)


def test_source_that_holds_another_model_is_refused_and_changes_nothing(world, make_manifest):
    event = Create(
        deployment_id="d", call=creation("node-0", version="v2"), manifest=make_manifest("v1")
    )
    with pytest.raises(InvalidInput):
        world.give(event)
    with pytest.raises(InvalidInput):
        world.create("node-0", "node-0")
    assert world.state.deployments() == []


def test_frozen_coordinator_does_not_lose_the_fleet_when_it_thaws(world):
    d = started(world, *NODES)
    world.wait(2)
    world.now_s += 30  # nobody listened
    world.tick()
    assert world.names(EventName.WORKER_LOST) == []
    world.wait(2)
    assert world.epoch(d) == 1


def test_large_fleet_is_asked_to_beat_more_slowly(make_world):
    world = make_world(settings=CoordinatorSettings(beat_s=0.5, beats_per_second=10))
    world.register(*(f"w{index}" for index in range(50)))
    assert world.beat("w0").next_beat_s == 5.0
    world.silent |= {f"w{index}" for index in range(50)}
    world.wait(10)
    assert world.state.fleet.alive("w0"), "silence is measured by the interval it was told"


def test_neighbours_are_named_from_the_plan(world):
    d = started(world, "node-0", "node-1", "node-2", topology="chain")
    parts = {each.worker_id: each for each in world.state.progress(d)}
    assert parts["node-0"].upstream_worker == "origin:s3://b/m"
    assert parts["node-0"].downstream_worker == "node-1"
    assert parts["node-2"].upstream_worker == "node-1"
    assert parts["node-2"].downstream_worker is None
