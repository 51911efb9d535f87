"""What survives: one transaction a command, fenced by the leader's epoch, read back equal."""

import sqlite3

import pytest

from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.messages import Register
from paceline.coordinator.store import CoordinatorStore
from paceline.errors import Conflict, ServiceUnavailable, StaleEpoch
from paceline.wire.calls import CreateDeployment, RegisterWorker
from tests.coordinator.conftest import World, small_manifest
from tests.coordinator.test_invariants import read_back
from tests.coordinator.test_state import started


def register(name="node-0"):
    call = RegisterWorker(
        worker_id=name, hostname="h", rack="r", available_storage=1, address="a:1"
    )
    return Register(call=call)


@pytest.fixture
def coordinator(tmp_path):
    made = Coordinator(tmp_path / "c.sqlite", fetch_manifest=lambda _: small_manifest())
    yield made
    made.stop()


def creation(**more):
    fields = {"model_id": "m", "version": "v1", "source_url": "s3://b/m"}
    return CreateDeployment(target_workers=("node-0",), **fields, **more)


def test_everything_that_was_kept_is_read_back_equal(tmp_path):
    store = CoordinatorStore(tmp_path / "c.sqlite")
    world = World()
    d = started(world, "node-0", "node-1", key="k1")
    world.receive(d, "node-0", 2, origin_bytes=5_000)
    world.tick()
    world.finish(d, "node-0")
    world.register("node-1")
    world.tick()
    world.cancel(d)
    store.commit(world.kept)
    loaded = store.load(0.0)
    assert loaded == read_back(world.kept)
    assert loaded.deployments[0].memo.spent == {"node-0 127.0.0.1:1001 0": 5_000}
    store.close()


def test_after_a_reboot_running_deployments_get_their_time_again(tmp_path):
    store = CoordinatorStore(tmp_path / "c.sqlite")
    world = World()
    world.register("node-0")
    world.create("node-0")
    store.commit(world.kept)
    store.close()
    database = sqlite3.connect(tmp_path / "c.sqlite")
    database.execute("UPDATE deployments SET boot_id = 'another'")
    database.commit()
    database.close()
    store = CoordinatorStore(tmp_path / "c.sqlite")
    assert store.load(5.0).deployments[0].memo.created_s == 5.0
    store.close()


def test_older_leader_cannot_write_and_says_so(tmp_path):
    old = Coordinator(tmp_path / "c.sqlite", fetch_manifest=lambda _: small_manifest())
    old.handle(register())
    new = Coordinator(tmp_path / "c.sqlite", fetch_manifest=lambda _: small_manifest())
    assert new.leader_epoch == old.leader_epoch + 1
    for _ in range(2):
        with pytest.raises(ServiceUnavailable) as caught:
            old.handle(register("node-1"))
        assert isinstance(caught.value.__cause__, StaleEpoch)
    with pytest.raises(ServiceUnavailable):
        old.check_ready()
    new.handle(register("node-2"))
    names = [each.worker_id for each in new.read(lambda state: state.fleet.workers())]
    assert names == ["node-0", "node-2"]
    old.stop()
    new.stop()


def test_what_cannot_be_committed_is_not_answered_and_not_remembered(coordinator, tmp_path):
    coordinator.handle(register())
    blocker = sqlite3.connect(tmp_path / "c.sqlite", isolation_level=None)
    coordinator._store._db.execute("PRAGMA busy_timeout=50")
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(ServiceUnavailable):
        coordinator.create(creation(), "k1")
    blocker.execute("ROLLBACK")
    blocker.close()
    assert coordinator.read(lambda state: state.deployments()) == []
    made = coordinator.create(creation(), "k1")
    assert coordinator.create(creation(), "k1").deployment_id == made.deployment_id
    with pytest.raises(Conflict):
        coordinator.create(creation(seed=1), "k1")


def test_file_of_another_version_is_refused_untouched(tmp_path):
    path = tmp_path / "c.sqlite"
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(ServiceUnavailable) as caught:
        CoordinatorStore(path)
    assert (caught.value.got, caught.value.wanted) == (99, 2)


def test_file_that_is_no_database_is_a_clear_error(tmp_path):
    path = tmp_path / "c.sqlite"
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 100)
    with pytest.raises(ServiceUnavailable) as caught:
        CoordinatorStore(path)
    assert caught.value.where == path


def test_same_key_at_once_from_many_threads_makes_one_deployment(coordinator):
    import threading

    coordinator.handle(register())
    made, gate = [], threading.Barrier(6)

    def create():
        gate.wait()
        made.append(coordinator.create(creation(), "k1").deployment_id)

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 6
    assert len(set(made)) == 1


def test_state_survives_being_closed_and_opened(tmp_path):
    path = tmp_path / "c.sqlite"
    first = Coordinator(path, fetch_manifest=lambda _: small_manifest())
    first.handle(register())
    made = first.create(creation(), None)
    last = first.events(0).last
    first.stop()
    second = Coordinator(path, fetch_manifest=lambda _: small_manifest())
    assert second.read(lambda state: state.plan(made.deployment_id)).epoch == 1
    assert second.events(last - 1).events[0].seq == last
    second.stop()
