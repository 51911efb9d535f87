"""The file: full disks, older versions, two processes, what a reboot spoils."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess

import pytest

from paceline.coordinator.state.messages import DropDeployment
from paceline.coordinator.stores import Candidate
from paceline.coordinator.stores.audit import SqliteAudit
from paceline.coordinator.stores.contracts import EventQuery
from paceline.coordinator.stores.sqlite import SqliteCoordination
from paceline.coordinator.stores.sqlite_file import _VERSION_1
from paceline.errors import ServiceUnavailable
from tests.coordinator.stores.effects import deployment, expected, told, worker

CANDIDATE = Candidate("r0", "u")


def led(path):
    store = SqliteCoordination(path)
    return store, store.campaign(CANDIDATE, lambda: False)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    allowed = os.geteuid() == 0
    if not allowed or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        reason = "mounting a tmpfs needs root and a machine that allows it"
        if "netns" in os.environ.get("PACELINE_REQUIRE", ""):
            pytest.fail(reason)
        pytest.skip(reason)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_acknowledges_nothing_and_loses_nothing(small_disk):
    store, term = led(small_disk / "c.sqlite")
    kept = []
    with pytest.raises(ServiceUnavailable, match="space"):
        for number in range(1_000):
            effects = [deployment(f"d{number}", f"v{number}", pieces=500)]
            store.commit(term, effects)
            kept += effects
    assert 0 < len(kept) < 1_000
    with pytest.raises(ServiceUnavailable):
        store.commit(term, [worker("w0")])
    assert store.load(0.0) == expected(kept)
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    store.load(0.0)
    more = [worker("w0"), DropDeployment("d0")]
    store.commit(term, more)
    assert store.load(0.0) == expected([*kept, *more])
    store.close()


def test_a_full_disk_leaves_events_waiting_for_the_audit_file(small_disk, tmp_path):
    audit = SqliteAudit(small_disk / "audit.sqlite")
    store, term = led(tmp_path / "c.sqlite")
    (small_disk / "filler").write_bytes(b"x" * (900 * 1024))
    events = store.commit(term, [told(n, deployment_id="d" * 2_000) for n in range(200)])
    with pytest.raises(ServiceUnavailable, match="space"):
        audit.append(events)
    assert audit.last() == 0
    (small_disk / "filler").unlink()
    audit.append(events[:50])
    assert audit.query() == events[:50]
    audit.close()
    store.close()


def test_a_file_of_version_one_goes_on_with_all_it_held(tmp_path):
    path = tmp_path / "c.sqlite"
    old = sqlite3.connect(path)
    for statement in _VERSION_1.split(";\n"):
        old.execute(statement)
    kept = worker("w0").worker
    old.execute("UPDATE leader SET epoch = 41")
    old.execute("INSERT INTO workers VALUES ('w0', 41, ?)", (kept.model_dump_json(),))
    for seq in range(1, 1_201):
        row = (seq, 41, "worker.lost", float(seq), None, "w0", json.dumps({"number": seq}))
        old.execute("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    old.execute("PRAGMA user_version=1")
    old.commit()
    old.close()
    store, term = led(path)
    audit = SqliteAudit(path)
    assert term.epoch == 42
    assert store.load(0.0).workers == (kept,)
    assert store.outbox().waiting == 0
    recent = store.events_after(0, 10_000)
    assert [each.seq for each in recent] == list(range(201, 1_201))
    assert audit.last() == 1_200
    assert audit.query(EventQuery(after=1_199))[0] == recent[-1]
    assert [each.seq for each in store.commit(term, [told(1)])] == [1_201]
    store.close()
    audit.close()


@pytest.mark.parametrize("kind", [SqliteCoordination, SqliteAudit])
def test_a_file_that_is_no_database_is_a_clear_error(tmp_path, kind):
    path = tmp_path / "c.sqlite"
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 100)
    with pytest.raises(ServiceUnavailable) as caught:
        kind(path)
    assert caught.value.where == path


def test_a_file_that_another_process_holds_is_a_clear_error_and_then_works(tmp_path):
    store, term = led(tmp_path / "c.sqlite")
    store._db.execute("PRAGMA busy_timeout=50")
    blocker = sqlite3.connect(tmp_path / "c.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(ServiceUnavailable, match="locked"):
        store.commit(term, [worker("w0")])
    blocker.execute("ROLLBACK")
    blocker.close()
    assert store.load(0.0) == expected([])
    store.commit(term, [worker("w1")])
    assert store.load(0.0) == expected([worker("w1")])
    store.close()


def test_coordination_and_audit_share_one_file_in_either_order(tmp_path):
    for name, kinds in (("a", (SqliteCoordination, SqliteAudit)), ("b", (SqliteAudit,))):
        path = tmp_path / f"{name}.sqlite"
        opened = [kind(path) for kind in kinds]
        store, term = led(path)
        audit = SqliteAudit(path)
        events = store.commit(term, [told(1)])
        audit.append(events)
        assert audit.query() == events
        for each in (*opened, store, audit):
            each.close()
