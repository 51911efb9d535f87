"""Ctrl-C in the middle of `paceline lifecycle`, of its relay and of its training, on real servers.

The command names its run and what goes on with it, Prefect shows flows and stage as cancelled, the
deployment goes on, and the same run repeats no finished stage.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.client import CoordinatorClient
from paceline.config import Runtime
from paceline.schemas import INTERRUPTED, DeploymentStatus
from tests.support.stack import (
    Ended,
    finish,
    installation,
    paceline,
    prefect,
    start,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(1200),
]

BESIDE = 4_000_000  # bytes beside the base's weights: some seconds at 8 Mbit/s
STEPS = 400
ENDED = {f"CANCELLED {INTERRUPTED}", "COMPLETED Completed"}


def interrupted(words: tuple[str, ...], stack: Runtime, is_due: Callable[[], Any]) -> str:
    """Type a command, interrupt it once ``is_due``, and return the run that it names."""
    process = start(*words, state=stack.state_dir)
    wait_until(lambda: process.poll() is not None or is_due(), 200, "it is midway")
    process.send_signal(signal.SIGINT)
    ended = finish(process, 120)
    assert ended.code == 130, ended.err
    named = re.search(r"run (run-\S+) is interrupted; it goes on with:\n +(.+)\n", ended.err)
    assert named, ended.err
    assert named[2].startswith("paceline lifecycle --model")
    assert f"--run-id {named[1]}" in named[2]
    return named[1]


def states_of(stack: Runtime, run_id: str) -> dict[str, set[str]]:
    """Return the states of the run's flow runs and their stages, by the names of flow or stage."""
    body: dict[str, Any] = {"flow_runs": {"tags": {"all_": [f"run:{run_id}"]}}}
    runs = prefect(stack, "POST", "/flow_runs/filter", body)
    body = {"flow_runs": {"id": {"any_": [each["id"] for each in runs]}}}
    found: dict[str, set[str]] = {}
    for each in (*runs, *prefect(stack, "POST", "/task_runs/filter", body)):
        name = re.split(r"[ -]", each["name"])[0]
        found.setdefault(name, set()).add(f"{each['state_type']} {each['state_name']}")
    return found


def require_interrupted(stack: Runtime, run_id: str, *names: str) -> None:
    """Prefect hears of a stage's end a moment later than of its flow's."""

    def shown() -> bool:
        found = states_of(stack, run_id)
        return set().union(*found.values()) <= ENDED and all(
            f"CANCELLED {INTERRUPTED}" in found[each] for each in names
        )

    wait_until(shown, 30, f"{', '.join(names)} are cancelled, and all else is complete")


def test_a_lifecycle_goes_on_after_ctrl_c(lifecycle: Ended, stack: Runtime, tmp_path: Path) -> None:
    client, model = CoordinatorClient.of(stack), lifecycle.answer["model"]
    home = stack.node_dir("node-0") / "store" / "models" / model["model_id"]
    base = tmp_path / "base"  # other bytes than the lifecycle's
    shutil.copytree(home / model["base_version"], base)
    (base / "manifest.json").unlink()
    (base / "beside.json").write_text(json.dumps(os.urandom(BESIDE // 2).hex()))
    words = ("lifecycle", "--model", str(base), "--set", f"training.steps={STEPS}")
    before = {each.deployment_id for each in client.deployments()}

    def relays() -> bool:
        made = [each for each in client.deployments() if each.deployment_id not in before]
        return any(not each.status.is_final for each in made)

    run_id = interrupted(words, stack, relays)
    (deployment_id,) = {each.deployment_id for each in client.deployments()} - before
    require_interrupted(stack, run_id, "lifecycle", "distribute", "relay")
    time.sleep(6)  # the coordinator looks at the flow run's state meanwhile
    assert client.deployment(deployment_id).status is not DeploymentStatus.CANCELLED

    def trains() -> bool:
        jobs = [each for each in client.jobs(["running"]).jobs if each.run_id == run_id]
        return any(each.report is not None and each.report.step for each in jobs)

    again = (*words, "--run-id", run_id)
    assert interrupted(again, stack, trains) == run_id
    require_interrupted(stack, run_id, "lifecycle", "train")

    done = paceline(*again, "--json", state=stack.state_dir)
    assert done.code == 0, done.err
    stages = {each["stage"]: each["already_done"] for each in done.answer["stages"]}
    reused = {name for name, already in stages.items() if already}
    assert {"base", "snapshot", "relay", "validate-data"} <= reused
    assert not stages["train"]
    assert any("training resumed at step" in note for note in done.answer["notes"])


def test_down_interrupts_a_lifecycle_which_goes_on_after_up(tmp_path: Path) -> None:
    state, words = tmp_path / "state", ("lifecycle", "--set", f"training.steps={STEPS}")
    with installation(state) as stack:
        client = CoordinatorClient.of(stack)
        process = start(*words, state=state)
        wait_until(
            lambda: any(each.report and each.report.step for each in client.jobs(["running"]).jobs),
            200, "it trains",
        )  # fmt: skip
        down = paceline("down", state=state)
        ended = finish(process, 5)  # it has ended before
    assert (down.code, ended.code) == (0, 130), down.err + ended.err
    named = re.search(r"run (run-\S+) is interrupted; it goes on with:\n", ended.err)
    assert named, ended.err
    assert f"run {named[1]} was interrupted" in down.out
    assert "Traceback" not in ended.err
    assert "Connect" not in ended.err, "a server was away"
    with installation(state):
        done = paceline(*words, "--run-id", named[1], "--json", state=state)
    assert done.code == 0, done.err
    assert any("training resumed at step" in note for note in done.answer["notes"])
