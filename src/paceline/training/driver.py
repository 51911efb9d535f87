"""One training job from start to stored result: launch the gang, restart it, keep the account.

Idempotent: a finished job returns its stored result. Each restart resumes from the last healthy
checkpoint; a node that is lost, or fails twice, is left out where others remain. Knows no torch and
no Dask.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from paceline.data import load_snapshot, require_purpose
from paceline.errors import Conflict, InvalidInput, SourceMissing, TemporaryError, TrainingFailed
from paceline.objects import ObjectStore, join_url
from paceline.profile import load_runtime
from paceline.training.gang import GangLauncher, GangMember, GangOutcome, GangResult
from paceline.training.identity import config_digest
from paceline.training.watch import STOPPED_EXIT
from paceline.wire.base import canonical_json
from paceline.wire.training import RankEvent, Restart, TrainJob, TrainResult

log = logging.getLogger(__name__)

RESULT_FILE = "result.json"
MAX_BACKOFF_S = 5.0
FAILURES_PER_WORKER = 2
DIVERGED = "TrainingFailed"


def run_job(
    job: TrainJob,
    workers: Sequence[str],
    launch: GangLauncher,
    *,
    on_event: Callable[[RankEvent], None] | None = None,
    store: ObjectStore | None = None,
) -> TrainResult:
    """Run ``job`` on ``workers`` (ranks go round them in turn) and return its stored result.

    Raises TrainingFailed when its restarts are used up or it cannot succeed, Conflict where the job
    id was used with other settings, InvalidSnapshot where the data are for another purpose.
    """
    if not workers:
        raise InvalidInput("no workers to train on", got=0, wanted="at least one")
    store = store or ObjectStore.from_runtime(load_runtime(job.state_dir))
    if (finished := stored_result(job, store)) is not None:
        return finished
    require_purpose(load_snapshot(job.snapshot_url, store), job.purpose)
    account = _Account(job, on_event)
    left = list(workers)
    failures: Counter[str] = Counter()
    for attempt in range(1, job.settings.guard.max_restarts + 2):
        account.begin(attempt)
        outcome = _launch(job, left, launch, account, attempt)
        if outcome.ok:
            result = account.result()
            store.put_bytes(_result_url(job), canonical_json(result))
            return result
        account.failed(outcome)
        left = _without_bad(left, failures, outcome)
        if attempt <= job.settings.guard.max_restarts:
            time.sleep(min(MAX_BACKOFF_S, 0.25 * 2**attempt))
    raise TrainingFailed(
        "training used up its restarts",
        got=account.reasons(),
        wanted=f"at most {job.settings.guard.max_restarts} restarts",
        where=join_url(job.checkpoint_url, job.job_id),
        do="Look at the reasons; the last healthy checkpoint is kept, the same job id resumes it.",
    )


def stored_result(job: TrainJob, store: ObjectStore) -> TrainResult | None:
    """Return the result of ``job`` where it finished; raises Conflict for other settings."""
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
    return result


def members_of(job: TrainJob, workers: Sequence[str]) -> list[GangMember]:
    """Return the gang: rank ``i`` on worker ``i`` modulo their number."""
    return [
        GangMember(
            worker_id=workers[rank % len(workers)],
            rank=rank,
            argv=[sys.executable, "-m", "paceline.training.rank"],
            env={
                "PACELINE_WORKER_ID": workers[rank % len(workers)],
                "OMP_NUM_THREADS": str(job.settings.threads_per_rank),
            },
            input_json=job.model_dump_json(),
        )
        for rank in range(job.settings.ranks)
    ]


def _launch(
    job: TrainJob, workers: Sequence[str], launch: GangLauncher, account: _Account, attempt: int
) -> GangOutcome:
    try:
        return launch.run_gang(
            members_of(job, workers),
            on_event=account.on_line,
            start_deadline_s=job.settings.guard.start_deadline_s,
            silence_deadline_s=job.settings.guard.step_deadline_s,
            attempt=attempt,
        )
    except TemporaryError as error:
        return GangResult(ok=False, exit_codes={}, reason=error.one_line())


def _without_bad(workers: list[str], failures: Counter[str], outcome: GangOutcome) -> list[str]:
    worker, rank = outcome.failed_worker, outcome.failed_rank
    code = 0 if rank is None else outcome.exit_codes.get(rank)
    if worker is None or code == STOPPED_EXIT:  # stopped as asked: no fault of the node's
        return workers
    failures[worker] += 1
    lost = code is None
    if not lost and failures[worker] < FAILURES_PER_WORKER:
        return workers
    others = [each for each in workers if each != worker]
    if others:
        log.warning("worker left out worker=%s failures=%d", worker, failures[worker])
    return others or workers


class _Account:
    """What happened over all attempts of one job."""

    def __init__(self, job: TrainJob, on_event: Callable[[RankEvent], None] | None) -> None:
        self._job = job
        self._on_event = on_event
        self._started = time.monotonic()
        self._attempt = 0
        self._step = 0  # the furthest that any attempt came
        self._resumed = 0
        self._first_resumed: int | None = None
        self._result: RankEvent | None = None
        self._failures: dict[int, dict[str, Any]] = {}  # by rank, of this attempt
        self._restarts: list[Restart] = []
        self._open: tuple[GangOutcome, float] | None = None
        self._diverged_at: int | None = None

    def begin(self, attempt: int) -> None:
        """Start counting a new attempt."""
        self._attempt = attempt
        self._failures = {}
        self._result = None

    def on_line(self, raw: dict[str, Any]) -> None:
        """Take in one line of a rank."""
        try:
            event = RankEvent.model_validate(raw)
        except ValidationError:
            return
        if event.attempt != self._attempt:
            return
        if event.event == "failed":
            self._failures[event.rank] = {"step": event.step, **event.data}
        if event.rank == 0:
            if event.event == "resumed":
                self._resumed = event.step
                if self._first_resumed is None:
                    self._first_resumed = event.step
            elif event.event in ("step", "result"):
                self._close_restart()
                self._step = max(self._step, event.step)
                if event.event == "result":
                    self._result = event
        if self._on_event is not None:
            self._on_event(event)

    def failed(self, outcome: GangOutcome) -> None:
        """Note that the attempt failed; raises TrainingFailed where another cannot do better."""
        self._close_restart()
        self._open = (outcome, time.monotonic())
        for said in self._failures.values():
            if said.get("code") not in _HOPELESS:
                continue
            if said.get("code") == DIVERGED and self._diverged_at is None:
                self._diverged_at = self._step  # once may be a flipped bit; twice is the recipe
                continue
            raise TrainingFailed(
                "training cannot succeed as asked",
                got=said.get("message"),
                where=join_url(self._job.checkpoint_url, self._job.job_id),
            )

    def reasons(self) -> str:
        """Return why each attempt ended."""
        last = [self._open[0].reason] if self._open else []
        return "; ".join([*(each.reason for each in self._restarts), *last])

    def result(self) -> TrainResult:
        """Return the account of a gang that ended well."""
        if self._result is None:
            raise TrainingFailed("rank 0 ended without a result", where=self._job.job_id)
        said = {
            key: value
            for key, value in self._result.data.items()
            if key in TrainResult.model_fields
        }
        said["resumed_from_step"] = self._first_resumed or 0
        return TrainResult.model_validate(
            said
            | {
                "job_id": self._job.job_id,
                "restarts": [each.model_dump() for each in self._restarts],
                "seconds": time.monotonic() - self._started,
            }
        )

    def _close_restart(self) -> None:
        if self._open is None:
            return
        outcome, seen_at = self._open
        self._open = None
        self._restarts.append(
            Restart(
                attempt=self._attempt,
                failed_rank=outcome.failed_rank,
                worker_id=outcome.failed_worker,
                reason=outcome.reason[:2000],
                resumed_step=self._resumed,
                lost_steps=max(0, self._step - self._resumed),
                seconds=time.monotonic() - seen_at,
            )
        )


# Errors that the next attempt would meet again; anything else may be the machine's.
_HOPELESS = {
    "InvalidInput",
    "InvalidSnapshot",
    "InvalidManifest",
    "DataRejected",
    "AccessDenied",
    "Conflict",
    DIVERGED,
}


def _result_url(job: TrainJob) -> str:
    return join_url(job.checkpoint_url, job.job_id, RESULT_FILE)
