"""The progress contract: shared where Redis is there, and nobody's trouble where it is not."""

from __future__ import annotations

import secrets
import threading

import pytest

from paceline.coordinator.stores import Progress
from paceline.coordinator.stores.redis_progress import MOST_PARTS, RedisProgress
from paceline.schemas.records import WorkerProgress, WorkerStatus
from tests.coordinator.stores.conftest import REAL, until
from tests.support.redis import redis_server


def part(name, pieces=0):
    return WorkerProgress(
        worker_id=name,
        status=WorkerStatus.RECEIVING,
        pieces_held=pieces,
        chunks_received=(0, 2),
        upstream_worker="w9",
    )


def test_the_newest_part_of_each_worker_is_read_back(progress):
    assert isinstance(progress, Progress)
    assert progress.get("d0") == {}
    progress.put({("d0", "w0"): part("w0", 1), ("d0", "w1"): part("w1", 5)}, {"w0": 1.5})
    progress.put({("d0", "w0"): part("w0", 2), ("d1", "w0"): part("w0", 7)}, {"w1": 2.5})
    wanted = {"w0": part("w0", 2), "w1": part("w1", 5)}
    until(lambda: progress.get("d0") == wanted, "the parts of d0")
    until(lambda: progress.get("d1") == {"w0": part("w0", 7)}, "the parts of d1")
    until(lambda: progress.beats() == {"w0": 1.5, "w1": 2.5}, "the beats")
    assert progress.healthy


def test_a_dropped_deployment_is_forgotten_and_may_come_again(progress):
    progress.put({("d0", "w0"): part("w0"), ("d1", "w0"): part("w0")}, {})
    until(lambda: progress.get("d1"), "the parts")
    progress.drop("d0")
    until(lambda: progress.get("d0") == {}, "the end of d0")
    assert progress.get("d1")
    progress.put({("d0", "w1"): part("w1")}, {})
    until(lambda: progress.get("d0") == {"w1": part("w1")}, "d0 again")


def test_what_was_put_is_sent_before_it_is_closed(progress):
    if isinstance(progress, RedisProgress):
        other = RedisProgress(
            progress._where,
            prefix=progress._prefix,
            password=progress._redis.connection_pool.connection_kwargs["password"],
        )
    else:
        other = progress
    progress.put({("d0", "w0"): part("w0")}, {"w0": 1.0})
    progress.close()
    assert other.get("d0") == {"w0": part("w0")}
    other.close()


# --- Redis that loses, freezes, dies ------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis-faults")) as server:
        yield server


@REAL
def test_what_redis_lost_is_sent_again(own):
    progress = own.open()
    everything = {("d0", f"w{number}"): part(f"w{number}", number) for number in range(3_000)}
    progress.put(everything, {"w0": 1.0})
    until(lambda: len(progress.get("d0")) == 3_000, "all parts")
    own.wipe()
    assert progress.get("d0") == {}
    progress.put({("d0", "w7"): part("w7", 8)}, {"w0": 2.0})  # the next beat
    until(lambda: len(progress.get("d0")) == 3_000, "all parts again")
    assert progress.get("d0")["w7"] == part("w7", 8)
    assert progress.beats() == {"w0": 2.0}
    progress.close()


@REAL
def test_beats_of_who_is_long_forgotten_leave_redis_too(own, monkeypatch):
    monkeypatch.setattr("paceline.coordinator.stores.redis_progress.MOST_BEATS", 10)
    progress = own.open()
    progress.put({}, {f"pod-{number}": 1.0 for number in range(10)})
    until(lambda: len(progress.beats()) == 10, "all of them")
    now = {"pod-9": 2.0, "w0": 2.0}
    progress.put({}, now)
    until(lambda: progress.beats() == now, "those that are known now")
    progress.close()


@REAL
@pytest.mark.parametrize("how", ["freeze", "kill"])
def test_a_redis_that_is_away_is_no_trouble_and_gets_everything_when_it_is_back(own, how):
    progress = own.open()
    progress.put({("d0", "w0"): part("w0", 1)}, {"w0": 1.0})
    until(lambda: progress.get("d0"), "the first part")
    getattr(own.server, how)()
    for number in range(50):
        progress.put({("d0", "w1"): part("w1", number)}, {"w1": float(number)})
    assert progress.get("d0") == {}
    assert progress.beats() == {}
    until(lambda: not progress.healthy, "a failed exchange")
    progress.drop("d9")
    if how == "freeze":
        own.server.thaw()
    else:
        own.server.start()
    wanted = {"w0": part("w0", 1), "w1": part("w1", 49)}
    progress.put({}, {"w0": 2.0})
    until(lambda: progress.get("d0") == wanted, "everything again")
    assert progress.beats() == {"w0": 2.0, "w1": 49.0}
    progress.close()


@REAL
def test_nothing_is_asked_of_a_redis_that_just_failed(own, monkeypatch):
    progress = own.open()
    own.server.freeze()
    try:
        assert progress.get("d0") == {}
        asked = []
        monkeypatch.setattr(progress._redis, "hgetall", asked.append)
        for _ in range(100):
            assert progress.get("d0") == {}
        assert asked == []
    finally:
        own.server.thaw()
    progress.close()


@REAL
def test_an_earlier_term_does_not_overwrite_a_later_one(own):
    prefix = secrets.token_hex(4)
    first, second = own.open(prefix), own.open(prefix)
    first.put({("d0", "w0"): part("w0", 1)}, {"w0": 1.0})
    until(lambda: second.get("d0") == {"w0": part("w0", 1)}, "the first leader's part")
    second.begin()
    second.put({("d0", "w0"): part("w0", 2)}, {"w0": 2.0})
    until(lambda: first.get("d0") == {"w0": part("w0", 2)}, "the second leader's part")
    sent = threading.Event()
    send = first._send
    first._send = lambda **more: (send(**more), sent.set())
    first.begin()  # it leads again
    first.put({}, {"w0": 3.0})
    assert sent.wait(20)
    until(lambda: second.beats() == {"w0": 3.0}, "the beat")
    assert second.get("d0") == {"w0": part("w0", 2)}
    first.close()
    second.close()


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("paceline.coordinator.stores.redis_progress.MOST_PARTS", 10)
    progress = RedisProgress("redis://127.0.0.1:1/0", prefix="p")
    for number in range(100):
        progress.put({("d0", f"w{number}"): part("w")}, {})
    assert sum(map(len, progress._known.values())) == 10
    progress.drop("d0")
    progress.put({("d1", "w0"): part("w")}, {})
    assert sum(map(len, progress._known.values())) == 1
    monkeypatch.setattr("paceline.coordinator.stores.redis_progress.MOST_BEATS", 10)
    for number in range(100):
        progress.put({}, {f"pod-{number}": 1.0, "w0": float(number)})
    assert len(progress._beats) <= 11
    assert progress._beats["w0"] == 99.0
    assert progress._new_beats <= progress._beats.keys()
    progress.close()
    assert not progress.healthy
    assert MOST_PARTS >= 100_000
