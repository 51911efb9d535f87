"""The audit contract: everything once, in order, found again; migrations; a database that goes."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from paceline.coordinator.stores import MAX_QUERY_EVENTS, EventQuery, PostgresAudit
from paceline.errors import Conflict, InvalidProfile, ServiceUnavailable
from paceline.schemas import Event, EventName
from tests.coordinator.stores.conftest import REAL
from tests.support.postgres import postgres_server


def event(seq, **more):
    fields = {"name": EventName.WORKER_LOST, "at": float(seq), "data": {"n": seq}, **more}
    return Event(seq=seq, **fields)


def test_events_are_kept_once_however_often_they_come(audit):
    store = audit.open()
    assert store.last() == 0
    told = [event(seq) for seq in range(1, 8)]
    store.append(told[:4])
    store.append(told[2:])
    store.append([])
    store.append([told[0], told[0]])
    assert store.query() == told
    assert store.last() == 7
    assert audit.open().query() == told


def test_another_event_under_a_number_is_refused_and_changes_nothing(audit):
    store = audit.open()
    store.append([event(1), event(2)])
    with pytest.raises(Conflict) as caught:
        store.append([event(3), event(2, worker_id="other")])
    assert caught.value.do is not None
    with pytest.raises(Conflict):
        store.append([event(4), event(4, worker_id="other")])
    assert store.query() == [event(1), event(2)]


def test_events_are_found_by_what_they_are_about(audit):
    store = audit.open()
    told = [
        event(1, deployment_id="d0"),
        event(2, deployment_id="d1", worker_id="w0"),
        event(3, name=EventName.DEPLOYMENT_CREATED, deployment_id="d0"),
        event(5, worker_id="w0"),
        event(8, name=EventName.STAGE_FINISHED),
    ]
    store.append(told)

    def numbers(**asked):
        return [each.seq for each in store.query(EventQuery(**asked))]

    assert numbers(deployment_id="d0") == [1, 3]
    assert numbers(worker_id="w0") == [2, 5]
    assert numbers(names=[EventName.DEPLOYMENT_CREATED, EventName.STAGE_FINISHED]) == [3, 8]
    assert numbers(after=2) == [3, 5, 8]
    assert numbers(after=1, before=5) == [2, 3]
    assert numbers(since=2.0, until=5.0) == [2, 3]
    assert numbers(newest_first=True, limit=2) == [8, 5]
    assert numbers(newest_first=True, before=5, limit=1) == [3]
    assert numbers(deployment_id="d0", worker_id="w0") == []
    assert numbers(deployment_id="'; DROP TABLE audit; --") == []
    assert numbers(limit=0) == []
    assert numbers(limit=-5) == []
    assert numbers(limit=10**9) == [1, 2, 3, 5, 8]


def test_one_answer_is_bounded(audit):
    store = audit.open()
    store.append([event(seq) for seq in range(1, MAX_QUERY_EVENTS + 100)])
    assert [each.seq for each in store.query(EventQuery(limit=10**6))] == list(
        range(1, MAX_QUERY_EVENTS + 1)
    )


def test_nothing_that_was_told_holds_up_the_rest(audit):
    store = audit.open()
    strange = [
        event(1, data={"nul": "a\0b", "surrogate": "\ud800", "nan": float("nan")}),
        event(2, worker_id="w\0x", deployment_id="\ud800"),
        event(3, data={"large": 2**70, "text": "ü" * 10_000}),
    ]
    store.append(strange)
    store.append(strange)
    kept = store.query()
    assert [each.seq for each in kept] == [1, 2, 3]
    assert kept[0].data == {"nul": "a\0b", "surrogate": "?", "nan": None}
    assert kept[2].data == strange[2].data


def test_the_oldest_are_deleted_beyond_what_is_to_be_kept(audit):
    store = audit.open()
    assert store.prune(10) == 0
    store.append([event(seq) for seq in (*range(1, 31), 500, 501)])
    assert store.prune(12) == 20
    assert store.prune(12) == 0
    assert [each.seq for each in store.query()] == [*range(21, 31), 500, 501]
    assert store.prune(0) == 11
    assert store.last() == 501


def test_many_may_append_and_ask_at_once(audit):
    store = audit.open()
    failures = []

    def work(first):
        try:
            for seq in range(first, 61, 4):
                store.append([event(seq)])
                assert store.query(EventQuery(after=seq - 1, limit=1))[0].seq == seq
        except Exception as error:  # noqa: BLE001 (told below)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.last() == 60
    assert len(store.query()) == 60


# --- PostgreSQL ---------------------------------------------------------------------------------


@REAL
def test_of_many_that_start_at_once_one_migrates(postgres):
    schema = postgres.schema()
    stores = [postgres.open(schema) for _ in range(6)]
    gate, failures = threading.Barrier(6), []

    def start(store):
        gate.wait()
        try:
            store.append([event(1)])
        except Exception as error:  # noqa: BLE001 (told below)
            failures.append(error)

    threads = [threading.Thread(target=start, args=(each,)) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert stores[0].query() == [event(1)]
    with postgres.connect(schema) as db:
        assert db.execute("SELECT version FROM audit_schema").fetchall() == [(1,)]
    for each in stores:
        each.close()


@REAL
def test_tables_of_the_last_release_open_and_newer_ones_are_refused(postgres):
    schema = postgres.schema()
    with postgres.connect(schema) as db:
        db.execute("CREATE TABLE audit_schema (version INTEGER NOT NULL)")
        db.execute("INSERT INTO audit_schema VALUES (1)")
        db.execute(
            "CREATE TABLE audit (seq BIGINT PRIMARY KEY, name TEXT NOT NULL,"
            " at DOUBLE PRECISION NOT NULL, deployment_id TEXT, worker_id TEXT, data JSON NOT NULL)"
        )
        for index in ("deployment", "worker", "name"):
            column = index if index == "name" else f"{index}_id"
            db.execute(f"CREATE INDEX audit_by_{index} ON audit ({column}, seq)")
        db.execute("INSERT INTO audit VALUES (1, 'worker.lost', 1.0, NULL, NULL, '{\"n\": 1}')")
    store = postgres.open(schema)
    store.append([event(1), event(2)])
    assert store.query() == [event(1), event(2)]
    store.close()
    with postgres.connect(schema) as db:
        db.execute("UPDATE audit_schema SET version = 2")
    newer = postgres.open(schema)
    with pytest.raises(ServiceUnavailable, match="another version"):
        newer.append([event(3)])
    newer.close()


@REAL
def test_events_are_stored_once_a_synchronous_standby_has_them(monkeypatch):
    monkeypatch.setattr("paceline.coordinator.stores.audit.EXCHANGE_S", 2.0)
    with (
        postgres_server() as server,
        contextlib.closing(server.open()) as audit,
        server.connect() as db,
    ):
        audit.append([event(1)])
        db.execute("ALTER SYSTEM SET synchronous_standby_names = 'away'")
        db.execute("SELECT pg_reload_conf()")
        last = 1
        with pytest.raises(ServiceUnavailable):
            while last < 500:  # its processes read the setting a moment later
                audit.append([event(last + 1)])
                last += 1
                time.sleep(0.02)
        with pytest.raises(ServiceUnavailable):
            audit.append([event(last + 1)])
        assert audit.last() == last
        db.execute("ALTER SYSTEM RESET synchronous_standby_names")
        db.execute("SELECT pg_reload_conf()")
        audit.append([event(last + 1)])
        assert audit.last() == last + 1


@REAL
def test_a_wrong_password_is_said(postgres):
    store = PostgresAudit(postgres.url(postgres.schema()), password="wrong")
    with pytest.raises(ServiceUnavailable, match="password"):
        store.check()
    store.close()


def test_a_url_that_is_none_is_refused_at_once():
    with pytest.raises(InvalidProfile):
        PostgresAudit("postgresql://host/db?nonsense=1")
