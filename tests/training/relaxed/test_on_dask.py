"""A parameter server on nodes that Dask holds: a worker, the leader and a whole node fall."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from paceline import fleet
from paceline.data import Snapshot, build_snapshot
from paceline.fleet import Fleet
from paceline.manifest import build_manifest, write_manifest
from paceline.models import config_for, new_model, save_model
from paceline.objects import ObjectStore
from paceline.profile import DataSettings, Runtime, Secrets, save_runtime
from paceline.training import run_job
from paceline.wire.training import RankEvent, TrainJob
from tests.fleet.conftest import small_profile
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
    secrets = Secrets(s3_access_key=s3.access_key, s3_secret_key=s3.secret_key)
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
            pid = started[rank]["pid"]
            if what == "node":
                with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - the kernel's
                    pid = int(file.read().rsplit(")", 1)[1].split()[1])
            os.kill(int(pid), signal.SIGKILL)
            self.killed.append(what)


@pytest.mark.chaos
def test_on_dask_a_worker_the_leader_and_a_node_fall_and_no_step_is_lost(site: Site) -> None:
    job = TrainJob(
        job_id="served-on-dask",
        run_id="run-20260101-000000-abcdef",
        state_dir=str(site.runtime.state_dir),
        model_id="tiny",
        version="v1",
        manifest_digest=site.manifest_digest,
        snapshot_url=site.snapshot.url,
        snapshot_digest=site.snapshot.digest,
        purpose="tests",
        checkpoint_url=f"s3://{BUCKET}/checkpoints",
        settings=SETTINGS.model_copy(update={
            "ranks": 6, "steps": STEPS,
            "synchrony": SETTINGS.synchrony.model_copy(update={"kind": "parameter-server"}),
        }),
    )  # fmt: skip
    striking = Striking()
    with Fleet.connect(site.runtime) as connection:
        result = run_job(job, NODES, connection, on_event=striking, store=site.store)
    assert striking.killed == ["worker", "leader", "node"]
    # node-0 has rank 3 by then, and neither the gang's store (node-2) nor who leads (node-1).
    assert {0, 3} <= {each.failed_rank for each in result.restarts}
    assert {each.attempt for each in result.restarts} == {1}
    assert {e.kind for e in result.restarts if e.failed_rank == 3} == {"failed", "lost"}
    steps = [e.step for e in striking.events if (e.event, e.rank) == ("step", 0)]
    assert steps == list(range(1, STEPS + 1))
    assert result.steps == STEPS and result.final_loss < result.first_loss - 1
