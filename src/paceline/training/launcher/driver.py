"""Driver of one training job: run the gang, restart it after failures, store the result.

``run_job`` is idempotent: a finished job returns its stored result. Each restart resumes from the
newest healthy checkpoint on the nodes that the placement selects; a batch that caused a bad step is
skipped from then on. Imports neither torch nor Dask: the caller passes a launcher.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pydantic import ValidationError

from paceline.config import load_runtime
from paceline.errors import Conflict, InvalidInput, SourceMissing, TemporaryError, TrainingFailed
from paceline.models import CONFIG_FILE
from paceline.schemas import RankEvent, TrainJob, TrainResult, canonical_json
from paceline.storage import ObjectStore, join_url, open_store
from paceline.training.deadlines import Deadlines
from paceline.training.identity import config_digest, export_directory, training_inputs
from paceline.training.launcher.admission import admit
from paceline.training.launcher.gang import GangSupervisor
from paceline.training.launcher.job_history import HistoryWriter, JobHistory, read_history
from paceline.training.launcher.job_tracker import JobTracker
from paceline.training.launcher.local import launcher_argv
from paceline.training.launcher.placement import Assignment, NodePool, with_fewer_ranks
from paceline.training.launcher.ports import GangResult, Launcher
from paceline.training.parallel import data_shares_of, is_asynchronous

log = logging.getLogger(__name__)

RESULT_FILE = "result.json"
RANK = "paceline.training.loop.rank:main"
MAX_BACKOFF_S = 5.0
MAX_IDLE_ATTEMPTS = 20  # consecutive attempts without a step, whatever ended them
SPARE_BACKOFF_S = 300.0  # longest wait before a spare that ended is replaced
RETURN_CHECK_S = 3.0  # time per checkpoint to look for returned nodes; rank messages wait meanwhile
# Longest time from a cancel to the ranks' end. Prefect's worker kills 30 s after its SIGTERM;
# unresponsive launchers, releasing nodes and closing the record take up to 8 s more.
CANCEL_GRACE_S = 15.0


def run_job(
    job: TrainJob,
    workers: Sequence[str],
    launcher: Launcher,
    *,
    on_event: Callable[[RankEvent], None] | None = None,
    store: ObjectStore | None = None,
    cancel: threading.Event | None = None,
    on_wait: Callable[[str], None] | None = None,
    state_dir: str = "",
    accelerators: Mapping[str, int] | None = None,
    slots: Mapping[str, tuple[int, int]] | None = None,
) -> TrainResult:
    """Run ``job`` on ``workers`` (placement.py assigns ranks to them); return its stored result.

    ``state_dir`` is used in this process where ``job.state_dir`` is empty, which lets each node
    use its own. ``accelerators`` are those of ``workers`` by kind, for the result. ``slots`` are
    how many slots of how many a queue has reserved on each of ``workers``, one a rank; without,
    they are held whole.

    Raises TrainingFailed where the restarts are used up or the job cannot succeed, Conflict where
    the job id has other settings or other gangs hold the nodes, InvalidSnapshot where the data are
    for another purpose, Cancelled once ``cancel`` is set and every rank has ended.
    """
    if not workers:
        raise InvalidInput("no workers to train on", got=0, wanted="at least one")
    own = job.model_copy(update={"state_dir": job.state_dir or state_dir})
    store = store or open_store(load_runtime(own.state_dir))
    if (finished := stored_result(job, store)) is not None:
        return finished
    admit(own, workers[0], store)
    guard = job.settings.guard
    deadlines = Deadlines.of_job(job)
    with launcher.open_nodes(
        workers, launcher_argv(RANK), wait_s=guard.node_wait_s, cancel=cancel, on_wait=on_wait,
        slots=slots, work=job.job_id,
    ) as nodes:  # fmt: skip
        gangs = GangSupervisor(
            nodes,
            deadlines,
            cancel=cancel,
            grace_s=min(guard.grace_s, CANCEL_GRACE_S),
            node_wait_s=guard.node_wait_s,
        )
        gangs.watch_for_preemption(guard.preemption, guard.grace_s)
        if (finished := stored_result(job, store)) is not None:
            return finished  # by the driver that held the nodes before
        return run_on_nodes(job, workers, gangs, store, on_event, accelerators, slots)


def run_on_nodes(
    job: TrainJob,
    workers: Sequence[str],
    gangs: GangSupervisor,
    store: ObjectStore,
    on_event: Callable[[RankEvent], None] | None = None,
    accelerators: Mapping[str, int] | None = None,
    slots: Mapping[str, tuple[int, int]] | None = None,
) -> TrainResult:
    """Run ``job`` on nodes already held; see ``run_job``."""
    ranks = {worker: count for worker, (count, _) in (slots or {}).items()}
    pool = NodePool(workers, job.settings, ranks)
    with HistoryWriter(job, store) as history_writer:
        result = _JobRun(job, pool, gangs, read_history(job, store), history_writer, on_event).run()
    result = result.model_copy(update={"accelerators": dict(accelerators or {})})
    store.put_bytes(_result_url(job), canonical_json(result))
    return result


def stored_result(job: TrainJob, store: ObjectStore) -> TrainResult | None:
    """Return the stored result of ``job``, None without one; raises Conflict for other settings."""
    where = _result_url(job)
    try:
        result = TrainResult.model_validate_json(store.get_bytes(where))
    except SourceMissing:
        return None
    except ValidationError as error:
        raise Conflict("stored result cannot be read", where=where, do="Delete it.") from error
    if result.config_digest != config_digest(job):
        raise Conflict(
            "job id is taken by a job with other settings",
            got=job.job_id,
            where=where,
            do="Use another job id.",
        )
    # Older versions exported user code without a config: nothing said how it is built. And the job
    # may ask for files of another size now.
    wanted, found = export_directory(job.settings), result.export_url.rpartition("/")[2]
    if wanted != found or not store.exists(join_url(result.export_url, CONFIG_FILE)):
        log.warning("a finished job's model is exported again url=%s into=%s", where, wanted)
        return None
    # Older versions did not store these fields; the job with the same configuration has them.
    return result.model_copy(update=training_inputs(job))


class _JobRun:
    """The attempts of one job."""

    def __init__(
        self,
        job: TrainJob,
        pool: NodePool,
        gangs: GangSupervisor,
        history: JobHistory,
        history_writer: HistoryWriter,
        on_event: Callable[[RankEvent], None] | None,
    ) -> None:
        self._job = job
        self._gangs = gangs
        self._history = history
        self._history_writer = history_writer
        self._on_event = on_event
        self._pool = pool
        self._began = time.monotonic()
        self._tracker = JobTracker(job, self._began, self._history)
        self._assignment: Assignment | None = None
        self._running_job = job
        self._spares_made = 0
        self._spare_due, self._spare_tries = 0.0, 0

    def run(self) -> TrainResult:
        """Run attempts until one succeeds; return the result."""
        attempt, idle = self._history.attempts, 0  # numbers continue: no stored file is overwritten
        while True:
            attempt += 1
            outcome = self._attempt(attempt)
            if outcome.ok:
                return self._tracker.result(
                    time.monotonic(), self._pool, self._running_job.settings.ranks
                )
            progressed = self._tracker.progressed
            self._record_failure(outcome, attempt)
            idle = 0 if progressed else idle + 1
            if idle > max(MAX_IDLE_ATTEMPTS, self._job.settings.guard.max_restarts):
                raise TrainingFailed(
                    "attempt after attempt ended before its first step",
                    got=self._tracker.reasons(),
                    wanted=f"one step within {idle} attempts",
                    where=join_url(self._job.checkpoint_url, self._job.job_id),
                    do="Look at the reasons; the same job id goes on from the newest checkpoint.",
                )
            if idle:  # restart at once after progress; back off where an attempt made no step
                time.sleep(min(MAX_BACKOFF_S, 0.25 * 2**idle))

    def _attempt(self, attempt: int) -> GangResult:
        assignment = self._assignment = self._assign_ranks()
        self._tracker.begin(attempt, assignment.ranks)
        self._spare_due, self._spare_tries = 0.0, 0
        job = self._running_job = self._job.model_copy(
            update={
                "settings": with_fewer_ranks(self._job.settings, assignment.ranks),
                "data_readers": data_shares_of(self._job.settings),
                "skip_batches": tuple(sorted(self._tracker.skipped)),
                "failures": self._tracker.failures,
                "running_s": self._tracker.running_s(time.monotonic()),
            }
        )
        if assignment.reduced:
            log.warning(
                "gang goes on with nodes away ranks=%d of=%d nodes=%d of=%d",
                assignment.ranks,
                self._job.settings.ranks,
                len({each.worker_id for each in assignment.members}),
                len(self._pool.workers),
            )
        members = [
            replace(each, env=rank_environment(job, each.worker_id)) for each in assignment.members
        ]
        try:
            text = job.model_dump_json()
            return self._gangs.run_gang(
                members, text, attempt, self._on_line, served=is_asynchronous(job.settings)
            )
        except TemporaryError as error:
            return GangResult(ok=False, exit_codes={}, reason=error.one_line())

    def _assign_ranks(self) -> Assignment:
        self._pool.forget_old_failures(time.monotonic())
        try:
            return self._pool.assignment(self._gangs.spares)
        except TrainingFailed:
            if not self._pool.missing:
                raise
            # A Dask worker that died is back within seconds: retry with all nodes, the gang's start
            # waits for them.
            for each in self._pool.missing:
                self._pool.mark_reachable(each)
            return self._pool.assignment(self._gangs.spares)

    def _on_line(self, raw: dict[str, object]) -> None:
        event = self._tracker.on_line(raw, time.monotonic())
        if event is None:
            return
        if event.rank == 0 and event.event == "step":
            self._keep_spares()
        elif event.rank == 0 and event.event == "checkpoint" and not event.data.get("rejected"):
            self._check_returned_nodes()
        if self._on_event is not None:
            self._on_event(event)

    def _keep_spares(self) -> None:
        wanted = self._job.settings.guard.spares - len(self._gangs.spares)
        now = time.monotonic()
        if wanted <= 0 or now < self._spare_due:
            return
        # Back off exponentially, so that a spare that keeps ending, or a node that does not answer,
        # does not cost a new process at every step.
        self._spare_due = now + min(SPARE_BACKOFF_S, 2.0**self._spare_tries)
        self._spare_tries += 1
        for worker in self._pool.spare_nodes(wanted):
            if not self._gangs.restart_node(worker):
                continue
            self._spares_made += 1
            env = {**rank_environment(self._job, worker), "PACELINE_SPARE": "1"}
            name = f"spare-{self._spares_made}"
            self._gangs.start_spare(name, worker, env, self._running_job.model_dump_json())

    def _check_returned_nodes(self) -> None:
        """After a checkpoint: restart lost nodes; where one is back, stop the attempt to use it."""
        assert self._assignment is not None
        if not self._assignment.reduced:
            return
        until = time.monotonic() + RETURN_CHECK_S
        back = [
            each
            for each in self._pool.missing
            if time.monotonic() < until and self._gangs.restart_node(each)
        ]
        for each in back:
            self._pool.mark_reachable(each)
        if back:
            self._tracker.record_stop("returned", f"{', '.join(back)} returned")
            self._gangs.request_stop("nodes returned")

    def _record_failure(self, outcome: GangResult, attempt: int) -> None:
        """Record the failure; raises TrainingFailed where another attempt cannot succeed."""
        now = time.monotonic()
        for worker in outcome.preempted:
            self._pool.record_preemption(worker)
        try:
            counts = self._tracker.record_failure(outcome, now, self._keep_stacks(outcome, attempt))
            self._record_node_failures(outcome, now, counts=counts)
        finally:
            self._history_writer.keep_history(self._tracker.history(now, self._pool))
        if self._on_event is not None:
            self._on_event(self._tracker.loss_event())
        if self._tracker.recent > self._job.settings.guard.max_restarts:
            raise TrainingFailed(
                "training used up its restarts",
                got=self._tracker.reasons(),
                wanted=f"at most {self._job.settings.guard.max_restarts} restarts",
                where=join_url(self._job.checkpoint_url, self._job.job_id),
                do="Look at the reasons; the last healthy checkpoint is kept, the same job id "
                "resumes it.",
            )

    def _record_node_failures(self, outcome: GangResult, now: float, *, counts: bool) -> None:
        for worker in sorted(outcome.lost - outcome.preempted):  # preempted: not a node failure
            self._pool.record_failure(worker, lost=True, now=now)
        failed = outcome.failed_worker
        if counts and failed is not None and failed not in outcome.lost:
            lost = outcome.failed_rank is not None and (
                outcome.exit_codes.get(outcome.failed_rank, 0) is None and not outcome.hung
            )
            self._pool.record_failure(failed, lost=lost, now=now)

    def _keep_stacks(self, outcome: GangResult, attempt: int) -> str:
        """Store the stacks of a hung gang; return their URL prefix, "" for other ends."""
        url = ""
        for rank, text in outcome.stderr.items() if outcome.hung else ():
            url = self._history_writer.keep_stack(attempt, rank, text)
        return url


def rank_environment(job: TrainJob, worker_id: str) -> dict[str, str]:
    """Return the environment variables of a rank on the node."""
    return {
        "PACELINE_WORKER_ID": worker_id,
        "OMP_NUM_THREADS": str(job.settings.threads_per_rank),
    }


def _result_url(job: TrainJob) -> str:
    return join_url(job.checkpoint_url, job.job_id, RESULT_FILE)
