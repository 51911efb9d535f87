"""What survives on one machine: kept in one transaction, read back equal."""

import sqlite3

import pytest

from paceline.coordinator.stores import Candidate
from paceline.coordinator.stores.sqlite import SqliteCoordination
from paceline.errors import ServiceUnavailable
from tests.coordinator.conftest import World
from tests.coordinator.test_invariants import read_back
from tests.coordinator.test_state import started

CANDIDATE = Candidate("coordinator", "http://127.0.0.1:1")


def test_everything_that_was_kept_is_read_back_equal(tmp_path):
    store = SqliteCoordination(tmp_path / "c.sqlite")
    world = World()
    d = started(world, "node-0", "node-1", key="k1")
    world.receive(d, "node-0", 2, origin_bytes=5_000)
    world.tick()
    world.finish(d, "node-0")
    world.register("node-1")
    world.tick()
    world.cancel(d)
    store.commit(store.campaign(CANDIDATE, lambda: False), world.kept)
    loaded = store.load(0.0)
    assert loaded == read_back(world.kept)
    assert loaded.deployments[0].memo.spent == {"node-0 127.0.0.1:1001 0": 5_000}
    store.close()


def test_after_a_reboot_running_deployments_get_their_time_again(tmp_path):
    store = SqliteCoordination(tmp_path / "c.sqlite")
    world = World()
    world.register("node-0")
    world.create("node-0")
    store.commit(store.campaign(CANDIDATE, lambda: False), world.kept)
    store.close()
    database = sqlite3.connect(tmp_path / "c.sqlite")
    database.execute("UPDATE deployments SET boot_id = 'another'")
    database.commit()
    database.close()
    store = SqliteCoordination(tmp_path / "c.sqlite")
    assert store.load(5.0).deployments[0].memo.created_s == 5.0
    store.close()


def test_file_of_another_version_is_refused_untouched(tmp_path):
    path = tmp_path / "c.sqlite"
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(ServiceUnavailable) as caught:
        SqliteCoordination(path)
    assert (caught.value.got, caught.value.wanted) == (99, 2)


def test_file_that_is_no_database_is_a_clear_error(tmp_path):
    path = tmp_path / "c.sqlite"
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 100)
    with pytest.raises(ServiceUnavailable) as caught:
        SqliteCoordination(path)
    assert caught.value.where == path
