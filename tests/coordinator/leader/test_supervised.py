"""The supervisor runs several replicas; a replica that is asked to stop resigns."""

import os
import secrets
import signal

import pytest

from paceline import cluster as fleet
from paceline.client import CoordinatorClient
from paceline.config import Profile
from paceline.schemas import RegisterWorker

pytestmark = [pytest.mark.services, pytest.mark.timeout(180), pytest.mark.xdist_group("etcd")]

NAMES = ("coordinator", "coordinator-2")
LEASE_S = 60.0  # longer than anything here waits: who leads sooner was let lead
REGISTRATION = RegisterWorker(
    worker_id="w", hostname="h", rack="r", available_storage=1, address="127.0.0.1:9"
)


def test_replicas_run_and_a_stopping_leader_hands_over_at_once(etcd, tmp_path):
    control = {
        "coordination": "etcd",
        "etcd_endpoints": list(etcd.access.endpoints),
        "etcd_prefix": f"/tests/{secrets.token_hex(6)}",
        "replicas": len(NAMES),
        "lease_s": LEASE_S,
    }
    profile = Profile.model_validate({"control": control})
    runtime = fleet.start(profile, tmp_path, detach=False, only=NAMES)
    try:
        urls = runtime.endpoints.coordinator_urls
        assert len(set(urls)) == len(NAMES)
        assert runtime.endpoints.coordinator_url == urls[0]
        client = CoordinatorClient.of(runtime, patience_s=LEASE_S / 2)
        client.register(REGISTRATION)
        old = urls.index(client.base_url)
        pids = {each.name: each.pid for each in fleet.status(tmp_path).services}
        os.kill(pids[NAMES[old]], signal.SIGTERM)
        client.register(REGISTRATION)
        new = urls.index(client.base_url)
        assert new != old
        assert client.epoch > 1

        logs = {path.name for path in tmp_path.glob("*.log")}
        assert {f"{name}.log" for name in NAMES} <= logs, "a log of its own for each"
        client.close()
    finally:
        fleet.stop(tmp_path)
