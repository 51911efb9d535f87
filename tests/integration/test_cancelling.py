"""A cancel through Prefect's API, in the middle of training and of judging, on real ranks.

Ranks save and are gone, nodes are free, Prefect says CANCELLED and MLflow KILLED, and the next run
goes on with the very next step. One run is Prefect's worker's, the other a person's `paceline`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.cli.training import recorded_run
from paceline.cluster import Fleet, call, worker_processes as remote
from paceline.config import Runtime
from paceline.registry import Registry, lineage
from paceline.schemas import digest_of, new_run_id
from paceline.storage import ObjectStore, join_url
from paceline.training import Recorded
from tests.deployments.test_monitoring import BOARDS, RULES, expressions_of, rules_of
from tests.support.stack import (
    Ended,
    await_registered,
    finish,
    paceline,
    prefect,
    processes_of,
    start,
    state_of,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(600),
]

STEPS = 100_000  # more than will ever be made
MIDWAY = 25
DATA = Path(__file__).parents[2] / "docs"
LAUNCHER, JUDGE = "paceline.training.launcher.forkserver", "paceline.evaluation.run"


@pytest.fixture(scope="module")
def trained(lifecycle: Ended, stack: Runtime) -> Recorded:
    """What the lifecycle trained: a base model on every node, its data, a candidate."""
    await_registered(stack)
    return recorded_run(stack, str(lifecycle.answer["run_id"]))


def begin(stack: Runtime, flow: str, **parameters: Any) -> tuple[str, str]:
    """Have Prefect's worker run ``flow``; return the flow run and our run's id."""
    deployment = prefect(stack, "GET", f"/deployments/name/{flow}/{flow}")
    run_id = new_run_id()
    here = {"state_dir": str(stack.state_dir), "run_id": run_id}
    body = {"parameters": parameters | here}
    made = prefect(stack, "POST", f"/deployments/{deployment['id']}/create_flow_run", body)
    return str(made["id"]), run_id


def cancel(stack: Runtime, flow_run_id: str) -> None:
    body = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False}
    prefect(stack, "POST", f"/flow_runs/{flow_run_id}/set_state", body)


def ends_cancelled(stack: Runtime, flow_run_id: str) -> None:
    wait_until(lambda: state_of(stack, flow_run_id) == "CANCELLED", 60, "the run is CANCELLED")


def running_of(stack: Runtime, name: str) -> str:
    """Return the id of the one run of the flow called ``name`` that runs."""
    body = {
        "flows": {"name": {"any_": [name]}},
        "flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}},
    }
    (found,) = prefect(stack, "POST", "/flow_runs/filter", body)
    return str(found["id"])


def pages(stack: Runtime) -> dict[str, str]:
    """Return the metrics page of every rank that runs, by where Prometheus learns of it."""
    found = {}
    for path in (stack.state_dir / "metrics" / "targets").glob("*.json"):
        try:
            ((target,),) = [each["targets"] for each in json.loads(path.read_text())]
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as answer:
                found[path.name] = answer.read().decode()
        except OSError:  # it ended meanwhile
            continue
    return found


def least_step(stack: Runtime) -> int:
    steps = re.findall(
        r"^paceline_training_step\{.*\} (\S+)$", "\n".join(pages(stack).values()), re.MULTILINE
    )
    return int(min(map(float, steps))) if len(steps) == 2 else 0


def processes(stack: Runtime, words: str) -> list[psutil.Process]:
    """Return those of the installation that run ``words``, guards apart, and all their children."""
    found: dict[int, psutil.Process] = {}
    for each in processes_of(stack.state_dir):
        try:
            line = each.cmdline()
            if any(words in word for word in line) and not any("subreaper.py" in x for x in line):
                found |= {one.pid: one for one in (each, *each.children(recursive=True))}
        except psutil.Error:
            continue
    return list(found.values())


def living(some: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in some if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def free_nodes(stack: Runtime) -> list[str]:
    """Return the nodes that another gang would get now."""
    free = []
    with Fleet.connect(stack) as fleet:
        for worker_id, address in sorted(fleet._addresses().items()):
            if call(fleet, worker_id, address, remote.claim, "a-probe") is None:
                free.append(worker_id)
                call(fleet, worker_id, address, remote.release, "a-probe")
    return free


def mlflow_status(stack: Runtime, run_id: str) -> str:
    registry = Registry.from_runtime(stack)
    return str(registry.call("get_run", registry.find_run(run_id)).info.status)


def losses(stack: Runtime, run_id: str) -> dict[int, float]:
    registry = Registry.from_runtime(stack)
    return registry.history(registry.find_run(run_id), lineage.LOSS)


def require_nothing_left(stack: Runtime, ranks: list[psutil.Process], everyone: list[str]) -> None:
    assert living(ranks) == []
    assert pages(stack) == {}
    assert free_nodes(stack) == everyone


def midway(stack: Runtime, is_due: Callable[[], bool]) -> list[psutil.Process]:
    """Return launchers and ranks once ``is_due``: they are in the middle of a step."""
    wait_until(is_due, 120, "ranks are midway")
    ranks = processes(stack, LAUNCHER)
    assert len(ranks) >= 4, "a launcher and a rank on each of two nodes"
    return ranks


def require_pages_hold_what_is_watched(shown: dict[str, str]) -> None:
    """The names of rules and dashboards are on the pages of ranks that train."""
    families = {
        each.name for page in shown.values() for each in text_string_to_metric_families(page)
    }
    boards = [json.loads(each.read_text()) for each in BOARDS]
    asked = [each["expr"] for path in RULES for each in rules_of(path)]
    asked += [each for board in boards for each in expressions_of(board)]
    wanted = {x for each in asked for x in re.findall(r"\bpaceline_training_\w+", each)}
    missing = {each for each in wanted if each.removesuffix("_total") not in families}
    no_gpu = {"accelerator_memory_peak_bytes", "accelerator_memory_reserved_bytes"}
    no_evaluation = {"held_out_loss_nats"}
    assert missing <= {f"paceline_training_{each}" for each in no_gpu | no_evaluation}


def test_a_cancel_midway_saves_ends_frees_tells_and_the_next_run_goes_on(
    trained: Recorded, stack: Runtime
) -> None:
    model, version, data = trained.job.model_id, trained.job.version, trained.job.snapshot_url
    everyone = free_nodes(stack)
    assert len(everyone) == stack.profile.cluster.nodes
    flow_run_id, first = begin(
        stack, "train-model", model_id=model, version=version, snapshot_url=data, steps=STEPS
    )
    ranks = midway(stack, lambda: least_step(stack) >= MIDWAY)
    require_pages_hold_what_is_watched(pages(stack))
    cancel(stack, flow_run_id)
    ends_cancelled(stack, flow_run_id)
    require_nothing_left(stack, ranks, everyone)
    wait_until(lambda: mlflow_status(stack, first) == "KILLED", 10, "its record is closed")
    made = losses(stack, first)
    saved = max(made)
    assert saved >= MIDWAY
    assert sorted(made) == list(range(1, saved + 1)), "no figure is lost"

    registry = Registry.from_runtime(stack)
    job_id = registry.call("get_run", registry.find_run(first)).data.tags[lineage.TAG_JOB]
    kept = ObjectStore.from_runtime(stack).directories(join_url(stack.checkpoints_url, job_id))
    assert any(each.startswith(f"step-{saved:08d}-") for each in kept), kept

    second = new_run_id()
    command = start(
        *("training", "start", model, version, "--snapshot", data),
        *("--steps", str(STEPS), "--run-id", second),
        state=stack.state_dir,
    )  # fmt: skip
    ranks = midway(stack, lambda: least_step(stack) >= saved + MIDWAY)
    flow_run_id = running_of(stack, "train-model")
    cancel(stack, flow_run_id)
    ended = finish(command, 60)
    assert ended.code == 130, ended.err
    assert "cancelled" in ended.problem
    assert state_of(stack, flow_run_id) == "CANCELLED"
    require_nothing_left(stack, ranks, everyone)
    assert mlflow_status(stack, second) == "KILLED"
    again = losses(stack, second)
    assert min(again) == saved + 1, "the very next step: nothing was lost, nothing made twice"


def test_a_cancel_while_a_candidate_is_judged_ends_the_judge(
    trained: Recorded, stack: Runtime
) -> None:
    # On other data than the lifecycle's: that judgement is recorded and would be answered at once.
    made = paceline("snapshot", str(DATA), "--max-bytes", "300kB", "--json", state=stack.state_dir)
    assert made.code == 0, made.err
    flow_run_id, run_id = begin(
        stack, "evaluate-model", model_id=trained.job.model_id,
        base_version=trained.job.version, trained=digest_of(trained.result),
        snapshot_url=made.answer["url"],
    )  # fmt: skip

    def judging() -> list[psutil.Process]:
        return processes(stack, JUDGE)

    judges = wait_until(judging, 90, "a process judges")
    for each in judges:
        os.kill(each.pid, signal.SIGSTOP)  # midway, for as long as it takes
    time.sleep(0.5)
    cancel(stack, flow_run_id)
    ends_cancelled(stack, flow_run_id)
    assert living(judges) == []
    assert not judging()
    wait_until(lambda: mlflow_status(stack, run_id) == "KILLED", 10, "its record is closed")
