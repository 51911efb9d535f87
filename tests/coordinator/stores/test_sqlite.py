"""The file: full disks, older versions, two processes, what a reboot spoils."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess

import pytest

from paceline.coordinator.state import (
    DropDeployment,
    Save,
    SaveDeployment,
    SaveIdempotencyKey,
    SavePlan,
)
from paceline.coordinator.stores import (
    Candidate,
    EventQuery,
    SqliteAudit,
    SqliteCoordination,
    boot_id,
)
from paceline.errors import ServiceUnavailable
from paceline.schemas import Receipt, TokenRecord, Worker
from tests.coordinator.stores.effects import (
    DIGEST,
    deployment,
    expected,
    plan,
    receipt,
    stage,
    token,
    told,
    worker,
)
from tests.support.reaper import mount_small_disk

CANDIDATE = Candidate("r0", "u")


def led(path):
    store = SqliteCoordination(path)
    return store, store.campaign(CANDIDATE, lambda: False)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not mount_small_disk(disk, "1m"):
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


VERSION_2 = """
CREATE TABLE leader (
  id INTEGER PRIMARY KEY CHECK (id = 1), epoch INTEGER NOT NULL,
  replica_id TEXT NOT NULL DEFAULT '', url TEXT NOT NULL DEFAULT '');
INSERT INTO leader (id, epoch) VALUES (1, 41);
CREATE TABLE deployments (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, deployment_id TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL,
  record TEXT NOT NULL, memo TEXT NOT NULL, boot_id TEXT NOT NULL, manifest BLOB NOT NULL);
CREATE TABLE plans (
  deployment_id TEXT NOT NULL, plan_epoch INTEGER NOT NULL, epoch INTEGER NOT NULL,
  plan TEXT NOT NULL, PRIMARY KEY (deployment_id, plan_epoch));
CREATE TABLE receipts (
  deployment_id TEXT NOT NULL, worker_id TEXT NOT NULL, epoch INTEGER NOT NULL,
  receipt TEXT NOT NULL, PRIMARY KEY (deployment_id, worker_id));
CREATE TABLE workers (
  worker_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, record TEXT NOT NULL);
CREATE TABLE idempotency_keys (
  key TEXT PRIMARY KEY, body_digest TEXT NOT NULL, deployment_id TEXT NOT NULL,
  epoch INTEGER NOT NULL);
CREATE TABLE ledger (
  stage TEXT NOT NULL, input_digest TEXT NOT NULL, epoch INTEGER NOT NULL, record TEXT NOT NULL,
  PRIMARY KEY (stage, input_digest));
CREATE TABLE audit (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, name TEXT NOT NULL,
  at REAL NOT NULL, deployment_id TEXT, worker_id TEXT, data TEXT NOT NULL);
CREATE TABLE tokens (token_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, record TEXT NOT NULL);
CREATE TABLE outbox (
  seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, name TEXT NOT NULL,
  at REAL NOT NULL, deployment_id TEXT, worker_id TEXT, data TEXT NOT NULL);
CREATE TABLE counters (
  id INTEGER PRIMARY KEY CHECK (id = 1), revision INTEGER NOT NULL,
  last INTEGER NOT NULL, shipped INTEGER NOT NULL);
CREATE INDEX keys_by_deployment ON idempotency_keys (deployment_id);
"""


def old_rows(effects):
    """Yield what earlier versions wrote for ``effects``: a table and its values."""
    for number, each in enumerate(effects, 1):
        match each:
            case SaveDeployment(record, persisted, given):
                texts = (record.model_dump_json(), persisted.to_json(), boot_id(), given.to_bytes())
                yield "deployments", (number, record.deployment_id, 41, *texts)
            case SavePlan(one):
                text = one.model_dump_json()
                yield "plans", (one.deployment_id, one.epoch, 41, text)
            case Save(Receipt() as one):
                text = one.model_dump_json()
                yield "receipts", (one.deployment_id, one.worker_id, 41, text)
            case Save(Worker() as one):
                yield "workers", (one.worker_id, 41, one.model_dump_json())
            case Save(TokenRecord() as one):
                yield "tokens", (one.token_id, 41, one.model_dump_json())
            case SaveIdempotencyKey(key, digest, name):
                yield "idempotency_keys", (key, digest, name, 41)


def test_a_file_of_the_version_before_continues_with_all_it_held(tmp_path):
    path = tmp_path / "c.sqlite"
    effects = [
        deployment("d/0 ü"),
        deployment("d1", "v2", pieces=9_000),
        *(plan("d1", epoch) for epoch in (8, 9, 10)),
        receipt("d1", "w0"),
        worker("w0"),
        SaveIdempotencyKey("key/with spaces", DIGEST, "d1"),
        token("t0"),
    ]
    events = [
        (seq, 41, "worker.lost", seq + 0.5, None, "w0", json.dumps({"number": seq, "nul": "\0"}))
        for seq in range(1, 1_201)
    ]
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.executescript(VERSION_2)
        for table, values in old_rows(effects):
            old.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)
        record = stage("fetch").model_dump_json()
        old.execute("INSERT INTO ledger VALUES ('fetch', ?, 41, ?)", (DIGEST, record))
        old.executemany("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", events)
        old.execute("DELETE FROM audit WHERE seq > 1150")  # not shipped yet
        recent = events[200:]
        old.executemany("INSERT INTO outbox VALUES (?, ?, ?, ?, ?, ?, ?)", recent)
        old.execute("INSERT INTO counters VALUES (1, 77, 1200, 1150)")
        old.execute("PRAGMA user_version=2")
        old.commit()
    store, term = led(path)
    audit = SqliteAudit(path)
    assert term.epoch == 42
    assert store.load(0.0) == expected(effects)
    assert store.stage("fetch", DIGEST) == stage("fetch")
    assert store.outbox().waiting == 50
    recent = store.events_after(0, 10_000)
    assert [each.seq for each in recent] == list(range(201, 1_201))
    assert recent[0].data == {"number": 201, "nul": "\0"}
    assert audit.query(EventQuery(after=1_149))[0] == recent[949]
    assert [each.seq for each in store.commit(term, [told(1), plan("d1", 11)])] == [1_201]
    later = [deployment("d2", "v3")]
    store.commit(term, later)
    again, _ = led(path)
    assert again.load(0.0) == expected([*effects, plan("d1", 11), *later])
    for each in (store, again, audit):
        each.close()


def test_after_a_reboot_running_deployments_get_their_time_again(tmp_path, monkeypatch):
    store, term = led(tmp_path / "c.sqlite")
    store.commit(term, [deployment("d0")])
    store.close()
    monkeypatch.setattr("paceline.coordinator.stores.coordination.boot_id", lambda: "another")
    store, _ = led(tmp_path / "c.sqlite")
    assert store.load(7.0).deployments[0].persisted.created_s == 7.0
    store.close()


def test_an_operator_can_raise_the_epoch_of_a_restored_file(tmp_path):
    led(tmp_path / "c.sqlite")[0].close()
    with contextlib.closing(sqlite3.connect(tmp_path / "c.sqlite")) as db:
        db.execute("UPDATE rows SET value = '1000' WHERE key = CAST('meta/epoch' AS BLOB)")
        db.commit()
    store, term = led(tmp_path / "c.sqlite")
    assert term.epoch == 1_001
    store.close()


@pytest.mark.parametrize("version", [1, 99])
def test_a_file_of_another_version_is_refused(tmp_path, version):
    path = tmp_path / "c.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version={version}")
    with pytest.raises(ServiceUnavailable, match=r"another version"):
        SqliteCoordination(path)


@pytest.mark.parametrize("kind", [SqliteCoordination, SqliteAudit])
def test_a_file_that_is_no_database_is_a_clear_error(tmp_path, kind):
    path = tmp_path / "c.sqlite"
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 100)
    with pytest.raises(ServiceUnavailable) as caught:
        kind(path)
    assert caught.value.where == path


def test_a_record_of_a_newer_version_is_named(tmp_path):
    store, term = led(tmp_path / "c.sqlite")
    store.commit(term, [worker("w0")])
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "c.sqlite")) as db:
        ((value,),) = db.execute(
            "SELECT value FROM rows WHERE instr(key, CAST('workers/' AS BLOB))"
        )
        newer = bytes(value).replace(b"{", b'{"newer":1,', 1)
        db.execute("UPDATE rows SET value = ? WHERE value = ?", (newer, value))
        db.commit()
    store, _ = led(tmp_path / "c.sqlite")
    with pytest.raises(ServiceUnavailable, match=r"another version.*newer.*Upgrade this replica"):
        store.load(0.0)
    store.close()


def test_a_file_locked_by_another_process_is_a_clear_error_then_works(tmp_path):
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
