"""The scheduler of training jobs: a duty of the leader, on a thread of its own for one term.

Every second it reads what flows reported and what Prefect says of them, has an engine (our own
admission, Slurm or Kubernetes) admit gangs, starts their flows, and ends those that are to pause,
to yield or to be cancelled. A reservation is stored before its flow is started, and the next leader
reads it: two gangs get the same host only where a coordinator of another installation lends it out,
and then the nodes' own claims keep the second waiting. Prefect is a port (``FlowPort``): a server
that is away delays starts and endings and changes nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from paceline.config import Profile, TrainingSettings, with_job_settings
from paceline.coordinator import Coordinator, RepeatedTask
from paceline.errors import (
    AccessDenied,
    InvalidInput,
    InvalidProfile,
    NotFound,
    PacelineError,
    StaleEpoch,
    TemporaryError,
)
from paceline.jobs.engines import Engine, OwnAdmission, Request, Standing
from paceline.jobs.placement import Gang, Host, gang_of, hosts_of
from paceline.jobs.preemption import Reservation
from paceline.jobs.states import (
    cause_of,
    is_passing,
    losses_since_checkpoint,
    with_abandoned_run,
    with_budget_warning,
    with_state,
)
from paceline.jobs.table import JobTable
from paceline.jobs.usage import budget_reason, start_usage
from paceline.schemas import (
    FlowRunView,
    JobPlacement,
    JobState,
    TrainingJob,
)
from paceline.training import training_key

log = logging.getLogger(__name__)

FLOW = "train-model"
ROUND_S = 1.0
STOP_WAIT_S = 15.0
RETRY_S = 5.0  # after a start that Prefect could not make
CANCEL_RETRY_S = 10.0
LATE_START_S = 60.0  # until a Prefect worker should have taken a flow run
NO_WORKER_S = 600.0  # until its job gives its nodes back; it requests others after as long
LOST_S = 30.0  # without a report of a flow that has reported, or was cancelled before it began
# The same of one that never has: its first report needs 14 CPU-seconds after the start. Before, a
# Prefect worker may pull an image of gigabytes: it is PENDING then.
START_LOST_S = 300.0
PENDING_LOST_S = 1200.0
ENDED_WITHIN_S = 3600.0  # of its loss a flow run is ended in Prefect
UNANSWERED_S = 60.0  # that Prefect shows a lost flow run as Cancelling: no runner ends it
MOST_CALLS = 20  # of Prefect for lost flow runs, in one round
# Flow runs lost or ended by passing failures since the newest checkpoint; the next fails the job.
MOST_LOSSES = 3
RUNNING = "RUNNING"
ENDING = frozenset({"CANCELLING", "CANCELLED"})
OPEN = frozenset({"SCHEDULED", "PENDING", "RUNNING", "PAUSED"})
GONE = "GONE"  # Prefect does not have the flow run


class FlowPort(Protocol):
    """What the scheduler needs of Prefect."""

    def run(
        self, flow: str, run_id: str, parameters: Mapping[str, object], attempt: int = 0
    ) -> FlowRunView: ...

    def view(self, flow_run_id: str, after: int = 0) -> FlowRunView: ...

    def states(self, flow_run_ids: Collection[str]) -> Mapping[str, str]: ...

    def cancel(self, flow_run_id: str) -> None: ...

    def crash(self, flow_run_id: str, message: str) -> None: ...


class JobScheduler(RepeatedTask):
    """Admits, starts, follows and ends training jobs while one replica leads."""

    def __init__(
        self,
        coordinator: Coordinator,
        table: JobTable,
        flows: FlowPort | None,
        profile: Profile,
        engine: Engine | None = None,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``flows`` is None where the installation has no Prefect server: then only flows that
        others start are admitted. ``engine`` is our own admission by default.
        """
        super().__init__("job-scheduler", ROUND_S, STOP_WAIT_S)
        self._coordinator, self._table, self._flows = coordinator, table, flows
        self._profile, self._wall = profile, wall
        self._engine = engine or OwnAdmission(profile)
        self._began_s = wall()
        # of each open job its settings, and the key of its training
        self._settings: dict[str, tuple[TrainingSettings, str]] = {}
        self._retry_at: dict[str, float] = {}  # job → when Prefect is called for it again
        # flow run that has not reported → its state in Prefect, which may be GONE, and since when
        self._unreported: dict[str, tuple[str, float]] = {}
        self._cancelling: dict[str, float] = {}  # lost flow run → since when Prefect shows that
        self._lost_s = -math.inf  # when lost flow runs were last looked at

    def run_once(self) -> None:
        """Make one round: follow, admit, start, end."""
        self._end_lost()
        jobs = self._table.open_jobs()
        if not jobs and not self._engine.has_own_queue:
            return
        open_ = [each for each in jobs if each.state is not JobState.NEEDS_REVIEW]  # it has ended
        self._follow([each for each in open_ if each.state.holds_hosts or each.adopted])
        self._for_each([each for each in jobs if each.spec.budget], self._enforce_budget)
        self._admit()
        self._for_each(self._table.open_jobs(), self._advance)

    def _advance(self, job: TrainingJob) -> None:
        if job.state is JobState.ADMITTED and not job.adopted:
            self._start(job)
        elif job.state in (JobState.PAUSING, JobState.CANCELLING):
            self._end(job)

    def _for_each(self, jobs: Sequence[TrainingJob], step: Callable[[TrainingJob], None]) -> None:
        """Take a step of each job: what one job's step raises does not stop the others' queue. An
        error of the store or of this term concerns all, and is raised.
        """
        for job in jobs:
            if self._stop.is_set():
                return
            try:
                step(job)
            except (TemporaryError, StaleEpoch):
                raise
            except Exception:
                log.exception("%s is left as it is in this round", job.job_id)

    # -- following flows

    def _follow(self, jobs: Sequence[TrainingJob]) -> None:
        ids = [each.flow_run_id for each in jobs if each.flow_run_id]
        states: Mapping[str, str] = {}
        if ids and self._flows is not None:
            try:
                states = dict.fromkeys(ids, GONE) | dict(self._flows.states(ids))
            except TemporaryError as error:  # no flow starts meanwhile
                log.warning("the states of jobs' flows are unknown: %s", error)
        self._unreported = {key: since for key, since in self._unreported.items() if key in states}
        self._for_each(
            jobs, lambda job: self._follow_one(job, states.get(job.flow_run_id or "", ""))
        )

    def _follow_one(self, job: TrainingJob, state: str) -> None:
        report = job.report
        if report is not None and report.flow_run_id != (job.flow_run_id or ""):
            report = None
        # Reports are in memory: after a failover a flow has LOST_S to report to this leader.
        last_s = job.updated_at if report is None else report.at
        silent_s = self._wall() - max(last_s, self._began_s)
        if report is not None and report.checkpoints and not job.kind and job.usage:
            kind = next(iter(job.usage[-1].accelerators))  # a gang's hosts are of one
            self._table.change(job.job_id, lambda now: now.model_copy(update={"kind": kind}))
        if report is not None and report.outcome is not None:
            self._record_end(job, report.outcome, report.error)
        elif state == "COMPLETED":
            self._record_end(job, "succeeded", "")
        elif state in ("FAILED", "CRASHED", "CANCELLED", "INTERRUPTED"):
            assert self._flows is not None
            message = self._flows.view(job.flow_run_id or "", 2**31).message
            outcome = "cancelled" if state in ("CANCELLED", "INTERRUPTED") else "failed"
            self._record_end(job, outcome, message, lost=state == "CRASHED")
        elif job.adopted and job.wanted == "yield" and report is not None and report.waits:
            again = {"adopted": True, "flow_run_id": job.flow_run_id, "attempt": job.attempt + 1}
            self._preempt(job, **again)
        elif why := self._why_lost(job, state, silent_s if report or job.adopted else None):
            if state in ENDING and report is None and job.wanted != "run" and not job.adopted:
                self._record_end(job, "cancelled", why)
                return
            if job.flow_run_id and self._flows is not None:
                with contextlib.suppress(PacelineError):  # it may be gone, and Prefect away
                    self._flows.cancel(job.flow_run_id)
            self._record_loss(job, why, no_worker=state == "SCHEDULED" and report is None)
        elif job.state is JobState.ADMITTED and job.adopted and report and not report.waits:
            self._change(job, JobState.STARTING, started_at=job.started_at or self._wall())
        elif job.state is JobState.STARTING and report is not None and report.step > 0:
            self._change(job, JobState.RUNNING)
        elif state == "SCHEDULED" and silent_s > LATE_START_S and not job.adopted:
            self._table.note(job.job_id, "its flow run waits for a Prefect worker to take it")
        elif state in ENDING and job.state in (JobState.STARTING, JobState.RUNNING):
            self._change(job, JobState.CANCELLING, "cancelled in Prefect", wanted="cancel")

    def _why_lost(self, job: TrainingJob, state: str, silent_s: float | None) -> str:
        """Return why the job's flow is lost, "" while it may report; it has not for ``silent_s``,
        None: never.
        """
        if silent_s is not None:
            return f"its flow has not reported for {silent_s:.0f} s" if silent_s > LOST_S else ""
        flow_run_id, now = job.flow_run_id or "", self._wall()
        if not state:  # Prefect is away
            self._unreported.pop(flow_run_id, None)
            return ""
        if self._unreported.get(flow_run_id, ("", 0.0))[0] != state:
            self._unreported[flow_run_id] = state, now
        silent_s = now - self._unreported[flow_run_id][1]
        if state == GONE:
            return "Prefect does not have its flow run any more" if silent_s > LOST_S else ""
        # One that is cancelled before it began is cancelled by no runner: Prefect refuses to start
        # it, and shows it as Cancelling for five minutes. It holds no node, as it never reported.
        limits_s = {"PENDING": PENDING_LOST_S, "CANCELLING": LOST_S, "SCHEDULED": NO_WORKER_S}
        if silent_s <= limits_s.get(state, START_LOST_S):
            return ""
        if state == "SCHEDULED":
            return f"no Prefect worker has taken its flow run for {silent_s:.0f} s"
        return f"its flow has never reported, and is {state} in Prefect since {silent_s:.0f} s"

    def _record_end(
        self, job: TrainingJob, outcome: str, message: str, *, lost: bool = False
    ) -> None:
        """Record that the job's flow run has ended."""
        if outcome == "succeeded":
            review = job.report.review if job.report is not None else ""
            state = JobState.NEEDS_REVIEW if review else JobState.SUCCEEDED
            self._change(job, state, review)
        elif outcome == "cancelled" and job.wanted == "pause":
            saved = job.report.checkpoints if job.report is not None else ()
            what = f"resumes at step {saved[-1].step}" if saved else "no step was made yet"
            self._change(job, JobState.PAUSED, f"{job.reason or 'paused'}; {what}")
        elif outcome == "cancelled" and job.wanted == "yield" and not job.adopted:
            self._preempt(job)
        elif outcome == "cancelled" or job.wanted == "cancel":
            reason = job.reason if job.wanted == "cancel" else "cancelled in Prefect"
            self._change(job, JobState.CANCELLED, reason)
        elif lost or is_passing(message):
            self._record_loss(job, message)
        else:
            self._change(job, JobState.FAILED, message)

    def _preempt(self, job: TrainingJob, **fields: Any) -> None:
        reason, fields = job.reason or "preempted", {"preemptions": job.preemptions + 1} | fields
        self._change(job, JobState.PREEMPTED, reason, cause="preempted", **fields)

    def _record_loss(self, job: TrainingJob, why: str, *, no_worker: bool = False) -> None:
        """Have the job start again, up to MOST_LOSSES times between two checkpoints; it resumes the
        newest. ``no_worker``: its flow run never began, and that is no fault of the job's.
        """
        cause = cause_of(why)
        if job.wanted == "cancel":
            self._change(job, JobState.CANCELLED, why, cause=cause)
        elif job.wanted == "pause":
            reason = "; ".join(filter(None, (job.reason, why)))
            self._change(job, JobState.PAUSED, reason, cause=cause)
        elif job.adopted:  # its flow was started outside the queue, and is again
            paused = " while it was paused" if job.state is JobState.PAUSED else ""
            reason = f"{why}{paused}; start it again: it resumes its checkpoint"
            self._change(job, JobState.FAILED, reason, cause=cause)
        elif no_worker:
            # What Slurm or Kubernetes holds for it is given back, too, as at a pause.
            after = self._change(job, JobState.RECOVERING, why, allocation=None, no_worker=True)
            if after.state is JobState.RECOVERING:
                self._retry_at[job.job_id] = self._wall() + NO_WORKER_S
        elif (losses := losses_since_checkpoint(job)) >= MOST_LOSSES:
            reason = f"ended {losses + 1} times without a new checkpoint; the last: {why}"
            self._change(job, JobState.FAILED, reason, cause=cause)
        else:
            self._change(job, JobState.RECOVERING, why, cause=cause, losses=job.losses + 1)

    # -- budgets

    def _enforce_budget(self, job: TrainingJob) -> None:
        """Note once that most of the job's budget is spent; pause the job when all of it is."""
        job = self._table.job(job.job_id)
        is_spent, why = budget_reason(job, self._profile.prices, self._wall())
        if is_spent and job.state.waits:
            self._change(job, JobState.PAUSED, why)
        elif is_spent and job.state in (JobState.STARTING, JobState.RUNNING):
            self._change(job, JobState.PAUSING, why, wanted="pause")
        elif why and not is_spent and not job.budget_warned and job.state.holds_hosts:
            self._table.change(job.job_id, lambda now: with_budget_warning(now, why, self._wall()))

    # -- admission

    def _admit(self) -> None:
        jobs = self._table.open_jobs()
        kept = {each.job_id for each in jobs}
        self._settings = {key: value for key, value in self._settings.items() if key in kept}
        holding = [each for each in jobs if each.state.holds_hosts and self._has_settings(each)]
        training = {self._settings[e.job_id][1]: e.job_id for e in reversed(holding)}
        # Our admission sees all that wait, and starts the first that fits; another engine may start
        # two before the next round.
        twin_of = training.setdefault if self._engine.has_own_queue else training.get
        waiting = []
        for job in jobs:
            if job.state.waits and not self._is_held_back(job) and self._has_settings(job):
                other = twin_of(self._settings[job.job_id][1], job.job_id)
                if other == job.job_id:
                    waiting.append(job)
                else:  # its result will be this job's, too
                    self._table.note(job.job_id, f"waiting for {other}, which trains the same")
        if not waiting and not self._engine.has_own_queue:
            return
        workers = self._coordinator.read(lambda state: state.fleet.workers())
        hosts = hosts_of(workers, self._profile.training)
        requests = [
            request
            for each in waiting
            if not self._stop.is_set()  # another replica may lead, and requests it, too
            if (request := self._request(each, hosts)) is not None
        ]
        running = [
            self._reservation(each, self._gang_of(each, hosts))
            for each in holding
            if each.placement is not None
        ]
        standings = self._engine.status(hosts, requests, running, self._wall())
        reasons = self._engine.reasons()
        by_name = {each.name: each for each in hosts}
        for job in jobs:
            if (found := standings.get(job.job_id)) is not None:
                if (held := found.allocation) is not None and held != job.allocation:
                    # Another one is stored: the next leader must know a cancelled one as the job's.
                    is_new = job.allocation is None or job.allocation.id != held.id
                    self._table.note(job.job_id, None, stored=is_new, allocation=held)
                self._apply_standing(job, found, by_name)
            now = self._table.job(job.job_id)
            if now.state.waits and (why := reasons.get(job.job_id, "")[:500]) not in (
                "",
                now.reason,
            ):
                # The reason changes more often than the state: it is kept without an event.
                self._table.note(job.job_id, why)
        needed = {
            each.job_id
            for each in self._table.open_jobs()
            if each.state.holds_hosts or (each.state.waits and not self._is_held_back(each))
        }
        for job_id in standings.keys() - needed:
            self._engine.cancel(job_id)

    def _is_held_back(self, job: TrainingJob) -> bool:
        """Return whether the job gave its nodes back as no Prefect worker took its flow run, and
        leaves them to others yet.
        """
        return job.state is JobState.RECOVERING and self._is_backing_off(job)

    def _request(self, job: TrainingJob, hosts: Sequence[Host]) -> Request | None:
        """Ask the engine for the gang of a waiting job; None for one that can have none."""
        per_node = self._settings[job.job_id][0].ranks_per_node
        request = Request(job=job, gang=self._gang_of(job, hosts), ranks_per_node=per_node)
        try:
            self._engine.submit(request)
        except (InvalidInput, AccessDenied) as error:
            self._change(job, JobState.FAILED, error.one_line())
            return None
        return request

    def _apply_standing(self, job: TrainingJob, found: Standing, hosts: Mapping[str, Host]) -> None:
        """Have a job become what its standing with the engine makes of it."""
        holds = job.state in (JobState.ADMITTED, JobState.STARTING, JobState.RUNNING)
        if job.state.waits and found.placement is not None:
            placed = found.placement
            held = [hosts[each] for each in placed.hosts]
            # What an engine grants are whole nodes; of ours a small gang takes a share.
            shared = not self._engine.has_own_queue
            placement = JobPlacement(
                hosts=dict(placed.hosts),
                slots={each.name: each.slots for each in held} if shared else {},
                level=placed.level,
                score=round(placed.score, 4),
            )
            usage = start_usage(job, held, placed.hosts, self._wall(), whole=not shared)
            self._change(job, JobState.ADMITTED, "", placement=placement, usage=usage)
        elif job.state.waits and found.phase == "failed":
            self._change(job, JobState.FAILED, found.reason)
        elif found.phase == "cancelled" and (job.state.waits or holds):
            running = holds and job.flow_run_id
            state = JobState.CANCELLING if running else JobState.CANCELLED
            self._change(job, state, found.reason, wanted="cancel")
        elif found.phase == "revoked" and holds and job.adopted and not job.yields:
            self._record_loss(job, found.reason)
        elif found.phase == "revoked" and holds:
            if job.flow_run_id:
                self._change(job, JobState.PAUSING, found.reason, wanted="yield")
            else:
                self._preempt(job.model_copy(update={"reason": found.reason}))

    def _gang_of(self, job: TrainingJob, hosts: Sequence[Host]) -> Gang:
        settings, training = self._settings[job.job_id]
        return gang_of(job, settings, hosts, training)

    def _has_settings(self, job: TrainingJob) -> bool:
        """Read the job's settings and return True. A waiting job whose settings the profile no
        longer takes fails; one that runs counts with the profile's own.
        """
        if job.job_id in self._settings:  # read once: what a job trains never changes
            return True
        try:
            profile = with_job_settings(self._profile, job.spec.settings)
            read = profile.training, training_key(job.spec, profile)
        except InvalidProfile as error:
            if job.state.waits:
                self._change(job, JobState.FAILED, error.one_line())
                return False
            read = self._profile.training, job.job_id  # the key of no other job
        self._settings[job.job_id] = read
        return True

    def _reservation(self, job: TrainingJob, gang: Gang) -> Reservation:
        assert job.placement is not None
        saved = [each.created_at for each in job.report.checkpoints] if job.report else []
        is_unbegun = job.state is JobState.ADMITTED and not job.adopted  # as while Prefect is away
        # earlier work is lost or saved
        began = job.usage[-1].since if job.usage and not is_unbegun else self._wall()
        trained = job.report is not None and job.report.training_digest is not None
        return Reservation(
            gang=gang,
            hosts=job.placement.hosts,
            lost_work_s=max(0.0, self._wall() - max([began, *saved])),
            # a flow that yields does so while its ranks run, and no more once they have trained
            preemptible=is_unbegun
            or (
                (not trained if job.yields else not job.adopted)
                and job.state in (JobState.STARTING, JobState.RUNNING)
            ),
            ending=job.state in (JobState.PAUSING, JobState.CANCELLING),
        )

    # -- starting and ending flows

    def _start(self, job: TrainingJob) -> None:
        if self._flows is None or job.placement is None or self._is_backing_off(job):
            return
        try:
            started = self._flows.run(FLOW, job.run_id, parameters_of(job), job.attempt + 1)
        except InvalidInput as error:
            self._change(job, JobState.FAILED, error.one_line())
            return
        except PacelineError as error:
            self._retry_at[job.job_id] = self._wall() + RETRY_S
            self._table.note(job.job_id, f"its flow cannot be started yet: {error.one_line()}")
            return
        self._retry_at.pop(job.job_id, None)
        after = self._change(
            job,
            JobState.STARTING,
            flow_run_id=started.flow_run_id,
            attempt=job.attempt + 1,
            started_at=job.started_at or self._wall(),
        )
        if after.flow_run_id != started.flow_run_id:  # it was paused or cancelled meanwhile
            at = self._wall()
            self._table.change(
                job.job_id, lambda now: with_abandoned_run(now, started.flow_run_id, at)
            )
            self._lost_s = -math.inf  # it is ended in the next round

    def _end(self, job: TrainingJob) -> None:
        if self._flows is None or not job.flow_run_id or self._is_backing_off(job):
            return  # without Prefect a flow that runs ends by itself or by a signal
        if job.adopted and job.wanted == "yield":
            return  # its flow reads that, and goes on: it waits to be admitted again
        self._retry_at[job.job_id] = self._wall() + CANCEL_RETRY_S
        try:
            if self._flows.states([job.flow_run_id]).get(job.flow_run_id) not in ENDING:
                self._flows.cancel(job.flow_run_id)
        except PacelineError as error:
            log.warning("flow run %s is not cancelled yet: %s", job.flow_run_id, error)

    def _end_lost(self) -> None:
        """End in Prefect what was lost: cancel what could not be cancelled then, and record a crash
        where no runner acts on that. The jobs' records say which: the next leader goes on.
        """
        now = self._wall()
        if self._flows is None or now - self._lost_s < CANCEL_RETRY_S:
            return
        self._lost_s, since = now, now - ENDED_WITHIN_S
        lost = {
            change.flow_run_id: job
            for job in self._table.jobs()
            if job.updated_at > since
            for change in job.history
            if change.flow_run_id and change.at > since
        }
        try:
            states = self._flows.states(lost) if lost else {}
            ending = [each for each in lost if states.get(each) == "CANCELLING"]
            self._cancelling = {each: self._cancelling.get(each, now) for each in ending}
            dead = [each for each in ending if now - self._cancelling[each] > UNANSWERED_S]
            # An adopted flow whose nodes were taken ends by itself.
            open_ = [e for e in lost if states.get(e) in OPEN and not lost[e].adopted]
            for each in (*dead, *open_)[:MOST_CALLS]:
                with contextlib.suppress(NotFound):  # it was deleted meanwhile
                    if each in self._cancelling:
                        self._flows.crash(each, "nothing has cancelled it: it has no process")
                    else:
                        self._flows.cancel(each)
        except PacelineError as error:
            log.warning("lost flow runs are not ended in Prefect yet: %s", error)

    def _is_backing_off(self, job: TrainingJob) -> bool:
        return self._retry_at.get(job.job_id, 0.0) > self._wall()

    def _change(
        self, job: TrainingJob, state: JobState, reason: str = "", **fields: Any
    ) -> TrainingJob:
        """Store a change unless someone else has changed the job since it was read; return the job
        as it is then."""

        def make(now: TrainingJob) -> TrainingJob:
            if now.state is not job.state or now.flow_run_id != job.flow_run_id:
                return now
            return with_state(now, state, self._wall(), reason, **fields)

        self._retry_at.pop(job.job_id, None)
        return self._table.change(job.job_id, make)


def parameters_of(job: TrainingJob) -> dict[str, object]:
    """Return the parameters of the flow that runs the job."""
    spec = job.spec
    given: dict[str, object] = {
        "model_id": spec.model_id,
        "version": spec.version,
        "snapshot_url": spec.data_snapshot,
        "labels": spec.labels,
        "settings": spec.settings,
        "job_id": job.job_id,
    }
    if spec.code_ref:
        given["code_ref"] = spec.code_ref
    if spec.optimizer_ref:
        given["optimizer_ref"] = spec.optimizer_ref
    if spec.continue_from:
        given["continue_from"] = spec.continue_from
    if spec.purpose:
        given["purpose"] = spec.purpose
    if spec.evaluate_on is not None:
        given["evaluate_on"] = spec.evaluate_on
    return given
