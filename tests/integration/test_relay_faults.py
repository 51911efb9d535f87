"""A disk is too small for a model; a copy on a disk rots."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from paceline.config import Runtime
from paceline.manifest import publish_model
from paceline.storage import ObjectStore
from tests.support.stack import paceline

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


@pytest.mark.nightly
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
