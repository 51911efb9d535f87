"""The progress contract: shared where Redis is there, and nobody's trouble where it is not."""

from __future__ import annotations

import secrets

import pytest

from paceline.schemas import WorkerProgress, WorkerStatus
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
    assert progress.get("d0") == {}
    progress.put({("d0", "w0"): part("w0", 1), ("d0", "w1"): part("w1", 5)}, {"w0": 1.5})
    progress.put({("d0", "w0"): part("w0", 2), ("d1", "w0"): part("w0", 7)}, {"w1": 2.5})
    wanted = {"w0": part("w0", 2), "w1": part("w1", 5)}
    assert progress.get("d0") == wanted
    assert progress.get("d1") == {"w0": part("w0", 7)}
    assert progress.beats() == {"w1": 2.5}
    assert progress.healthy


def test_a_dropped_deployment_is_deleted_and_may_come_again(progress):
    progress.put({("d0", "w0"): part("w0"), ("d1", "w0"): part("w0")}, {"w0": 1.0})
    progress.drop("d0")
    assert progress.get("d0") == {}
    assert progress.get("d1")
    progress.put({("d0", "w1"): part("w1")}, {"w0": 2.0})
    assert progress.get("d0") == {"w1": part("w1")}


# --- Redis that freezes and dies -----------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis-faults")) as server:
        yield server


@REAL
@pytest.mark.parametrize("how", ["freeze", "kill"])
def test_a_redis_that_is_away_costs_one_timeout_and_works_when_it_is_back(own, how, monkeypatch):
    monkeypatch.setattr("paceline.coordinator.stores.progress.PAUSE_AFTER_FAILURE_S", (0.5, 0.5))
    progress = own.open()
    progress.put({("d0", "w0"): part("w0", 1)}, {"w0": 1.0})
    getattr(own.server, how)()
    assert progress.get("d0") == {}
    assert not progress.healthy
    with monkeypatch.context() as patch:  # nothing is sent for a while
        patch.setattr(progress._redis, "hgetall", lambda _: pytest.fail("it was called"))
        patch.setattr(progress._redis, "pipeline", lambda: pytest.fail("it was called"))
        progress.put({("d0", "w1"): part("w1", 1)}, {"w1": 1.0})
        assert progress.get("d0") == progress.beats() == {}
    if how == "freeze":
        own.server.thaw()
    else:
        own.server.start()

    def works():
        progress.put({("d0", "w1"): part("w1", 2)}, {"w1": 2.0})
        return progress.healthy

    until(works, "a Redis that answers")
    kept = {"w1": part("w1", 2)} | ({"w0": part("w0", 1)} if how == "freeze" else {})
    assert progress.get("d0") == kept
    assert progress.beats() == {"w1": 2.0}
    progress.close()


@REAL
def test_thousands_of_parts_are_stored_and_other_versions_are_skipped(own):
    prefix = secrets.token_hex(4)
    progress, other = own.open(prefix), own.open(prefix)
    everything = {("d0", f"w{number}"): part(f"w{number}", number) for number in range(2_500)}
    progress.put(everything, {f"w{number}": 1.0 for number in range(2_500)})
    progress._redis.hset(f"{prefix}:parts:d0", "w7", '{"from": "the future"}')
    found = other.get("d0")
    assert len(found) == 2_499
    assert found["w8"] == part("w8", 8)
    assert len(other.beats()) == 2_500
    for each in (progress, other):
        each.close()
