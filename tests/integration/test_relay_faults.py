"""A node's agent dies in the middle of a relay; a disk is too small; the bucket is corrupt."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from paceline.client import CoordinatorClient
from paceline.config import Runtime
from paceline.manifest import publish_model
from paceline.schemas import Deployment, WorkerProgress
from paceline.storage import ObjectStore
from tests.support.stack import finish, paceline, start, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(300),
]


def publish_random(stack: Runtime, tmp_path: Path, model_id: str, size: int) -> None:
    """Publish a model of ``size`` random bytes as version 1."""
    directory = tmp_path / model_id
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(random.Random(model_id).randbytes(size))
    (directory / "config.json").write_text("{}")
    publish_model(
        directory,
        f"{stack.models_url}/{model_id}/1",
        model_id=model_id,
        version="1",
        store=ObjectStore.from_runtime(stack),
        link_mbit=stack.profile.cluster.link_mbit,
    )


def deployment_of(client: CoordinatorClient, model_id: str) -> Deployment | None:
    return next((each for each in client.deployments() if each.model_id == model_id), None)


@pytest.mark.nightly  # test_relay_processes shows it without the flow
def test_the_line_closes_up_when_an_agent_is_killed(stack: Runtime, tmp_path: Path) -> None:
    size = 8_000_000  # 8 s at 8 Mbit/s
    publish_random(stack, tmp_path, "killed", size)
    client = CoordinatorClient.of(stack)
    relay = start("distribute", "killed", "1", "--json", state=stack.state_dir)
    deployment = wait_until(lambda: deployment_of(client, "killed"), 60, "the deployment exists")

    def half_way() -> WorkerProgress | None:
        progress = {each.worker_id: each for each in client.workers_of(deployment.deployment_id)}
        victim = progress["node-1"]  # in the middle of its rack: others are fed through it
        return victim if 0.3 * size <= victim.bytes_held <= 0.7 * size else None

    wait_until(half_way, 60, "the victim holds about half")
    announced = json.loads((stack.node_dir("node-1") / "agent.json").read_text())
    os.kill(announced["pid"], signal.SIGKILL)
    ended = finish(relay, 200)
    assert ended.code == 0, ended.err
    moved = ended.answer["relay"]
    assert moved["workers"] == 4  # the victim came back and went on from its disk
    receipts = {
        each.worker_id: each.receipt for each in client.workers_of(deployment.deployment_id)
    }
    survivors = [each for node, each in receipts.items() if node != "node-1" and each]
    assert len(survivors) == 3
    assert sum(each.refetched_bytes for each in survivors) <= 0.02 * 3 * size
    returned = receipts["node-1"]
    assert returned is not None
    assert returned.incarnation > 1
    assert returned.received_bytes + returned.origin_bytes < 0.8 * size  # the rest was on its disk
    # Once from S3, and at most what the head had asked for when the new plan made another the head.
    assert moved["origin_bytes"] <= 1.1 * size
    assert any("node-1" in line and "lost" in line for line in ended.answer["notes"])


def test_a_full_disk_is_told_before_a_byte_moves(
    stack: Runtime, tmp_path: Path, small_disk: bool
) -> None:
    if not small_disk:
        require("netns", "mounting a small disk needs root")
    publish_random(stack, tmp_path, "toolarge", 40_000_000)
    ended = paceline("distribute", "toolarge", "1", "--json", state=stack.state_dir)
    assert ended.code != 0
    problem = ended.answer["error"]
    assert problem["code"] == "StorageFull"
    assert "node-3 lacks" in problem["message"]
    for index in range(4):
        store = stack.node_dir(f"node-{index}") / "store"
        assert not (store / "models" / "toolarge").exists()
    assert paceline("status", state=stack.state_dir).code == 0


@pytest.mark.nightly  # tests/relay/test_origin.py shows it without the flow
def test_a_flipped_byte_in_the_bucket_is_named_and_nothing_is_published(
    stack: Runtime, tmp_path: Path
) -> None:
    publish_random(stack, tmp_path, "flipped", 600_000)
    where = stack.state_dir / "s3" / stack.profile.storage.bucket / "models" / "flipped" / "1"
    weights = bytearray((where / "model.safetensors").read_bytes())
    weights[300_000] ^= 1
    (where / "model.safetensors").write_bytes(weights)
    ended = paceline("distribute", "flipped", "1", "--json", state=stack.state_dir)
    assert ended.code != 0
    assert "flipped/1" in ended.answer["error"]["message"]
    assert "model.safetensors" in ended.answer["error"]["message"]
    for index in range(4):
        assert not (stack.node_dir(f"node-{index}") / "store/models/flipped/1").exists()


@pytest.mark.nightly
def test_a_copy_that_rotted_on_a_disk_is_found_and_brought_again(
    stack: Runtime, tmp_path: Path
) -> None:
    publish_random(stack, tmp_path, "rotting", 400_000)
    assert paceline("distribute", "rotting", "1", state=stack.state_dir).code == 0
    home = stack.node_dir("node-2") / "store" / "models" / "rotting" / "1"
    weights = bytearray((home / "model.safetensors").read_bytes())
    weights[200_000] ^= 1
    (home / "model.safetensors").write_bytes(weights)
    found = paceline("verify", "rotting", "1", "--json", state=stack.state_dir)
    assert found.answer["error"]["code"] == "CorruptData"
    assert "node-2" in found.problem
    assert not home.exists()
    again = paceline("distribute", "rotting", "1", "--json", state=stack.state_dir)
    assert again.code == 0, again.err
    assert again.answer["verify"]["verified"] == 4
    assert again.answer["relay"]["origin_bytes"] == 0  # a neighbour has it


def require(what: str, reason: str) -> None:
    """Skip with ``reason``, or fail where CI says that ``what`` must be there."""
    if what in os.environ.get("PACELINE_REQUIRE", "").split(","):
        pytest.fail(f"PACELINE_REQUIRE={what}: {reason}")
    pytest.skip(reason)
