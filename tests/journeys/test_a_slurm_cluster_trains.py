"""Journey (c): the lifecycle in Slurm, as docs/how-to/train-on-a-fleet.md has it typed.

Real munged, slurmctld and slurmd; two ranks on each of two nodes in one allocation, which Slurm
requeues midway.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.fleet import KEY, SECRET, rclone_s3
from tests.journeys.hosts import site, until
from tests.journeys.slurm import PARTITION, queue, slurm_name, start_node, start_slurm
from tests.journeys.trainers import TYPED, Trainers, make_base, start_control

pytestmark = [
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
]
CREDENTIALS = f"[default]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n"


@pytest.fixture(scope="module")
def fleet(plane_software: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    logs = tmp_path_factory.mktemp("logs")
    with site(plane_software, hosts=3) as bed, rclone_s3(bed, logs) as s3_url:
        for host in bed.hosts[1:]:
            host.write(".aws/credentials", CREDENTIALS)
        start_slurm(bed, logs)
        made = start_control(bed, logs, s3_url, init="slurm-init", PARTITION=PARTITION)
        make_base(made)
        yield made


def log_of(fleet: Trainers) -> str:
    path = fleet.logs / "cluster-0"
    return path.read_text() if path.exists() else ""


def start_cluster(fleet: Trainers) -> subprocess.Popen[Any]:
    before = log_of(fleet).count("Registered to")
    running = fleet.stays("cluster")
    until(lambda: log_of(fleet).count("Registered to") == before + 2, "both register", 120)
    return running


def stop_cluster(fleet: Trainers, running: subprocess.Popen[Any]) -> None:
    """End the command as systemd does; nothing is left in Slurm and on the nodes."""
    fleet.control.run("pkill", "-TERM", "-f", "bin/paceline cluster").ok()
    assert running.wait(60) == 0, log_of(fleet)[-2000:]
    nothing_is_left(fleet)


def nothing_is_left(fleet: Trainers) -> None:
    until(lambda: not queue(fleet.control), "no job is left")
    for host in fleet.nodes:
        until(
            lambda at=host: not at.run("pgrep", "-f", "bin/python", root=True).out,
            "nothing of it runs",
        )


def test_a_model_is_trained_promoted_and_rolled_out_in_one_allocation(fleet: Trainers) -> None:
    running = start_cluster(fleet)
    (job,) = queue(fleet.control)
    assert job.startswith("RUNNING|None|paceline-slurm-")
    fleet.type("publish")
    fleet.type("train")
    trained = fleet.answer("trained.json")
    assert (trained["ranks"], trained["restarts"]) == (4, [])
    for host in fleet.nodes:
        work = f"paceline-state/nodes/{slurm_name(host)}/work/{trained['job_id']}"
        assert host.run("ls", work, root=True, at="/home/user").ok().out.count("rank-") == 2
    fleet.type("promote")
    fleet.type("roll-out")
    for host in fleet.nodes:
        active = f"paceline-state/nodes/{slurm_name(host)}/store/models/tiny/active"
        found = host.run("readlink", active, root=True, at="/home/user").ok().out
        assert found.strip().endswith("2")
    stop_cluster(fleet, running)


def test_a_requeued_allocation_goes_on_at_the_newest_checkpoint(fleet: Trainers) -> None:
    """What a preemption or a failed node does to the job: Slurm puts it back into the queue."""
    running = start_cluster(fleet)
    saved = len(checkpoints(fleet))
    longer = TYPED["train"].replace("training start", "training start --steps 400")
    training = fleet.control.start(
        *("bash", "-euc", longer), env=fleet.env, log=fleet.logs / "train-again"
    )
    until(
        lambda: len(checkpoints(fleet)) > saved or training.poll() is not None, "a checkpoint", 180
    )
    job = fleet.control.run("squeue", "--noheader", "-o%i").ok().out.strip()
    fleet.control.run("scontrol", "requeue", job).ok()
    until(lambda: "state=PENDING" in log_of(fleet) or "waiting for" in log_of(fleet), "it is seen")
    assert training.wait(500) == 0, (fleet.logs / "train-again").read_text()
    trained = fleet.answer("trained.json")
    assert (trained["steps"], trained["ranks"]) == (400, 4)
    assert trained["restarts"][0]["resumed_step"] > 0
    stop_cluster(fleet, running)


def checkpoints(fleet: Trainers) -> list[Path]:
    """Return the committed generations, as the S3 server's disk shows them."""
    return list((fleet.logs / "s3/models/checkpoints").glob("*/*/commit.json"))


def test_a_full_cluster_and_a_wrong_partition_are_one_line(fleet: Trainers) -> None:
    control = fleet.control
    other = control.run(
        *("sbatch", "--parsable", "--nodes=1", "--exclusive", "--output=/dev/null"),
        "--wrap=exec sleep infinity",
    ).ok()
    running = fleet.stays("cluster")
    until(lambda: "reason=Resources" in log_of(fleet), "it says that the cluster is full", 60)
    running.terminate()
    control.run("pkill", "-TERM", "-f", "bin/paceline cluster")
    running.wait(60)
    control.run("scancel", other.out.strip()).ok()
    nothing_is_left(fleet)
    control.run("cp", "-r", ".paceline", "wrong").ok()
    control.run("sed", "-i", f's/"{PARTITION}"/"nope"/', "wrong/runtime.json").ok()
    refused = control.run("paceline", "cluster", "--state", "wrong", env=fleet.env)
    assert refused.code == 2, refused.err
    assert "Slurm refuses the allocation: got invalid partition specified: nope" in refused.err
    assert "--partition=nope" in refused.err
    bare = control.run("paceline", "cluster", env={**fleet.env, "PATH": "/opt/paceline/bin"})
    assert bare.code == 1, bare.err
    assert "Slurm's commands are not on this machine" in bare.err
    nothing_is_left(fleet)


def test_a_cancelled_job_ends_the_command_a_killed_command_leaves_a_job(
    fleet: Trainers,
) -> None:
    running = start_cluster(fleet)
    fleet.control.run("pkill", "-KILL", "-f", "bin/paceline cluster").ok()
    running.wait(30)
    assert len(queue(fleet.control)) == 1, "its job stays"
    again = start_cluster(fleet)
    until(lambda: len(queue(fleet.control)) == 1, "the earlier job is cancelled")
    job = fleet.control.run("squeue", "--noheader", "-o%i").ok().out.strip()
    fleet.control.run("scancel", job).ok()
    assert again.wait(60) != 0
    assert "the Slurm job was cancelled" in log_of(fleet)
    nothing_is_left(fleet)


def test_a_dead_slurmd_is_named_and_its_node_is_used_once_it_returns(fleet: Trainers) -> None:
    """Before the start, and while workers run there: Slurm puts the job back into the queue."""
    control, lost = fleet.control, fleet.nodes[1]

    def kill_slurmd() -> None:
        lost.run("pkill", "-KILL", "-x", "slurmd", root=True).ok()

    def returns(registered: int) -> None:
        start_node(lost, fleet.logs)
        until(lambda: log_of(fleet).count("Registered to") == registered, "both register", 300)

    kill_slurmd()
    down = ("sinfo", "-h", "-t", "down", "-o%N")
    until(lambda: slurm_name(lost) in control.run(*down).out, "Slurm misses it", 120)
    before = log_of(fleet).count("Registered to")
    running = fleet.stays("cluster")
    named = f"not_usable={slurm_name(lost)}: Not responding"
    until(lambda: log_of(fleet).count(named) == 1, "it is named", 60)
    returns(before + 2)
    kill_slurmd()
    until(lambda: log_of(fleet).count(named) == 2, "it is named again", 120)
    assert running.poll() is None, "the command waits"
    returns(before + 4)
    stop_cluster(fleet, running)
