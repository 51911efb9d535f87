"""A parameter server on nodes that Dask holds: workers, servers, whole nodes and the store fall."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline import cluster as fleet
from paceline.cluster import Fleet
from paceline.config import DataSettings, Runtime, save_runtime
from paceline.data import Snapshot, build_snapshot
from paceline.manifest import build_manifest, write_manifest
from paceline.models import config_for, new_model, save_model
from paceline.schemas import RankEvent, TrainJob
from paceline.storage import ObjectStore
from paceline.training import run_job
from tests.cluster.conftest import small_profile
from tests.support.rclone import RcloneS3
from tests.training.conftest import PARAMETERS, SETTINGS

NODES = ("node-0", "node-1", "node-2")
STEPS = 800
BUCKET = "served"


@dataclass
class Site:
    runtime: Runtime
    snapshot: Snapshot
    manifest_digest: str
    store: ObjectStore


@pytest.fixture(scope="module")
def site(s3: RcloneS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three Dask nodes, real S3, a tiny base model on each node's disk."""
    store = s3.store()
    store.ensure_bucket(BUCKET)
    root = tmp_path_factory.mktemp("site")
    texts = root / "texts"
    texts.mkdir()
    for number in range(30):
        body = "".join(f"line {n} of file {number} is {n * number}\n" for n in range(30))
        (texts / f"{number}.txt").write_text(body)
    data = DataSettings(shard_bytes=4096, purpose="tests", held_out_share=0.2)
    snapshot = build_snapshot(str(texts), f"s3://{BUCKET}/data", data, store)
    state = root / "state"
    runtime = fleet.start(small_profile(), state, detach=False, only=("dask",))
    served = runtime.endpoints.model_copy(update={"s3_url": s3.endpoint_url})
    keys = {"s3_access_key": s3.access_key, "s3_secret_key": s3.secret_key}
    secrets = runtime.secrets.model_copy(update=keys)
    save_runtime(runtime.model_copy(update={"endpoints": served, "secrets": secrets}))  # for ranks
    try:
        directory = runtime.node_dir("node-0") / "store" / "models" / "tiny" / "v1"
        config = config_for(PARAMETERS, 32)
        save_model(new_model(config, 0), config, directory)
        manifest = build_manifest(directory, model_id="tiny", version="v1", link_mbit=100)
        write_manifest(directory, manifest)
        for node in NODES[1:]:
            target = runtime.node_dir(node) / "store" / "models" / "tiny" / "v1"
            shutil.copytree(directory, target)
        yield Site(runtime, snapshot, manifest.digest, store)
    finally:
        fleet.stop(state)


class Striking:
    """Kills a worker, then the leader, then the launcher of a node of workers."""

    def __init__(self) -> None:
        self.events: list[RankEvent] = []
        self.killed: list[str] = []

    def __call__(self, event: RankEvent) -> None:
        self.events.append(event)
        if (event.event, event.rank) != ("step", 0):
            return
        started = {e.rank: e.data for e in self.events if e.event == "started" and "pid" in e.data}
        for what, step, rank in (("worker", 10, 3), ("leader", 40, 0), ("node", 120, 3)):
            if what in self.killed or event.step < step:
                continue
            pid = int(started[rank]["pid"])
            os.kill(parent(pid) if what == "node" else pid, signal.SIGKILL)
            self.killed.append(what)


def parent(pid: int) -> int:
    """The process that started this one: a rank's launcher, a launcher's Dask worker."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def job_of(site: Site, name: str, **changes: object) -> TrainJob:
    served = SETTINGS.synchrony.model_copy(update={"kind": "parameter-server"})
    return TrainJob(
        job_id=name,
        run_id="run-20260101-000000-abcdef",
        state_dir=str(site.runtime.state_dir),
        model_id="tiny",
        version="v1",
        manifest_digest=site.manifest_digest,
        snapshot_url=site.snapshot.url,
        snapshot_digest=site.snapshot.digest,
        purpose="tests",
        checkpoint_url=f"s3://{BUCKET}/checkpoints",
        settings=SETTINGS.model_copy(update={"synchrony": served} | changes),
    )


@pytest.mark.chaos
def test_on_dask_a_worker_the_leader_and_a_node_fall_and_no_step_is_lost(site: Site) -> None:
    job = job_of(site, "served-on-dask", ranks=6, steps=STEPS)
    striking = Striking()
    with Fleet.connect(site.runtime) as connection:
        result = run_job(job, NODES, connection, on_event=striking, store=site.store)
    assert striking.killed == ["worker", "leader", "node"]
    # node-0 has rank 3 by then, and neither the gang's store (node-2) nor the leader (node-1).
    assert {0, 3} <= {each.failed_rank for each in result.restarts}
    assert {each.attempt for each in result.restarts} == {1}
    assert {e.kind for e in result.restarts if e.failed_rank == 3} == {"failed", "lost"}
    steps = [e.step for e in striking.events if (e.event, e.rank) == ("step", 0)]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS
    assert len(steps) >= STEPS - 1, (
        "the leader's last step may have been acknowledged, but not reported"
    )
    assert result.steps == STEPS and result.final_loss < result.first_loss - 1


class NodeStriking:
    """Kills the Dask worker of the node where ``rank`` runs, and with it all that is there."""

    def __init__(self, rank: int) -> None:
        self.events: list[RankEvent] = []
        self.rank, self.killed = rank, 0

    def __call__(self, event: RankEvent) -> None:
        self.events.append(event)
        if (event.event, event.rank) != ("step", 0) or event.step < 100 or self.killed:
            return
        started = {e.rank: e.data for e in self.events if e.event == "started" and "pid" in e.data}
        self.killed = parent(parent(int(started[self.rank]["pid"])))
        os.kill(self.killed, signal.SIGKILL)


@pytest.mark.chaos
@pytest.mark.parametrize(("nodes", "ranks", "rank"), [(NODES, 6, 2), (NODES[:2], 4, 1)])
def test_on_dask_the_machine_with_the_gangs_store_is_lost_and_no_step_is(
    site: Site, nodes: tuple[str, ...], ranks: int, rank: int
) -> None:
    """Three nodes: the store's has workers only. Two: the standby is on it, too."""
    striking = NodeStriking(rank)
    job = job_of(site, f"store-lost-on-{len(nodes)}", ranks=ranks, steps=400)
    with Fleet.connect(site.runtime) as connection:
        result = run_job(job, nodes, connection, on_event=striking, store=site.store)
    assert striking.killed
    restart, *later = result.restarts
    assert {(each.kind, each.lost_steps) for each in later} <= {("returned", 0)}, "spread out again"
    assert (restart.kind, restart.worker_id, restart.lost_steps) == ("lost", nodes[rank], 0)
    assert "the gang's store lay there" in restart.reason
    assert restart.resumed_step >= 100, "the leader saved before it ended"
    assert result.ranks == ranks, "the machine came back and was used again"
    steps = [e.step for e in striking.events if (e.event, e.rank) == ("step", 0)]
    assert steps == list(range(1, 401))
    assert result.final_loss < result.first_loss - 1
