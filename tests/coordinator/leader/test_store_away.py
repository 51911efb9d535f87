"""etcd is away, at a start or midway: 503 with Retry-After, nothing lost, it goes on after."""

import http.client
import time

import pytest

from benchmarks.leaders.cluster import cluster, make_model
from benchmarks.leaders.history import violations
from benchmarks.leaders.load import Load, final_of
from tests.coordinator.leader.fakes import until
from tests.support.etcd import etcd_cluster

pytestmark = [pytest.mark.nightly, pytest.mark.services, pytest.mark.timeout(240)]
BODY = b'{"worker_id": "w", "hostname": "h", "rack": "r", "available_storage": 1}'


def refusal(made, name: str) -> tuple[int, str | None]:
    """What one replica answers to a write, and when it says to come again."""
    url = made.urls[int(name[1:])]
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    headers = {"Authorization": f"Bearer {made.token}", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/workers/register", BODY, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Retry-After")
    finally:
        connection.close()


def test_store_that_goes_away_and_comes_back_costs_no_acknowledged_write(tmp_path):
    with (
        etcd_cluster(tmp_path / "etcd") as etcd,
        cluster(tmp_path / "state", etcd.access.endpoints, lease_s=2.0) as made,
    ):
        load = Load(made, make_model(made.state / "sources" / "v1", "v1", 64 * 1024))
        load.start()
        try:
            until(lambda: len(load.accepted) > 20, "writes")
            for member in etcd.members[:2]:  # no quorum is left
                member.freeze()
            for name in made.replicas:
                until(lambda name=name: refusal(made, name)[0] == 503, "it refuses", 60)
                status, retry_after = refusal(made, name)
                assert status == 503
                assert retry_after is not None
                assert int(retry_after) >= 1
                healthy = made.ask(name)
                assert healthy is not None
                assert healthy.status == 200, "the process itself is well"
            made.replicas["r0"].kill()  # it starts without a store, and leads or follows later
            made.reap("r0")
            made.start_replica("r0")
            until(lambda: made.ask("r0") is not None, "it serves, though it has no store", 60)
            assert made.ask("r0", "/readyz", timeout_s=10.0).status == 503
            assert refusal(made, "r0")[0] == 503
            away_s = time.monotonic()
            etcd.restored()
            until(lambda s=away_s: load.accepted[-1][0] > s, "writes are accepted again", 60)
            made.await_ready()
        finally:
            load.stop()
        found = violations(load.history.all(), final_of(made, load.history))
        assert found + load.read_failures + load.broken == []
