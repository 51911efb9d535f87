"""The driver on the embedded store: one transaction a command, fenced, read back equal."""

import sqlite3
import threading
import time
from contextlib import contextmanager

import pytest

from paceline.coordinator import Coordinator, Replica
from paceline.coordinator.state import (
    Answer,
    CoordinatorState,
    EmitEvent,
    HeartbeatReceived,
    Membership,
    Register,
)
from paceline.coordinator.stores import Candidate, MemoryProgress, SqliteAudit, SqliteCoordination
from paceline.errors import Conflict, NotLeading, ServiceUnavailable
from paceline.schemas import EventName, Heartbeat, HeartbeatAnswer
from tests.coordinator.conftest import creation, registration, small_manifest


def register(name="node-0"):
    return Register(call=registration(name))


@contextmanager
def standing(path):
    """The only replica of an installation."""
    store, audit, progress = SqliteCoordination(path), SqliteAudit(path), MemoryProgress()
    made = Coordinator(
        store, progress=progress, audit=audit, resolve_source=lambda url: (url, small_manifest())
    )
    replica = Replica(made, store, progress, Candidate("coordinator", "http://127.0.0.1:1"))
    replica.start()
    try:
        yield made
    finally:
        replica.stop()
        for each in (audit, progress, store):
            each.close()


@pytest.fixture
def coordinator(tmp_path):
    with standing(tmp_path / "c.sqlite") as made:
        yield made


def again(what):
    """Do it as a caller does who was told to call again."""
    end_s = time.monotonic() + 30
    while True:
        try:
            return what()
        except ServiceUnavailable:
            assert time.monotonic() < end_s
            time.sleep(0.05)


def test_newer_process_on_the_same_file_takes_over_for_good(tmp_path):
    path = tmp_path / "c.sqlite"
    with standing(path) as old:
        old.handle(register())
        with standing(path) as new:
            assert new.leader_epoch == old.leader_epoch + 1
            for _ in range(2):
                with pytest.raises(NotLeading):
                    old.handle(register("node-1"))
            with pytest.raises(ServiceUnavailable):
                old.check_ready()
            new.check_ready()
            new.handle(register("node-2"))
            names = [each.worker_id for each in new.read(lambda state: state.fleet.workers())]
            assert names == ["node-0", "node-2"]
        with pytest.raises(NotLeading):
            old.handle(register("node-1"))


def test_what_cannot_be_committed_is_not_answered_and_not_remembered(coordinator, tmp_path):
    coordinator.handle(register())
    blocker = sqlite3.connect(tmp_path / "c.sqlite", isolation_level=None)
    coordinator._coordination._db.execute("PRAGMA busy_timeout=50")
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(ServiceUnavailable):
        coordinator.create(creation("node-0"), "k1")
    blocker.execute("ROLLBACK")
    blocker.close()
    assert again(lambda: coordinator.read(lambda state: state.deployments())) == []
    made = again(lambda: coordinator.create(creation("node-0"), "k1"))
    assert coordinator.create(creation("node-0"), "k1").deployment_id == made.deployment_id
    with pytest.raises(Conflict):
        coordinator.create(creation("node-0", seed=1), "k1")


def test_what_a_defect_had_changed_is_undone(coordinator, monkeypatch):
    """The state ran into a bug half way: nobody sees, or builds on, what was never kept."""
    coordinator.handle(register())
    entered = Membership.register

    def broken(self, *given):
        entered(self, *given)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Membership, "register", broken)
        with pytest.raises(ZeroDivisionError):
            coordinator.handle(register("node-1"))
    coordinator.check_ready()
    names = [each.worker_id for each in coordinator.read(lambda state: state.fleet.workers())]
    assert names == ["node-0"]
    coordinator.handle(register("node-2"))


def test_calm_beat_that_left_something_to_keep_is_undone(coordinator, monkeypatch):
    coordinator.handle(register())
    beat = Heartbeat(worker_id="node-0", status="idle")
    lost = EmitEvent(EventName.WORKER_LOST, 0.0)
    answer = Answer(HeartbeatAnswer(epoch=1, next_beat_s=1))
    monkeypatch.setattr(CoordinatorState, "handle", lambda *_: [lost, answer])
    with pytest.raises(AssertionError):
        coordinator.try_decide(HeartbeatReceived(beat=beat, at=0.0))
    monkeypatch.undo()
    assert coordinator.handle(HeartbeatReceived(beat=beat, at=0.0)).go_on


def test_same_key_at_once_from_many_threads_makes_one_deployment(coordinator):
    coordinator.handle(register())
    made, gate = [], threading.Barrier(6)

    def create():
        gate.wait()
        made.append(coordinator.create(creation("node-0"), "k1").deployment_id)

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 6
    assert len(set(made)) == 1
