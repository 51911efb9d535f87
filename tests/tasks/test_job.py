"""A training flow and its job in the queue: only the flow run that the queue started may train."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from paceline.client import raised
from paceline.config import PriceSettings
from paceline.errors import Conflict, TemporaryError
from paceline.schemas import (
    AdoptJob,
    JobPlacement,
    JobReport,
    JobState,
    JobUsage,
    Moved,
    RankEvent,
    SubmitJob,
    TrainingJob,
    new_run_id,
)
from paceline.tasks._support import cancelling, job as job_module
from paceline.tasks._support.figures import record_result
from paceline.tasks._support.job import StepTimes, linked
from tests.jobs.test_cost import result
from tests.support.stack import wait_until

JOB_ID = "tj-0123456789ab"
SPEC = SubmitJob(model_id="acme/tiny", version="1", data_snapshot="s3://b/data/snapshots/0")


class Coordinator:
    """Holds one job, which ``flow_run_id`` runs on two hosts."""

    def __init__(self, flow_run_id: str, state: JobState = JobState.STARTING) -> None:
        self.reports: list[JobReport] = []
        self.job = TrainingJob(
            job_id=JOB_ID, submission_id="0" * 64, spec=SPEC, run_id=new_run_id(), state=state,
            created_at=1.0, updated_at=1.0, flow_run_id=flow_run_id,
            placement=JobPlacement(hosts={"node-1": 1, "node-0": 1}, level="rack"),
        )  # fmt: skip

    def report_job(self, job_id: str, report: JobReport) -> TrainingJob:
        assert job_id == JOB_ID
        self.reports.append(report)
        return self.job


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "REPORT_S", 0.01)
    monkeypatch.setattr(job_module, "WAIT_S", 0.01)
    monkeypatch.setattr(job_module.flow_run, "get_id", lambda: "mine")
    monkeypatch.setattr(cancelling, "_ids", list)  # no Prefect to ask


def run_of(coordinator: Coordinator) -> Any:
    return SimpleNamespace(
        coordinator=coordinator,
        retry=lambda call: call(),
        summary=SimpleNamespace(notes=[]),
        run_id=new_run_id(),
        job=None,
    )


def test_the_flow_run_of_the_queue_trains_on_the_hosts_that_it_reserved() -> None:
    coordinator = Coordinator("mine")
    with linked(run_of(coordinator), SPEC, JOB_ID) as link:
        assert link.hosts == ["node-0", "node-1"]
        assert link.admitted() == coordinator.job.placement
        assert not link.superseded.is_set()
    assert [each.outcome for each in coordinator.reports][-1] == "succeeded"
    assert {each.flow_run_id for each in coordinator.reports} == {"mine"}


def test_a_flow_run_given_the_id_of_anothers_job_is_refused() -> None:
    coordinator = Coordinator("theirs")
    with (
        pytest.raises(Conflict, match="another flow run") as refused,
        linked(run_of(coordinator), SPEC, JOB_ID),
    ):
        raise AssertionError
    assert "theirs" in refused.value.one_line()


def test_it_waits_until_the_queue_has_recorded_that_it_started_it() -> None:
    coordinator = Coordinator("", JobState.ADMITTED)
    reported = coordinator.report_job

    def recorded(job_id: str, report: JobReport) -> TrainingJob:
        if len(coordinator.reports) == 3:
            update = {"flow_run_id": "mine", "state": JobState.STARTING}
            coordinator.job = coordinator.job.model_copy(update=update)
        return reported(job_id, report)

    coordinator.report_job = recorded  # type: ignore[method-assign]
    with linked(run_of(coordinator), SPEC, JOB_ID) as link:
        assert link.hosts


@pytest.mark.parametrize(
    "update",
    [{"flow_run_id": "the next one"}, {"state": JobState.CANCELLED}, {"flow_run_id": None}],
    ids=["another flow run", "ended", "waits again"],
)
def test_a_flow_run_that_lost_its_job_learns_it_while_it_trains(update: dict[str, Any]) -> None:
    coordinator = Coordinator("mine")
    with linked(run_of(coordinator), SPEC, JOB_ID) as link:
        time.sleep(0.05)
        assert not link.superseded.is_set()
        coordinator.job = coordinator.job.model_copy(update=update)
        wait_until(link.superseded.is_set, 10, "it learns that the job is another's")


def test_a_trial_reports_at_each_point_where_its_sweep_may_prune_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_module, "REPORT_S", 300.0)
    monkeypatch.setattr(job_module, "NEWS_S", 0.01)
    coordinator = Coordinator("mine")
    spec = SPEC.model_copy(update={"sweep": new_run_id()})
    coordinator.job = coordinator.job.model_copy(update={"spec": spec})
    with linked(run_of(coordinator), spec, JOB_ID) as link:
        for step in (1, 100, 200):  # the first tells that the rank runs
            data = {"loss": 1.0, "worker_id": "node-0"}
            link.take(RankEvent(event="step", rank=0, attempt=1, step=step, data=data), 1600)
            reached = lambda step=step: step in [each.step for each in coordinator.reports]  # noqa: E731
            wait_until(reached, 10, f"step {step} is reported")


def test_bytes_of_the_object_store_are_reported_while_it_trains() -> None:
    coordinator = Coordinator("mine")
    with linked(run_of(coordinator), SPEC, JOB_ID) as link:
        for reused in (False, True):
            link.relayed(Moved.model_construct(origin_bytes=700, reused_result=reused))
        for step in range(1, 11):
            data = {"url": f"s3://b/{step}", "digest": "0" * 64, "bytes": 50}
            link.take(RankEvent(event="checkpoint", rank=0, attempt=1, step=step, data=data), 20)
    last = coordinator.reports[-1]
    assert (last.read_bytes, last.written_bytes) == (700, 500), "a result found again moved nothing"
    assert sum(each.bytes for each in last.checkpoints) == 8 * 50, "of those that are listed"


def test_bytes_that_ranks_read_are_added_to_those_of_relays() -> None:
    coordinator = Coordinator("mine")
    with linked(run_of(coordinator), SPEC, JOB_ID) as link:
        link.relayed(Moved.model_construct(origin_bytes=700, reused_result=False))
        for step, read in ((1, 40), (2, 40), (3, 90)):  # of all ranks so far
            data: dict[str, object] = {"read_bytes": read}
            link.take(RankEvent(event="step", rank=0, attempt=1, step=step, data=data), 20)
            own: dict[str, object] = {"read_bytes": 5}  # in the sum of rank 0
            link.take(RankEvent(event="step", rank=1, attempt=1, step=step, data=own), 20)
    assert coordinator.reports[-1].read_bytes == 790


def test_mlflow_has_the_price_of_the_nodes_that_the_queue_counted() -> None:
    coordinator, logged = Coordinator("mine"), dict[str, float]()
    held = JobUsage(attempt=1, accelerators={"cpu": 2}, since=1.0, node_share=0.5, spot_share=0.0)
    coordinator.job = coordinator.job.model_copy(update={"usage": (held,)})
    with linked(run_of(coordinator), SPEC, JOB_ID) as link:
        assert link.held == held
    registry: Any = SimpleNamespace(
        log_metrics=lambda _, points: logged.update({each.key: each.value for each in points}),
        log_tags=lambda *_: None,
        log_artifact_text=lambda *_: None,
    )
    prices = PriceSettings(per_hour={"cpu": 3.0}, spot_factor=0.1)
    record_result(registry, "run", result(accelerators={"cpu": 2}), prices, held)
    assert logged["cost/total"] == pytest.approx(3.0)


def test_steps_are_counted_once_and_their_time_by_class() -> None:
    times = StepTimes()

    def step(now_s: float, number: int, attempt: int = 1, **more: float) -> None:
        data: dict[str, object] = {"step_seconds": 1.0, **more}
        times.take(RankEvent(event="step", rank=0, attempt=attempt, step=number, data=data), now_s)

    times.take(RankEvent(event="resumed", rank=0, attempt=1, step=10), 0.0)
    step(100.0, 11, waited_s=50.0)  # it waited in an earlier flow run
    step(102.0, 12, waited_s=50.5, stalled_s=0.25)
    assert (times.made_steps, times.seconds) == (
        2,
        {"useful": 2.25, "data_wait": 0.5, "checkpoint": 0.25, "recovery": 0.0},
    )
    # A rank dies; the gang goes on after step 11 and makes step 12 again.
    times.take(RankEvent(event="resumed", rank=0, attempt=2, step=11), 120.0)
    step(130.0, 12, attempt=2, waited_s=50.5)
    step(131.0, 13, attempt=2, waited_s=50.5)
    assert (times.made_steps, times.seconds) == (
        3,
        {"useful": 3.25, "data_wait": 0.5, "checkpoint": 0.25, "recovery": 28.0},
    )
    assert times.began_step == 10


def test_a_preempted_adopted_training_reports_each_attempt_once() -> None:
    coordinator = Coordinator("mine", JobState.RUNNING)
    run, warned = run_of(coordinator), list[str]()
    run.warn, run.report = warned.append, lambda *_: None
    adopted: list[AdoptJob] = []

    def adopt(call: AdoptJob) -> TrainingJob:
        adopted.append(call)
        return coordinator.job

    def becomes(state: JobState, wanted: str, placement: JobPlacement | None) -> None:
        coordinator.job = coordinator.job.model_copy(
            update={"state": state, "wanted": wanted, "placement": placement, "adopted": True}
        )

    coordinator.adopt_job = adopt  # type: ignore[attr-defined]
    first, second = coordinator.job.placement, JobPlacement(hosts={"node-2": 2}, level="host")
    becomes(JobState.ADMITTED, "run", first)
    with linked(run, SPEC, None) as link:
        assert link.admitted() == first
        for number in (1, 2):
            link.take(RankEvent(event="step", rank=0, attempt=1, step=number), 9)
        assert not link.gives_way(), "nothing preempts it"
        becomes(JobState.PAUSING, "yield", first)
        wait_until(link.preempted.is_set, 10, "it learns that it is preempted")
        assert link.gives_way()
        assert "waits for its next hosts" in warned[-1]
        seen = len(coordinator.reports)
        waiting = threading.Thread(target=link.admitted)
        waiting.start()
        wait_until(lambda: len(coordinator.reports) > seen + 2, 10, "it reports that it waits")
        last = coordinator.reports[-1]
        assert (last.waits, last.step, last.made_steps) == (True, 2, 2)
        assert waiting.is_alive(), "the hosts of the attempt that ends are not its own any more"
        becomes(JobState.PREEMPTED, "run", None)
        time.sleep(0.05)
        assert waiting.is_alive()
        becomes(JobState.ADMITTED, "run", second)
        waiting.join(10)
        assert link.placement == second and not link.gives_way()
        link.take(RankEvent(event="resumed", rank=0, attempt=2, step=2), 9)
        link.take(RankEvent(event="step", rank=0, attempt=2, step=3), 9)
    last = coordinator.reports[-1]
    assert (last.outcome, last.waits, last.step, last.made_steps) == ("succeeded", False, 3, 1)
    assert [(each.yields, each.flow_run_id) for each in adopted] == [(True, "mine")]


def test_ctrl_c_inside_a_finalizer_ends_the_wait_for_admission() -> None:
    coordinator = Coordinator("mine", JobState.QUEUED)
    coordinator.job = coordinator.job.model_copy(update={"placement": None, "reason": "full"})
    run = run_of(coordinator)
    run.report = lambda *_: None

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)  # what its handler raises here is lost

    def report_job(_job_id: str, report: JobReport) -> TrainingJob:
        coordinator.reports.append(report)
        if len(coordinator.reports) == 2:
            Finalized()
        assert len(coordinator.reports) < 10, "it waits on"
        return coordinator.job

    coordinator.report_job = report_job  # type: ignore[method-assign]
    coordinator.adopt_job = lambda _call: coordinator.job  # type: ignore[attr-defined]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), linked(run, SPEC, None) as link:
            link.admitted()
    finally:
        signal.signal(signal.SIGINT, before)
    assert coordinator.reports[-1].outcome == "cancelled"


def test_a_rank_that_starts_again_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "REPORT_S", 600.0)
    monkeypatch.setattr(job_module, "NEWS_S", 0.0)
    coordinator = Coordinator("mine")

    def seen() -> list[tuple[int, str]]:
        return [(e.attempt, rank.state) for e in coordinator.reports for rank in e.workers]

    with linked(run_of(coordinator), SPEC, JOB_ID) as link:
        for attempt, event, state in (
            (1, "started", "starting"),
            (1, "resumed", "running"),
            (2, "started", "starting"),
            (2, "resumed", "running"),
        ):
            data: dict[str, object] = {"worker_id": "node-0"}
            link.take(RankEvent.model_validate(
                {"event": event, "rank": 0, "attempt": attempt, "step": 0, "data": data}
            ), 9)  # fmt: skip
            wait_until(lambda each=(attempt, state): each in seen(), 10, f"{event} is reported")


def test_failures_are_reported_by_host_and_kind() -> None:
    coordinator = Coordinator("mine")
    with linked(run_of(coordinator), SPEC, JOB_ID) as link:
        link.take(
            RankEvent(event="resumed", rank=1, attempt=1, data={"worker_id": "node-1"}), steps=9
        )
        for kind, host in [("lost", "node-1"), ("lost", "node-1"), ("preempted", "node-0")]:
            why: dict[str, object] = {"kind": kind, "worker_id": host, "reason": "gone"}
            link.take(RankEvent(event="lost", rank=1, attempt=1, data=why), steps=9)
    last = coordinator.reports[-1]
    assert last.failures == {"node-1": {"lost": 2}}
    assert [each.state for each in last.workers] == ["ended"]


def away(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1:4200/api/task_runs/")
    return httpx.HTTPStatusError(
        "no", request=request, response=httpx.Response(status, request=request)
    )


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (away(503), True),
        (away(500), True),
        (away(404), False),
        (httpx.ReadTimeout("30 s"), True),
        (TimeoutError("of something else"), False),
    ],
    ids=["503", "500", "404", "no answer", "another timeout"],
)
def test_the_queue_starts_a_flow_again_whose_prefect_server_is_busy(
    error: Exception, passes: bool
) -> None:
    coordinator = Coordinator("mine")
    with pytest.raises(type(error)), linked(run_of(coordinator), SPEC, JOB_ID):
        raise error
    last = coordinator.reports[-1]
    kind, _ = raised(last.error)
    assert last.outcome == "failed"
    assert (kind is not None and issubclass(kind, TemporaryError)) is passes, last.error


def test_data_passed_over_are_counted_while_it_trains() -> None:
    coordinator = Coordinator("mine")
    with linked(run_of(coordinator), SPEC, JOB_ID) as link:
        for rank, bad in ((0, ["a", "b#7"]), (1, ["a"]), (1, [])):  # each rank names what it met
            data = {"quarantined_shards": bad} if bad else {}
            link.take(RankEvent(event="step", rank=rank, attempt=1, step=1, data=data), 20)
        counted = lambda: 2 in [each.quarantined for each in coordinator.reports]  # noqa: E731
        wait_until(counted, 10, "the count is reported")
    assert coordinator.reports[-1].quarantined == 2
