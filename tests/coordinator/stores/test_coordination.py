"""The coordination contract, against every backend for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from paceline.coordinator.state import (
    Answer,
    Drop,
    DropDeployment,
    EmitEvent,
    Save,
    SaveIdempotencyKey,
)
from paceline.coordinator.stores import RECENT_EVENTS
from paceline.errors import ServiceUnavailable, StaleEpoch
from paceline.schemas import (
    EventName,
    JobState,
    StageRecord,
    Success,
    TokenRecord,
    TrainingJob,
    Worker,
    digest_of,
)
from tests.coordinator.stores.conftest import REAL, until
from tests.coordinator.stores.effects import (
    DIGEST,
    EARLIER_JOB,
    deployment,
    expected,
    job,
    plan,
    receipt,
    stage,
    token,
    told,
    worker,
)

pytestmark = pytest.mark.xdist_group("etcd")


def test_everything_that_was_kept_is_read_back_equal(coordination):
    store, term = coordination.led()
    effects = [
        worker("w1"),
        worker("w0"),
        deployment("d1"),
        deployment("d0", "v2"),
        SaveIdempotencyKey("key/with spaces ü", DIGEST, "d1"),
        *[plan("d1", epoch) for epoch in range(1, 7)],
        receipt("d1", "w1"),
        receipt("d1", "w0"),
        worker("w0", incarnation=2),
        token("t0"),
        token("t1"),
        Drop(TokenRecord, ("t0",)),
        worker("w2"),
        worker("w22"),
        Drop(Worker, ("w2",)),
        deployment("d1", new=False, epoch=6),
        Answer(Success()),
    ]
    assert store.commit(term, effects) == []
    assert store.load(0.0) == expected(effects)
    assert coordination.open().load(0.0) == expected(effects)


def test_a_dropped_deployment_takes_everything_of_its_own_along(coordination):
    store, term = coordination.led()
    kept = [
        worker("w0"),
        deployment("d1"),
        SaveIdempotencyKey("k1", DIGEST, "d1"),
        receipt("d1", "w0"),
    ]
    gone = [
        deployment("d0"),
        SaveIdempotencyKey("k0", DIGEST, "d0"),
        plan("d0", 1),
        receipt("d0", "w0"),
    ]
    store.commit(term, [*gone, *kept])
    store.commit(term, [DropDeployment("d0")])
    assert store.load(0.0) == expected(kept)
    again = [deployment("d0", "v3"), plan("d0", 1)]
    store.commit(term, [DropDeployment("d0"), *again])
    assert store.load(0.0) == expected([*kept, *again])


def test_changes_of_one_commit_hold_in_their_order(coordination):
    store, term = coordination.led()
    effects = [
        *[plan("d0", epoch) for epoch in (3, 9, 4)],
        deployment("d0"),
        DropDeployment("d0"),
        deployment("d0", "v2"),
        plan("d0", 1),
        token("t0"),
        Drop(TokenRecord, ("t0",)),
        token("t0", at=7.0),
    ]
    store.commit(term, effects)
    assert store.load(0.0) == expected(effects)


def test_events_are_numbered_without_a_gap_over_terms_and_commits(coordination):
    store, term = coordination.led()
    first = store.commit(term, [told(1), worker("w0"), told(2)])
    store.resign(term)
    other, next_term = coordination.led()
    second = other.commit(next_term, [told(3)])
    assert [each.seq for each in (*first, *second)] == [1, 2, 3]
    assert other.events_after(0, 10) == [*first, *second] == store.events_after(0, 10)
    assert other.events_after(1, 1) == [first[1]]
    assert other.events_after(3, 10) == []
    assert other.outbox().waiting == 3


def test_any_event_text_can_be_stored_and_read_back(coordination):
    store, term = coordination.led()
    strange = {
        "nul": "a\0b",
        "half": "\ud800",
        "nan": float("nan"),
        "pair": (1, 2),
        "kind": ValueError("no"),
        3: True,
    }
    [event] = store.commit(term, [EmitEvent(EventName.WORKER_LOST, 1.0, "d\0", "\ud800", strange)])
    fit = {"nul": "a\0b", "half": "?", "nan": None, "pair": [1, 2], "kind": "no", "3": True}
    assert event.data == fit
    assert (event.deployment_id, event.worker_id) == ("d\ufffd", "?")
    assert store.events_after(0, 10) == [event]
    assert event.model_dump_json()


def test_epochs_rise_over_every_term(coordination):
    epochs = []
    for _ in range(3):
        store, term = coordination.led()
        epochs.append(term.epoch)
        assert store.is_leading(term)
        assert store.leader() == term
        store.resign(term)
        assert not store.is_leading(term)
        assert store.leader() is None
    assert epochs == sorted(set(epochs))


def test_a_former_leader_writes_nothing_any_more(coordination):
    old, old_term = coordination.led()
    old.commit(old_term, [worker("w0"), told(1)])
    if old.standbys:
        old.resign(old_term)
    new, new_term = coordination.led()
    assert new_term.epoch > old_term.epoch
    for write in (
        lambda: old.commit(old_term, [worker("w1"), told(2)]),
        lambda: old.commit(old_term, [Save(stage("fetch")), told(2)]),
        lambda: old.trim_events(old_term, 1),
        lambda: old.continue_numbering(old_term, 1_000),
    ):
        with pytest.raises((StaleEpoch, ServiceUnavailable)):
            write()
        old.load(0.0)  # so that it is the term that is refused each time
        with pytest.raises(StaleEpoch):
            write()
        old.load(0.0)
    assert not old.is_leading(old_term)
    assert [each.seq for each in new.commit(new_term, [told(3)])] == [2]
    assert new.load(0.0) == expected([worker("w0")])
    assert new.stage("fetch", DIGEST) is None
    assert new.outbox().shipped == 0


def test_a_commit_is_all_or_nothing(coordination):
    store, term = coordination.led()
    with pytest.raises(AssertionError):
        store.commit(term, [worker("w0"), object()])
    assert store.load(0.0) == expected([])
    store.commit(term, [worker("w1")])
    assert store.load(0.0) == expected([worker("w1")])


def test_a_commit_too_large_for_one_transaction_is_one_commit(coordination):
    store, term = coordination.led()
    effects = [worker(f"w{number:04}") for number in range(1_500)]
    effects += [told(number) for number in range(1_500)]
    assert len(store.commit(term, effects)) == 1_500
    assert store.load(0.0) == expected(effects)
    assert coordination.open().load(0.0) == expected(effects)
    events = store.events_after(0, 10_000)
    assert [each.seq for each in events] == list(range(1, 1_501))
    assert events[-1].data == {"number": 1_499}


def test_a_large_manifest_is_kept_whole(coordination):
    store, term = coordination.led()
    effects = [deployment("d0", "v1", pieces=20_000), deployment("d1", "v1", pieces=20_000)]
    store.commit(term, effects)
    assert store.load(0.0) == expected(effects)
    store.commit(term, [DropDeployment("d0")])
    assert coordination.open().load(0.0) == expected(effects[1:])


def test_the_ledger_keeps_the_newest_record(coordination):
    store, term = coordination.led()
    assert store.stage("fetch", DIGEST) is None
    store.commit(term, [Save(stage("fetch")), told(1)])
    events = store.commit(term, [Save(stage("fetch", seconds=2.0)), told(2)])
    assert [each.seq for each in events] == [2]
    assert coordination.open().stage("fetch", DIGEST) == stage("fetch", seconds=2.0)


def test_jobs_of_any_size_are_kept_until_they_are_dropped(coordination):
    store, term = coordination.led()
    small, large = job("tj-" + "0" * 12, ranks=1), job("tj-" + "1" * 12, ranks=4096)
    assert len(large.model_dump_json()) > 300_000
    store.commit(term, [Save(small), Save(large), told(1)])
    moved = small.model_copy(update={"state": JobState.CANCELLED})
    store.commit(term, [Save(moved), told(2)])
    again = coordination.open()
    assert list(again.jobs()) == [moved, large]
    assert again.load(0.0) == expected([]), "the state machine does not read them"
    store.commit(term, [Drop(TrainingJob, (large.job_id,))])
    assert list(coordination.open().jobs()) == [moved]


def test_jobs_of_the_release_before_leave_the_ledger(coordination, caplog):
    store, term = coordination.led()
    kept = [json.loads(EARLIER_JOB) | {"job_id": f"tj-{number:012x}"} for number in range(150)]
    stages = []
    for each in [*kept, {"job_id": "tj-of-another-kind"}]:
        key, run_id = digest_of({"training_job": each["job_id"]}), "run-20261125-000000-000000"
        stages.append(Save(StageRecord.of("training-job", key, each, run_id)))
    store.commit(term, stages)
    newer = job("tj-" + "0" * 12, ranks=1)  # that a newer leader has saved since
    store.commit(term, [Save(newer), Save(stage("fetch"))])
    store.move_jobs(term)
    again = coordination.open()
    assert list(again.jobs()) == [newer, *map(TrainingJob.model_validate, kept[1:])]
    assert [each.output["job_id"] for each in again.stages("training-job")] == [
        "tj-of-another-kind"
    ]
    assert "left out" in caplog.text
    assert again.stage("fetch", DIGEST) == stage("fetch")


def test_the_outbox_holds_what_waits_and_what_is_recent(coordination):
    store, term = coordination.led()
    for _ in range(3):
        store.commit(term, [told(number) for number in range(1_000)])
    store.trim_events(term, 2_500)
    box = store.outbox()
    assert (box.shipped, box.last, box.waiting) == (2_500, 3_000, 500)
    kept = [each.seq for each in store.events_after(0, 10_000)]
    assert kept[-RECENT_EVENTS:] == list(range(3_001 - RECENT_EVENTS, 3_001))
    assert len(kept) < 3_000
    store.trim_events(term, 10)  # late: what is shipped stays shipped
    store.trim_events(term, 9_999)  # more than there is
    assert store.outbox().shipped == 3_000
    assert len(store.events_after(2_000, 10_000)) == 1_000


def test_too_many_unshipped_events_block_new_ones_until_some_ship(coordination, monkeypatch):
    monkeypatch.setattr("paceline.coordinator.stores.coordination.MAX_OUTBOX_EVENTS", 2_000)
    store, term = coordination.led()
    for _ in range(4):
        store.commit(term, [told(number) for number in range(500)])
    with pytest.raises(ServiceUnavailable, match="audit store"):
        store.commit(term, [worker("w0"), told(1)])
    with pytest.raises(ServiceUnavailable):
        store.commit(term, [Save(stage("fetch")), told(1)])
    assert store.load(0.0) == expected([])
    with pytest.raises(ServiceUnavailable, match="audit store"):
        store.commit(term, [Save(stage("fetch")), told(1)])
    store.load(0.0)
    store.trim_events(term, 500)
    assert [e.seq for e in store.commit(term, [told(1)])] == [2_001]


def test_numbers_go_on_above_what_the_audit_store_has(coordination):
    store, term = coordination.led()
    store.commit(term, [told(1)])
    store.trim_events(term, 1)
    store.continue_numbering(term, 500)
    store.continue_numbering(term, 400)
    assert store.outbox().waiting == 0
    assert [each.seq for each in store.commit(term, [told(2)])] == [501]
    assert store.outbox().waiting == 1


def test_numbers_of_many_threads_are_each_given_once(coordination):
    store, term = coordination.led()
    numbers = []

    def tell():
        for _ in range(10):
            numbers.extend(each.seq for each in store.commit(term, [told(1), told(2)]))

    threads = [threading.Thread(target=tell) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 101))


def test_the_revision_changes_with_a_commit_and_a_new_leader(coordination):
    store, term = coordination.led()
    watcher = coordination.open()
    seen = watcher.revision()
    assert watcher.revision() == seen
    store.commit(term, [worker("w0")])
    assert watcher.revision() > seen
    seen = watcher.revision()
    store.resign(term)
    store.campaign(coordination.candidate(), lambda: False)
    assert watcher.revision() > seen


def test_a_standby_that_follows_sees_each_commit(coordination):
    store, term = coordination.led()
    standby = coordination.open()
    effects = []
    for number in range(5):
        effects += [worker(f"w{number}"), deployment(f"d{number}", f"v{number}")]
        store.commit(term, effects[-2:])
        seen = standby.revision()
        assert standby.load(0.0) == expected(effects)
        assert standby.revision() == seen
    effects.append(DropDeployment("d2"))
    store.commit(term, effects[-1:])
    assert standby.load(0.0) == expected(effects)


def test_a_candidate_gives_up_on_request(coordination):
    store, term = coordination.led()
    asked = []

    def give_up():
        asked.append(1)
        return len(asked) > 2

    other = coordination.open()
    if other.standbys:
        assert other.campaign(coordination.candidate(), give_up) is None
        assert len(asked) == 3
        assert store.leader() == term
    else:
        assert other.campaign(coordination.candidate(), lambda: True) is None


@pytest.mark.parametrize("coordination", [pytest.param("etcd", marks=REAL)], indirect=True)
def test_of_many_candidates_one_leads_at_a_time(coordination):
    first = coordination.open()
    epochs, stop = [], threading.Event()

    def stand():
        store = coordination.open()
        term = store.campaign(coordination.candidate(), stop.is_set)
        if term is not None:
            store.commit(term, [told(term.epoch)])
            epochs.append(term.epoch)
            store.resign(term)

    threads = [threading.Thread(target=stand) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(epochs) == 4, "a term for everybody")
    for thread in threads:
        thread.join()
    assert sorted(epochs) == [1, 2, 3, 4]
    events = first.events_after(0, 10)
    assert [each.data["number"] for each in events] == [1, 2, 3, 4]


REPLICA = """
import sys
from pathlib import Path
from paceline.coordinator.stores import Candidate
from tests.coordinator.stores.effects import told, worker
kind, where, *endpoints = sys.argv[1:]
if kind == "sqlite":
    from paceline.coordinator.stores.sqlite import SqliteCoordination
    store = SqliteCoordination(Path(where))
else:
    from paceline.coordinator.stores.etcd.client import EtcdAccess
    from paceline.coordinator.stores.etcd.coordination import EtcdCoordination
    store = EtcdCoordination(EtcdAccess(endpoints=tuple(endpoints)), where, lease_s=2.0)
term = store.campaign(Candidate("process", "http://127.0.0.1:1"), lambda: False)
print(term.epoch, flush=True)
for line in sys.stdin:
    try:
        store.commit(term, [worker(line.strip()), told(1)])
        print("kept", flush=True)
    except Exception as error:
        print(type(error).__name__, store.is_leading(term), flush=True)
"""


@pytest.fixture
def process(coordination):
    """A leader in a process of its own, to be killed and frozen."""
    made = subprocess.Popen(
        [sys.executable, "-c", REPLICA, *coordination.address.split()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    yield made
    made.kill()
    made.wait()
    made.stdin.close()
    made.stdout.close()


def ask(process, worker_id):
    process.stdin.write(f"{worker_id}\n")
    return process.stdout.readline().strip()


def test_a_leader_frozen_past_its_lease_is_refused_when_it_wakes(coordination, process):
    epoch = int(process.stdout.readline())
    assert ask(process, "w0") == "kept"
    os.kill(process.pid, signal.SIGSTOP)
    store, term = coordination.led()
    os.kill(process.pid, signal.SIGCONT)
    assert term.epoch > epoch
    assert ask(process, "w2") == "StaleEpoch False"
    store.commit(term, [worker("w1")])
    assert store.load(0.0) == expected([worker("w0"), worker("w1")])
    assert [each.seq for each in store.commit(term, [told(1)])] == [2]


def test_the_next_one_leads_after_a_leader_was_killed(coordination, process):
    epoch = int(process.stdout.readline())
    assert ask(process, "w0") == "kept"
    process.kill()
    store, term = coordination.led()
    assert term.epoch == epoch + 1
    assert store.load(0.0) == expected([worker("w0")])
