"""A training flow's link to its job in the coordinator's queue: admission, and reports.

A flow that the queue started has a job already. One that a person or the lifecycle started asks for
a job when it has something to train, and waits here until its gang is admitted: one place decides
which gang runs where, however the training was started. Preempted, such a flow's ranks save and
leave, and it waits here again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prefect.runtime import flow_run

from paceline.errors import Cancelled, Conflict, PacelineError
from paceline.jobs import POINTS
from paceline.schemas import (
    AdoptJob,
    Evaluated,
    JobCheckpoint,
    JobPlacement,
    JobRank,
    JobReport,
    JobState,
    JobUsage,
    Moved,
    RankEvent,
    SubmitJob,
    Trained,
    TrainingJob,
)
from paceline.tasks._support.cancelling import noticed, prefect_away, stop_if_cancelled
from paceline.tasks._support.run import Run

logger = logging.getLogger(__name__)

REPORT_S = 5.0
# between two reports where ranks start, fail or go on again, or a trial comes to another point
NEWS_S = 1.0
WAIT_S = 2.0
RESERVED_S = 60.0  # for the queue to record which flow run it started
SHOWN_RANKS = 4096
KEPT_NOTES = 50
NO_FAILURE = ("returned", "preempted")  # kinds of a gang's end for which no host is to blame
_RANK_STATES = {"started": "starting", "resumed": "running", "step": "running"}


class StepTimes:
    """Seconds by class of time, and new steps, as rank 0 of one flow run reports its steps.

    None of them ever falls, as metrics count their differences. The launcher's ``TimeAccounts``
    takes seconds back: once a gang has resumed, steps that it makes again were no useful time.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("useful", "data_wait", "checkpoint", "recovery"), 0.0)
        self.made_steps = 0
        self.began_step: int | None = None  # after which the first gang went on
        self._reached: int | None = None
        self._attempt: int | None = None
        self._last_s = self._waited_s = self._stalled_s = 0.0

    def take(self, event: RankEvent, now_s: float) -> None:
        """Count a step, or the step after which an attempt of the gang goes on."""
        if event.event == "resumed":
            self._reached = max(event.step, self._reached or 0)
            if self.began_step is None:
                self.began_step = event.step
        if event.event != "step":
            return
        data: dict[str, Any] = event.data
        waited_s, stalled_s, own_s = (
            float(data.get(name) or 0.0) for name in ("waited_s", "stalled_s", "step_seconds")
        )
        if event.attempt == self._attempt:
            passed_s = max(0.0, now_s - self._last_s)
            wait_s = min(passed_s, max(0.0, waited_s - self._waited_s))
            stall_s = min(passed_s - wait_s, max(0.0, stalled_s - self._stalled_s))
        else:  # the gang's first step: before it is start, or recovery
            passed_s, wait_s, stall_s = own_s, 0.0, 0.0
            if self._attempt is not None:
                self.seconds["recovery"] += max(0.0, now_s - own_s - self._last_s)
        reached = event.step - 1 if self._reached is None else self._reached
        self.made_steps += max(0, event.step - reached)
        self.seconds["data_wait"] += wait_s
        self.seconds["checkpoint"] += stall_s
        again = event.step <= reached  # the gang was restarted before this step was saved
        self.seconds["recovery" if again else "useful"] += passed_s - wait_s - stall_s
        self._reached, self._attempt = max(event.step, reached), event.attempt
        self._last_s, self._waited_s, self._stalled_s = now_s, waited_s, stalled_s


class JobLink:
    """The job of one flow run; threads may share it."""

    def __init__(self, run: Run, spec: SubmitJob, job_id: str | None) -> None:
        """``job_id`` is the queue's, None where the flow was started otherwise."""
        self._run, self._spec = run, spec
        self.job_id = job_id
        self.placement: JobPlacement | None = None  # that the queue has reserved
        self.held: JobUsage | None = None  # of that, as the queue counts it
        self.user = spec.team or "default", spec.project  # for whom it trains: team, project
        self.sweep = ""  # the run id of the sweep whose trial it is
        self.on_admission: Callable[[], object] = lambda: None  # before a node is busy
        self._flow_run_id = str(flow_run.get_id() or "")
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {"read_bytes": 0, "written_bytes": 0}
        self._ranks_read = 0  # bytes, of the facts' read_bytes
        self._times = StepTimes()
        self._ranks: dict[int, JobRank] = {}
        self._failures: dict[str, Counter[str]] = defaultdict(Counter)  # host → kind → times
        self._checkpoints: list[JobCheckpoint] = []
        self._passed_over: set[str] = set()  # shards, and samples as shard#row
        self._over, self._news = threading.Event(), threading.Event()
        self.superseded = threading.Event()  # the job goes on in another flow run, or has ended
        self.preempted = threading.Event()  # an adopted job is to leave its hosts and wait again
        self._thread = threading.Thread(target=self._report_on, name="job-report", daemon=True)

    @property
    def hosts(self) -> list[str]:
        """Return the hosts that the queue has reserved; none before it has."""
        return sorted(self.placement.hosts) if self.placement is not None else []

    def admitted(self) -> JobPlacement:
        """Return what the job may use, waiting for it. Raises Cancelled where the job
        was cancelled while it waited, and what ``on_admission`` raises.
        """
        if self.placement is not None:
            return self.placement
        run, was_preempted = self._run, self.preempted.is_set()
        call = AdoptJob(
            spec=self._spec, run_id=run.run_id, flow_run_id=self._flow_run_id, yields=True
        )
        if self.job_id is None:
            job = run.retry(lambda: run.coordinator.adopt_job(call))
            # the token may be bound to a team and a project, which count then
            self.job_id, self.user = job.job_id, (job.spec.team, job.spec.project)
        placement = None
        while placement is None:
            # An exception that a signal raises would be lost inside a finalizer, of which Prefect's
            # client has many: the signal is noted, and delivered where the ``with`` ends.
            with noticed() as stopped:
                placement = self._wait_for_placement(stopped, was_preempted)
                if placement is None:
                    stop_if_cancelled()
        self.placement = placement
        self._begin()
        self.on_admission()
        return placement

    def _wait_for_placement(
        self, stopped: threading.Event, was_preempted: bool
    ) -> JobPlacement | None:
        """Return what the queue reserves, None once ``stopped``; raises as ``admitted`` does."""
        said = None
        while True:
            job = self._send()
            mine = job is not None and (job.wanted == "run" or not was_preempted)
            if mine and job is not None and job.placement is not None:
                with self._lock:  # what is reported from now on is of the next attempt
                    self._times, self._ranks = StepTimes(), {}
                    for name in ("waits", "attempt", "step", "steps", "metrics"):
                        self._facts.pop(name, None)
                    self._facts |= {"read_bytes": 0, "written_bytes": 0}
                    self._ranks_read = 0
                self.preempted.clear()
                self.held = job.usage[-1] if job.usage else None
                return job.placement
            if job is not None and (job.state.is_final or job.wanted == "cancel"):
                kind = Cancelled if job.state is JobState.CANCELLED else Conflict
                raise kind(
                    "the job ended while it waited", got=job.reason or job.state, where=job.job_id
                )
            if job is not None and job.reason != said:
                said = job.reason
                self._run.report("train", 0.0, said or "waiting to be admitted")
            if stopped.wait(WAIT_S):
                return None

    def gives_way(self) -> bool:
        """Return whether the ranks ended because the job is preempted and its flow waits again:
        ``admitted`` then returns the next hosts.
        """
        if not self.preempted.is_set():
            return False
        with self._lock:
            self._facts["waits"] = True
        self.placement = None
        self._run.warn("preempted: its state is saved, and it waits for its next hosts")
        return True

    def require_reserved(self) -> None:
        """Take the hosts that the queue has reserved for this flow run of its job; raises Conflict
        where it has reserved none.
        """
        until = time.monotonic() + RESERVED_S
        while True:
            job = self._run.retry(self._call)
            if job.wanted == "cancel":
                raise Cancelled("the job is cancelled", where=job.job_id)
            if job.flow_run_id == self._flow_run_id and job.placement is not None:
                self.placement = job.placement
                self.held = job.usage[-1] if job.usage else None
                self.user = job.spec.team, job.spec.project
                self.sweep = job.spec.sweep
                self._begin()
                return
            if job.state is not JobState.ADMITTED or time.monotonic() > until:
                raise Conflict(
                    "the job runs in another flow run, or does not run",
                    got=f"flow run {self._flow_run_id}; the job is {job.state}",
                    wanted=f"flow run {job.flow_run_id}" if job.flow_run_id else "its own start",
                    where=job.job_id,
                    do="Leave out job_id: the queue then makes a job for this run.",
                )
            time.sleep(WAIT_S)  # it is recorded just after the flow run was made

    def take(self, event: RankEvent, steps: int) -> None:
        """Take in an event of the ranks; never waits for a server."""
        now = time.time()
        data: dict[str, Any] = event.data
        if event.event == "lost":
            self._take_loss(str(event.data["worker_id"]), str(event.data["kind"]))
            return
        with self._lock:
            known = self._ranks.get(event.rank)
            host = event.data.get("worker_id") or (known.host if known else "")
            state = _RANK_STATES.get(event.event) or (known.state if known else "starting")
            if event.event in ("result", "failed"):
                good = event.event == "result" or event.data.get("code") == "Stopped"
                state = "ended" if good else "failed"
            if known is None or known.state != state:
                self._news.set()
            if host:
                self._ranks[event.rank] = JobRank.model_validate(
                    {"rank": event.rank, "host": host, "state": state, "last_heartbeat": now}
                )
            self._facts["attempt"] = event.attempt
            if bad := data.get("quarantined_shards"):  # of any rank; several may name one
                self._passed_over.update(bad)
                self._facts["quarantined"] = len(self._passed_over)
            if event.rank == 0:
                self._times.take(event, time.monotonic())
            if event.rank == 0 and isinstance(read := event.data.get("read_bytes"), int):
                self._facts["read_bytes"] += read - self._ranks_read  # it is the sum of all ranks
                self._ranks_read = read
            if event.rank == 0 and event.event == "step":
                figures = {
                    key: float(value)
                    for key, value in event.data.items()
                    if isinstance(value, int | float) and not isinstance(value, bool)
                }
                before = self._facts.get("step", 0) * POINTS // (steps or 1)
                if self.sweep and event.step * POINTS // (steps or 1) > before:
                    self._news.set()  # where its sweep may prune it
                self._facts |= {"step": event.step, "steps": steps, "metrics": figures}
            if event.event == "checkpoint" and "url" in event.data:
                metrics = self._facts.get("metrics", {})
                loss = {"loss": metrics["loss"]} if "loss" in metrics else {}
                written = int(str(event.data.get("bytes", 0)))
                made = JobCheckpoint(
                    step=event.step, object_ref=str(event.data["url"]), metrics=loss,
                    created_at=now, bytes=written,
                )  # fmt: skip
                self._facts["written_bytes"] += written
                self._checkpoints = [*self._checkpoints, made][-8:]

    def _take_loss(self, host: str, kind: str) -> None:
        """Count the gang's end; its ranks have ended, until they start again."""
        with self._lock:
            if host and kind not in NO_FAILURE:
                self._failures[host][kind] += 1
            for number, each in self._ranks.items():
                if each.state in ("starting", "running"):
                    self._ranks[number] = each.model_copy(update={"state": "ended"})
        self._news.set()

    def relayed(self, moved: Moved) -> None:
        """Take in what a relay to the job's hosts read from the object store."""
        with self._lock:
            self._facts["read_bytes"] += 0 if moved.reused_result else moved.origin_bytes

    def shown(self, name: str, page: str) -> None:
        """Take in where a part of the job can be looked at."""
        with self._lock:
            self._facts["pages"] = self._facts.get("pages", {}) | {name: page}

    def finished(self, result: Trained) -> None:
        """Take in the training's result, found or made."""
        with self._lock:
            figures = {"tokens_per_second": result.tokens_per_second} | result.held_out
            if result.final_loss is not None:
                figures["loss"] = result.final_loss
            self._facts |= {
                "training_id": result.job_id,
                "training_digest": result.training_digest,
                "quarantined": len(result.quarantined_shards),
                "review": f"passed over: {result.passed_over}" if result.passed_over else "",
                "step": result.steps,
                "steps": result.steps,
                "metrics": self._facts.get("metrics", {}) | figures,
            }

    def judged(self, report: Evaluated) -> None:
        """Take in the evaluation of the result."""
        found = report.score("candidate")
        with self._lock:
            self._facts["report_digest"] = report.report_digest
            if found is not None:
                bits = {"evaluation_bits_per_byte": found.bits_per_byte.value}
                self._facts["metrics"] = self._facts.get("metrics", {}) | bits

    def close(self, outcome: str, error: str = "") -> None:
        """Report how the flow ended; does nothing for a flow that needed no job."""
        self._over.set()
        self._news.set()
        if self.job_id is None:
            return
        try:
            self._run.retry(lambda: self._call(outcome, error))
        except PacelineError as refused:  # the scheduler reads it from Prefect
            logger.warning("the end is not reported to the job: %s", refused)

    def _begin(self) -> None:
        if not self._thread.is_alive() and not self._over.is_set():
            self._thread.start()

    def _report_on(self) -> None:
        while not self._over.is_set():
            job = self._send()
            if job is not None and (job.state.is_final or job.flow_run_id != self._flow_run_id):
                self.superseded.set()
            elif job is not None and job.adopted and job.wanted == "yield":
                self.preempted.set()
            self._over.wait(min(NEWS_S, REPORT_S))
            self._news.wait(max(0.0, REPORT_S - NEWS_S))
            self._news.clear()

    def _send(self) -> TrainingJob | None:
        try:
            return self._call()
        except PacelineError as error:
            logger.warning("the job's report waits: %s", error)
            return None

    def _call(self, outcome: str | None = None, error: str = "") -> TrainingJob:
        with self._lock:
            report = JobReport.model_validate(
                {
                    "flow_run_id": self._flow_run_id,
                    "at": time.time(),
                    "made_steps": self._times.made_steps,
                    "began_step": self._times.began_step,
                    "seconds": dict(self._times.seconds),
                    "checkpoints": tuple(self._checkpoints),
                    "workers": tuple(
                        self._ranks[each] for each in sorted(self._ranks)[:SHOWN_RANKS]
                    ),
                    "failures": self._failures,
                    "notes": tuple(each[:1000] for each in self._run.summary.notes[-KEPT_NOTES:]),
                    "outcome": outcome,
                    "error": error[:2000],
                    **self._facts,
                }
            )
        assert self.job_id is not None
        return self._run.coordinator.report_job(self.job_id, report)


@contextmanager
def linked(run: Run, spec: SubmitJob, job_id: str | None) -> Iterator[JobLink]:
    """Within the ``with``, ``run.job`` is the flow's link to its job; its end is reported."""
    link = run.job = JobLink(run, spec, job_id)
    try:
        if job_id is not None:
            link.require_reserved()
        yield link
    except Cancelled as error:
        link.close("cancelled", error.one_line())
        raise
    except PacelineError as error:
        link.close("failed", f"{error.code}: {error.one_line()}")
        raise
    except Exception as error:
        named = prefect_away(error) or error
        link.close("failed", f"{type(named).__name__}: {named}")
        raise
    except BaseException as error:  # a signal: a cancel in Prefect, or Ctrl-C
        link.close("cancelled", type(error).__name__)
        raise
    else:
        link.close("succeeded")
    finally:
        run.job = None
