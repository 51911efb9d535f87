"""Who leads, who follows, and what an old leader may still say: nothing."""

import threading
import time

import pytest

from paceline.coordinator import STEP_DOWN_DELAY_S
from paceline.coordinator.state import FetchLanes, HeartbeatReceived, Register
from paceline.coordinator.stores import MemoryProgress
from paceline.errors import NotFound, NotLeading, ServiceUnavailable
from paceline.schemas import Heartbeat, StageRecord, TrainingJob, WorkerStatus
from tests.coordinator.conftest import creation, registration
from tests.coordinator.leader.fakes import Cluster, Node, until
from tests.coordinator.stores.effects import EARLIER_JOB

CALL = creation("node-0")


def registered(worker_id="node-0", incarnation=1):
    return Register(call=registration(worker_id, incarnation))


def beat(worker_id="node-0", incarnation=1):
    return HeartbeatReceived(
        beat=Heartbeat(worker_id=worker_id, status=WorkerStatus.IDLE, incarnation=incarnation)
    )


def deployments(node):
    return [each.deployment_id for each in node.coordinator.read(lambda s: s.deployments())]


def test_one_leads_and_the_others_follow_what_it_commits(three):
    made = three.leader.coordinator.create(CALL, "key-1").deployment_id
    three.follow_up()
    for each in three.standbys:
        assert deployments(each) == [made]
        assert each.coordinator.leader.url == three.leader.url
        until(lambda each=each: each.coordinator.events(0).events, "what happened, after the state")
        assert [e.deployment_id for e in each.coordinator.events(0).events] == [made]
        with pytest.raises(NotLeading) as caught:
            each.coordinator.create(CALL, "key-2")
        assert three.leader.url in str(caught.value)


def test_standby_asks_the_store_before_it_answers_not_found(three):
    three.follow_up()
    standby = three.standbys[0]
    made = three.leader.coordinator.create(CALL, "key-1").deployment_id
    assert standby.coordinator.read(lambda s: s.view(made)).deployment_id == made
    with pytest.raises(NotFound):
        standby.coordinator.read(lambda s: s.view("dep-none"))


def test_next_leader_has_everything_that_was_acknowledged(three):
    old = three.leader
    old.coordinator.handle(registered())
    made = old.coordinator.create(CALL, "key-1")
    old.link.lapsed = True
    three.cluster.expire()
    until(lambda: any(n.leads and n is not old for n in three.nodes), "another leader")
    new = three.leader
    assert new.coordinator.term.epoch > 1
    assert new.coordinator.create(CALL, "key-1").deployment_id == made.deployment_id
    assert new.coordinator.handle(beat()).go_on, "the worker need not register again"
    assert deployments(new) == [made.deployment_id]


def test_next_leader_has_the_jobs_of_a_leader_of_the_release_before(three):
    old = three.leader
    job = TrainingJob.model_validate_json(EARLIER_JOB)
    fields = job.model_dump(mode="json")
    old.coordinator.save_stage(StageRecord.of("training-job", "a" * 64, fields, job.run_id))
    old.link.lapsed = True
    three.cluster.expire()
    until(lambda: any(n.leads and n is not old for n in three.nodes), "another leader")
    assert three.leader.coordinator.jobs() == [job]


def test_frozen_leader_answers_no_write_or_beat_and_becomes_a_standby(three):
    old = three.leader
    old.coordinator.handle(registered())
    # Frozen: its threads stand still, its lease runs out, another is elected. Then it wakes.
    with old.coordinator._lock:
        old.link.lapsed = True
        three.cluster.expire()
        until(lambda: any(n.leads for n in three.nodes if n is not old), "another leader")
    for event in (registered("node-1"), beat()):
        with pytest.raises(NotLeading):
            old.coordinator.handle(event)
    until(lambda: old.coordinator.leader == three.leader.coordinator.term, "it follows")
    made = three.leader.coordinator.create(CALL, "key-1").deployment_id
    until(lambda: deployments(old) == [made], "the old leader shows what the new one did")
    # And once more round, in the same process.
    new = three.leader
    with new.coordinator._lock:
        new.link.lapsed = True
        for each in three.nodes:
            each.link.up = each is old
        three.cluster.expire()
        until(lambda: old.leads, "it leads again")
    assert old.coordinator.create(CALL, "key-1").deployment_id == made


def test_beat_answered_while_the_lease_ran_out_is_not_let_out(three):
    leader = three.leader
    leader.coordinator.handle(registered())
    state = leader.coordinator._state
    decide = state.handle

    def slow(event, now_s):
        effects = decide(event, now_s)
        if isinstance(event, HeartbeatReceived):
            leader.link.lapsed = True
        return effects

    state.handle = slow
    with pytest.raises(NotLeading):
        leader.coordinator.handle(beat())


def test_deposed_leader_is_refused_by_the_store_and_steps_down_at_once(three):
    old = three.leader
    epoch = old.coordinator.term.epoch
    three.cluster.expire()
    until(lambda: any(n.leads for n in three.nodes if n is not old), "another leader")
    if old.leads:  # nothing told it so far: two believe that they lead, one of them can write
        with pytest.raises(NotLeading):
            old.coordinator.create(CALL, "key-1")
    assert not old.leads
    new = three.leader
    assert new.coordinator.term.epoch > epoch
    assert deployments(new) == []


def test_write_whose_answer_got_lost_is_there_once(three):
    leader = three.leader
    leader.link.lost_answers = 1
    with pytest.raises(ServiceUnavailable):
        leader.coordinator.create(CALL, "key-1")

    def again():
        try:
            return leader.coordinator.create(CALL, "key-1")
        except ServiceUnavailable:
            return None

    until(again, "the store is tried again")
    assert len(deployments(leader)) == 1


def test_absent_store_refuses_writes_quickly_and_work_resumes_after(three):
    leader = three.leader
    leader.coordinator.create(CALL, "key-1")
    leader.link.up = False
    loads = leader.link.loads
    for _ in range(50):
        with pytest.raises(ServiceUnavailable):
            leader.coordinator.create(CALL, "key-2")
    assert leader.link.loads == loads, "calls do not queue up behind a store that is away"
    leader.link.up = True

    def again():
        try:
            return leader.coordinator.create(CALL, "key-2")
        except ServiceUnavailable:
            return None

    until(again, "the store is back")
    assert len(deployments(leader)) == 2


def test_standby_that_is_cut_off_from_the_store_stops_answering(three):
    three.follow_up()
    standby = three.standbys[0]
    late = [0.0]
    real = time.monotonic
    standby.coordinator._role._monotonic = lambda: real() + late[0]
    assert deployments(standby) == []
    standby.link.up = False
    late[0] = 3600.0
    with pytest.raises(ServiceUnavailable):
        standby.coordinator.read(lambda s: s.deployments())
    with pytest.raises(ServiceUnavailable):
        standby.coordinator.check_ready()
    assert standby.coordinator.leader is None, "it sends nobody to a leader it knows nothing of"
    standby.link.up = True
    until(lambda: standby.coordinator.leader is not None, "it follows again")
    standby.coordinator.check_ready()


def test_leader_that_stops_makes_way_at_once(three):
    old = three.leader
    old.replica.resign()
    until(lambda: three.cluster.holder not in (None, old.coordinator.term), "another leader")
    until(lambda: not old.leads, "it stepped down")
    with pytest.raises(NotLeading):
        old.coordinator.handle(registered())


def test_leader_whose_clock_thread_is_stuck_makes_way(three):
    stuck = three.leader
    real = stuck.coordinator._monotonic
    gate = threading.Event()
    stuck.coordinator.tick = lambda: gate.wait(60)
    try:
        until(lambda: any(t.name == "replica-tick" for t in stuck.replica._threads), "its thread")
        stuck.coordinator._monotonic = lambda: real() + 2 * STEP_DOWN_DELAY_S
        until(lambda: any(n.leads for n in three.nodes if n is not stuck), "another leader")
    finally:
        gate.set()


def test_wall_clock_that_jumps_an_hour_either_way_changes_nothing(three):
    leader = three.leader
    leader.coordinator.handle(registered())
    made = leader.coordinator.create(CALL, "key-1").deployment_id
    three.follow_up()
    epoch = leader.coordinator.term.epoch
    real = leader.coordinator._wall
    for jump_s in (3600.0, -3600.0):
        leader.coordinator._wall = lambda jump_s=jump_s: real() + jump_s
        for _ in range(20):
            leader.coordinator.tick()
            assert leader.coordinator.handle(beat()).go_on
    assert leader.coordinator.term.epoch == epoch
    view = leader.coordinator.read(lambda s: s.view(made))
    assert not view.deployment.status.is_final
    alive = leader.coordinator.read(lambda s: [w.alive for w in s.fleet.workers()])
    assert alive == [True]


def test_held_answers_are_let_go_when_the_leader_steps_down(three):
    leader = three.leader
    rung = threading.Event()
    leader.coordinator.notifier.notify = rung.set
    leader.link.lapsed = True
    until(rung.is_set, "the bell")


@pytest.mark.parametrize("standbys", [True, False])
def test_elected_replica_that_cannot_read_the_store_stands_again(tmp_path, make_manifest, standbys):
    node = Node("a", Cluster(tmp_path / "c.sqlite"), MemoryProgress(), make_manifest())
    node.link.standbys = standbys
    node.link.failing_loads = 2  # one may be the read of a standby
    node.start()
    try:
        until(lambda: node.leads, "it leads after all")
        assert node.coordinator.term.epoch > 1
        node.coordinator.handle(registered())
    finally:
        node.stop()


def test_a_reader_that_also_follows_gets_each_event_once(three):
    three.follow_up()
    standby, leader = three.standbys[0], three.leader
    stopping = threading.Event()

    def read():
        while not stopping.is_set():
            with pytest.raises(NotFound):
                standby.coordinator.read(lambda s: s.view("dep-none"))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for each in readers:
        each.start()
    for number in range(1, 21):
        leader.coordinator.handle(registered(incarnation=number))
    last = leader.coordinator.events(0).last
    until(lambda: standby.coordinator.events(0).last == last, "it has heard of everything")
    stopping.set()
    for each in readers:
        each.join()
    numbers = [each.seq for each in standby.coordinator.events(0).events]
    assert numbers == sorted(set(numbers))
    # And so it stays when it is elected, and when it follows again after that.
    leader.link.lapsed = True
    three.cluster.expire()
    until(lambda: not leader.leads and any(n.leads for n in three.nodes), "another leader")
    three.leader.coordinator.handle(registered(incarnation=99))
    last = three.leader.coordinator.events(0).last
    for node in three.nodes:
        until(lambda node=node: node.coordinator.events(0).last == last, "it has heard")
        numbers = [each.seq for each in node.coordinator.events(0).events]
        assert numbers == sorted(set(numbers))


def receiving(node):
    """Begin a deployment on node-0; return its id and a way to report progress of it."""
    node.coordinator.handle(registered())
    made = node.coordinator.create(CALL, "key-1").deployment_id
    node.coordinator.handle(FetchLanes(deployment_id=made, worker_id="node-0"))
    epoch = node.coordinator.read(lambda s: s.plan(made)).epoch

    def report(pieces, at=0.0):
        held = {"pieces_held": pieces, "bytes_held": pieces * 1024, "chunks_received": ()}
        entry = {"deployment_id": made, "epoch": epoch, "status": "receiving", **held}
        beat = Heartbeat(worker_id="node-0", status="receiving", deployments=(entry,))
        node.coordinator.handle(HeartbeatReceived(beat=beat, at=at))

    return made, report


def test_progress_survives_the_leader(three):
    leader = three.leader
    made, report = receiving(leader)
    report(3)
    until(lambda: three.progress.get(made), "progress in the progress store")

    def held(node):
        return [p.pieces_held for p in node.coordinator.read(lambda s: list(s.progress(made)))]

    leader.link.lapsed = True
    three.cluster.expire()
    until(lambda: any(n.leads for n in three.nodes if n is not leader), "another leader")
    assert held(three.leader) == [3]
    until(lambda: leader.coordinator.leader is not None, "the old one follows")
    assert held(leader) == [3]


def test_progress_of_standbys_goes_on_without_a_commit(three, monkeypatch):
    """Heartbeats are not committed: a standby shows what the progress store has."""
    monkeypatch.setattr("paceline.coordinator.leadership.PROGRESS_S", 0.1)
    leader = three.leader
    made, report = receiving(leader)
    three.follow_up()
    revisions = []
    for pieces in (1, 2, 5):
        report(pieces, at=1e10 + pieces)

        def shown(node, pieces=pieces):
            (part,) = node.coordinator.read(lambda s: list(s.progress(made)))
            (worker,) = node.coordinator.read(lambda s: s.fleet.workers())
            told = (part.pieces_held, part.status.value, worker.last_heartbeat)
            return told == (pieces, "receiving", 1e10 + pieces)

        until(lambda shown=shown: all(map(shown, three.standbys)), "standbys that show it")
        revisions.append(three.standbys[0].link.revision())
    assert revisions[1] == revisions[2], "nothing was committed meanwhile"
    three.progress._parts.clear()
    time.sleep(0.3)
    assert all(map(shown, three.standbys)), "deleted progress is shown until it is replaced"
