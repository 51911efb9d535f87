"""Journey: each training job has a Slurm job of its own, as docs/how-to/train-on-a-fleet.md has it.

Real munged, slurmctld and slurmd. Each job needs both nodes, so the second one waits in Slurm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.fleet import rclone_s3
from tests.journeys.hosts import site, until
from tests.journeys.slurm import PARTITION, queue, start_slurm
from tests.journeys.test_a_slurm_cluster_trains import CREDENTIALS, nothing_is_left
from tests.journeys.trainers import TYPED, Trainers, make_base, start_control

pytestmark = [
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def fleet(plane_software: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    logs = tmp_path_factory.mktemp("logs")
    with site(plane_software, hosts=3) as bed, rclone_s3(bed, logs) as s3_url:
        for host in bed.hosts[1:]:
            host.write(".aws/credentials", CREDENTIALS)
        start_slurm(bed, logs)
        made = start_control(bed, logs, s3_url, init="slurm-jobs-init", PARTITION=PARTITION)
        make_base(made)
        made.stays("cluster")
        made.stays("slurm-jobs-worker")
        made.type("slurm-jobs-publish")
        yield made


def submit(fleet: Trainers, *options: str) -> str:
    line = f"{TYPED['slurm-jobs-submit'].rstrip()} {' '.join(options)}"
    done = fleet.control.run("bash", "-euc", line, env=fleet.env).ok()
    return str(json.loads(done.out)["job"]["job_id"])


def shown(fleet: Trainers, job_id: str) -> Any:
    done = fleet.control.run("paceline", "jobs", "show", job_id, "--json", env=fleet.env).ok()
    return json.loads(done.out)["job"]


def becomes(fleet: Trainers, job_id: str, *states: str, timeout_s: float = 300) -> Any:
    def there() -> bool:
        job = shown(fleet, job_id)
        over = job["state"] in ("succeeded", "failed", "cancelled")
        assert not over or job["state"] in states, json.dumps(job, indent=1)[-6000:]
        return job["state"] in states

    until(there, f"{job_id} becomes {states}", timeout_s)
    return shown(fleet, job_id)


def step(fleet: Trainers, job_id: str) -> int:
    return int((shown(fleet, job_id)["report"] or {}).get("step", 0))


def test_the_second_job_waits_with_slurms_own_reason_and_both_succeed(fleet: Trainers) -> None:
    until(lambda: "worker" in (fleet.logs / "slurm-jobs-worker-0").read_text().lower(), "Prefect")
    first = submit(fleet, "--name", "first", "--seed", "1")
    becomes(fleet, first, "starting", "running")
    second = submit(fleet, "--name", "second", "--seed", "2")
    until(lambda: (shown(fleet, second).get("allocation") or {}).get("reason"), "a reason", 60)
    waits = shown(fleet, second)
    assert waits["state"] == "queued"
    assert (waits["allocation"]["engine"], waits["allocation"]["state"]) == ("slurm", "PENDING")
    assert waits["allocation"]["reason"] in ("Resources", "Priority")
    slurm_id = waits["allocation"]["id"]
    assert waits["reason"] == f"Slurm job {slurm_id} is PENDING: {waits['allocation']['reason']}"
    in_slurm = [each.split("|") for each in queue(fleet.control)]
    assert sorted(each[0] for each in in_slurm) == ["PENDING", "RUNNING"]
    assert {each[2][-len(first) :] for each in in_slurm} == {first, second}
    text = fleet.control.run("paceline", "jobs", "show", second, env=fleet.env).ok().out
    assert f"slurm       {slurm_id}, PENDING, " in text
    done = becomes(fleet, first, "succeeded")
    assert done["report"]["step"] == 60
    assert {each["host"] for each in done["report"]["workers"]} == {"host-1", "host-2"}
    assert becomes(fleet, second, "succeeded")["allocation"]["id"] == slurm_id
    nothing_is_left(fleet)


@pytest.mark.chaos  # minutes each: see CONTRIBUTING.md
def test_a_cancelled_job_and_one_whose_flow_died_keep_no_nodes(fleet: Trainers) -> None:
    control = fleet.control
    long = submit(fleet, "--steps", "100000", "--seed", "3")
    behind = submit(fleet, "--seed", "4")
    slurm_id = becomes(fleet, long, "running")["allocation"]["id"]
    control.run("paceline", "jobs", "cancel", behind, env=fleet.env).ok()
    assert becomes(fleet, behind, "cancelled")["attempt"] == 0
    until(lambda: len(queue(control)) == 1, "the one that waited has left Slurm's queue", 60)
    control.run("pkill", "-KILL", "-f", "prefect.engine|prefect.flow_engine").ok()
    until(lambda: shown(fleet, long)["losses"] == 1, "the lost flow is noticed", 180)
    again = becomes(fleet, long, "running")
    assert (again["allocation"]["id"], again["losses"]) == (slurm_id, 1), "in the same allocation"
    control.run("paceline", "jobs", "cancel", long, env=fleet.env).ok()
    becomes(fleet, long, "cancelled")
    nothing_is_left(fleet)


@pytest.mark.chaos  # minutes each: see CONTRIBUTING.md
def test_a_requeued_job_goes_on_at_the_checkpoint_of_its_preemption(
    fleet: Trainers,
) -> None:
    """No checkpoint is made but the one at SIGTERM."""
    control = fleet.control
    rare = ("--set", "training.checkpoints.every_steps=1000000")
    job_id = submit(fleet, "--steps", "600", "--seed", "5", *rare)
    slurm_id = becomes(fleet, job_id, "running")["allocation"]["id"]
    until(lambda: step(fleet, job_id) >= 20, "steps", 120)
    control.run("scontrol", "requeue", slurm_id).ok()
    waits = becomes(fleet, job_id, "preempted", timeout_s=180)
    assert "Slurm has taken its nodes back" in json.dumps(waits["history"])
    done = becomes(fleet, job_id, "succeeded", timeout_s=600)
    assert (done["preemptions"], done["allocation"]["id"]) == (1, slurm_id)
    assert 0 < done["report"]["made_steps"] < 600, "it went on"
    nothing_is_left(fleet)


@pytest.mark.chaos  # minutes each: see CONTRIBUTING.md
def test_what_slurm_would_refuse_is_refused_at_submission(fleet: Trainers) -> None:
    refused = {
        "--queue nope": "invalid partition specified: nope",
        "--ranks 99": "node configuration is not available",
        "--priority 5": "Slurm decides where and when jobs run here",
    }
    for options, said in refused.items():
        line = f"{TYPED['slurm-jobs-submit'].rstrip()} {options}"
        done = fleet.control.run("bash", "-euc", line, env=fleet.env)
        assert done.code == 2, done.err
        assert said in done.err
        assert len(done.err.splitlines()) == 1, done.err
    assert not queue(fleet.control)
