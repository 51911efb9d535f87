"""The queue of training jobs: admitted as gangs, followed to their end, whatever dies meanwhile.

The coordinator is a store in memory and Prefect a table of flow runs; both keep their promises.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import Profile, load_profile
from paceline.errors import Conflict, InvalidInput, NotFound, ServiceUnavailable
from paceline.jobs import NEXT, JobScheduler, JobTable, hosts_of, parameters_of, with_state
from paceline.schemas import (
    Accelerator,
    FlowRunView,
    Inventory,
    JobCheckpoint,
    JobReport,
    JobState,
    Labels,
    SubmitJob,
    TrainingJob,
    Worker,
    digest_of,
    new_run_id,
)

S = JobState
SNAPSHOT = "s3://b/data/snapshots/0"


class Store:
    """A leading coordinator with its store and its workers."""

    def __init__(self, workers: list[Worker]) -> None:
        self.records: dict[str, TrainingJob] = {}
        self.term: Any = SimpleNamespace(epoch=1)
        self.workers = workers
        self.events: list[dict[str, object]] = []

    def jobs(self) -> list[TrainingJob]:
        return list(self.records.values())

    def save_job(self, job: TrainingJob, dropped: Collection[str] = ()) -> None:
        for each in dropped:
            del self.records[each]
        self.records[job.job_id] = job
        self.events.append({"job_id": job.job_id, "state": job.state, "reason": job.reason})

    def read(self, question: Any) -> Any:
        return question(SimpleNamespace(fleet=SimpleNamespace(workers=lambda: self.workers)))


class Flows:
    """Prefect: one flow run for the same run and parameters, until that ended badly."""

    def __init__(self) -> None:
        self.runs: dict[str, str] = {}  # flow run → state
        self.given: dict[str, Mapping[str, object]] = {}
        self.messages: dict[str, str] = {}
        self.away = False
        self.refuses = False

    def run(
        self, flow: str, run_id: str, parameters: Mapping[str, object], attempt: int = 0
    ) -> FlowRunView:
        assert flow == "train-model"
        if self.away:
            raise ServiceUnavailable("Prefect's server does not answer")
        if self.refuses:
            raise InvalidInput("Prefect refuses these parameters")
        key = digest_of([run_id, dict(parameters), attempt])[:8]
        for number in range(100):
            name = f"{key}-{number}"
            if self.runs.setdefault(name, "SCHEDULED") not in ("FAILED", "CRASHED", "CANCELLED"):
                self.given[name] = parameters
                return self.view(name)
        raise AssertionError

    def view(self, flow_run_id: str, after: int = 0) -> FlowRunView:
        return FlowRunView(
            flow_run_id=flow_run_id,
            flow="train-model",
            run_id="",
            state=self.runs[flow_run_id],
            message=self.messages.get(flow_run_id, ""),
        )

    def states(self, flow_run_ids: Collection[str]) -> Mapping[str, str]:
        if self.away:
            raise ServiceUnavailable("Prefect's server does not answer")
        return {each: self.runs[each] for each in flow_run_ids if each in self.runs}

    def cancel(self, flow_run_id: str) -> None:
        if self.away:
            raise ServiceUnavailable("Prefect's server does not answer")
        if flow_run_id not in self.runs:
            raise NotFound("no such flow run")
        self.runs[flow_run_id] = "CANCELLING"

    def crash(self, flow_run_id: str, message: str) -> None:
        assert message
        self.runs[flow_run_id] = "CRASHED"


def worker(name: str, gpus: int = 0, kind: str = "NVIDIA A100", **labels: str) -> Worker:
    cards = (Accelerator(kind=kind, count=gpus, memory_bytes=80 << 30),) if gpus else ()
    return Worker(
        worker_id=name, hostname=name, labels=Labels(rack=labels.pop("rack", "r1"), others=labels),
        address=f"{name}:1", available_storage=1, link_mbit=1000, incarnation=1,
        inventory=Inventory(cores=8, memory_bytes=1, shared_memory_bytes=1, accelerators=cards),
    )  # fmt: skip


class Queue:
    """A scheduler, and what happens around it."""

    def __init__(self, *workers: Worker, profile: Profile | None = None) -> None:
        self.store = Store(list(workers))
        self.flows = Flows()
        self.profile = profile or load_profile("ci")
        self.now = 1000.0
        self.lead()

    def lead(self) -> None:
        """Another replica leads: it knows what the store holds, and nothing else."""
        self.store.term = SimpleNamespace(epoch=self.store.term.epoch + 1)
        self.table = JobTable(self.store, lambda: self.now)  # type: ignore[arg-type]
        self.scheduler = JobScheduler(
            self.store,  # type: ignore[arg-type]
            self.table,
            self.flows,
            self.profile,
            wall=lambda: self.now,
        )

    def submit(self, ranks: int = 2, **more: Any) -> str:
        resources = {"ranks": ranks} | more.pop("resources", {})
        seed = len(self.table.jobs()) + 1  # another training
        spec = SubmitJob.model_validate(
            {
                "model_id": "acme/tiny",
                "version": "1",
                "data_snapshot": SNAPSHOT,
                "resources": resources,
                "seed": seed,
                **more,
            }
        )
        return self.add(spec).job_id

    def start(self, ranks: int = 2, **more: Any) -> str:
        """Submit a job, and run a round."""
        job_id = self.submit(ranks, **more)
        self.run_once()
        return job_id

    def add(self, spec: SubmitJob, **more: Any) -> TrainingJob:
        run_id = new_run_id()
        self.now += 0.001
        return self.table.add(
            TrainingJob(
                job_id=f"tj-{digest_of(run_id)[:12]}",
                submission_id=digest_of(spec.model_dump(mode="json")),
                spec=spec,
                run_id=run_id,
                state=S.QUEUED,
                created_at=self.now,
                updated_at=self.now,
                **more,
            )
        )

    def adopt(self, **more: Any) -> str:
        """A person has started a training outside of the queue."""
        spec = SubmitJob(model_id="acme/tiny", version="1", data_snapshot=SNAPSHOT)
        return self.add(spec, adopted=True, flow_run_id="by-hand", attempt=1, **more).job_id

    def run_once(self, rounds: int = 1, seconds: float = 1.0) -> None:
        for _ in range(rounds):
            self.now += seconds
            self.scheduler.run_once()

    def job(self, job_id: str) -> TrainingJob:
        return self.table.job(job_id)

    def state(self, job_id: str) -> JobState:
        return self.job(job_id).state

    def flow_of(self, job_id: str) -> str:
        return self.job(job_id).flow_run_id or ""

    def ends(self, job_id: str, state: str, message: str = "") -> None:
        """The job's flow run ends so in Prefect."""
        self.flows.runs[self.flow_of(job_id)] = state
        self.flows.messages[self.flow_of(job_id)] = message

    def report(self, job_id: str, **more: Any) -> None:
        """The job's flow reports."""
        flow_run_id = self.flow_of(job_id)
        self.table.report(job_id, JobReport(at=self.now, flow_run_id=flow_run_id, **more))

    def ask(self, job_id: str, wanted: str, state: JobState) -> None:
        """A person pauses or cancels it."""
        self.table.change(
            job_id, lambda job: with_state(job, state, self.now, wanted, wanted=wanted)
        )


@pytest.fixture
def queue() -> Queue:
    return Queue(*(worker(f"node-{each}") for each in range(4)))


def test_a_job_goes_through_its_states_and_its_flow_gets_its_id(queue: Queue) -> None:
    job_id = queue.start(2)
    assert queue.state(job_id) is S.STARTING
    given = queue.flows.given[queue.flow_of(job_id)]
    assert given["job_id"] == job_id
    queue.report(job_id, step=3, steps=10)
    queue.run_once()
    assert queue.state(job_id) is S.RUNNING
    queue.ends(job_id, "COMPLETED")
    queue.run_once()
    job = queue.job(job_id)
    assert (job.state, job.placement, job.ended_at) == (S.SUCCEEDED, None, queue.now)
    assert [each.state for each in job.history] == ["admitted", "starting", "running", "succeeded"]
    assert [each["state"] for each in queue.store.events if each["job_id"] == job_id] == [
        "queued", "admitted", "starting", "running", "succeeded",
    ]  # fmt: skip


def test_two_gangs_never_share_a_node_and_the_second_waits_with_a_reason(queue: Queue) -> None:
    first, second = queue.submit(3), queue.submit(2)
    queue.run_once(3)
    assert queue.state(second) is S.QUEUED
    assert "2" in queue.job(second).reason
    queue.ends(first, "COMPLETED")
    queue.run_once(2)
    assert queue.state(second) is S.STARTING


def twins(queue: Queue, *of_each: dict[str, Any]) -> list[str]:
    """The ids of jobs that train the same, and differ in what the queue looks at."""
    spec = {"model_id": "acme/tiny", "version": "1", "data_snapshot": SNAPSHOT}
    return [queue.add(SubmitJob.model_validate(spec | each)).job_id for each in of_each]


def test_of_identical_jobs_the_one_of_higher_priority_begins_first(queue: Queue) -> None:
    first, second = twins(queue, {}, {"team": "b", "priority": 9})
    queue.run_once(2)
    # They would write the same checkpoints.
    assert (queue.state(first), queue.state(second)) == (S.QUEUED, S.STARTING)
    assert f"waiting for {second}, which trains the same" in queue.job(first).reason
    queue.ends(second, "COMPLETED")
    queue.run_once(2)
    assert queue.state(first) is S.STARTING


SAME: dict[str, dict[str, Any]] = {
    "seed": {"seed": 0},
    "the profile's value": {"parameters": {"training.optimizer": "adamw"}},
    "accumulation": {"parameters": {"training.accumulation": 2}},
    "training.ranks": {"parameters": {"training.ranks": 1}},
    "purpose": {"purpose": "language-model-training"},
    "mesh": {"parameters": {"training.mesh.shard": 2}},
    "another export": {"parameters": {"training.export_dtype": "float32"}},
    "files of another size": {"parameters": {"training.export_file_bytes": 4096}},
    "snapshot's URL": {"data_snapshot": f"{SNAPSHOT}/"},
}
OTHER: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1}, "learning rate": {"parameters": {"training.learning_rate": 0.5}},
    "hook": {"parameters": {"training.mesh.hook": "bf16"}},
    "batching": {"parameters": {"data.batching": "packed"}}, "labels": {"labels": "shuffled"},
    "purpose": {"purpose": "speech"}, "code": {"code_ref": "task:make"},
    "optimiser": {"optimizer_ref": "task:lion"}, "continued": {"continue_from": "job-0123456789ab"},
}  # fmt: skip


@pytest.mark.parametrize("given", SAME.values(), ids=SAME)
def test_jobs_that_write_the_same_checkpoints_wait_for_each_other(
    queue: Queue, given: dict[str, Any]
) -> None:
    first, second = twins(queue, {"resources": {"ranks": 1}}, given)
    queue.run_once(2)
    assert (queue.state(first), queue.state(second)) == (S.STARTING, S.QUEUED)
    assert queue.job(second).reason == f"waiting for {first}, which trains the same"
    queue.ends(first, "COMPLETED")
    queue.run_once(2)
    assert queue.state(second) is S.STARTING, "it finds the result"


@pytest.mark.parametrize("given", OTHER.values(), ids=OTHER)
def test_jobs_of_other_trainings_run_beside_each_other(queue: Queue, given: dict[str, Any]) -> None:
    both = twins(queue, {"resources": {"ranks": 1}}, given)
    queue.run_once(2)
    assert [queue.state(each) for each in both] == [S.STARTING] * 2


@pytest.mark.parametrize("blocked_by", ["its quota", "busy hosts"])
def test_an_identical_job_starts_where_the_one_before_it_cannot(blocked_by: str) -> None:
    quota = {"jobs.quotas.nlp.slots": "1", "jobs.quotas.nlp.borrow": "0"}
    h100, a100 = (worker(name, 1, f"NVIDIA {name.upper()}") for name in ("h100", "a100"))
    queue = Queue(h100, a100, profile=load_profile("ci", quota))
    on_h100, on_a100 = ({"resources": {"ranks": 1, "accelerator": e}} for e in ("h100", "a100"))
    (running,) = twins(queue, {"seed": 5, "team": "nlp"} | on_h100)
    queue.run_once(2)
    blocked = {"team": "nlp"} | on_a100 if blocked_by == "its quota" else {"team": "b"} | on_h100
    first, second = twins(queue, blocked, {"team": "vision"} | on_a100)
    queue.run_once(2)
    assert queue.state(running) is S.STARTING
    assert (queue.state(first), queue.state(second)) == (S.QUEUED, S.STARTING)
    assert queue.job(first).reason == f"waiting for {second}, which trains the same"


@pytest.mark.parametrize("ending", ["CRASHED", "FAILED"])
def test_a_lost_flow_is_started_again_and_a_job_that_never_works_fails(
    queue: Queue, ending: str
) -> None:
    job_id = queue.start(2)
    seen = set()
    for _ in range(3):
        seen.add(queue.flow_of(job_id))
        queue.ends(job_id, ending, "Flow run encountered an exception: WorkerLost: node-1 is gone")
        queue.run_once(2)
        assert queue.state(job_id) is S.STARTING
    assert len(seen | {queue.flow_of(job_id)}) == 4
    queue.ends(job_id, ending, "exception: WorkerLost: node-1 is gone")
    queue.run_once(2)
    assert queue.state(job_id) is S.FAILED
    assert "ended 4 times" in queue.job(job_id).reason
    assert "node-1 is gone" in queue.job(job_id).reason


def test_a_permanent_failure_is_not_tried_again(queue: Queue) -> None:
    job_id = queue.start(2)
    queue.ends(job_id, "FAILED", "Flow run encountered an exception: InvalidInput: no such column")
    queue.run_once(3)
    assert queue.state(job_id) is S.FAILED
    assert "no such column" in queue.job(job_id).reason


def test_a_flow_that_falls_silent_is_lost_though_prefect_says_running(queue: Queue) -> None:
    job_id = queue.start(2)
    before = queue.flow_of(job_id)
    queue.flows.runs[before] = "RUNNING"
    queue.report(job_id, step=5, steps=10)
    queue.run_once(1, seconds=29)
    assert queue.state(job_id) is S.RUNNING
    queue.run_once(2, seconds=5)
    assert queue.flows.runs[before] == "CANCELLING"
    assert queue.job(job_id).losses == 1
    assert queue.job(job_id).report is not None  # its checkpoints are still shown


@pytest.mark.parametrize("wanted", ["run", "pause", "cancel"])
@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "CANCELLING", "deleted", "SCHEDULED"])
def test_a_flow_that_is_lost_before_its_first_report_frees_its_nodes(
    queue: Queue, state: str, wanted: str
) -> None:
    job_id = queue.start(4)
    first = queue.flow_of(job_id)
    queue.run_once(2, seconds=100)  # no Prefect worker takes it: it is not lost yet
    assert (queue.flow_of(job_id), queue.state(job_id)) == (first, S.STARTING)

    def prefect_says() -> None:  # whatever the queue asks of Prefect: no process acts on it
        if state == "deleted":
            queue.flows.runs.pop(first, None)
        else:
            queue.flows.runs[first] = state

    if wanted != "run":
        queue.ask(job_id, wanted, S.PAUSING if wanted == "pause" else S.CANCELLING)
    for _ in range({"deleted": 28, "CANCELLING": 28, "PENDING": 1198}.get(state, 298)):
        prefect_says()
        queue.run_once()
    assert queue.flow_of(job_id) == first, "it may begin yet"
    for _ in range(5):
        if queue.flow_of(job_id) == first:
            prefect_says()
        queue.run_once()
    job = queue.job(job_id)
    cancelled = state == "CANCELLING" and wanted == "run"  # by someone in Prefect's page
    wanted = "cancel" if cancelled else wanted
    if state == "SCHEDULED":
        assert job.flow_run_id == first
        assert "Prefect worker" in job.reason
    elif wanted == "run":
        assert (job.state, job.losses, job.attempt) == (S.STARTING, 1, 2), "it starts again"
        (lost,) = (each for each in job.history if each.cause)
        assert (lost.state, lost.cause) == (S.RECOVERING, "lost-flow")
        assert ("does not have" if state == "deleted" else f"is {state} in Prefect") in lost.reason
    else:
        assert job.state is (S.PAUSED if wanted == "pause" else S.CANCELLED)
        assert job.placement is None


@pytest.mark.parametrize("word", ["pause", "cancel"])
def test_a_flow_made_while_its_job_is_paused_or_cancelled_is_ended(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    job_id, make = queue.submit(4), queue.flows.run

    def slow(*given: Any) -> FlowRunView:
        made = make(*given)
        queue.ask(job_id, "run", S.PAUSED if word == "pause" else S.CANCELLED)
        return made

    monkeypatch.setattr(queue.flows, "run", slow)
    queue.run_once()
    monkeypatch.undo()
    (flow,) = queue.flows.runs
    state, reason = queue.state(job_id), queue.job(job_id).reason
    queue.lead()
    queue.run_once()
    assert queue.flows.runs[flow] == "CANCELLING"
    assert (queue.state(job_id), queue.job(job_id).reason) == (state, reason)
    if word == "pause":  # Prefect still shows the first one as Cancelling
        queue.ask(job_id, "run", S.QUEUED)
        queue.run_once(2)
        assert queue.state(job_id) is S.STARTING
        assert queue.flow_of(job_id) != flow
        assert [each.attempt for each in queue.job(job_id).usage] == [1, 2]


def test_a_job_of_many_losses_goes_on_while_it_saves_checkpoints(queue: Queue) -> None:
    job_id = queue.start(2)
    for lost in range(1, 8):
        saved = JobCheckpoint(step=lost, object_ref=f"s3://b/c/{lost}", created_at=queue.now)
        queue.report(job_id, step=lost, steps=99, checkpoints=(saved,))
        queue.run_once()
        queue.ends(job_id, "CRASHED")
        queue.run_once(2)
        assert (queue.state(job_id), queue.job(job_id).losses) == (S.STARTING, lost)
    for _ in range(2):  # with the last one, three since the newest checkpoint
        queue.report(job_id, step=8, steps=99)
        queue.lead()
        queue.ends(job_id, "CRASHED")
        queue.run_once(2)
    assert queue.state(job_id) is S.STARTING
    queue.ends(job_id, "CRASHED")
    queue.run_once()
    assert queue.state(job_id) is S.FAILED
    assert "ended 4 times without a new checkpoint" in queue.job(job_id).reason


def test_a_job_whose_flow_no_worker_takes_gives_its_nodes_to_others(queue: Queue) -> None:
    job_id = queue.start(4, priority=9)
    first = queue.flow_of(job_id)
    queue.run_once(7, seconds=100)
    assert queue.flow_of(job_id) == first
    other = queue.adopt()
    queue.run_once()
    job = queue.job(job_id)
    assert (job.state, job.losses, job.placement) == (S.RECOVERING, 0, None)
    assert queue.flows.runs[first] == "CANCELLING"
    assert queue.state(other) is S.ADMITTED
    queue.report(other, outcome="succeeded")
    queue.run_once(5, seconds=100)
    job = queue.job(job_id)
    assert (job.state, job.reason) == (
        S.RECOVERING,
        "no Prefect worker has taken its flow run for 601 s",
    )
    queue.run_once(2, seconds=100)
    assert queue.state(job_id) is S.STARTING
    assert queue.flow_of(job_id) != first


def test_a_flow_that_no_worker_took_is_ended_also_where_prefect_was_busy(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = queue.start(4)
    flow, cancel, calls = queue.flow_of(job_id), queue.flows.cancel, []

    def busy_once(flow_run_id: str) -> None:
        calls.append(flow_run_id)
        if len(calls) == 1:
            raise ServiceUnavailable("Prefect's server is busy")
        cancel(flow_run_id)

    monkeypatch.setattr(queue.flows, "cancel", busy_once)
    queue.run_once(8, seconds=100)
    assert queue.state(job_id) is S.RECOVERING
    queue.run_once(2, seconds=30)
    assert queue.flows.runs[flow] == "CANCELLING"


def test_a_person_need_not_wait_for_a_job_that_no_worker_took(queue: Queue) -> None:
    job_id = queue.start(4)
    queue.run_once(8, seconds=100)
    assert queue.state(job_id) is S.RECOVERING
    queue.ask(job_id, "run", S.PAUSED)
    queue.ask(job_id, "run", S.QUEUED)
    queue.run_once()
    assert queue.state(job_id) is S.STARTING


def test_a_job_that_prefect_cannot_start_is_preempted(queue: Queue) -> None:
    low = queue.submit(4)
    queue.flows.away = True
    queue.run_once(60, seconds=10)
    assert queue.state(low) is S.ADMITTED
    high = queue.submit(4, priority=50)
    queue.run_once(2)
    assert (queue.state(low), queue.state(high)) == (S.PREEMPTED, S.ADMITTED)
    assert queue.job(low).preemptions == 1
    assert f"preempted for {high}" in queue.job(low).history[-1].reason
    queue.flows.away = False
    queue.run_once(6)
    assert queue.state(high) is S.STARTING
    assert len(queue.flows.runs) == 1


def test_of_two_victims_the_one_that_has_not_begun_is_taken() -> None:
    queue = Queue(worker("node-0"), worker("node-1"))
    begun = queue.start(1)
    queue.report(begun, step=1, steps=100)
    queue.flows.away = True
    waits = queue.submit(1)
    for _ in range(100):
        queue.report(begun, step=1, steps=100)
        queue.run_once()
    saved = JobCheckpoint(step=2, object_ref="s3://b/c/2", created_at=queue.now - 9)
    queue.report(begun, step=2, steps=100, checkpoints=(saved,))
    queue.submit(1, priority=50)
    queue.run_once()
    assert [queue.state(each) for each in (begun, waits)] == [S.RUNNING, S.PREEMPTED]


def test_while_prefect_is_away_no_flow_that_starts_is_lost(queue: Queue) -> None:
    job_id = queue.start(1)
    queue.flows.runs[queue.flow_of(job_id)] = "PENDING"
    queue.run_once(2)
    queue.flows.away = True
    queue.run_once(2, seconds=300)
    queue.flows.away = False
    queue.run_once(3, seconds=100)
    assert (queue.state(job_id), queue.job(job_id).losses) == (S.STARTING, 0)


@pytest.mark.parametrize("then", ["RUNNING", "deleted"])
def test_time_in_one_state_does_not_count_for_the_next(queue: Queue, then: str) -> None:
    job_id = queue.start(1)
    flow = queue.flow_of(job_id)
    queue.flows.runs[flow] = "PENDING"  # a Prefect worker pulls an image
    queue.run_once(3, seconds=350)
    if then == "deleted":
        del queue.flows.runs[flow]
    else:
        queue.flows.runs[flow] = then
    queue.run_once(2)
    assert (queue.flow_of(job_id), queue.job(job_id).losses) == (flow, 0)


@pytest.mark.parametrize("change_of", ["no leader", "the leader"])
def test_prefect_does_not_show_a_dead_flow_as_cancelling_for_ever(
    queue: Queue, change_of: str
) -> None:
    job_id, other = queue.submit(2), queue.submit(1)
    queue.run_once()
    dead, lives = queue.flow_of(job_id), queue.flow_of(other)
    for each in (dead, lives):
        queue.flows.runs[each] = "RUNNING"
    queue.report(job_id, step=5, steps=10)
    for _ in range(40):
        queue.report(other, step=5, steps=10)
        queue.run_once()
    assert queue.flows.runs[dead] == "CANCELLING"
    queue.ask(other, "cancel", S.CANCELLING)  # its ranks take long to save
    if change_of == "the leader":
        queue.lead()
    for second in range(80):
        if second == 40:
            assert queue.flows.runs[dead] == "CANCELLING", "its runner may end it yet"
        queue.report(other, step=5, steps=10)
        queue.run_once()
    assert queue.flows.runs[dead] == "CRASHED"
    assert queue.flows.runs[lives] == "CANCELLING", "it is not lost"


def test_a_flow_lost_while_prefect_was_away_is_cancelled_afterwards(queue: Queue) -> None:
    job_id = queue.start(2)
    lost = queue.flow_of(job_id)
    queue.flows.runs[lost] = "RUNNING"
    queue.report(job_id, step=5, steps=10)
    queue.flows.away = True
    queue.run_once(40)
    assert queue.job(job_id).losses == 1
    queue.lead()
    queue.flows.away = False
    queue.run_once(12)
    assert queue.flows.runs[lost] == "CANCELLING"


def test_a_new_leader_waits_for_reports_before_it_takes_a_flow_for_lost(queue: Queue) -> None:
    job_id = queue.start(2)
    queue.flows.runs[queue.flow_of(job_id)] = "RUNNING"
    queue.report(job_id, step=5, steps=10)
    queue.run_once()
    queue.now += 300  # no leader for five minutes
    queue.lead()
    queue.run_once(10)
    assert queue.state(job_id) is S.RUNNING
    assert len(queue.flows.runs) == 1


def test_a_new_leader_knows_how_a_flow_ended(queue: Queue) -> None:
    job_id = queue.start(2)
    digest = "a" * 64
    queue.report(
        job_id, step=9, steps=9, outcome="succeeded", review="2 shards", report_digest=digest
    )
    queue.lead()  # before the leader looked at it
    queue.ends(job_id, "COMPLETED")
    queue.run_once()
    job = queue.job(job_id)
    assert (job.state, job.reason) == (S.NEEDS_REVIEW, "2 shards")
    assert job.report is not None and (job.report.step, job.report.report_digest) == (9, digest)


def test_a_leader_that_leads_again_reads_what_was_stored_meanwhile(queue: Queue) -> None:
    job_id = queue.start(2)
    queue.report(job_id, step=3, steps=9)
    before = queue.table
    queue.lead()
    queue.report(job_id, step=9, steps=9, outcome="succeeded")
    queue.store.term = SimpleNamespace(epoch=queue.store.term.epoch + 1)
    report = before.job(job_id).report
    assert report is not None and (report.step, report.outcome) == (9, "succeeded")


def test_a_leader_that_dies_between_reservation_and_start_starts_one_flow(queue: Queue) -> None:
    job_id = queue.submit(2)
    queue.flows.away = True
    queue.run_once()
    assert queue.state(job_id) is S.ADMITTED
    reserved = queue.job(job_id).placement
    queue.flows.away = False
    run = queue.job(job_id)
    queue.flows.run("train-model", run.run_id, parameters_of(run), 1)  # started, and not recorded
    queue.lead()
    queue.run_once(2)
    assert queue.state(job_id) is S.STARTING
    assert queue.job(job_id).placement == reserved
    assert len(queue.flows.runs) == 1


def test_the_flow_gets_whether_its_job_is_judged(queue: Queue) -> None:
    job = queue.job(queue.submit(1))
    assert "evaluate_on" not in parameters_of(job)
    for url in ("", "s3://b/held"):
        spec = job.spec.model_copy(update={"evaluate_on": url})
        assert parameters_of(job.model_copy(update={"spec": spec}))["evaluate_on"] == url


def test_pause_saves_the_job_and_resume_goes_on_on_any_nodes(queue: Queue) -> None:
    job_id = queue.start(4)
    queue.ask(job_id, "pause", S.PAUSING)
    queue.run_once()
    assert queue.flows.runs[queue.flow_of(job_id)] == "CANCELLING"
    queue.run_once(3)
    assert queue.state(job_id) is S.PAUSING  # its ranks are saving
    queue.ends(job_id, "CANCELLED")
    queue.run_once()
    assert queue.state(job_id) is S.PAUSED
    other = queue.submit(3)
    queue.run_once(2)
    assert queue.state(other) is S.STARTING
    queue.table.change(job_id, lambda job: with_state(job, S.QUEUED, queue.now))
    queue.ends(other, "COMPLETED")
    queue.run_once(2)
    assert queue.state(job_id) is S.STARTING
    assert queue.job(job_id).attempt == 2


def test_checkpoints_of_an_earlier_run_stay_until_the_next_saves_its_own(queue: Queue) -> None:
    job_id = queue.start(2)
    first = JobCheckpoint(step=40, object_ref="s3://b/c/40", created_at=queue.now)
    queue.report(job_id, step=40, steps=100, checkpoints=(first,))
    queue.run_once()
    queue.ends(job_id, "CRASHED")
    queue.run_once(2)
    queue.report(job_id)  # the next flow run has made no step yet
    queue.lead()
    queue.report(job_id)
    report = queue.job(job_id).report
    assert report is not None
    assert (report.step, report.checkpoints) == (0, (first,))
    queue.ask(job_id, "pause", S.PAUSING)
    queue.report(job_id, outcome="cancelled")
    queue.run_once()
    assert "resumes at step 40" in queue.job(job_id).reason
    queue.table.change(job_id, lambda job: with_state(job, S.QUEUED, queue.now))
    queue.run_once(2)
    newer = first.model_copy(update={"step": 60})
    queue.report(job_id, step=61, steps=100, checkpoints=(newer,))
    report = queue.job(job_id).report
    assert report is not None
    assert report.checkpoints == (newer,)


def test_a_preemption_counts_work_since_the_checkpoint_or_the_begin() -> None:
    """Of two victims the one with less work to lose is taken, however long ago it began."""
    queue = Queue(worker("node-0"), worker("node-1"))
    old, young = queue.submit(1), queue.submit(1)
    queue.run_once()
    saved = JobCheckpoint(step=40, object_ref="s3://b/c/40", created_at=queue.now)
    queue.report(old, step=40, steps=100, checkpoints=(saved,))
    queue.report(young, step=1, steps=100)
    queue.run_once()
    for _ in range(100):  # for 1000 s
        queue.report(young, step=1, steps=100, checkpoints=())
        queue.report(old, step=40, steps=100, checkpoints=(saved,))
        queue.run_once(seconds=10)
    queue.ends(old, "CRASHED")
    queue.run_once(2)
    queue.report(old)  # it began again just now
    queue.run_once()
    queue.submit(1, priority=50)
    queue.run_once()
    assert [queue.state(each) for each in (young, old)] == [S.RUNNING, S.PAUSING]


def test_a_job_that_finishes_while_it_is_asked_to_pause_has_succeeded(queue: Queue) -> None:
    job_id = queue.start(2)
    queue.ask(job_id, "pause", S.PAUSING)
    queue.ends(job_id, "COMPLETED")
    queue.run_once()
    assert queue.state(job_id) is S.SUCCEEDED


def test_a_higher_priority_preempts_and_the_victim_comes_back_by_itself(queue: Queue) -> None:
    low = queue.submit(4, priority=0)
    queue.run_once(2)
    queue.report(low, step=7, steps=100)
    high = queue.submit(4, priority=50)
    queue.run_once(2)
    assert queue.state(low) is S.PAUSING
    assert high in queue.job(low).reason
    queue.ends(low, "CANCELLED")
    queue.run_once(2)
    assert (queue.state(low), queue.state(high)) == (S.PREEMPTED, S.STARTING)
    assert queue.job(low).preemptions == 1
    queue.ends(high, "COMPLETED")
    queue.run_once(2)
    assert queue.state(low) is S.STARTING


def test_a_cancel_in_prefects_page_cancels_the_job(queue: Queue) -> None:
    job_id = queue.start(2)
    queue.flows.runs[queue.flow_of(job_id)] = "CANCELLING"
    queue.run_once()
    assert queue.state(job_id) is S.CANCELLING
    queue.ends(job_id, "CANCELLED")
    queue.run_once()
    assert (queue.state(job_id), queue.job(job_id).reason) == (S.CANCELLED, "cancelled in Prefect")


def test_bad_data_needs_a_review(queue: Queue) -> None:
    job_id = queue.start(2)
    queue.report(job_id, step=9, steps=9, outcome="succeeded", review="passed over: 2 shards")
    queue.run_once()
    assert queue.state(job_id) is S.NEEDS_REVIEW
    assert "2 shards" in queue.job(job_id).reason
    queue.run_once(3)
    assert queue.state(job_id) is S.NEEDS_REVIEW


def test_parameters_that_prefect_refuses_fail_the_job_and_free_its_nodes(queue: Queue) -> None:
    queue.flows.refuses = True
    job_id = queue.start(4)
    assert queue.state(job_id) is S.FAILED
    queue.flows.refuses = False
    other = queue.start(4)
    assert queue.state(other) is S.STARTING


def test_an_adopted_flow_waits_its_turn_and_is_never_preempted(queue: Queue) -> None:
    first = queue.start(3)
    mine = queue.adopt()
    for _ in range(40):
        queue.report(mine)
        queue.run_once()
    assert queue.state(mine) is S.QUEUED
    queue.ends(first, "COMPLETED")
    queue.run_once()
    assert queue.state(mine) is S.ADMITTED
    queue.report(mine)
    queue.run_once()
    assert queue.state(mine) is S.STARTING
    queue.submit(4, priority=100)
    queue.report(mine, step=1, steps=2)
    queue.run_once(3)
    assert queue.state(mine) is S.RUNNING
    queue.report(mine, outcome="succeeded")
    queue.run_once()
    assert queue.state(mine) is S.SUCCEEDED


def test_an_adopted_flow_that_can_wait_is_preempted_and_goes_on_in_place(queue: Queue) -> None:
    mine = queue.adopt(yields=True)
    queue.run_once()
    queue.report(mine, step=30, steps=100, made_steps=30)
    queue.run_once(2)
    assert queue.state(mine) is S.RUNNING
    high = queue.submit(4, priority=100)
    queue.run_once(2)
    job = queue.job(mine)
    assert (job.state, job.wanted) == (S.PAUSING, "yield")
    queue.report(mine, step=31, steps=100, made_steps=31)
    queue.run_once(2)
    assert queue.state(mine) is S.PAUSING, "its ranks still save"
    queue.lead()
    queue.report(mine, step=32, steps=100, made_steps=32, waits=True)
    queue.run_once()
    job = queue.job(mine)
    assert (job.state, job.preemptions, job.flow_run_id) == (S.PREEMPTED, 1, "by-hand")
    assert (job.usage[-1].steps, job.usage[-1].ended) == (32, S.PREEMPTED)
    assert "by-hand" not in queue.flows.runs, "nothing was cancelled in Prefect"
    assert queue.state(high) is S.STARTING
    for _ in range(40):
        queue.report(mine, waits=True)
        queue.run_once()
    assert queue.state(mine) is S.PREEMPTED
    queue.ends(high, "COMPLETED")
    queue.run_once()
    queue.report(mine, step=32, waits=True)  # it has not read that it is admitted
    queue.run_once()
    assert queue.state(mine) is S.ADMITTED
    queue.report(mine)
    queue.run_once()
    assert queue.state(mine) is S.STARTING
    queue.report(mine, step=100, steps=100, made_steps=68, outcome="succeeded")
    queue.run_once()
    job = queue.job(mine)
    assert (job.state, [each.steps for each in job.usage]) == (S.SUCCEEDED, [32, 68])
    assert [each.attempt for each in job.usage] == [1, 2]


@pytest.mark.parametrize("report", [{"outcome": "cancelled"}, {}], ids=["Ctrl-C", "lost"])
def test_an_adopted_flow_that_ends_while_it_yields_is_not_started_again(
    queue: Queue, report: dict[str, Any]
) -> None:
    mine = queue.adopt(yields=True)
    queue.run_once()
    queue.report(mine, step=30)
    queue.run_once(2)
    queue.submit(4, priority=100)
    queue.run_once(2)
    assert queue.job(mine).wanted == "yield"
    queue.report(mine, step=30, **report)
    queue.run_once(3, seconds=15)
    assert queue.state(mine) is (S.CANCELLED if report else S.FAILED)


def test_an_adopted_flow_that_dies_while_paused_fails_with_what_to_do(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.submit(4)
    queue.run_once()
    mine = queue.adopt()
    queue.report(mine, waits=True)
    queue.table.change(
        mine, lambda job: with_state(job, S.PAUSED, queue.now, "pause requested by ada")
    )
    for _ in range(40):
        queue.report(mine, waits=True)
        queue.run_once()
    assert queue.state(mine) is S.PAUSED, "its process lives"
    queue.run_once(2, seconds=20)
    job = queue.job(mine)
    assert (job.state, job.ended_at) == (S.FAILED, queue.now)
    assert job.reason == (
        "its flow has not reported for 41 s while it was paused; "
        "start it again: it resumes its checkpoint"
    )
    assert "is left as it is" not in caplog.text


@pytest.mark.parametrize("before", [S.QUEUED, S.PAUSED])
@pytest.mark.parametrize("review", ["", "2 shards"])
def test_an_adopted_flow_that_completes_as_it_waits_ends_its_job(
    queue: Queue, caplog: pytest.LogCaptureFixture, before: JobState, review: str
) -> None:
    queue.submit(4)
    queue.run_once()
    mine = queue.adopt()
    queue.report(mine, waits=True)
    if before is S.PAUSED:
        queue.ask(mine, "run", S.PAUSED)
    queue.report(mine, outcome="succeeded", review=review)
    queue.run_once(3)
    assert queue.state(mine) is (S.NEEDS_REVIEW if review else S.SUCCEEDED)
    assert "is left as it is" not in caplog.text


def test_an_adopted_flow_that_dies_while_it_waits_gives_its_place_up(queue: Queue) -> None:
    queue.submit(4)
    queue.run_once()
    mine = queue.adopt()
    queue.report(mine)
    queue.run_once(3, seconds=15)
    assert queue.state(mine) is S.FAILED
    assert "start it again" in queue.job(mine).reason


def test_a_report_of_an_earlier_flow_run_is_left_out(queue: Queue) -> None:
    job_id = queue.start(2)
    queue.table.report(job_id, JobReport(at=queue.now, flow_run_id="older", outcome="failed"))
    queue.run_once()
    assert queue.state(job_id) is S.STARTING


def test_accelerators_labels_and_a_part_of_a_kinds_name_choose_the_hosts() -> None:
    queue = Queue(
        worker("cpu-0"),
        worker("a-0", 8, capacity="spot"),
        worker("a-1", 8),
        worker("a-2", 8, pool="research"),
        worker("h-0", 8, "NVIDIA H100 80GB HBM3"),
    )
    ours = {"training.ranks_per_node": 0}
    wanted = {
        "h-0": {"accelerator": "h100"},
        "a-0": {"accelerator": "a100", "capacity": "spot"},
        "a-2": {"node_labels": {"pool": "research"}},
        "a-1": {"accelerator": "A100", "capacity": "on-demand", "memory_bytes": 80 << 30},
    }
    for host, resources in wanted.items():
        job_id = queue.submit(8, resources=resources, parameters=ours)
        queue.run_once()
        placement = queue.job(job_id).placement
        assert placement is not None, queue.job(job_id).reason
        assert (placement.hosts, placement.level) == ({host: 8}, "host")


def test_of_a_host_with_cards_of_two_kinds_the_most_alike_are_slots() -> None:
    mixed = worker("mixed", 2)
    cards = [
        Accelerator(kind=kind, count=count, memory_bytes=80 << 30)
        for kind, count in (("NVIDIA A100", 4), ("NVIDIA H100", 5))
    ]
    assert mixed.inventory is not None
    machine = mixed.inventory.model_copy(update={"accelerators": tuple(cards)})
    (host,) = hosts_of(
        [mixed.model_copy(update={"inventory": machine})], load_profile("ci").training
    )
    assert (host.kind, host.slots) == ("NVIDIA H100", 5)


@pytest.mark.parametrize("state", list(S))
def test_changes_that_may_not_follow_are_refused(queue: Queue, state: JobState) -> None:
    job = queue.job(queue.submit(2)).model_copy(update={"state": state})
    for following in S:
        if following in NEXT[state]:
            made = with_state(job, following, 1.0)
            assert (made.state, made.history[-1].state) == (following, following)
        else:
            with pytest.raises(Conflict, match=f"is {state} cannot become {following}"):
                with_state(job, following, 1.0)
    assert bool(NEXT[state]) is not state.is_final
    if state.waits or state.holds_hosts:
        assert NEXT[state] & {S.CANCELLED, S.CANCELLING}, "it can be cancelled"


def test_a_key_that_belongs_to_another_submission_is_refused(queue: Queue) -> None:
    spec = SubmitJob(model_id="acme/tiny", version="1", data_snapshot=SNAPSHOT)
    job = queue.add(spec)
    assert queue.table.add(job) == job
    with pytest.raises(Conflict, match="idempotency"):
        queue.table.add(job.model_copy(update={"submission_id": "0" * 64}))


def test_a_job_whose_settings_the_profile_no_longer_takes_stops_no_other(queue: Queue) -> None:
    """The profile may have changed since the job was submitted, and refuses it then."""
    running = queue.start(2)
    stale = {"parameters": {"training.of_an_older_release": 1}}
    queue.table.change(
        running, lambda job: job.model_copy(update={"spec": job.spec.model_copy(update=stale)})
    )
    queue.lead()
    refused, other = queue.submit(1, priority=9, **stale), queue.submit(2)
    queue.run_once(2)
    assert queue.state(refused) is S.FAILED
    assert "training.of_an_older_release" in queue.job(refused).reason
    assert [queue.state(each) for each in (running, other)] == [S.STARTING, S.STARTING]


def test_what_goes_wrong_with_one_job_stops_no_other(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, other = queue.submit(1), queue.submit(1)
    queue.run_once()
    following = queue.scheduler._follow_one

    def follow(job: TrainingJob, state: str) -> None:
        if job.job_id == broken:
            raise ValueError("a report that nothing expects")
        following(job, state)

    monkeypatch.setattr(queue.scheduler, "_follow_one", follow)
    queue.report(other, step=1, steps=9)
    last = queue.start(1)
    assert [queue.state(each) for each in (other, last)] == [S.RUNNING, S.STARTING]


def test_of_jobs_that_have_ended_the_newest_are_kept(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.jobs.table.MOST_ENDED", 2)
    jobs = [queue.submit(1) for _ in range(4)]
    ended = [jobs[2], jobs[0], jobs[1]]
    for each in ended:
        queue.now += 1
        queue.ask(each, "cancel", S.CANCELLED)
    kept = {each.job_id for each in queue.table.jobs()}
    assert kept == {jobs[0], jobs[1], jobs[3]} == set(queue.store.records)
    queue.report(jobs[0], step=1, steps=9)
    assert queue.job(jobs[0]).report is None, "a late report of a job that has ended"


def test_a_job_resumes_on_the_kind_that_it_began_on() -> None:
    queue = Queue(worker("a-0", 8), worker("h-0", 8, "NVIDIA H100"))
    job_id = queue.start(8, parameters={"training.ranks_per_node": 0})
    (kind,) = queue.job(job_id).usage[-1].accelerators
    queue.ask(job_id, "pause", S.PAUSING)
    saved = JobCheckpoint(step=5, object_ref="s3://b/c/5", created_at=queue.now)
    queue.report(job_id, step=5, steps=9, checkpoints=(saved,), outcome="cancelled")
    queue.run_once()
    queue.lead()
    assert (queue.state(job_id), queue.job(job_id).kind) == (S.PAUSED, kind)
    queue.store.workers = [worker("x-0", 8, "NVIDIA L4"), worker("y-0", 8, kind, capacity="spot")]
    queue.table.change(job_id, lambda job: with_state(job, S.QUEUED, queue.now))
    queue.run_once()
    assert queue.job(job_id).placement is not None
    assert set(queue.job(job_id).placement.hosts) == {"y-0"}  # type: ignore[union-attr]


def test_a_job_without_a_checkpoint_resumes_on_any_kind() -> None:
    queue = Queue(worker("a-0", 8))
    job_id = queue.start(8, parameters={"training.ranks_per_node": 0})
    queue.report(job_id, step=5, steps=9)
    queue.run_once()
    queue.ask(job_id, "pause", S.PAUSING)
    queue.report(job_id, step=5, steps=9, outcome="cancelled")
    queue.run_once()
    assert queue.job(job_id).reason == "pause; no step was made yet", "none was saved"
    queue.store.workers = [worker("x-0", 8, "NVIDIA L4")]
    queue.ask(job_id, "run", S.QUEUED)
    queue.run_once()
    assert queue.state(job_id) is S.STARTING, queue.job(job_id).reason


def test_a_flow_run_that_no_worker_takes_is_named_in_the_jobs_reason(queue: Queue) -> None:
    job_id = queue.submit(1)
    queue.run_once(2)
    assert queue.job(job_id).reason == ""
    queue.run_once(seconds=61.0)
    assert "Prefect worker" in queue.job(job_id).reason
    queue.report(job_id, step=1, steps=9)
    queue.run_once()
    assert (queue.state(job_id), queue.job(job_id).reason) == (S.RUNNING, "")
