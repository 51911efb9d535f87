"""REST routes of training jobs: submit, list, look at, pause, resume, cancel and review them.

What a job may ask for is checked here, before it is queued; which gang runs where is decided by
``jobs.JobScheduler``. Flows of training that someone else started (a person in Prefect's page, the
lifecycle) ask for admission here, too, so that one place decides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Header

from paceline.api.flow_runs import require_free
from paceline.api.flow_starter import PrefectStarter
from paceline.api.job_views import JobId, ShownJob, add_reading, own_training, require_job_owner
from paceline.api.problems import PROBLEM
from paceline.api.routes import COSTS, JOBS
from paceline.config import Profile, Runtime, with_job_settings
from paceline.coordinator import (
    Coordinator,
    current_call,
    current_caller,
    is_submitter,
    may_see,
    owner_of,
    refuse_own,
)
from paceline.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    InvalidProfile,
    NotFound,
    PacelineError,
    PermanentError,
    SourceMissing,
    short_repr,
)
from paceline.jobs import (
    JobTable,
    RecentCosts,
    Request,
    end_requested,
    engine_of,
    estimate_like,
    estimate_submitted,
    gang_of,
    hosts_of,
    require_open,
    require_permitted,
    require_prices,
    resumed,
    training_costs,
    with_state,
)
from paceline.relay import allowed_source, fetch_allowed_manifest
from paceline.schemas import (
    AdoptJob,
    CostEstimate,
    JobChange,
    JobReport,
    JobState,
    JobView,
    Resources,
    ResumeJob,
    ReviewJob,
    SubmitJob,
    TrainingCosts,
    TrainingJob,
    TrainingUsage,
    digest_of,
    new_run_id,
    require_no_secrets,
)

if TYPE_CHECKING:
    from paceline.data import Snapshot

Key = Annotated[str | None, Header(alias="Idempotency-Key", max_length=200)]
SKEW_S = 5.0  # a report that is older or younger comes from a host with another clock
RESTARTS_S = 900.0  # a silent node counts as one that restarts, where a gang needs every node


def make_job_router(
    runtime: Runtime, coordinator: Coordinator, table: JobTable, flows: PrefectStarter | None
) -> APIRouter:
    """Return the routes; without ``flows`` (no Prefect server) nothing can be submitted."""
    router = APIRouter(responses=PROBLEM, tags=["jobs"])
    shown = ShownJob(runtime, table, flows)
    _add_submitting(router, runtime, coordinator, table, shown, flows)
    add_reading(router, table, shown, flows)

    @router.get(COSTS)
    def get_training_costs() -> TrainingCosts:
        """Return what each training and each attempt of a job used, and the prices of now."""
        found = training_costs(table.jobs(), runtime, time.time(), _is_callers)
        bound = current_caller().is_bound
        return found.model_copy(update={"without_result": 0}) if bound else found

    _add_changing(router, runtime, coordinator, table, shown)
    return router


def _add_submitting(
    router: APIRouter,
    runtime: Runtime,
    coordinator: Coordinator,
    table: JobTable,
    shown: ShownJob,
    starter: PrefectStarter | None,
) -> None:
    recent = RecentCosts(table.jobs, runtime)

    def estimated(job: TrainingJob) -> TrainingJob:
        earlier = filter(_is_callers, recent().usages)
        guess = _estimate(job.spec, runtime, earlier, coordinator)
        return job.model_copy(update={"estimate": guess})

    @router.post(JOBS, status_code=201)
    def submit_job(call: SubmitJob, key: Key = None) -> JobView:
        """Queue a training job. The same Idempotency-Key and body again return the same job; an
        identical job without one is another job, which finds the training of the first."""
        if shown.flows is None:
            raise NotFound(
                "this installation has no Prefect server to run jobs",
                wanted="endpoints.prefect_api_url",
                do="Have an operator name the server: `paceline init --prefect URL`.",
            )
        continued = own_training(call.continue_from, table)
        call = _with_owner(call.model_copy(update={"continue_from": continued}))
        job = _new_job(call, new_run_id(), key)
        job = job.model_copy(update={"spec": _with_judgement(job.spec, runtime.profile)})
        if key is None or not any(each.job_id == job.job_id for each in table.jobs()):
            _require_possible(job, runtime, coordinator)
            job = estimated(job)
        return shown(table.add(job))

    @router.post(f"{JOBS}/adopt", status_code=201)
    def adopt_job(call: AdoptJob) -> JobView:
        """Admit a training whose flow runs already; the flow waits until its job is admitted. A
        token that is bound to a team or project names no flow run and no run of another one."""
        require_free(call, table, coordinator, starter)
        job = _new_job(
            _with_owner(call.spec), call.run_id, digest_of([call.run_id, call.flow_run_id])
        )
        _require_priority_and_budget(job.spec, runtime.profile)
        if job.spec.resources != Resources():
            _require_room(job, runtime, coordinator)
        job = job.model_copy(
            update={
                "adopted": True, "yields": call.yields, "flow_run_id": call.flow_run_id,
                "attempt": 1,
            }
        )  # fmt: skip
        if all(each.job_id != job.job_id for each in table.jobs()):
            job = estimated(job)
        return shown(table.add(job))

    @router.post(f"{JOBS}/{{job_id}}/report")
    def report_job(job_id: JobId, call: JobReport) -> JobView:
        """Take in what the job's flow reports; the answer says what is wanted of it."""
        require_job_owner(table.job(job_id))
        return JobView(job=table.report(job_id, _by_this_clock(call)))


def _add_changing(
    router: APIRouter,
    runtime: Runtime,
    coordinator: Coordinator,
    table: JobTable,
    shown: ShownJob,
) -> None:
    prices = runtime.profile.prices

    def change(job_id: str, make: Callable[[TrainingJob], TrainingJob]) -> TrainingJob:
        if (request := current_call.get()) is not None:
            request.on["job_id"] = job_id
        require_job_owner(table.job(job_id))
        return table.change(job_id, make)

    @router.post(f"{JOBS}/{{job_id}}/pause")
    def pause_job(job_id: JobId) -> JobView:
        """Save the job's state on every rank and end them; it keeps its place in the queue."""

        def make(job: TrainingJob) -> TrainingJob:
            require_open(job, "pause")
            if job.state is JobState.PAUSED or job.wanted == "pause":
                return job
            return end_requested(job, "pause", by=current_caller().name, at=time.time())

        return shown(change(job_id, make))

    @router.post(f"{JOBS}/{{job_id}}/resume")
    def resume_job(job_id: JobId, call: ResumeJob | None = None) -> JobView:
        """Put a paused job into the queue again; it goes on from its newest checkpoint. A repeat
        changes nothing. A new budget counts for a job that waits or runs, too."""
        budget = None if call is None else call.budget
        require_prices(budget, prices)
        paused = table.job(job_id)
        require_job_owner(paused)
        if paused.kind and paused.state is JobState.PAUSED:
            # It goes on with the kind of accelerator that made its checkpoint. This may ask Slurm,
            # so it is done before the table is locked.
            _require_room(paused, runtime, coordinator)

        return shown(
            change(
                job_id,
                lambda job: resumed(job, budget, prices, by=current_caller().name, at=time.time()),
            )
        )

    @router.post(f"{JOBS}/{{job_id}}/cancel")
    def cancel_job(job_id: JobId) -> JobView:
        """End the job for good; its checkpoints stay."""

        def make(job: TrainingJob) -> TrainingJob:
            if job.state is JobState.CANCELLED or job.wanted == "cancel":
                return job
            require_open(job, "cancel")
            return end_requested(job, "cancel", by=current_caller().name, at=time.time())

        return shown(change(job_id, make))

    @router.post(f"{JOBS}/{{job_id}}/review")
    def review_job(job_id: JobId, call: ReviewJob) -> JobView:
        """Accept or reject a job that passed bad data over. Where the policy of its model is
        four-eyes, who submitted it, its run or its sweep accepts nothing."""
        require_no_secrets(call)
        job = table.job(job_id)
        own = job.submitted_by == current_caller().name or any(
            is_submitter(coordinator, run) for run in (job.run_id, job.spec.sweep) if run
        )
        return shown(change(job_id, lambda job: _reviewed(job, call, runtime.profile, own)))


def _reviewed(job: TrainingJob, call: ReviewJob, profile: Profile, own: bool) -> TrainingJob:
    """Return ``job`` accepted or rejected by the caller; raises Conflict where it waits for no
    review, AccessDenied where its submitter (``own``) may not accept it."""
    policy = profile.gate.policy(job.spec.model_id)
    if call.accepted and own and policy.approval == "four-eyes":
        refuse_own("who submitted a job may not accept it", job.job_id)
    if job.state is not JobState.NEEDS_REVIEW:
        raise Conflict(
            "this job waits for no review",
            got=job.state,
            wanted=JobState.NEEDS_REVIEW,
            where=job.job_id,
        )
    word = "accepted" if call.accepted else "rejected"
    state = JobState.SUCCEEDED if call.accepted else JobState.FAILED
    why = f"{word} by {current_caller().name}" + (f": {call.reason}" if call.reason else "")
    return with_state(job, state, time.time(), why, current_caller().name)


def _estimate(
    spec: SubmitJob, runtime: Runtime, earlier: Iterable[TrainingUsage], coordinator: Coordinator
) -> CostEstimate | None:
    """Return what the job would take and cost by what ``earlier`` ones did, else by the model of a
    step; None: nothing says it."""
    profile = runtime.profile
    try:
        settings = with_job_settings(profile, spec.settings).training
    except InvalidProfile:  # of an adopted job: its flow finds out
        return None
    hosts = hosts_of(coordinator.read(lambda state: state.fleet.workers()), settings)
    return estimate_like(
        spec.model_id, settings, profile.prices, earlier, spec.resources.capacity
    ) or estimate_submitted(spec, {each.kind for each in hosts}, runtime)


def _new_job(spec: SubmitJob, run_id: str, key: str | None) -> TrainingJob:
    require_no_secrets(spec)
    caller, now = current_caller(), time.time()
    seed = digest_of([run_id, now]) if key is None else digest_of([caller.name, key])
    queued = JobChange(state=JobState.QUEUED, at=now, by=caller.name)
    return TrainingJob(
        job_id=f"tj-{seed[:12]}",
        submission_id=_submission_id(spec),
        spec=spec,
        run_id=run_id,
        state=JobState.QUEUED,
        created_at=now,
        updated_at=now,
        submitted_by=caller.name,
        history=(queued,),
    )


def _by_this_clock(report: JobReport) -> JobReport:
    """Return ``report`` with times of this clock, which changes of jobs have, too."""
    now = time.time()
    behind_s = now - report.at
    update: dict[str, Any] = {"at": now}
    if abs(behind_s) > SKEW_S:
        update["checkpoints"] = tuple(
            each.model_copy(update={"created_at": each.created_at + behind_s})
            for each in report.checkpoints
        )
    return report.model_copy(update=update)


def _submission_id(spec: SubmitJob) -> str:
    """Return the digest of what was sent, as earlier releases made it: to them an empty
    ``evaluate_on`` was none."""
    unsaid = None if spec.evaluate_on else {"evaluate_on"}
    return digest_of(spec.model_dump(mode="json", exclude=unsaid))


def _is_callers(usage: TrainingUsage) -> bool:
    return may_see(usage.team, usage.project)


def _with_owner(spec: SubmitJob) -> SubmitJob:
    team, project = owner_of(spec.team, spec.project)
    return spec.model_copy(update={"team": team, "project": project})


def _with_judgement(spec: SubmitJob, profile: Profile) -> SubmitJob:
    if spec.evaluate_on is not None or not profile.evaluation.after_training:
        return spec
    # A sweep compares its trials itself, and only the best one is worth a judgement.
    return spec.model_copy(update={"evaluate_on": "" if spec.sweep else spec.data_snapshot})


def _require_possible(job: TrainingJob, runtime: Runtime, coordinator: Coordinator) -> None:
    """Raise for a job that could never run here: settings, code, data, model, or its gang."""
    spec, profile = job.spec, runtime.profile
    own = with_job_settings(profile, spec.settings)
    _require_priority_and_budget(spec, profile)
    if spec.code_ref or spec.optimizer_ref:
        from paceline.training.user_code import with_code

        with_code(own, spec.code_ref, spec.optimizer_ref)
    if not spec.data_snapshot.startswith("s3://"):
        raise InvalidInput(
            "a job names its snapshot by URL",
            got=short_repr(spec.data_snapshot),
            wanted="s3://bucket/prefix",
            where="data_snapshot",
            do="Make one: `paceline snapshot s3://…` prints its URL.",
        )
    allowed_source(spec.data_snapshot, runtime)
    snapshot = _require_snapshot(spec, runtime, coordinator)
    try:
        fetch_allowed_manifest(f"{runtime.models_url}/{spec.model_id}/{spec.version}", runtime)
    except SourceMissing as error:
        raise SourceMissing(
            "no such published model",
            got=f"{spec.model_id} {spec.version}",
            where=error.where,
            do="Publish it first: `paceline publish`.",
        ) from error
    continued = spec.continue_from
    _require_room(job, runtime, coordinator)
    if snapshot is not None and not continued:  # else settings are those of the earlier job
        _require_base(spec, runtime, snapshot)
    if continued and not continued.startswith("job-"):
        raise InvalidInput("not a training's id", got=continued, wanted="job-…")


def _require_priority_and_budget(spec: SubmitJob, profile: Profile) -> None:
    """Raise for a budget that cannot be counted, and a priority that its team may not have."""
    require_prices(spec.budget, profile.prices)
    quotas = profile.jobs.quotas
    most = quotas[spec.team].max_priority if spec.team in quotas else 0
    if quotas and spec.priority > most:
        raise AccessDenied(
            "the team's jobs may not have this priority",
            got=spec.priority,
            wanted=f"at most {most}, jobs.quotas.{spec.team}.max_priority (0 for a team without)",
        )


def _require_room(job: TrainingJob, runtime: Runtime, coordinator: Coordinator) -> None:
    """Raise InvalidInput for a job whose gang would never get nodes: of this fleet, or of Slurm."""
    asked, profile = job.spec.resources, runtime.profile
    if (asked.queue or asked.time_limit_s) and not profile.cluster.per_job:
        raise InvalidInput(
            "the installation's own queue has no partitions and no time limits",
            got=f"queue {asked.queue!r}, time limit {asked.time_limit_s} s",
            wanted="neither of them",
            where="resources",
            do="They are for jobs that Slurm or Kubernetes admits (cluster.slurm.per_job).",
        )
    workers = coordinator.read(lambda state: state.fleet.workers())
    hosts = hosts_of(workers, profile.training, heard_since=time.time() - RESTARTS_S)
    settings = with_job_settings(profile, job.spec.settings).training
    gang = gang_of(job, settings, hosts)
    request = Request(job=job, gang=gang, ranks_per_node=settings.ranks_per_node)
    if never := engine_of(runtime).why_never(request, hosts):
        raise InvalidInput(
            "this gang would never get its nodes",
            got=f"{gang.ranks} ranks",
            wanted=never,
            where="resources",
            do="`paceline workers` shows what the nodes have, `sinfo` what Slurm has."
            if profile.cluster.per_job
            else "`paceline workers` shows what the nodes have.",
        )


def _require_base(spec: SubmitJob, runtime: Runtime, snapshot: Snapshot) -> None:
    """Raise InvalidInput where config, tokenizer or shapes say that the job cannot train its base;
    the flow, which has torch, also builds it."""
    from paceline.storage import ObjectStore
    from paceline.training import check_base

    profile = with_job_settings(runtime.profile, spec.settings)
    training = profile.training
    if spec.code_ref or training.code_ref:
        return
    url = f"{runtime.models_url}/{spec.model_id}/{spec.version}"
    store = ObjectStore.from_runtime(runtime)
    try:
        check_base(
            url, store, training, profile.data, profile.model.context, snapshot, builds=False
        )
    except PermanentError as error:  # CorruptData and SourceMissing, too: it is this request
        raise error.as_kind(InvalidInput) from error


def _require_snapshot(
    spec: SubmitJob, runtime: Runtime, coordinator: Coordinator
) -> Snapshot | None:
    """Raise SourceMissing for a snapshot that is not there, AccessDenied or InvalidSnapshot for one
    that may not be used so, InvalidInput for one that cannot judge, DataRejected for one that a
    validation has refused; return that of the training. Where its package is not installed the flow
    checks it (None)."""
    from paceline.storage import ObjectStore

    try:
        from paceline.data import expectations_text, load_snapshot, require_not_refused
    except ImportError:
        return None
    data, store = runtime.profile.data, ObjectStore.from_runtime(runtime)
    found: list[Snapshot] = []
    for url in dict.fromkeys((spec.data_snapshot, spec.evaluate_on or spec.data_snapshot)):
        try:
            snapshot = load_snapshot(url, store)
        except SourceMissing as error:
            raise SourceMissing(
                "no such data snapshot", got=url, do="`paceline snapshot` prints a snapshot's URL."
            ) from error
        require_permitted(
            coordinator.purposes(),
            snapshot,
            spec.purpose or data.purpose,
            [(spec.team, spec.project)],
            own_project=data.project,
            now=time.time(),
        )
        found.append(snapshot)
        if url == spec.evaluate_on and not snapshot.of_split("held-out"):
            raise InvalidInput(
                "nothing is held out to be judged on",
                got=url,
                wanted="a snapshot with a held-out split",
                do="Build one with data.held_out_share above 0, or leave out the evaluation.",
            )
    own = ""  # without them a refusal counts, too
    with contextlib.suppress(PacelineError):  # a file that only the flow's machine has
        own = expectations_text(data.expectations, store)
    require_not_refused(found[0].digest, own, runtime.records_url, store)
    return found[0]
