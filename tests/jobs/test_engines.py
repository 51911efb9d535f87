"""Slurm and Kubernetes as engines: what is asked of them, and what their answers make of jobs.

Their commands are scripts that answer as the real ones do. With a real slurmctld:
tests/journeys/test_slurm_admits_each_job.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from paceline.client import job_spec
from paceline.cluster import SlurmJob
from paceline.config import Endpoints, Runtime, Secrets, load_profile, with_job_settings
from paceline.errors import AccessDenied, InvalidInput, InvalidProfile
from paceline.jobs import (
    Engine,
    Host,
    JobScheduler,
    KubernetesEngine,
    OwnAdmission,
    Request,
    SlurmEngine,
    Standing,
    engine_of,
    gang_of,
    with_state,
)
from paceline.jobs.engines import kubernetes, slurm  # their pure decisions
from paceline.schemas import JobAllocation, JobState, SubmitJob, TrainingJob, digest_of
from paceline.units import seconds
from tests.jobs.test_scheduler import SNAPSHOT, Queue, worker

S = JobState
GOLDEN = Path(__file__).with_name("golden")
SCHEDULER = "tls://control:8786"
OVERRIDES = {
    "slurm": {"cluster.slurm.per_job": "true"},
    "kubernetes": {
        "cluster.kubernetes.queue": "training",
        "cluster.kubernetes.image": "registry.example/all:1",
        "training.ranks_per_node": "2",
    },
}


def runtime_of(kind: str, directory: Path, **more: str) -> Runtime:
    profile = load_profile(kind, OVERRIDES[kind] | more)
    return Runtime(
        profile=profile,
        state_dir=directory,
        endpoints=Endpoints(scheduler_address=SCHEDULER),
        secrets=Secrets(),
    )


def job(**spec: Any) -> TrainingJob:
    made = SubmitJob.model_validate(
        {"model_id": "acme/tiny", "version": "1", "data_snapshot": SNAPSHOT, **spec}
    )
    return TrainingJob(
        job_id="tj-0123456789ab", submission_id=digest_of(made.model_dump(mode="json")), spec=made,
        run_id="run-20261127-210000-000001", state=S.QUEUED, created_at=1.0, updated_at=1.0,
    )  # fmt: skip


def request(runtime: Runtime, **spec: Any) -> Request:
    asked = job(**spec)
    settings = with_job_settings(runtime.profile, asked.spec.settings).training
    gang = gang_of(asked, settings, [])
    return Request(job=asked, gang=gang, ranks_per_node=settings.ranks_per_node)


class Site:
    """Commands of a cluster on the PATH: each adds its arguments to ``called``."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        (directory / "bin").mkdir()
        monkeypatch.setenv("PATH", f"{directory / 'bin'}:/usr/bin:/bin")
        for name in ("sbatch", "squeue", "scancel", "scontrol"):
            self.says(name, "")

    def says(self, name: str, script: str) -> None:
        path = self.directory / "bin" / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.directory}/called\n{script}\n')
        path.chmod(0o755)

    def called(self, name: str) -> list[str]:
        path = self.directory / "called"
        lines = path.read_text().splitlines() if path.exists() else []
        return [each for each in lines if each.split()[0] == name]

    def queue(self, *lines: str) -> None:
        """What squeue prints; ``NAME`` stands for what comes before a job's id in names."""
        text = "\n".join(lines).replace("NAME", f"paceline-slurm-{digest()}-")
        (self.directory / "queue").write_text(text + "\n" if lines else "")
        self.says("squeue", f"cat {self.directory}/queue")


def digest() -> str:
    import hashlib

    return hashlib.sha256(SCHEDULER.encode()).hexdigest()[:8]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path, monkeypatch)
    made.says("sbatch", "echo 12")
    made.queue()
    return made


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return runtime_of("slurm", tmp_path)


class SlurmQueue(Queue):
    """Jobs that Slurm admits, on two CPU nodes of two ranks."""

    def __init__(self, runtime: Runtime, site: Site) -> None:
        self.site, self.runtime = site, runtime
        self.clock = 0.0
        super().__init__(worker("n1"), worker("n2"), profile=runtime.profile)

    def lead(self) -> None:
        super().lead()
        self.scheduler = JobScheduler(
            self.store,  # type: ignore[arg-type]
            self.table,
            self.flows,
            self.profile,
            SlurmEngine(self.runtime, lambda: self.clock),
            wall=lambda: self.now,
        )

    def run_once(self, rounds: int = 1, seconds: float = 4.0) -> None:
        for _ in range(rounds):
            self.clock += seconds
            super().run_once(1, seconds)

    def slurm(self, job_id: str, state: str, reason: str = "None", nodes: str = "") -> None:
        self.site.queue(f"12|{state}|{reason}|{nodes}|NAME{job_id}")

    def runs(self, job_id: str) -> None:
        self.slurm(job_id, "RUNNING", nodes="n1,n2")
        self.run_once(6)
        assert self.state(job_id) is S.STARTING

    def begin(self) -> str:
        """Submit a job of both nodes, and have Slurm grant them."""
        job_id = self.start(4)
        self.runs(job_id)
        return job_id


@pytest.fixture
def queue(runtime: Runtime, site: Site) -> SlurmQueue:
    return SlurmQueue(runtime, site)


def test_a_gang_of_an_engine_is_charged_for_its_whole_nodes(queue: SlurmQueue) -> None:
    queue.store.workers = [worker("n1", 8), worker("n2", 8)]
    job_id = queue.submit(10, resources={"ranks_per_node": 8})
    queue.runs(job_id)
    (held,) = queue.job(job_id).usage
    assert (held.accelerators, held.ranks) == ({"NVIDIA A100": 16}, 10)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, {"--nodes=2"}),
        ({"resources": {"ranks": 5}}, {"--nodes=3"}),
        ({"resources": {"ranks": 8, "ranks_per_node": 8}}, {"--nodes=1"}),
        (
            {"resources": {"accelerator": "a100", "queue": "gpu", "time_limit_s": 5400}},
            {"--gres=gpu:a100:2", "--partition=gpu", "--time=90"},
        ),
        ({"team": "nlp"}, {"--partition=nlp", "--account=lab", "--qos=high"}),
        ({"team": "nlp", "resources": {"queue": "gpu"}}, {"--partition=gpu", "--account=lab"}),
        ({"priority": -7}, {"--nice=7"}),
    ],
)
def test_a_job_requests_its_gang_in_its_own_its_teams_or_profiles_words(
    tmp_path: Path, spec: dict[str, Any], words: set[str]
) -> None:
    teams = '{nlp = {partition = "nlp", account = "lab", qos = "high"}}'
    runtime = runtime_of(
        "slurm", tmp_path, **{"cluster.slurm.teams": teams, "cluster.slurm.partition": "train"}
    )
    argv = slurm.argv_of(request(runtime, **spec), "name", runtime)
    assert words <= {*argv}
    assert {"--job-name=name", "--exclusive", "--requeue", "--export=NONE"} <= {*argv}
    assert sum(each.startswith("--partition") for each in argv) == 1


def test_a_time_limit_is_typed_with_its_unit(runtime: Runtime) -> None:
    """As `paceline jobs submit --time-limit 90m` makes the record."""
    given = {"model_id": "tiny", "version": "1", "data_snapshot": SNAPSHOT}
    spec = job_spec(given | {"resources": {"time_limit_s": seconds("90m")}})
    asked = request(runtime, resources=spec.resources.model_dump())
    assert "--time=90" in slurm.argv_of(asked, "name", runtime)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"priority": 1}, "priority"),
        ({"resources": {"within": "rack"}}, "resources.within"),
        ({"resources": {"within": "host"}}, "resources.within"),
        ({"resources": {"memory_bytes": 8}}, "resources.memory_bytes"),
        ({"resources": {"capacity": "spot"}}, "resources.capacity"),
        ({"resources": {"node_labels": {"a": "b"}}}, "resources.node_labels"),
    ],
)
@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_what_an_engine_cannot_be_asked_for_is_refused(
    tmp_path: Path, site: Site, kind: str, spec: dict[str, Any], field: str
) -> None:
    engine = engine_of(runtime_of(kind, tmp_path))
    wide = {"ranks": 4} | spec.get("resources", {})
    asked = request(runtime_of(kind, tmp_path), **(spec | {"resources": wide}))
    assert f"got {field}" in engine.why_never(asked, [])
    if kind == "slurm":
        with pytest.raises(InvalidInput, match=field):
            engine.submit(asked)
    assert not site.called("sbatch")


def test_one_host_can_be_asked_for_where_the_gang_fits_on_one(runtime: Runtime, site: Site) -> None:
    asked = request(runtime, resources={"ranks": 2, "within": "host"})
    assert SlurmEngine(runtime).why_never(asked, []) == ""
    assert "--test-only" in site.called("sbatch")[0]


def test_slurms_refusal_is_known_before_anything_is_queued(runtime: Runtime, site: Site) -> None:
    said = "allocation failure: Requested node configuration is not available"
    site.says("sbatch", f'echo "{said}" >&2; exit 1')
    never = SlurmEngine(runtime).why_never(request(runtime), [])
    assert "Requested node configuration is not available" in never
    site.says("sbatch", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert SlurmEngine(runtime).why_never(request(runtime), []) == ""


def test_a_profile_must_say_how_many_ranks_a_node_runs(tmp_path: Path) -> None:
    with pytest.raises(InvalidProfile, match="ranks_per_node"):
        runtime_of("slurm", tmp_path, **{"training.ranks_per_node": "0"})


def test_the_engine_is_the_profiles(tmp_path: Path) -> None:
    def kind(name: str, **more: str) -> type[Engine]:
        return type(engine_of(runtime_of(name, tmp_path, **more)))

    assert kind("slurm") is SlurmEngine
    assert kind("kubernetes") is KubernetesEngine
    assert kind("slurm", **{"cluster.slurm.per_job": "false"}) is OwnAdmission


def test_a_job_waits_with_slurms_reason_and_gives_its_nodes_back(
    queue: SlurmQueue, site: Site
) -> None:
    job_id = queue.start(4)
    assert len(site.called("sbatch")) == 1
    for reason in ("Priority", "QOSMaxCpuPerUserLimit"):
        queue.slurm(job_id, "PENDING", reason)
        queue.run_once(2)
        waits = queue.job(job_id)
        assert (waits.state, waits.reason) == (S.QUEUED, f"Slurm job 12 is PENDING: {reason}")
        assert waits.allocation == JobAllocation(
            engine="slurm", id="12", state="PENDING", reason=reason
        )
    queue.runs(job_id)
    placed = queue.job(job_id).placement
    assert placed is not None and placed.hosts == {"n1": 2, "n2": 2}
    queue.report(job_id, step=3, steps=10)
    queue.run_once()
    assert not site.called("scancel")
    queue.ends(job_id, "COMPLETED")
    queue.run_once(2)
    assert queue.state(job_id) is S.SUCCEEDED
    assert {*site.called("scancel")} == {"scancel --quiet 12"}
    assert len(site.called("sbatch")) == 1


def test_a_job_starts_once_every_node_has_a_worker(queue: SlurmQueue) -> None:
    job_id = queue.start(4)
    queue.store.workers = [worker("n1"), worker("n2").model_copy(update={"alive": False})]
    queue.slurm(job_id, "RUNNING", nodes="n1,n2")
    queue.run_once(10)
    assert queue.state(job_id) is S.QUEUED
    assert "waiting for the workers of n2" in queue.job(job_id).reason
    queue.store.workers = [worker("n1"), worker("n2")]
    queue.run_once()
    assert queue.state(job_id) is S.STARTING


def test_after_a_death_behind_sbatch_there_is_no_second_allocation(
    queue: SlurmQueue, site: Site
) -> None:
    job_id = queue.start(4)
    queue.slurm(job_id, "PENDING", "Resources")
    queue.lead()
    queue.run_once(2)
    assert len(site.called("sbatch")) == 1
    assert queue.job(job_id).allocation is not None


def test_nothing_is_submitted_while_slurm_does_not_say_what_it_has(
    queue: SlurmQueue, site: Site
) -> None:
    site.says("squeue", "echo 'slurm_load_jobs error' >&2; exit 1")
    job_id = queue.submit(4)
    queue.run_once(3)
    assert not site.called("sbatch")
    assert "Slurm does not answer" in queue.job(job_id).reason
    site.queue()
    queue.run_once(2)
    assert len(site.called("sbatch")) == 1


@pytest.mark.parametrize(
    ("said", "state", "calls"),
    [
        ("Batch job submission failed: Invalid qos specification", S.FAILED, 1),
        ("Unable to contact slurm controller (connect failure)", S.QUEUED, 2),
        ("Job violates accounting/QOS policy (job submit limit, user's limits)", S.QUEUED, 2),
    ],
)
def test_a_refusal_for_good_fails_the_job_and_another_is_tried_again(
    queue: SlurmQueue, site: Site, said: str, state: JobState, calls: int
) -> None:
    site.says("sbatch", f'echo "sbatch: error: {said}" >&2; exit 1')
    job_id = queue.submit(4)
    queue.run_once(2, seconds=20)
    queue.run_once(1, seconds=20)
    assert queue.state(job_id) is state
    assert said in queue.job(job_id).reason
    assert len(site.called("sbatch")) == calls


def test_a_job_that_slurm_preempts_goes_on_in_the_same_slurm_job(
    queue: SlurmQueue, site: Site
) -> None:
    job_id = queue.begin()
    queue.report(job_id, step=3, steps=10)
    first = queue.flow_of(job_id)
    queue.slurm(job_id, "COMPLETING", nodes="n1,n2")
    queue.run_once()
    assert queue.state(job_id) is S.RUNNING, "what it becomes is not said yet"
    queue.slurm(job_id, "PENDING", "BeginTime")
    queue.run_once()
    assert queue.state(job_id) is S.PAUSING
    assert queue.flows.runs[first] == "CANCELLING"
    queue.ends(job_id, "CANCELLED")
    queue.run_once(2)
    waits = queue.job(job_id)
    assert (waits.state, waits.preemptions, waits.losses) == (S.PREEMPTED, 1, 0)
    assert waits.reason == "Slurm job 12 is PENDING: BeginTime"
    queue.runs(job_id)
    assert queue.flow_of(job_id) != first
    assert (len(site.called("sbatch")), site.called("scancel")) == (1, [])


@pytest.mark.parametrize("ended", ["TIMEOUT", "NODE_FAIL", "PREEMPTED"])
def test_an_allocation_that_ended_by_itself_is_followed_by_another(
    queue: SlurmQueue, site: Site, ended: str
) -> None:
    job_id = queue.begin()
    queue.report(job_id, step=3, steps=10)
    queue.slurm(job_id, ended)
    queue.run_once()
    assert queue.state(job_id) is S.PAUSING
    queue.ends(job_id, "CANCELLED")
    queue.run_once(2)
    assert queue.state(job_id) is S.PREEMPTED
    assert len(site.called("sbatch")) == 2


@pytest.mark.parametrize("state", ["OUT_OF_MEMORY", "FAILED", "DEADLINE", "COMPLETED"])
def test_an_allocation_that_slurm_ended_while_the_job_waited_fails_it(
    queue: SlurmQueue, site: Site, state: str
) -> None:
    job_id = queue.start(4)
    queue.slurm(job_id, state, "NonZeroExitCode")
    queue.run_once(2)
    assert queue.state(job_id) is S.FAILED
    assert f"Slurm job 12 is {state}: NonZeroExitCode" in queue.job(job_id).reason
    assert ("paceline cluster" in queue.job(job_id).reason) == (state == "COMPLETED")
    assert len(site.called("sbatch")) == 1


def test_scancel_cancels_the_job_and_a_pause_does_not_look_like_it(
    queue: SlurmQueue, site: Site
) -> None:
    job_id = queue.begin()
    queue.report(job_id, step=3, steps=10)
    queue.run_once()
    queue.ask(job_id, "pause", S.PAUSING)
    queue.run_once()
    queue.ends(job_id, "CANCELLED")
    queue.run_once()
    assert (queue.state(job_id), site.called("scancel")) == (S.PAUSED, ["scancel --quiet 12"])
    queue.table.change(job_id, lambda now: with_state(now, S.QUEUED, queue.now, "resumed"))
    queue.slurm(job_id, "COMPLETING")
    queue.run_once()
    queue.slurm(job_id, "CANCELLED")
    site.says("sbatch", "echo 13")
    queue.run_once(2)
    assert (queue.state(job_id), len(site.called("sbatch"))) == (S.QUEUED, 2)
    old = f"12|CANCELLED|None||NAME{job_id}"
    site.queue(old, f"13|PENDING|Priority||NAME{job_id}")
    queue.run_once(2)
    assert queue.job(job_id).reason == "Slurm job 13 is PENDING: Priority"
    site.queue(old, f"13|CANCELLED|None||NAME{job_id}")
    queue.run_once(2)
    assert (queue.state(job_id), len(site.called("sbatch"))) == (S.CANCELLED, 2)


def test_a_lost_flow_starts_again_in_the_allocation_and_a_cancel_frees_it(
    queue: SlurmQueue, site: Site
) -> None:
    job_id = queue.begin()
    queue.ends(job_id, "CRASHED", "its process was killed")
    queue.run_once(2)
    assert (queue.state(job_id), queue.job(job_id).losses) == (S.STARTING, 1)
    assert (len(site.called("sbatch")), site.called("scancel")) == (1, [])
    queue.ask(job_id, "cancel", S.CANCELLING)
    queue.run_once()
    queue.ends(job_id, "CANCELLED")
    site.says("scancel", "exit 1")
    queue.run_once(2)
    site.says("scancel", "")
    queue.run_once(1)
    assert len(site.called("scancel")) >= 2, "again until Slurm has done it"
    assert queue.state(job_id) is S.CANCELLED


def test_a_job_whose_flow_no_worker_takes_gives_its_allocation_back(
    queue: SlurmQueue, site: Site
) -> None:
    job_id = queue.begin()
    queue.run_once(7, seconds=100)
    assert queue.state(job_id) is S.RECOVERING
    assert len(site.called("scancel")) == 1
    queue.slurm(job_id, "CANCELLED")
    queue.run_once(5, seconds=100)
    assert queue.state(job_id) is S.RECOVERING
    assert len(site.called("sbatch")) == 1
    queue.run_once(2, seconds=100)
    assert len(site.called("sbatch")) == 2


def test_an_allocation_without_a_job_is_released_and_others_left_alone(
    queue: SlurmQueue, site: Site
) -> None:
    site.queue(
        "3|RUNNING|None|n1|NAMEtj-ffffffffffff",
        "4|RUNNING|None|n2|paceline-slurm-00000000-tj-ffffffffffff",
        "5|RUNNING|None|n2|train.sh",
    )
    queue.run_once(1, seconds=61)
    queue.run_once(1, seconds=61)
    assert {*site.called("scancel")} == {"scancel --quiet 3"}


def test_nodes_that_cannot_hold_the_gang_fail_the_job_and_go_back(
    queue: SlurmQueue, site: Site
) -> None:
    queue.store.workers = [worker("n1", gpus=1), worker("n2", gpus=1)]
    job_id = queue.start(4)
    queue.slurm(job_id, "RUNNING", nodes="n1,n2")
    queue.run_once(7)
    assert queue.state(job_id) is S.FAILED
    assert "n1, n2 cannot hold it" in queue.job(job_id).reason
    assert {*site.called("scancel")} == {"scancel --quiet 12"}


def test_a_person_s_training_fails_when_slurm_takes_its_nodes(queue: SlurmQueue) -> None:
    """Its flow was started outside of the queue; it is started again there."""
    made = queue.adopt()
    queue.flows.runs["by-hand"] = "RUNNING"
    queue.run_once()
    queue.slurm(made, "RUNNING", nodes="n1,n2")
    for _ in range(8):
        queue.report(made, step=1, steps=9)
        queue.run_once()
    assert queue.state(made) is S.RUNNING
    queue.slurm(made, "PENDING", "Priority")
    queue.run_once()
    assert queue.state(made) is S.FAILED
    assert "start it again" in queue.job(made).reason


@pytest.mark.parametrize(
    ("state", "waits", "phase"),
    [
        ("PENDING", True, "waiting"), ("CONFIGURING", True, "waiting"),
        ("REQUEUE_HOLD", True, "waiting"), ("SUSPENDED", True, "waiting"),
        ("RUNNING", True, "granted"), ("CANCELLED", True, "cancelled"), ("FAILED", True, "failed"),
        ("RUNNING", False, "granted"), ("COMPLETING", False, "granted"),
        ("SUSPENDED", False, "revoked"), ("REQUEUED", False, "revoked"),
        ("TIMEOUT", False, "revoked"),
        ("OUT_OF_MEMORY", False, "revoked"), ("CANCELLED", False, "cancelled"),
    ],
)  # fmt: skip
def test_each_state_of_slurm_means_one_thing(
    runtime: Runtime, state: str, waits: bool, phase: str
) -> None:
    nodes = ("n1", "n2") if state in ("RUNNING", "COMPLETING") else ()
    view = SlurmJob(job_id="7", name="x", state=state, nodes=nodes)
    hosts = {each: Host(name=each, slots=1) for each in ("n1", "n2")}
    if waits:
        found = slurm.standing(view, request(runtime), hosts, has_settled=True)
    else:
        found = slurm.held_standing(view, {"n1": 2, "n2": 2})
    assert found.phase == phase


def test_a_job_that_moved_to_other_nodes_between_two_looks_was_taken() -> None:
    moved = SlurmJob(job_id="7", state="RUNNING", nodes=("n2", "n3"))
    assert slurm.held_standing(moved, {"n1": 2, "n2": 2}).phase == "revoked"


@pytest.mark.parametrize(
    ("steps", "minutes"),
    [
        (["1.0"] * 3 + [""] * 99, 13),  # steps for three minutes, then none for ten
        ([""] * 99, 10),
        (["1.batch"] * 99, 10),
        (["fail"] * 30 + [""] * 99, 40),  # Slurm's silence says nothing of steps
    ],
)
def test_an_allocation_without_workers_ends_by_itself(
    tmp_path: Path, steps: list[str], minutes: int
) -> None:
    (tmp_path / "steps").write_text("\n".join(steps) + "\n")
    scripts = {
        "sleep": "echo x >> slept",
        "squeue": 'l=$(head -1 steps); sed -i 1d steps; [ "$l" = fail ] && exit 1; echo "$l"',
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "1"}
    subprocess.run(["sh", "-c", slurm.HOLD], check=True, cwd=tmp_path, env=env, timeout=60)
    assert len((tmp_path / "slept").read_text().splitlines()) == minutes


def test_other_peoples_arrays_and_heterogeneous_jobs_are_left_out(
    queue: SlurmQueue, site: Site
) -> None:
    job_id = queue.submit(4)
    site.queue(
        "9_[1-10]|PENDING|Priority||sweep",
        "9_3|RUNNING|None|n7|sweep",
        "8+0|RUNNING|None|n8|mpi",
        f"12|PENDING|Priority||NAME{job_id}",
    )
    queue.run_once(2)
    assert queue.job(job_id).reason == "Slurm job 12 is PENDING: Priority"
    assert not site.called("sbatch")


def test_an_sbatch_that_slurm_took_though_it_was_killed_is_not_repeated(
    queue: SlurmQueue, site: Site
) -> None:
    queue.run_once()
    site.says("sbatch", "echo 'sbatch: error: Socket timed out' >&2; exit 1")
    job_id = queue.start(4)
    site.says("squeue", "echo 'slurm_load_jobs error' >&2; exit 1")
    queue.run_once(5, seconds=40)
    assert len(site.called("sbatch")) == 1
    assert "Slurm does not answer" in queue.job(job_id).reason
    queue.slurm(job_id, "PENDING", "Priority")
    queue.run_once(2, seconds=40)
    assert len(site.called("sbatch")) == 1
    assert queue.job(job_id).reason == "Slurm job 12 is PENDING: Priority"


def test_of_two_slurm_jobs_of_one_name_the_second_is_cancelled(
    queue: SlurmQueue, site: Site
) -> None:
    job_id = queue.begin()
    site.queue(
        f"11|CANCELLED|None||NAME{job_id}",
        f"12|RUNNING|None|n1,n2|NAME{job_id}",
        f"13|RUNNING|None|n3,n4|NAME{job_id}",
        f"14|PENDING|Priority||NAME{job_id}",
    )
    queue.run_once()
    assert queue.state(job_id) is S.STARTING
    assert site.called("scancel") == ["scancel --quiet 13", "scancel --quiet 14"]


class Clock:
    """Seconds that commands of a site add to."""

    def __init__(self, site: Site) -> None:
        self.path = site.directory / "clock"
        self.path.write_text("0\n")

    def __call__(self) -> float:
        return float(sum(map(int, self.path.read_text().split())))

    def passes(self, seconds: int) -> str:
        return f"echo {seconds} >> {self.path}"


@pytest.mark.parametrize(("name", "reads", "tries"), [("squeue", 1, 0), ("sbatch", 1, 1)])
def test_a_round_waits_for_a_silent_slurm_once(
    runtime: Runtime, site: Site, name: str, reads: int, tries: int
) -> None:
    """Whatever waits: the scheduler's thread has other jobs, too."""
    clock = Clock(site)
    asked = [
        Request(
            job=each.job.model_copy(update={"job_id": f"tj-{number:012}"}),
            gang=each.gang,
            ranks_per_node=2,
        )
        for number, each in enumerate([request(runtime)] * 5)
    ]
    site.says(name, f"{clock.passes(10)}; echo 'Unable to contact slurm controller' >&2; exit 1")
    engine = SlurmEngine(runtime, clock)
    for each in asked:
        engine.submit(each)
    engine.status([], asked, [], 0.0)
    assert (len(site.called("squeue")), len(site.called("sbatch"))) == (reads, tries)
    assert all("contact" in why for why in engine.reasons().values())
    assert len(engine.reasons()) == 5


def test_a_limit_of_one_job_holds_no_other_up(runtime: Runtime, site: Site) -> None:
    site.says("sbatch", "echo 'Job violates accounting/QOS policy' >&2; exit 1")
    engine = SlurmEngine(runtime, lambda: 0.0)
    for number in range(3):
        one = job().model_copy(update={"job_id": f"tj-{number:012}"})
        engine.submit(Request(job=one, gang=request(runtime).gang, ranks_per_node=2))
    assert len(site.called("sbatch")) == 3


@pytest.mark.parametrize(
    "said",
    [
        "Batch job submission failed: Protocol authentication error",
        "Munge encode failed: Failed to access /run/munge/munge.socket.2",
        "Batch job submission failed: Zero Bytes were transmitted or received",
        "Batch job submission failed: Slurm backup controller in standby mode",
        "Batch job submission failed: Required partition not available (inactive or drain)",
    ],
)
def test_a_fault_of_slurm_refuses_and_fails_no_job(
    queue: SlurmQueue, site: Site, said: str
) -> None:
    site.says("sbatch", f'echo "sbatch: error: {said}" >&2; exit 1')
    assert SlurmEngine(queue.runtime).why_never(request(queue.runtime), []) == ""
    job_id = queue.submit(4)
    queue.run_once(2)
    assert queue.state(job_id) is S.QUEUED
    assert said in queue.job(job_id).reason


def test_what_slurm_took_in_a_test_waits_with_an_unknown_reason(
    queue: SlurmQueue, site: Site
) -> None:
    site.says("sbatch", "echo 'sbatch: error: the site is closed on Fridays' >&2; exit 1")
    never = SlurmEngine(queue.runtime).why_never(request(queue.runtime), [])
    assert "closed on Fridays" in never
    job_id = queue.submit(4)
    queue.run_once(2)
    assert queue.state(job_id) is S.QUEUED
    assert "closed on Fridays" in queue.job(job_id).reason


def test_a_leader_that_stops_submits_nothing(queue: SlurmQueue, site: Site) -> None:
    queue.submit(4)
    queue.scheduler._stop.set()
    queue.run_once(2)
    assert not site.called("sbatch")


def test_nodes_of_another_kind_than_before_go_back_for_others(
    queue: SlurmQueue, site: Site
) -> None:
    queue.store.workers = [worker("n1", 2, "NVIDIA L4"), worker("n2", 2)]
    job_id = queue.submit(4)
    queue.table.change(job_id, lambda now: now.model_copy(update={"kind": "NVIDIA A100"}))
    queue.run_once()
    queue.slurm(job_id, "PENDING", "Priority")
    queue.run_once()
    queue.slurm(job_id, "RUNNING", nodes="n1,n2")
    queue.run_once(6)
    waits = queue.job(job_id)
    assert waits.state is S.QUEUED
    assert waits.allocation is not None
    assert "n1 not of NVIDIA A100" in waits.allocation.reason
    assert {*site.called("scancel")} == {"scancel --quiet 12"}
    queue.slurm(job_id, "CANCELLED")
    site.says("sbatch", "echo 13")
    queue.run_once(6, seconds=10)
    assert queue.state(job_id) is S.QUEUED, "it is not a person's scancel"
    assert "--exclude=n1" in site.called("sbatch")[1].split()
    queue.store.workers += [worker("n3", 2)]
    site.queue(f"13|RUNNING|None|n2,n3|NAME{job_id}")
    queue.run_once(6)
    assert queue.state(job_id) is S.STARTING


def test_nodes_of_two_kinds_go_back(runtime: Runtime) -> None:
    kinds = {"n1": "NVIDIA L4", "n2": "NVIDIA A100", "n3": "NVIDIA L4"}
    hosts = {name: Host(name=name, slots=2, kind=kind) for name, kind in kinds.items()}
    view = SlurmJob(job_id="7", state="RUNNING", nodes=tuple(hosts))
    for accelerator, avoid in (("", ("n2",)), ("a100", ("n1", "n3"))):
        asked = request(runtime, resources={"ranks": 6, "accelerator": accelerator})
        found = slurm.standing(view, asked, hosts, has_settled=True)
        assert (found.phase, found.avoid) == ("waiting", avoid)


def test_part_of_a_kinds_name_that_nodes_share_is_the_granted_nodes_kind(runtime: Runtime) -> None:
    hosts = [
        Host(name=name, slots=2, kind=kind)
        for name, kind in (("n1", "NVIDIA A100-SXM4-40GB"), ("n2", "NVIDIA A100-SXM4-80GB"))
    ]
    asked = job(resources={"ranks": 2, "accelerator": "a100"})
    settings = with_job_settings(runtime.profile, asked.spec.settings).training
    given = Request(job=asked, gang=gang_of(asked, settings, hosts), ranks_per_node=2)
    view = SlurmJob(job_id="7", state="RUNNING", nodes=("n2",))
    found = slurm.standing(view, given, {each.name: each for each in hosts}, has_settled=True)
    assert found.phase == "granted"


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_team_may_not_name_the_queue_of_another(tmp_path: Path, site: Site, kind: str) -> None:
    settings = {
        "slurm": {
            "cluster.slurm.teams": '{nlp = {partition = "nlp,big"}, vision = {partition = "big"}}',
            "cluster.slurm.partition": "train",
        },
        "kubernetes": {"cluster.kubernetes.queues": '{nlp = "nlp", vision = "big"}'},
    }
    runtime = runtime_of(kind, tmp_path, **settings[kind])
    engine = engine_of(runtime)
    with pytest.raises(AccessDenied, match="not of nlp alone"):
        engine.why_never(request(runtime, team="vision", resources={"queue": "nlp"}), [])
    common = "train" if kind == "slurm" else "training"
    for team, named in (("nlp", "nlp"), ("vision", "big"), ("vision", common), ("vision", "open")):
        asked = request(runtime, team=team, resources={"queue": named})
        assert engine.why_never(asked, []) == ""


def test_a_training_that_began_outside_of_the_queue_may_not_either(
    tmp_path: Path, site: Site
) -> None:
    queue = SlurmQueue(
        runtime_of("slurm", tmp_path, **{"cluster.slurm.teams": '{nlp = {partition = "nlp"}}'}),
        site,
    )
    job_id = queue.start(4, team="vision", resources={"queue": "nlp"})
    assert queue.state(job_id) is S.FAILED
    assert "another team's" in queue.job(job_id).reason
    assert not site.called("sbatch")


def test_an_accelerator_is_one_word_of_slurms_options(runtime: Runtime, site: Site) -> None:
    asked = request(runtime, resources={"accelerator": "a100:1,license:9"})
    assert "resources.accelerator" in SlurmEngine(runtime).why_never(asked, [])
    assert not site.called("sbatch")


def test_the_next_leader_knows_a_cancelled_slurm_job_as_the_jobs(
    queue: SlurmQueue, site: Site
) -> None:
    job_id = queue.start(4)
    queue.slurm(job_id, "PENDING", "Priority")
    queue.run_once(2)
    queue.slurm(job_id, "CANCELLED")
    queue.lead()
    queue.run_once(3)
    assert (queue.state(job_id), len(site.called("sbatch"))) == (S.CANCELLED, 1)


# -- Kubernetes: not run on a cluster


def pods(runtime: Runtime, asked: Request, phase: str, *nodes: str) -> list[dict[str, Any]]:
    made = kubernetes.rendered(asked, runtime)
    for each, node in zip(made, nodes or [""] * len(made), strict=True):
        each["status"] = {"phase": phase}
        if node:
            each["spec"]["nodeName"] = node
    return made


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("pod-group", {}),
        (
            "pod-group-of-a-team",
            {
                "team": "nlp",
                "resources": {
                    "ranks": 2,
                    "accelerator": "NVIDIA-H100-80GB-HBM3",
                    "time_limit_s": 3600,
                },
            },
        ),
    ],
)
def test_a_job_is_one_group_of_pods(tmp_path: Path, name: str, spec: dict[str, Any]) -> None:
    queues = {"cluster.kubernetes.queues": '{nlp = "of-nlp"}'}
    runtime = runtime_of("kubernetes", tmp_path, **queues)
    asked = request(runtime, **({"resources": {"ranks": 4}} | spec))
    made = kubernetes.rendered(asked, runtime)
    text = json.dumps(made, indent=1, sort_keys=True) + "\n"
    golden = GOLDEN / f"{name}.json"
    if "PACELINE_WRITE_GOLDEN" in os.environ:
        golden.write_text(text)
    assert text == golden.read_text()
    for version in ("1.29", "1.37"):
        for each in made:
            kubernetes_validate.validate(each, version, strict=True)
    for each in made:
        group = each["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"]
        assert group == f"{asked.job.job_id}-1"
        count = each["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"]
        assert count == str(len(made))
        (apart, _) = each["spec"]["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert (
            apart["labelSelector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
        ), "no two on one node"


def test_a_group_waits_with_kueues_reason_runs_and_is_evicted(tmp_path: Path) -> None:
    runtime = runtime_of("kubernetes", tmp_path)
    asked = request(runtime, resources={"ranks": 4})
    group = f"{asked.job.job_id}-1"
    hosts = {each: Host(name=each, slots=1) for each in ("n1", "n2")}
    said = "insufficient unused quota for nvidia.com/gpu in flavor h100"
    conditions = [{"type": "QuotaReserved", "status": "False", "message": said}]
    waits = kubernetes.waits_of(
        [{"metadata": {"name": group}, "status": {"conditions": conditions}}]
    )
    found = kubernetes.standing(pods(runtime, asked, "Pending"), asked, hosts, waits)
    assert (found.phase, found.reason) == ("waiting", f"pod group {group} is Pending: {said}")
    assert found.allocation is not None and found.allocation.reason == said
    running = pods(runtime, asked, "Running", "n1", "n2")
    granted = kubernetes.standing(running, asked, hosts, {})
    assert granted.placement is not None and granted.placement.hosts == {"n1": 2, "n2": 2}
    away = kubernetes.standing(running, asked, {"n1": hosts["n1"]}, {})
    assert (away.phase, away.placement) == ("waiting", None)
    assert kubernetes.held_standing(running, {"n1": 2, "n2": 2}).phase == "granted"
    running[0]["metadata"]["deletionTimestamp"] = "2026-11-27T21:00:00Z"
    assert kubernetes.held_standing(running, {"n1": 2, "n2": 2}).phase == "revoked"


KUBECTL = """#!/usr/bin/env python3
import json, pathlib, sys
here = pathlib.Path(__file__).parents[1]
with (here / "called").open("a") as file: print("kubectl", *sys.argv[1:], file=file)
kept, words = here / "pods.json", sys.argv[2:]
items = json.loads(kept.read_text()) if kept.exists() else []
if words[0] == "apply":
    kept.write_text(json.dumps(items + json.load(sys.stdin)["items"]))
elif words[0] == "delete":
    kept.write_text("[]")
else:
    print(json.dumps({"items": items if words[1] == "pods" else []}))
"""


class Cluster:
    """A stand-in for kubectl, and an engine whose every look is four seconds later."""

    def __init__(self, directory: Path, site: Site) -> None:
        self.site, self.kept = site, directory / "pods.json"
        site.says("kubectl", "")
        self.says(KUBECTL)
        self.runtime, self.clock = runtime_of("kubernetes", directory), 0.0
        self.engine = KubernetesEngine(self.runtime, lambda: self.clock)

    def says(self, script: str) -> None:
        (self.site.directory / "bin" / "kubectl").write_text(script)

    def run_once(self, asked: Request, *hosts: Host, seconds: float = 4.0) -> Standing | None:
        self.clock += seconds
        self.engine.submit(asked)
        found = self.engine.status(hosts, [asked], [], 0.0)
        return found.get(asked.job.job_id)

    def called(self, word: str) -> int:
        return sum(f" {word} " in each for each in self.site.called("kubectl"))

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.kept.read_text())
        return found

    def keep(self, pods: list[dict[str, Any]]) -> None:
        self.kept.write_text(json.dumps(pods))


@pytest.fixture
def cluster(tmp_path: Path, site: Site) -> Cluster:
    return Cluster(tmp_path, site)


def test_the_port_applies_reads_and_deletes_a_group_once(cluster: Cluster) -> None:
    engine: Engine = cluster.engine
    asked = request(cluster.runtime, resources={"ranks": 4})
    job_id = asked.job.job_id
    for _ in range(3):
        stands = cluster.run_once(asked)
        assert stands is not None and stands.phase == "waiting"
    assert "Pending" in engine.reasons()[job_id]
    assert cluster.called("apply") == 1
    for _ in range(3):  # rounds before the next answer
        assert engine.status([], [], [], 0.0).keys() == {job_id}, "no job needs it: to be cancelled"
        engine.cancel(job_id)
    assert cluster.called("delete") == 1
    cluster.clock += 4.0
    assert engine.status([], [], [], 0.0) == {}


def test_pods_that_are_being_deleted_are_not_deleted_again(cluster: Cluster) -> None:
    asked = request(cluster.runtime, resources={"ranks": 4})
    cluster.run_once(asked)
    pods = cluster.pods()
    for each in pods:
        each["metadata"]["deletionTimestamp"] = "2026-11-27T21:00:00Z"
    cluster.keep(pods)
    stands = [cluster.run_once(asked) for _ in range(3)]
    assert all(each is not None and each.phase == "waiting" for each in stands)
    assert (cluster.called("delete"), cluster.called("apply")) == (0, 1)


def test_a_group_that_was_applied_in_part_is_completed(cluster: Cluster) -> None:
    asked = request(cluster.runtime, resources={"ranks": 6})
    cluster.run_once(asked)
    whole = cluster.pods()
    cluster.keep(whole[:1])
    stands = cluster.run_once(asked)
    assert stands is not None and "1 of 3 pods are there" in stands.reason
    running = whole[:1]
    running[0] |= {"status": {"phase": "Running"}}
    running[0]["spec"]["nodeName"] = "n1"
    cluster.keep(running)
    stands = cluster.run_once(asked, Host(name="n1", slots=1))
    assert stands is not None and stands.phase == "waiting", "not failed on too few nodes"
    cluster.run_once(asked, seconds=40.0)
    names = [each["metadata"]["name"] for each in cluster.pods()]
    assert names == [each["metadata"]["name"] for each in whole]
    assert cluster.called("apply") == 2


def test_a_used_quota_of_a_namespace_passes_and_another_refusal_does_not(cluster: Cluster) -> None:
    asked = request(cluster.runtime, resources={"ranks": 4})
    said = 'pods "x" is forbidden: exceeded quota: gpus, requested: 8, used: 8, limited: 8'
    refusing = KUBECTL.replace(
        'if words[0] == "apply":', 'if words[0] == "apply": sys.exit(SAID)\nif 0:'
    )
    cluster.says(refusing.replace("SAID", repr(said)))
    assert cluster.run_once(asked) is None
    assert "exceeded quota" in cluster.engine.reasons()[asked.job.job_id]
    cluster.run_once(asked)
    assert cluster.called("apply") == 1, "not each second"
    cluster.says(refusing.replace("SAID", repr('pods "x" is forbidden: no such ServiceAccount')))
    with pytest.raises(InvalidInput, match="no such ServiceAccount"):
        cluster.run_once(asked, seconds=40.0)


def test_a_label_of_a_node_and_nvidia_smi_name_one_kind(tmp_path: Path) -> None:
    runtime = runtime_of("kubernetes", tmp_path)
    hosts = [Host(name=name, slots=2, kind="NVIDIA H100 80GB HBM3") for name in ("n1", "n2")]
    asked = job(resources={"ranks": 4, "accelerator": "NVIDIA-H100-80GB-HBM3"})
    settings = with_job_settings(runtime.profile, asked.spec.settings).training
    gang = gang_of(asked, settings, hosts)
    assert gang.kind == "NVIDIA H100 80GB HBM3"
    given = Request(job=asked, gang=gang, ranks_per_node=2)
    running = pods(runtime, given, "Running", "n1", "n2")
    found = kubernetes.standing(running, given, {each.name: each for each in hosts}, {})
    assert found.phase == "granted"


def test_pods_on_nodes_of_another_kind_go_back_and_avoid_them(cluster: Cluster) -> None:
    asked = request(cluster.runtime, resources={"ranks": 4})
    began = asked.job.model_copy(update={"kind": "NVIDIA A100"})
    asked = Request(job=began, gang=asked.gang, ranks_per_node=2)
    cluster.run_once(asked)
    cluster.keep(pods(cluster.runtime, asked, "Running", "n1", "n2"))
    hosts = [
        Host(name="n1", slots=2, kind="NVIDIA L4"), Host(name="n2", slots=2, kind="NVIDIA A100")
    ]  # fmt: skip
    stands = cluster.run_once(asked, *hosts)
    assert stands is not None and "n1 not of NVIDIA A100" in stands.reason
    assert (stands.phase, cluster.called("delete")) == ("waiting", 1)
    for _ in range(2):
        cluster.run_once(asked, *hosts, seconds=40.0)
    made = cluster.pods()
    assert len(made) == 2
    for each in made:
        (term,) = each["spec"]["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
        assert term["matchExpressions"][0]["values"] == ["n1"]
        kubernetes_validate.validate(each, "1.29", strict=True)


def test_our_own_admission_is_the_same_port(tmp_path: Path) -> None:
    engine: Engine = OwnAdmission(load_profile("ci"))
    asked = request(runtime_of("slurm", tmp_path), resources={"ranks": 4})
    large = [Host(name=each, slots=2) for each in ("n1", "n2")]
    small = large[:1]
    assert "at most 2 are there" in engine.why_never(asked, small)
    engine.submit(asked)
    assert engine.status(small, [asked], [], 0.0) == {}
    assert "4" in engine.reasons()[asked.job.job_id]
    found: Callable[..., Any] = engine.status
    assert found(large, [asked], [], 0.0)[asked.job.job_id].phase == "granted"
