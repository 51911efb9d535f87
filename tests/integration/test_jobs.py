"""Training jobs on the embedded installation: refused, queued, preempted, paused, killed, finished.

Through `paceline jobs` and Prefect's API alone; the ranks, Prefect, its worker and Dask are real.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.cli.training import recorded_run
from paceline.client import AccessClient, CoordinatorClient
from paceline.client.installation import FINAL
from paceline.config import Runtime
from paceline.errors import AccessDenied, Conflict
from paceline.registry import TAG_PARENT, Registry
from paceline.schemas import CreateToken, JobState, ReviewJob, Scope, SubmitJob, SweepShown
from tests.support import command
from tests.support.stack import (
    Ended,
    await_registered,
    paceline,
    prefect,
    processes_of,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(600),
]

FOREVER = 100_000  # steps


class Lab:
    """A model on every node, its data, and the queue as a researcher sees it."""

    def __init__(self, stack: Runtime, lifecycle: Ended) -> None:
        trained = recorded_run(stack, str(lifecycle.answer["run_id"])).job
        self.stack, self.client = stack, CoordinatorClient.of(stack)
        self.base = (trained.model_id, trained.version)
        self.snapshot = trained.snapshot_url
        self.open: list[str] = []

    def jobs(self, *words: str) -> Ended:
        return paceline("jobs", *words, state=self.stack.state_dir)

    def submit(self, *words: str, steps: int = FOREVER) -> str:
        """Submit a job; another number of steps is another training."""
        given = ("submit", *self.base, "--snapshot", self.snapshot, "--steps", str(steps), "--json")
        done = self.jobs(*given, *words)
        assert done.code == 0, done.err
        self.open.append(str(done.answer["job"]["job_id"]))
        return self.open[-1]

    def refused(self, code: int, *words: str, said: tuple[str, ...]) -> None:
        done = command.paceline("jobs", "submit", *words, "--state", self.stack.state_dir)
        assert done.returncode == code, done
        assert all(each in done.stderr for each in said), done.stderr

    def job(self, job_id: str) -> Any:
        return self.client.job(job_id).job

    def becomes(self, job_id: str, *states: JobState, timeout_s: float = 240) -> Any:
        def there() -> bool:
            job = self.job(job_id)
            wrong = job.state.is_final and job.state not in states
            assert not wrong, f"{job.state}: {job.reason}"
            return job.state in states

        wait_until(there, timeout_s, f"{job_id} becomes {', '.join(states)}")
        return self.job(job_id)

    def audited(self, job_id: str) -> list[object]:
        """Return the states that the job went through, as the audit history has them."""
        rows = AccessClient.of(self.stack).audit(names=("job.state_changed",), limit=1000)
        states = [each.data["state"] for each in rows if each.data["job_id"] == job_id]
        return [state for state, _ in itertools.groupby(states)]

    def step(self, job_id: str) -> int:
        report = self.job(job_id).report
        return 0 if report is None else int(report.step)


@pytest.fixture(scope="module")
def lab(stack: Runtime, lifecycle: Ended) -> Iterator[Lab]:
    await_registered(stack)
    made = Lab(stack, lifecycle)
    yield made
    for job_id in made.open:
        if not made.job(job_id).state.is_final:
            made.client.change_job(job_id, "cancel")
    for job_id in made.open:
        wait_until(lambda each=job_id: made.job(each).state.is_final, 120, "jobs end")


def test_what_can_never_run_is_refused_at_once(lab: Lab) -> None:
    began = time.monotonic()
    model, version = lab.base
    data = ("--snapshot", lab.snapshot)
    lab.refused(2, model, version, *data, "--ranks", "99", said=("99", "are there"))
    lab.refused(2, model, version, *data, "--accelerator", "h100", said=("h100",))
    lab.refused(2, model, version, *data, "--set", "training.foo=1", said=("training.foo",))
    lab.refused(2, model, version, *data, "--set", "gate.max_overlap=1", said=("gate.max_overlap",))
    lab.refused(2, model, version, *data, "--code-ref", "os:system", said=("not pinned",))
    lab.refused(2, model, version, "--snapshot", "/etc", said=("by URL",))
    gone = ("--snapshot", lab.snapshot[:-4] + "0000")
    lab.refused(1, model, version, *gone, said=("no such data snapshot",))
    lab.refused(1, model, "77", *data, said=("no such published model", "77"))
    assert not lab.client.jobs(["queued"]).jobs
    assert time.monotonic() - began < 60


@contextlib.contextmanager
def resident_agents(stack: Runtime, options: Mapping[str, Sequence[str]], path: Path) -> Any:
    """Have operators' own agents take the place of the nodes' agents; ``path``: programs of
    node-3, before those of its $PATH.

    A worker starts its agent again at once, so it is stopped until the other one answers; it adopts
    that one then.
    """
    started = []
    try:
        for name, words in options.items():
            said = stack.node_dir(name) / "agent.json"
            old = psutil.Process(json.loads(said.read_bytes())["pid"])
            worker, environment = old.parent(), old.environ()
            argv = [each for each in old.cmdline() if each != "--die-with-parent"]
            if name == "node-3":
                environment["PATH"] = f"{path}:{environment['PATH']}"
            assert worker is not None
            worker.suspend()
            try:
                old.kill()
                wait_until(lambda old=old: old.status() == psutil.STATUS_ZOMBIE, 10, "it has ended")
                started.append(subprocess.Popen([*argv, *words], env=environment))
                wait_until(
                    lambda said=said: json.loads(said.read_bytes())["pid"] == started[-1].pid,
                    60, f"{name}'s own agent",
                )  # fmt: skip
            finally:
                worker.resume()
        yield
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.wait(30)


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # with the installation's start, on a busy machine
def test_gangs_get_the_nodes_that_their_racks_domains_and_labels_say(
    lab: Lab, tmp_path: Path
) -> None:
    """Nodes 0 and 1 are in rack-0, 2 and 3 in rack-1; of node 3 a driver reports an A100."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'NVIDIA A100-SXM4-80GB, 81920'\n")
    driver.chmod(0o755)
    domain = ("--label", "domain=nvl-1")
    spot = ("--label", "capacity=spot", "--label", "pool=research")
    of_node = {"node-1": domain, "node-2": domain, "node-3": spot}

    def labels() -> dict[str, Any]:
        return {e.worker_id: e.labels.others for e in lab.client.workers() if e.alive}

    def runs_on(job_id: str) -> tuple[str, set[str]]:
        """Return the level of its placement, and where its ranks run."""
        placed = lab.becomes(job_id, JobState.RUNNING).placement

        def hosts() -> set[str]:
            return {each.host for each in lab.job(job_id).report.workers}

        wait_until(lambda: len(hosts()) == len(placed.hosts), 60, "each rank is reported")
        assert hosts() == set(placed.hosts)
        return placed.level, hosts()

    number = itertools.count()

    def submit(*words: str) -> str:
        return lab.submit(*words, "--seed", str(next(number)))  # each another training

    with resident_agents(lab.stack, of_node, tmp_path):
        wait_until(lambda: labels().get("node-3"), 60, "the agents are registered")
        data = (*lab.base, "--snapshot", lab.snapshot)
        for words, reason in {
            ("--capacity", "spot", "--ranks", "2"): "2 x any kind (spot); at most 1 are there",
            ("--within", "rack", "--ranks", "3"): "3 x any kind in one rack; at most 2 are there",
            ("--label", "pool=sales"): "no host can hold a rank",
            ("--label", "pool=research", "--capacity", "on-demand"): "no host can hold a rank",
            ("--accelerator", "a100", "--memory", "90GB"): "no host can hold a rank",
        }.items():
            done = command.paceline("jobs", "submit", *data, *words, "--state", lab.stack.state_dir)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
            assert reason in done.stderr, done.stderr
        wide = submit("--ranks", "3", "--capacity", "on-demand")
        labelled = submit("--ranks", "1", "--label", "pool=research", "--accelerator", "a100")
        waiting = submit("--ranks", "1", "--capacity", "on-demand")
        assert runs_on(wide) == ("fleet", {"node-0", "node-1", "node-2"})
        assert runs_on(labelled) == ("host", {"node-3"})
        assert "A100" in lab.job(labelled).kind
        lab.client.change_job(labelled, "cancel")
        lab.becomes(labelled, JobState.CANCELLED)
        reason = "waiting for 1 x any kind (on-demand); 0 free"
        wait_until(lambda: lab.job(waiting).reason == reason, 20, "node-3 is not for it")
        assert lab.job(waiting).state is JobState.QUEUED
        for each in (waiting, wide):
            lab.client.change_job(each, "cancel")
        lab.becomes(wide, JobState.CANCELLED)

        near = submit("--ranks", "2")
        wait_until(lambda: lab.job(near).placement, 20, "it is placed")
        placed = lab.job(near).placement
        assert (placed.level, set(placed.hosts)) == ("domain", {"node-1", "node-2"})
        lab.client.change_job(near, "cancel")
        lab.becomes(near, JobState.CANCELLED)
        racked = submit("--ranks", "2", "--within", "rack")
        assert runs_on(racked) == ("rack", {"node-0", "node-1"})
        assert "node-1 (1), in one rack" in lab.jobs("show", racked).out
        lab.client.change_job(racked, "cancel")
        lab.becomes(racked, JobState.CANCELLED)
    wait_until(lambda: not any(labels().values()), 60, "the nodes have their own agents again")


def test_a_run_from_prefects_form_is_a_job_with_what_the_form_was_given(lab: Lab) -> None:
    hold = lab.submit("--ranks", "4", "--priority", "100")  # so that the other waits
    chosen: dict[str, Any] = {
        "name": "from the form", "priority": 3, "seed": 5, "resources": {"ranks": 2},
        "checkpoint_policy": {"every_steps": 7},
    }  # fmt: skip
    where = prefect(lab.stack, "GET", "/deployments/name/train-model/train-model")
    shown = where["parameter_openapi_schema"]["properties"]
    assert chosen.keys() | {"budget"} <= shown.keys() and "job_id" not in shown
    data = {"model_id": lab.base[0], "version": lab.base[1], "snapshot_url": lab.snapshot}
    made = prefect(
        lab.stack, "POST", f"/deployments/{where['id']}/create_flow_run",
        {"parameters": data | chosen},
    )  # fmt: skip
    wait_until(lambda: lab.client.jobs(name="from the form").jobs, 240, "it is a job")
    (job,) = lab.client.jobs(name="from the form").jobs
    lab.open.append(job.job_id)
    assert (job.adopted, job.flow_run_id) == (True, made["id"])
    spec = job.spec.model_dump(mode="json", exclude_unset=True)
    assert spec["checkpoint_policy"]["every_steps"] == 7
    assert {name: spec[name] for name in ("name", "priority", "seed")}.items() <= chosen.items()
    assert job.spec.resources.ranks == 2
    for each in (job.job_id, hold):
        lab.client.change_job(each, "cancel")
    lab.becomes(job.job_id, JobState.CANCELLED)


@pytest.mark.nightly
def test_a_key_finds_its_job_and_a_team_sees_to_its_own(lab: Lab) -> None:
    hold = lab.submit("--ranks", "4", "--priority", "100")
    spec = SubmitJob(model_id=lab.base[0], version=lab.base[1], data_snapshot=lab.snapshot)
    access = AccessClient.of(lab.stack)

    def client(*scopes: Scope, team: str | None) -> CoordinatorClient:
        made = access.create_token(CreateToken(name="ann", scopes=scopes, team=team))
        url = lab.stack.endpoints.coordinator_url
        return CoordinatorClient((url,), made.token)

    nlp, vision = client(Scope.TRAIN, team="nlp"), client(Scope.TRAIN, team="vision")
    first = nlp.submit_job(spec, "key-1").job
    lab.open.append(first.job_id)
    assert nlp.submit_job(spec, "key-1").job.job_id == first.job_id
    assert first.spec.team == "nlp", "the token's"
    with pytest.raises(Conflict, match="another submission"):
        nlp.submit_job(spec.model_copy(update={"priority": 3}), "key-1")
    with pytest.raises(AccessDenied, match="another team"):
        nlp.submit_job(SubmitJob.model_validate(spec.model_dump() | {"team": "vision"}))
    for what in ("pause", "resume", "cancel"):
        with pytest.raises(AccessDenied, match="another team"):
            vision.change_job(first.job_id, what)  # type: ignore[arg-type]
    with pytest.raises(AccessDenied, match="scope"):
        client(Scope.READ, team=None).submit_job(spec)
    with pytest.raises(AccessDenied, match="scope"):
        nlp.review_job(first.job_id, ReviewJob(accepted=True))
    twin = lab.client.submit_job(spec.model_copy(update={"team": "nlp"}))
    lab.open.append(twin.job.job_id)
    assert twin.same_submission[-1] == first.job_id
    assert [e.job_id for e in nlp.jobs().jobs[:2]] == [twin.job.job_id, first.job_id]
    assert not vision.jobs(team="nlp").jobs

    assert nlp.change_job(first.job_id, "pause").job.state is JobState.PAUSED
    assert nlp.change_job(first.job_id, "resume").job.state is JobState.QUEUED
    assert nlp.change_job(first.job_id, "resume").job.state is JobState.QUEUED, "twice"
    for job_id in (first.job_id, twin.job.job_id):
        assert lab.client.change_job(job_id, "cancel").job.state is JobState.CANCELLED
        with pytest.raises(Conflict, match="ended"):
            lab.client.change_job(job_id, "pause")
    lab.client.change_job(hold, "cancel")
    assert lab.jobs("show", hold[:9]).code == 0
    lab.becomes(hold, JobState.CANCELLED)


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # with the installation's start, on a busy machine
def test_jobs_are_preempted_killed_paused_and_lose_no_step(lab: Lab) -> None:
    low = lab.submit("--ranks", "4", "--name", "low", steps=300)
    lab.becomes(low, JobState.RUNNING)
    wait_until(lambda: lab.job(low).report.checkpoints, 60, "a checkpoint")
    high = lab.submit("--ranks", "4", "--priority", "10", steps=FOREVER + 1)
    job = lab.becomes(low, JobState.PREEMPTED)
    assert high in next(each.reason for each in job.history if each.state == "pausing")
    saved = job.report.checkpoints[-1].step
    assert saved == lab.step(low) > 0, "every step that was made"

    every = lab.stack.profile.training.checkpoints.every_steps
    wait_until(lambda: lab.step(high) > every, 240, "it has more to lose than an interval")
    lab.becomes(high, JobState.RUNNING)  # which is reported some seconds after its steps
    flow_run = lab.job(high).flow_run_id
    engines = [each for each in processes_of(lab.stack.state_dir) if _runs(each, flow_run)]
    assert engines
    for each in engines:
        os.kill(each.pid, signal.SIGKILL)
    wait_until(lambda: lab.job(high).losses == 1, 60, "the lost flow is noticed")
    lab.becomes(high, JobState.RUNNING)
    assert lab.job(high).flow_run_id != flow_run

    assert lab.jobs("pause", high).code == 0
    paused = lab.becomes(high, JobState.PAUSED)
    killed, last = paused.usage
    reached = killed.began_step + killed.steps
    assert every < reached <= last.began_step + every, "at most an interval is lost"
    assert paused.report.checkpoints[-1].step == paused.report.step >= last.began_step
    done = lab.becomes(low, JobState.SUCCEEDED)
    assert (done.preemptions, done.report.step) == (1, 300)
    assert any(f"training resumed at step {saved} " in each for each in done.report.notes)
    assert [(e.began_step, e.steps) for e in done.usage] == [(0, saved), (saved, 300 - saved)]
    assert lab.jobs("cancel", high).code == 0
    costs = [e for e in lab.client.training_costs().usages if e.queued_job_id == low]
    assert [each.state for each in costs] == ["succeeded", "preempted"]
    assert all(each.by_class["useful"] > 0 for each in costs), costs
    assert costs[0].tokens, "of the training's result"
    shown = lab.jobs("show", low)
    for each in ("preempted", "succeeded", "checkpoint", "rank 0", "prefect", "job-"):
        assert each in shown.out, shown.out
    registry, page = Registry.from_runtime(lab.stack), lab.client.job(low).pages["data"]
    run, _, path = page.rpartition("/runs/")[2].partition("/artifacts/")
    kept = registry.call("list_artifacts", run)
    assert path == "data-validation.html" in [each.path for each in kept]
    listed = json.loads(lab.jobs("list", "--json").out)
    assert {low, high} <= {each["job_id"] for each in listed["jobs"]}
    lab.becomes(high, JobState.CANCELLED)
    started = "admitted starting running"
    preempted = f"queued {started} pausing preempted {started} succeeded"
    assert lab.audited(low) == preempted.split()
    assert (
        lab.audited(high)
        == f"queued {started} recovering {started} pausing paused cancelled".split()
    )
    assert [each.state for each in done.history] == lab.audited(low)


@pytest.mark.nightly
def test_hosts_that_lack_the_base_of_a_training_get_it(lab: Lab) -> None:
    """The queue reserves what is free, for a training that a command started, too."""
    model, version = lab.base
    stored = lab.stack.node_dir("node-0") / "store" / "models" / model / version
    for words in (
        ("publish", str(stored), "--model", "elsewhere", "--version", "1"),
        ("distribute", "elsewhere", "1", "--to", "node-0", "--stage-only"),
        (
            "training",
            "start",
            "elsewhere",
            "1",
            "--snapshot",
            lab.snapshot,
            *["--ranks", "4", "--steps", "3"],
        ),
    ):
        done = paceline(*words, state=lab.stack.state_dir)
        assert done.code == 0, done.err
    for name in ("node-0", "node-3"):
        copy = lab.stack.node_dir(name) / "store" / "models" / "elsewhere" / "1"
        assert (copy / "config.json").read_bytes() == (stored / "config.json").read_bytes()


def _runs(process: psutil.Process, flow_run_id: str | None) -> bool:
    try:
        return process.environ().get("PREFECT__FLOW_RUN_ID", "").replace("-", "") == (
            flow_run_id or "-"
        ).replace("-", "")
    except psutil.Error:
        return False


@pytest.mark.nightly
def test_the_installation_runs_a_sweep_whose_trials_are_one_run_in_mlflow(
    lab: Lab, tmp_path: Path
) -> None:
    space = tmp_path / "space.toml"
    rates = "choices = [1e-4, 3e-3]"
    space.write_text(f'[space."training.learning_rate"]\nkind = "categorical"\n{rates}\n')
    given = (*lab.base, "--snapshot", lab.snapshot, "--space", str(space), "--steps", "9")
    words = ("sweep", "lr", *given, "--ranks", "1", "--trials", "1", "--sampler", "random")
    begun = paceline(*words, "--seed", "3", "--detach", "--json", state=lab.stack.state_dir)
    assert begun.code == 0, begun.err
    flow_run = str(begun.answer["flow_run_id"])
    wait_until(lambda: lab.client.flow_run(flow_run).state in FINAL, 300, "the sweep ends")
    assert lab.client.flow_run(flow_run).state == "COMPLETED", lab.client.flow_run(flow_run)
    shown = paceline("sweep", "report", "lr", "--json", state=lab.stack.state_dir)
    found = SweepShown.model_validate(shown.answer)
    assert [each.state for each in found.trials] == ["complete"]
    assert found.run_id == begun.answer["run_id"] and found.best is not None
    registry = Registry.from_runtime(lab.stack)
    parent = registry.find_run(found.run_id)
    for each in found.trials:
        child = registry.call("get_run", registry.find_run(lab.job(each.job_id).run_id))
        assert child.data.tags[TAG_PARENT] == parent


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # with the installation's start, on a busy machine
def test_a_pruned_sweep_goes_on_after_a_kill_and_frees_its_slots(lab: Lab, tmp_path: Path) -> None:
    space, trials, steps = tmp_path / "space.toml", 6, 600
    rates = 'kind = "float"\nlow = 1e-7\nhigh = 1e-2\nlog = true\n'
    space.write_text(f'[space."training.learning_rate"]\n{rates}')
    given = (*lab.base, "--snapshot", lab.snapshot, "--space", str(space), "--ranks", "1")
    how = ("--trials", str(trials), "--parallel", "2", "--sampler", "random", "--seed", "3")
    words = ("sweep", "asha", *given, *how, "--pruner", "asha", "--steps", str(steps))

    def begin() -> dict[str, Any]:
        done = paceline(*words, "--detach", "--json", state=lab.stack.state_dir)
        assert done.code == 0, done.err
        return done.answer

    def jobs() -> dict[str, Any]:
        return {each.job_id: each for each in lab.client.jobs(project="sweep-asha").jobs}

    first = begin()
    wait_until(lambda: any(e.state.is_final for e in jobs().values()), 600, "a trial has ended")
    flow = str(first["flow_run_id"])
    engines = [each for each in processes_of(lab.stack.state_dir) if _runs(each, flow)]
    assert engines and len(jobs()) < trials
    for each in engines:
        os.kill(each.pid, signal.SIGKILL)
    wait_until(lambda: lab.client.flow_run(flow).state in FINAL, 120, "Prefect sees it has died")
    assert lab.client.flow_run(flow).state == "CRASHED"
    before = jobs()
    assert {e.wanted for e in before.values() if not e.state.is_final} <= {"run"}, "they go on"

    again = begin()
    wait_until(lambda: lab.client.flow_run(str(again["flow_run_id"])).state in FINAL, 900, "ends")
    assert lab.client.flow_run(str(again["flow_run_id"])).state == "COMPLETED"
    shown = paceline("sweep", "report", "asha", "--json", state=lab.stack.state_dir)
    found = SweepShown.model_validate(shown.answer)
    assert found.run_id == first["run_id"] and len(found.trials) == trials
    states = {each.job_id: each.state for each in found.trials}
    assert len(states) == trials, "each trial has one job"
    assert set(states.values()) == {"complete", "pruned"}, found
    assert before.keys() <= jobs().keys() == states.keys(), "none was submitted twice"

    wait_until(lambda: all(lab.job(each).state.is_final for each in states), 60, "jobs end")
    hold = lab.submit("--ranks", "4", steps=FOREVER + 2)
    lab.becomes(hold, JobState.RUNNING)  # every slot is free
    lab.client.change_job(hold, "cancel")
    registry = Registry.from_runtime(lab.stack)
    parent = registry.find_run(found.run_id)
    for trial in found.trials:
        job = lab.job(trial.job_id)
        run = registry.call("get_run", registry.find_run(job.run_id))
        assert run.data.tags[TAG_PARENT] == parent
        if trial.state == "pruned":
            assert (job.state, run.info.status) == (JobState.CANCELLED, "KILLED"), job.reason
            assert 0 < trial.step < steps
        else:
            assert (job.state, run.info.status) == (JobState.SUCCEEDED, "FINISHED"), job.reason
            assert trial.value == job.report.metrics["loss"]
        assert job.usage[-1].held_s is not None, "its slots are its own no more"
    assert registry.call("get_run", parent).info.status == "FINISHED"
    assert "sweep.html" in [each.path for each in registry.call("list_artifacts", parent)]
    best = min((e for e in found.trials if e.state == "complete"), key=lambda e: e.value or 0.0)
    assert found.best == best and f"{found.name} trial {best.number}" in found.reproduce
    lab.becomes(hold, JobState.CANCELLED)
