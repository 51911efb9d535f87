"""The wall clock of every process jumps an hour ahead, then two back: nobody notices.

A shim preloaded into replicas and agents adds to the real time (``tests/support/wall_jump.c``);
etcd's clock stays. Leases, deadlines and beats are monotonic.
"""

import time
from pathlib import Path

import pytest

from benchmarks.leaders.cluster import cluster, make_model
from paceline.schemas import CreateDeployment, DeploymentStatus, EventName
from tests.coordinator.leader.fakes import until
from tests.support.wall_jump import build_shim, jump, preloaded

pytestmark = [pytest.mark.nightly, pytest.mark.services, pytest.mark.timeout(180)]

HOUR_S = 3600
LINK_MBIT = 4.0
SIZE = 4_000_000  # eight seconds at that rate
TROUBLE = (EventName.WORKER_LOST, EventName.WORKER_RETURNED, EventName.DEPLOYMENT_REPLANNED)


class Wall:
    """The clock that the processes see."""

    def __init__(self, directory: Path) -> None:
        self._offset = directory / "jump"
        self.jump(0)
        self.environment = preloaded(build_shim(directory), self._offset)

    def jump(self, seconds: int) -> None:
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(jump(seconds))


def test_clocks_that_jump_an_hour_change_no_leader_and_lose_no_worker(etcd, tmp_path):
    wall = Wall(tmp_path)
    endpoints = list(etcd.access.endpoints)
    with cluster(tmp_path / "state", endpoints, lease_s=2.0, environment=wall.environment) as made:
        client = made.client(patience_s=30.0)
        names = ("node-0", "node-1")
        for name in names:
            made.start_agent(name, LINK_MBIT)
        until(lambda: {w.worker_id for w in client.workers()} == set(names), "two agents", 60)
        leader, epoch = made.leader()
        source = make_model(made.state / "sources" / "v1", "v1", SIZE)
        call = CreateDeployment(
            model_id="m", version="v1", source_url=source, target_workers=names, topology="chain"
        )
        deployment_id = client.create(call, "key").deployment_id

        def moving(share):
            return lambda: client.deployment(deployment_id).progress > share

        until(moving(0.1), "bytes move", 60)
        wall.jump(HOUR_S)
        seen = client.events(2**62).last
        again = client.create(call.model_copy(update={"target_workers": ("nobody",)}), "later")
        until(lambda: client.events(seen).events, "the jump is in what is told")
        assert client.events(seen).events[0].at > time.time() + HOUR_S / 2, "the shim works"
        client.cancel(again.deployment_id)
        until(moving(0.4), "bytes move on", 60)
        wall.jump(-HOUR_S)
        until(
            lambda: client.deployment(deployment_id).status is DeploymentStatus.COMPLETE,
            "it completes", 90,
        )  # fmt: skip
        assert made.leader() == (leader, epoch)
        told = [each for each in client.events(0).events if each.name in TROUBLE]
        assert told == []
        took_s = client.deployment(deployment_id).deployment.seconds
        assert took_s is not None
        assert 0 <= took_s < HOUR_S / 2, "durations are monotonic too"
        client.close()
