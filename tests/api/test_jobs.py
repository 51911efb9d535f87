"""What the routes of training jobs refuse without an installation around them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.api.jobs import make_job_router
from paceline.config import Profile
from paceline.coordinator import Caller, current_call
from paceline.coordinator.callers import Call
from paceline.errors import AccessDenied, Conflict, InvalidInput, NotFound
from paceline.jobs import JobTable, with_state
from paceline.jobs.states import with_budget_warning
from paceline.schemas import (
    Accelerator,
    AdoptJob,
    FlowRunView,
    Inventory,
    JobCheckpoint,
    JobPlacement,
    JobReport,
    JobState,
    JobUsage,
    Labels,
    Resources,
    Scope,
    SubmitJob,
    TrainingJob,
    Worker,
    digest_of,
    new_run_id,
)
from tests.api.conftest import make_runtime

S = JobState
SPEC = SubmitJob(model_id="acme/tiny", version="1", data_snapshot="s3://b/data/snapshots/0")


class Coordinator:
    """Leads, keeps jobs in memory, and has one host of eight accelerators."""

    term = SimpleNamespace(epoch=1)

    def __init__(self) -> None:
        self.kept: dict[str, TrainingJob] = {}
        self.kind = "NVIDIA A100"
        self.heard_at: float | None = None  # of its node, where that is silent

    def jobs(self) -> list[TrainingJob]:
        return list(self.kept.values())

    def save_job(self, job: TrainingJob, dropped: tuple[str, ...] = ()) -> None:
        self.kept[job.job_id] = job

    def read(self, question: Any) -> Any:
        cards = Accelerator(kind=self.kind, count=8, memory_bytes=80 << 30)
        host = Worker(
            worker_id="a-0",
            hostname="a-0",
            labels=Labels(),
            address="a-0:1",
            available_storage=1,
            link_mbit=1000,
            incarnation=1,
            alive=self.heard_at is None,
            last_heartbeat=self.heard_at or 0.0,
            inventory=Inventory(
                cores=8, memory_bytes=1, shared_memory_bytes=1, accelerators=(cards,)
            ),
        )
        return question(SimpleNamespace(fleet=SimpleNamespace(workers=lambda: [host])))


class Routes:
    """The routes' functions, by name, over one coordinator."""

    def __init__(self, profile: Profile, state_dir: Path) -> None:
        self.coordinator = Coordinator()
        self.table = JobTable(self.coordinator)  # type: ignore[arg-type]
        runtime = make_runtime(state_dir).model_copy(update={"profile": profile})
        self.logs: dict[str, list[str]] = {}  # flow run → its lines
        router = make_job_router(
            runtime,
            self.coordinator,  # type: ignore[arg-type]
            self.table,
            SimpleNamespace(page_of=lambda _: "", view=self.view),  # type: ignore[arg-type]
        )
        self.of = {each.name: each.endpoint for each in router.routes}  # type: ignore[attr-defined]

    def view(self, flow_run_id: str, after: int, tail: int) -> FlowRunView:
        """Return a flow run that has ended, with a part of its log."""
        lines = self.logs[flow_run_id][-tail:] if tail else self.logs[flow_run_id][after:]
        return FlowRunView(
            flow_run_id=flow_run_id, flow="", run_id="", state="COMPLETED", lines=tuple(lines)
        )

    def paused(self, kind: str) -> str:
        """Return a job that began on accelerators of ``kind`` and was paused."""
        job = TrainingJob(
            job_id="tj-0123456789ab",
            submission_id="0" * 64,
            spec=SPEC,
            run_id=new_run_id(),
            state=S.QUEUED,
            created_at=1.0,
            updated_at=1.0,
        )
        placed = {"placement": JobPlacement(hosts={"a-0": 1}, level="host"), "kind": kind}
        for state, more in ((S.ADMITTED, placed), (S.STARTING, {}), (S.PAUSED, {})):
            job = with_state(job, state, 2.0, **more)
        return self.table.add(job).job_id


@pytest.fixture
def routes(tmp_path: Path) -> Iterator[Routes]:
    quotas = {"nlp": {"slots": 4, "max_priority": 5}}
    caller = Caller(name="ann", token_id="t", scopes=frozenset({Scope.TRAIN}))
    token = current_call.set(Call(caller=caller, what="POST", address="127.0.0.1"))
    yield Routes(Profile.model_validate({"jobs": {"quotas": quotas}}), tmp_path)
    current_call.reset(token)


@pytest.fixture
def inputs_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshot, source and model of every job count as there, and as allowed."""
    monkeypatch.setattr("paceline.api.jobs._require_snapshot", lambda *_: None)
    monkeypatch.setattr("paceline.api.jobs.allowed_source", lambda *_: None)
    monkeypatch.setattr("paceline.api.jobs.fetch_allowed_manifest", lambda *_: None)


@pytest.mark.usefixtures("inputs_exist")
def test_a_priority_above_the_teams_is_refused(routes: Routes) -> None:
    urgent = SPEC.model_copy(update={"team": "nlp", "priority": 6})
    with pytest.raises(AccessDenied, match=r"got 6.*at most 5.*nlp"):
        routes.of["submit_job"](urgent)
    routes.of["submit_job"](urgent.model_copy(update={"priority": 5}))
    routes.of["submit_job"](urgent.model_copy(update={"team": "another", "priority": 0}))
    assert len(routes.coordinator.kept) == 2


@pytest.mark.parametrize(
    ("asked", "error", "why"),
    [
        ({"team": "nlp", "priority": 6}, AccessDenied, r"got 6.*at most 5.*nlp"),
        ({"budget": 3.0}, InvalidInput, "a budget needs prices"),
        ({"resources": {"ranks": 9}}, InvalidInput, "would never get its nodes"),
        ({"resources": {"accelerator": "h100"}}, InvalidInput, "would never get its nodes"),
        ({"resources": {"queue": "gpu"}}, InvalidInput, "has no partitions"),
    ],
)
def test_a_training_started_otherwise_may_ask_for_no_more_than_a_job(
    routes: Routes, asked: dict[str, Any], error: type[Exception], why: str
) -> None:
    spec = SubmitJob.model_validate(SPEC.model_dump() | asked)
    with pytest.raises(error, match=why):
        routes.of["adopt_job"](AdoptJob(spec=spec, run_id=new_run_id(), flow_run_id="f"))
    assert not routes.coordinator.kept
    possible = {"team": "nlp", "priority": 5, "name": "n", "resources": {"accelerator": "a100"}}
    spec = SubmitJob.model_validate(SPEC.model_dump() | possible)
    call = AdoptJob(spec=spec, run_id=new_run_id(), flow_run_id="f")
    assert routes.of["adopt_job"](call).job.spec == spec


@pytest.mark.usefixtures("inputs_exist")
def test_the_profile_says_whether_a_job_is_judged(tmp_path: Path, routes: Routes) -> None:
    def judged_on(routes: Routes, **given: str) -> str | None:
        spec = SubmitJob.model_validate(SPEC.model_dump() | given)
        found: str | None = routes.of["submit_job"](spec).job.spec.evaluate_on
        return found

    assert judged_on(routes) is None
    always = Routes(Profile.model_validate({"evaluation": {"after_training": True}}), tmp_path)
    assert judged_on(always) == SPEC.data_snapshot
    assert judged_on(always, evaluate_on="s3://b/other") == "s3://b/other"
    assert judged_on(always, evaluate_on="") == "", "--no-evaluate"
    assert judged_on(always, sweep=new_run_id()) == "", "a sweep compares its trials itself"
    spec = SPEC.model_copy(update={"evaluate_on": ""})
    ids = [always.of["submit_job"](each).job.submission_id for each in (SPEC, spec)]
    sent = SPEC.model_copy(update={"team": "default"}).model_dump(mode="json")
    assert ids == [digest_of(sent)] * 2, "the profile has no part in it"


@pytest.mark.usefixtures("inputs_exist")
def test_a_key_of_the_release_before_finds_its_job(routes: Routes) -> None:
    stored = "4a037d6048c23701c83b2b4f2032d652710191116787921ec44f399caa2ce995"  # of that release
    assert routes.of["submit_job"](SPEC, "release-1").job.submission_id == stored


@pytest.mark.parametrize(("skew_s", "shown_s"), [(3600.0, -10.0), (-3600.0, -10.0), (1.0, -9.0)])
def test_a_checkpoint_has_a_time_of_the_coordinators_clock(
    routes: Routes, skew_s: float, shown_s: float
) -> None:
    spec = SPEC.model_copy(update={"resources": Resources()})
    call = AdoptJob(spec=spec, run_id=new_run_id(), flow_run_id="f")
    job_id = routes.of["adopt_job"](call).job.job_id
    now = time.time()
    saved = JobCheckpoint(step=1, object_ref="s3://b/c", created_at=now + skew_s - 10)
    report = JobReport(at=now + skew_s, flow_run_id="f", checkpoints=(saved,))
    shown = routes.of["report_job"](job_id, report).job.report.checkpoints[0]
    assert abs(shown.created_at - now - shown_s) < 1


@pytest.mark.usefixtures("inputs_exist")
def test_a_gang_that_needs_a_node_which_restarts_waits_for_it(routes: Routes) -> None:
    routes.coordinator.heard_at = time.time() - 60
    assert routes.of["submit_job"](SPEC).job.state is S.QUEUED
    routes.coordinator.heard_at = time.time() - 3600
    with pytest.raises(InvalidInput, match="would never get its nodes"):
        routes.of["submit_job"](SPEC)


def test_the_logs_of_every_attempt_are_read_while_a_job_waits_too(routes: Routes) -> None:
    job_id, log = routes.paused("NVIDIA A100"), routes.of["get_job_log"]
    assert log(job_id, 0, 0, 0).lines == (), "no flow run yet"
    held = JobUsage(attempt=1, accelerators={"cpu": 1}, since=2.0)
    placed = {"placement": JobPlacement(hosts={"a-0": 1}, level="host")}
    routes.logs = {"flow-1": ["1a", "1b"], "flow-2": ["a", "b", "c"]}
    for attempt, end in ((1, S.PAUSED), (2, S.RECOVERING)):
        usage = (*routes.table.job(job_id).usage, held.model_copy(update={"attempt": attempt}))
        flow = {"flow_run_id": f"flow-{attempt}", "attempt": attempt}
        changes = ((S.ADMITTED, placed | {"usage": usage}), (S.STARTING, flow), (end, {}))
        for state, more in ((S.QUEUED, {}), *changes):
            routes.table.change(job_id, lambda job: with_state(job, state, 3.0, **more))  # noqa: B023
    assert routes.table.job(job_id).flow_run_id is None
    newest = log(job_id, 0, 0, 0)
    assert (newest.lines, newest.after, newest.is_over) == (("a", "b", "c"), 3, False)
    assert log(job_id, 3, 0, 0).is_over
    assert log(job_id, 1, 1, 0).lines == ("1b",)
    last = log(job_id, 0, 1, 1)
    assert (last.lines, last.is_over) == (("1b",), True)
    with pytest.raises(NotFound, match=r"no such attempt: got 3, wanted 1 to 2"):
        log(job_id, 0, 3, 0)


def test_a_job_that_has_succeeded_is_not_cancelled(routes: Routes) -> None:
    job_id = routes.paused("NVIDIA A100")
    for state in (S.QUEUED, S.ADMITTED, S.SUCCEEDED):
        routes.table.change(job_id, lambda job: with_state(job, state, 3.0))  # noqa: B023
    before = routes.table.job(job_id)
    with pytest.raises(Conflict, match=r"nothing to cancel.*got succeeded"):
        routes.of["cancel_job"](job_id)
    assert routes.table.job(job_id) == before


def test_of_many_resumes_at_once_one_queues_the_job(routes: Routes) -> None:
    job_id, calls = routes.paused("NVIDIA A100"), 8
    together = threading.Barrier(calls)

    def resume(_: int) -> JobState:
        together.wait(10)
        return routes.of["resume_job"](job_id).job.state

    caller = current_call.get()  # of this thread; each call has its own
    with ThreadPoolExecutor(calls, initializer=lambda: current_call.set(caller)) as pool:
        assert list(pool.map(resume, range(calls))) == [S.QUEUED] * calls
    history = routes.table.job(job_id).history
    assert sum(each.reason == "resumed" for each in history) == 1


@pytest.mark.parametrize("state", [S.QUEUED, S.ADMITTED, S.STARTING, S.RUNNING])
def test_a_job_that_was_never_paused_is_not_resumed(routes: Routes, state: JobState) -> None:
    paused = routes.table.job(routes.paused("NVIDIA A100"))
    others = {"job_id": "tj-000000000001", "state": S.QUEUED, "history": ()}
    job = paused.model_copy(update=others)
    for each in (S.ADMITTED, S.STARTING, S.RUNNING):
        if job.state is not state:
            job = with_state(job, each, 3.0)
    routes.table.add(job)
    with pytest.raises(Conflict, match=f"nothing to resume.*got {state}"):
        routes.of["resume_job"](job.job_id)
    assert routes.table.job(job.job_id) == job


def test_a_resume_is_repeated_until_its_job_has_made_a_step(routes: Routes) -> None:
    job_id = routes.paused("NVIDIA A100")
    for state in (S.QUEUED, S.ADMITTED, S.STARTING):
        if state is not S.QUEUED:
            routes.table.change(job_id, lambda job: with_state(job, state, 3.0))  # noqa: B023
        assert routes.of["resume_job"](job_id).job.state is state
    routes.table.change(job_id, lambda job: with_state(job, S.RECOVERING, 4.0))
    with pytest.raises(Conflict, match="nothing to resume"):
        routes.of["resume_job"](job_id)


def test_pages_of_jobs_have_each_job_once_the_newest_first(routes: Routes) -> None:
    base = routes.table.job(routes.paused("NVIDIA A100"))
    for number in range(4):
        new = {"job_id": f"tj-{number:012x}", "created_at": 2.0 + number}
        routes.table.add(base.model_copy(update=new))
    pages = [routes.of["list_jobs"](offset=offset, limit=2) for offset in (0, 2, 4, 6)]
    created = [[each.created_at for each in page.jobs] for page in pages]
    assert created == [[5.0, 4.0], [3.0, 2.0], [1.0], []]
    assert {page.total for page in pages} == {5}


def test_a_job_is_not_resumed_where_its_kind_of_accelerator_is_gone(routes: Routes) -> None:
    job_id = routes.paused("NVIDIA H100")
    with pytest.raises(InvalidInput, match=r"NVIDIA H100.*kinds of the fleet: NVIDIA A100"):
        routes.of["resume_job"](job_id)
    assert routes.table.job(job_id).state is S.PAUSED
    routes.coordinator.kind = "NVIDIA H100"
    assert routes.of["resume_job"](job_id).job.state is S.QUEUED


def test_changes_of_a_job_that_are_not_kept_are_counted(routes: Routes) -> None:
    job_id, most = routes.paused("NVIDIA A100"), 100
    assert [each.earlier for each in routes.of["get_job_events"](job_id)] == [0] * 3
    for state in [S.QUEUED, S.PAUSED] * most:
        routes.table.change(job_id, lambda job: with_state(job, state, 3.0, f"now {state}"))  # noqa: B023
    routes.table.change(
        job_id, lambda job: with_budget_warning(job, "80% of the budget is spent", 4.0)
    )
    events = routes.of["get_job_events"](job_id)
    assert len(events) == most
    assert [each.earlier for each in events] == [3 + 2 * most + 1 - most, *[0] * (most - 1)]
