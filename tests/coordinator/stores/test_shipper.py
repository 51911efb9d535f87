"""From the outbox to the audit store: nothing lost, nothing doubled, whatever goes away."""

from __future__ import annotations

import signal

import pytest

from paceline.coordinator.stores import EventQuery, OutboxShipper
from paceline.errors import ServiceUnavailable, StaleEpoch
from tests.coordinator.stores.conftest import REAL, until
from tests.coordinator.stores.effects import told, worker
from tests.support.postgres import postgres_server

pytestmark = pytest.mark.xdist_group("etcd")

PAIRS = pytest.mark.parametrize(
    ("coordination", "audit"),
    [("sqlite", "sqlite"), pytest.param("etcd", "postgres", marks=REAL)],
    indirect=True,
)


def history(audit):
    found, last = [], 0
    while more := audit.query(EventQuery(after=last)):
        found += more
        last = more[-1].seq
    return found


@PAIRS
def test_everything_committed_is_shipped_in_order(coordination, audit):
    store, term = coordination.led()
    kept = audit.open()
    shipper = OutboxShipper(store, kept, term)
    shipper.start()
    committed = []
    for number in range(30):
        committed += store.commit(term, [told(number), told(-number)])
    until(lambda: store.outbox().waiting == 0, "an empty outbox")
    shipper.stop()
    assert history(kept) == committed
    assert shipper.trouble is None


@PAIRS
def test_the_history_is_kept_to_a_length(coordination, audit):
    store, term = coordination.led()
    kept = audit.open()
    kept_before = store.commit(term, [told(number) for number in range(30)])
    kept.append(kept_before)
    shipper = OutboxShipper(store, kept, term, keep_events=5)
    shipper.start()
    until(lambda: [each.seq for each in kept.query()] == list(range(26, 31)), "five events")
    shipper.stop()


@PAIRS
def test_a_crash_between_the_two_stores_doubles_nothing(coordination, audit, monkeypatch):
    store, term = coordination.led()
    kept = audit.open()
    committed = store.commit(term, [told(number) for number in range(20)])
    monkeypatch.setattr(store, "trim_events", lambda *_: (_ for _ in ()).throw(OSError("dead")))
    with pytest.raises(OSError, match="dead"):
        OutboxShipper(store, kept, term).ship()
    monkeypatch.undo()
    store.resign(term)
    other, next_term = coordination.led()
    committed += other.commit(next_term, [told(99)])
    shipper = OutboxShipper(other, kept, next_term)
    while shipper.ship():
        pass
    assert history(kept) == committed
    assert other.outbox().waiting == 0


@PAIRS
def test_the_shipper_of_an_older_term_stops_by_itself(coordination, audit):
    store, term = coordination.led()
    kept = audit.open()
    shipper = OutboxShipper(store, kept, term)
    shipper.start()
    store.resign(term)
    other, next_term = coordination.led()
    other.commit(next_term, [told(1)])
    until(lambda: not shipper._thread.is_alive(), "the end of the older shipper")
    with pytest.raises(StaleEpoch):
        OutboxShipper(store, kept, term).ship()


@PAIRS
def test_a_store_restored_from_a_backup_takes_new_numbers(coordination, audit):
    kept = audit.open()
    store, term = coordination.led()
    before = store.commit(term, [told(number) for number in range(9)])
    kept.append([each.model_copy(update={"seq": each.seq + 100}) for each in before])
    store.trim_events(term, 9)  # the audit store went on to 109 after this backup was made
    shipper = OutboxShipper(store, kept, term)
    assert shipper.ship() == 0
    after = store.commit(term, [told(1)])
    assert [each.seq for each in after] == [110]
    assert shipper.ship() == 1
    assert history(kept)[-1] == after[0]


@PAIRS
def test_a_restored_store_that_went_on_at_once_loses_no_event(coordination, audit):
    kept = audit.open()
    store, term = coordination.led()
    before = store.commit(term, [told(number) for number in range(9)])
    kept.append(before)
    kept.append([each.model_copy(update={"seq": each.seq + 9, "at": 5.0}) for each in before])
    went_on = store.commit(term, [told(100 + number) for number in range(12)])  # 10 to 21
    shipper = OutboxShipper(store, kept, term)
    shipper._numbered = True  # the leader was quicker than the shipper
    while shipper.ship():
        pass
    numbers = [each.data["number"] for each in history(kept)]
    assert sorted(numbers[18:]) == [each.data["number"] for each in went_on]
    assert store.outbox().waiting == 0


# --- PostgreSQL that goes away ------------------------------------------------------------------


@pytest.fixture(scope="module")
def own():
    with postgres_server() as server:
        yield server


@REAL
@pytest.mark.parametrize("coordination", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "how", ["restart", "kill", pytest.param("freeze", marks=pytest.mark.nightly)]
)
def test_events_wait_for_a_postgres_that_is_away(coordination, own, how, monkeypatch):
    monkeypatch.setattr("paceline.coordinator.stores.audit.EXCHANGE_S", 1.5)
    monkeypatch.setattr("paceline.coordinator.stores.shipper.RETRY_S", 0.3)
    store, term = coordination.led()
    kept = own.open()
    shipper = OutboxShipper(store, kept, term)
    shipper.start()
    committed = store.commit(term, [told(number) for number in range(10)])
    until(lambda: store.outbox().waiting == 0, "the first events")
    if how == "freeze":
        own.freeze()
    elif how == "kill":
        own.kill()
    else:
        own.server.stop(signal.SIGINT)
    for number in range(40):
        committed += store.commit(term, [worker("w0"), told(number)])
    until(lambda: shipper.trouble is not None, "word that events wait", within_s=60)
    assert store.outbox().waiting == 40
    if how == "freeze":
        own.thaw()
    else:
        with pytest.raises(ServiceUnavailable):
            kept.check()
        own.server.start()
    until(lambda: store.outbox().waiting == 0, "an empty outbox", within_s=60)
    until(lambda: shipper.trouble is None, "the end of the trouble")
    shipper.stop()
    assert history(kept) == committed
    kept.close()


@REAL
@pytest.mark.parametrize("coordination", ["sqlite"], indirect=True)
def test_a_full_outbox_refuses_writes_until_postgres_is_back(coordination, own, monkeypatch):
    monkeypatch.setattr("paceline.coordinator.stores.coordination.MAX_OUTBOX_EVENTS", 1_000)
    store, term = coordination.led()
    kept = own.open()
    own.server.stop(signal.SIGINT)
    shipper = OutboxShipper(store, kept, term)
    shipper.start()
    committed = store.commit(term, [told(number) for number in range(1_000)])
    with pytest.raises(ServiceUnavailable, match="audit store"):
        store.commit(term, [told(1)])
    store.load(0.0)
    own.server.start()

    def works():
        try:
            committed.extend(store.commit(term, [told(2)]))
        except ServiceUnavailable:
            store.load(0.0)
            return False
        return True

    until(works, "writes that are taken again", within_s=60)
    until(lambda: store.outbox().waiting == 0, "an empty outbox", within_s=60)
    shipper.stop()
    assert history(kept) == committed
    kept.close()
