"""etcd that dies, freezes, answers late or not at all: what was acknowledged is there, once."""

from __future__ import annotations

import threading
from urllib.parse import urlsplit

import pytest

from paceline.coordinator.stores import Candidate
from paceline.coordinator.stores.etcd import EtcdAccess, EtcdCoordination
from paceline.errors import ServiceUnavailable, StaleEpoch
from tests.coordinator.stores.conftest import REAL, until
from tests.coordinator.stores.effects import deployment, expected, plan, told, worker
from tests.support.etcd import etcd_cluster
from tests.support.holdup import HoldUp

pytestmark = REAL
CANDIDATE = Candidate("r0", "http://127.0.0.1:1")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    with etcd_cluster(tmp_path_factory.mktemp("etcd-faults")) as cluster:
        yield cluster


@pytest.fixture
def cluster(own):
    """A cluster whose members may be killed and frozen."""
    yield own
    own.restored()


@pytest.fixture
def store(cluster):
    made = cluster.open()
    yield made
    made.close()


def lead(store):
    term = store.campaign(CANDIDATE, lambda: False)
    assert term is not None
    return term


def again(act):
    """What a caller does who hears "again"."""
    result = []

    def worked():
        try:
            result.append(act())
        except ServiceUnavailable:
            return False
        return True

    until(worked, "a store that works again")
    return result[0]


@pytest.mark.parametrize(("how", "member"), [("kill", 0), ("freeze", 1), ("freeze", 2)])
def test_two_of_three_members_go_on(cluster, store, how, member):
    term = lead(store)
    effects = [worker("w0")]
    store.commit(term, effects)
    getattr(cluster.members[member], how)()

    def keep(name):
        store.load(0.0)
        return store.commit(store_term(), [worker(name), told(1)])

    def store_term():
        nonlocal term
        if not store.is_leading(term):
            term = lead(store)
        return term

    numbers = [again(lambda name=name: keep(name))[0].seq for name in ("w1", "w2", "w3")]
    effects += [worker(name) for name in ("w1", "w2", "w3")]
    assert numbers == sorted(set(numbers))
    assert again(lambda: store.load(0.0)) == expected(effects)


@pytest.mark.nightly
def test_no_commit_is_acknowledged_without_a_majority_and_work_resumes(cluster, store):
    term = lead(store)
    store.commit(term, [worker("w0")])
    for member in cluster.members[:2]:
        member.freeze()
    with pytest.raises(ServiceUnavailable) as caught:
        store.commit(term, [worker("w1")])
    assert "majority" in caught.value.do
    for ask in (store.check, lambda: store.load(0.0)):
        with pytest.raises(ServiceUnavailable):
            ask()
    until(lambda: not store.is_leading(term), "a leader that knows its lease may be over")
    cluster.restored()
    shown = again(lambda: store.load(0.0))
    assert shown in (expected([worker("w0")]), expected([worker("w0"), worker("w1")]))
    if not store.is_leading(term):
        term = lead(store)
    store.commit(term, [worker("w2")])
    names = {each.worker_id for each in store.load(0.0).workers}
    assert names == {each.worker_id for each in shown.workers} | {"w2"}


@pytest.mark.nightly
def test_a_cluster_that_was_killed_as_a_whole_comes_back_with_everything(cluster, store):
    term = lead(store)
    effects = [worker(f"w{number}") for number in range(50)]
    events = store.commit(term, [*effects, told(1)])
    for member in cluster.members:
        member.kill()
    with pytest.raises(ServiceUnavailable):
        store.commit(term, [worker("lost")])
    cluster.restored()
    assert again(lambda: store.load(0.0)) == expected(effects)
    assert again(lambda: store.events_after(0, 10)) == events
    again_term = again(lambda: lead(store))
    assert again_term.epoch > term.epoch
    assert [each.seq for each in store.commit(again_term, [told(2)])] == [2]


def test_a_candidate_waits_for_an_etcd_that_is_away(cluster):
    for member in cluster.members:
        member.kill()
    store = cluster.open()
    won = []
    thread = threading.Thread(target=lambda: won.append(lead(store)))
    thread.start()
    cluster.restored()
    thread.join(60)
    assert won[0].epoch == 1
    assert store.leader() == won[0]
    store.close()


# --- answers that do not come -------------------------------------------------------------------


class Path:
    """One way to the cluster that can be held up."""

    def __init__(self, endpoint):
        self.gate = HoldUp(urlsplit(endpoint).port)
        self.endpoint = f"http://127.0.0.1:{self.gate.port}"


@pytest.fixture
def paths(cluster):
    made = [Path(each) for each in cluster.access.endpoints[:2]]
    yield made
    for each in made:
        each.gate.close()


def opened(paths, prefix, lease_s=30.0):
    access = EtcdAccess(endpoints=tuple(each.endpoint for each in paths))
    return EtcdCoordination(access, prefix, lease_s=lease_s)


def test_a_resent_commit_with_a_lost_answer_is_recognised(paths):
    store = opened(paths, "/tests/lost-answer")
    term = lead(store)
    store.commit(term, [told(1)])
    paths[store._client._current].gate.hold_answers()  # the other way stays open
    events = store.commit(term, [worker("w0"), told(2)])
    assert [each.seq for each in events] == [2]
    assert store.events_after(1, 10) == events
    assert store.load(0.0) == expected([worker("w0")])
    assert [each.seq for each in store.commit(term, [told(3)])] == [3]
    store.close()


def test_a_deposed_leader_calls_unknown_what_it_sent_twice(store, cluster, monkeypatch):
    term = lead(store)
    send = store._client.send
    other = cluster.open(store._layout.prefix.rstrip("/"))

    def answerless(name, message, **more):
        """The commit is carried out; its answer comes too late for this leader's term."""
        send(name, message, **more)
        store._held.lease.end(revoke=True)
        other.commit(lead(other), [worker("w1"), told(2)])
        return send(name, message, **more)[0], False

    with monkeypatch.context() as patch:
        patch.setattr(store._client, "send", answerless)
        with pytest.raises(ServiceUnavailable) as caught:
            store.commit(term, [worker("w0"), told(1)])
    assert not isinstance(caught.value, StaleEpoch)
    assert store.load(0.0) == expected([worker("w0"), worker("w1")])  # it had been kept
    with pytest.raises(StaleEpoch):
        store.commit(term, [worker("w2")])
    other.close()


def test_the_next_load_settles_a_commit_of_unknown_outcome(paths):
    store = opened(paths, "/tests/no-answer")
    term = lead(store)
    for each in paths:
        each.gate.hold_answers()
    with pytest.raises(ServiceUnavailable):
        store.commit(term, [worker("w0"), told(1)])
    with pytest.raises(ServiceUnavailable, match="load"):
        store.commit(term, [worker("w1")])
    for each in paths:
        each.gate.cut()
        each.gate.free()
    assert again(lambda: store.load(0.0)) == expected([worker("w0")])  # it was carried out
    assert [each.seq for each in store.commit(term, [told(2)])] == [2]
    store.close()


def test_a_commit_that_a_load_did_not_show_never_comes_to_pass(store, monkeypatch):
    term = lead(store)
    store.commit(term, [worker("w0")])
    call, late = store._client.call, []

    def delayed(name, message, **more):
        late.append((name, message))
        raise ServiceUnavailable("on its way, and slow")

    with monkeypatch.context() as patch:
        patch.setattr(store._client, "send", delayed)
        with pytest.raises(ServiceUnavailable):
            store.commit(term, [worker("late"), told(1)])
    assert store.load(0.0) == expected([worker("w0")])
    assert not call(*late[0]).succeeded  # it arrives now
    assert store.load(0.0) == expected([worker("w0")])
    assert [each.seq for each in store.commit(term, [worker("w1"), told(2)])] == [1]
    assert [each.data for each in store.events_after(0, 10)] == [{"number": 2}]


def test_a_commit_that_arrives_before_the_bar_is_shown(store, monkeypatch):
    term = lead(store)
    send = store._client.send
    late = []

    def delayed(name, message, **more):
        """The commit arrives when the bar has just read the tip."""
        if name == "Txn" and message.compare and not late:
            late.append(message)
            raise ServiceUnavailable("on its way, and slow")
        if name == "Txn" and message.compare and len(late) == 1:
            late.append(send(name, late[0])[0])
        return send(name, message, **more)

    monkeypatch.setattr(store._client, "send", delayed)
    with pytest.raises(ServiceUnavailable):
        store.commit(term, [worker("w0"), told(1)])
    assert store.load(0.0) == expected([worker("w0")])
    assert late[1].succeeded
    assert [each.seq for each in store.commit(term, [told(2)])] == [2]


def test_a_large_commit_is_finished_by_the_next_leader(cluster, monkeypatch):
    prefix = "/tests/half-done"
    first, second = cluster.open(prefix), cluster.open(prefix)
    term = lead(first)
    effects = [worker(f"w{number:03}") for number in range(500)]
    # Dies right after the commit, before the journal is carried out.
    monkeypatch.setattr(first, "_follow_up", lambda held: None)
    first.commit(term, [*effects, told(1)])
    assert second.load(0.0) == expected(effects)  # a standby sees it whole
    first.resign(term)
    next_term = lead(second)
    second.commit(next_term, [worker("w000", incarnation=7), told(2)])
    assert second.load(0.0) == expected([*effects, worker("w000", incarnation=7)])
    assert [each.seq for each in second.events_after(0, 10)] == [1, 2]
    first.close()
    second.close()


def test_blobs_that_nothing_names_are_collected_and_the_others_stay(cluster, store, monkeypatch):
    monkeypatch.setattr("paceline.coordinator.stores.etcd.coordination.COLLECT_EVERY", 6)
    term = lead(store)
    oldest = deployment("oldest", "v", pieces=4_000)
    store.commit(term, [oldest])
    made = []
    for number in range(7):
        made = [deployment("d0", f"v{number}", pieces=4_000), plan("d0", 1)]
        store.commit(term, made)
    start, end = store._layout.below("blobs")
    from paceline.coordinator.stores.etcd import request

    message = request("RangeRequest", key=start, range_end=end, count_only=True)
    assert store._client.call("Range", message).count < 6
    fresh = cluster.open(store._layout.prefix.rstrip("/"))
    manifests = [each.manifest for each in fresh.load(0.0).deployments]
    assert manifests == [oldest.manifest, made[0].manifest]
    fresh.close()


def test_a_lease_that_is_not_renewed_ends_the_term_without_anybody_asking(cluster):
    prefix = "/tests/silent"
    first, second = cluster.open(prefix), cluster.open(prefix)
    term = lead(first)
    first._held.lease._ended.set()  # its thread is gone, as in a process that hangs
    won = lead(second)
    assert won.epoch == term.epoch + 1
    with pytest.raises(StaleEpoch):
        first.commit(term, [worker("w0")])
    first.close()
    second.close()
