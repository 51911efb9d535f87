"""Tracks one job over all attempts: steps, restarts, failures, skipped batches, time accounting.

Input: rank events and attempt results; the only decision is whether another attempt can succeed.
``TimeAccounts`` assigns each second of wall-clock time to exactly one account. Pure: the caller
passes the time.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from paceline.errors import TrainingFailed
from paceline.schemas import Failures, RankEvent, Restart, TimeLedger, TrainJob, TrainResult
from paceline.storage import join_url
from paceline.training.identity import training_inputs
from paceline.training.launcher.job_history import JobHistory
from paceline.training.launcher.placement import FAILURE_MEMORY_S, NodePool
from paceline.training.launcher.ports import GangResult

STEPS_KEPT = 100_000  # latest steps that a resume can move to ``lost_work``
ACCOUNTS = (
    "start",
    "productive",
    "data_wait",
    "checkpoint_stall",
    "lost_work",
    "detection",
    "restart",
    "finish",
)


class _Step(NamedTuple):
    number: int
    began: float
    ended: float
    worked: float
    waited: float
    stalled: float


class TimeAccounts:
    """Time accounts of one job from ``now`` on (seconds of one monotonic clock).

    Work undone by a failure moves from ``productive`` to ``lost_work`` when the job resumes before
    it. A lost step that ended after the failure was found is not work: that time counts as
    ``detection`` until the failure was found and as ``restart`` afterwards.
    """

    def __init__(self, now: float) -> None:
        self._began = self._last = now
        self._phase = "start"
        self._spent = dict.fromkeys(ACCOUNTS, 0.0)
        self._steps: deque[_Step] = deque(maxlen=STEPS_KEPT)
        self._found_at = math.inf  # when a failure was found, until the job resumes
        self._first_step: float | None = None
        self._last_step: float | None = None

    def record_step(
        self, now: float, step: int, *, seconds: float, data_wait_s: float, stall_s: float
    ) -> None:
        """Record a step of ``seconds``, including its waits for data and checkpoint stalls."""
        passed = self._advance_to(now)
        own = min(passed, max(0.0, seconds))
        if self._phase != "productive":  # the time before the first step of an attempt
            self._spent[self._phase] += passed - own
            passed = own
            if self._first_step is None:
                self._first_step = now - own
        waited = min(passed, max(0.0, data_wait_s))
        stalled = min(passed - waited, max(0.0, stall_s))
        worked = passed - waited - stalled
        self._spent["data_wait"] += waited
        self._spent["checkpoint_stall"] += stalled
        self._spent["productive"] += worked
        self._steps.append(_Step(step, now - passed, now, worked, waited, stalled))
        self._phase, self._last_step = "productive", now

    def record_failure(self, now: float, found_at: float | None = None) -> None:
        """Record a failed attempt, found at ``found_at`` (default ``now``), fully ended at ``now``.

        After a first step, the time from the last event to ``found_at`` counts as detection.
        """
        found_at = min(now, now if found_at is None else found_at)
        account = "detection" if self._phase == "productive" else self._phase
        self._found_at = min(self._found_at, found_at)  # earliest, if attempts fail before resuming
        until_found = max(0.0, found_at - self._last)
        self._spent[account] += until_found
        self._spent["restart"] += self._advance_to(now) - until_found
        self._phase = "restart"

    def record_stop(self, now: float) -> None:
        """Record an attempt that ended on request; no time counts as detection."""
        self._spent["restart"] += self._advance_to(now)
        self._phase = "restart"

    def record_resume(self, step: int) -> None:
        """Record a resume after ``step``; later steps become lost work."""
        while self._steps and self._steps[-1].number > step:
            lost = self._steps.pop()
            self._spent["productive"] -= lost.worked
            if lost.ended <= self._found_at:
                self._spent["lost_work"] += lost.worked
                continue
            # A frozen rank is continued briefly to dump its stacks, which can complete a step that
            # its peers waited in: no work.
            self._spent["data_wait"] -= lost.waited
            self._spent["checkpoint_stall"] -= lost.stalled
            found_at = max(lost.began, self._found_at)
            self._spent["detection"] += found_at - lost.began
            self._spent["restart"] += lost.ended - found_at
        self._found_at = math.inf

    def finished(self, now: float) -> TimeLedger:
        """Close the accounts at ``now`` and return them."""
        self._spent["finish"] += self._advance_to(now)
        wall = now - self._began
        trained = (self._last_step or now) - (self._first_step or self._began)
        productive = max(0.0, self._spent["productive"])
        return TimeLedger(
            **{f"{name}_s": max(0.0, seconds) for name, seconds in self._spent.items()},
            wall_s=wall,
            goodput=min(1.0, productive / trained) if trained > 0 else 0.0,
        )

    def _advance_to(self, now: float) -> float:
        passed = max(0.0, now - self._last)
        self._last = max(now, self._last)
        return passed


Kind = Literal["failed", "hung", "lost", "preempted", "bad-step", "returned"]

COUNTED = ("failed", "hung", "lost")  # use up a restart; stops on request, preemptions do not
MAX_REASONS_SHOWN = 5  # end reasons listed in one error
DIVERGED = "TrainingFailed"
BAD_STEP = "BadStep"
NOT_SAVED = "NotSaved"
# Errors that repeat in the next attempt; all others may be caused by the machine.
PERMANENT_ERRORS = {
    "InvalidInput",
    "InvalidSnapshot",
    "InvalidManifest",
    "DataRejected",
    "AccessDenied",
    "Conflict",
    DIVERGED,
    NOT_SAVED,
}


class JobTracker:
    """Tracks the attempts of one job and builds its result."""

    def __init__(self, job: TrainJob, now: float, history: JobHistory | None = None) -> None:
        self._job = job
        self._history = history or JobHistory()
        self._started = now
        self._attempt = self._ranks = 0
        self._step = self._attempt_step = self._resumed = 0
        self._has_resumed = False
        self._first_resumed: int | None = None
        self._restarts: list[Restart] = []
        # Index and end time of the last restart, until the next attempt completes a step.
        self._unresumed_restart: tuple[int, float] | None = None
        self._rank_errors: dict[int, dict[str, Any]] = {}
        self._diverged_at: int | None = None
        self._requested_stop: tuple[Kind, str] | None = None
        self._result: RankEvent | None = None
        self._accounts = TimeAccounts(now)
        self._shards: dict[str, int] = {}
        self._read_bytes: dict[
            tuple[int, int], int
        ] = {}  # attempt, rank → bytes of the object store
        self._quarantine_reasons: dict[str, str] = {}  # shard → reason of its quarantine
        self._stalled = self._waited = 0.0
        self.counted = 0  # failures that count as restarts, in this driver
        self._counted_at: list[float] = []
        self.skipped: set[int] = {*job.skip_batches, *self._history.skipped_batches}
        self.progressed = False

    def begin(self, attempt: int, ranks: int) -> None:
        """Record the start of an attempt with ``ranks`` ranks."""
        self._attempt, self._ranks = attempt, ranks
        self._attempt_step, self._has_resumed = 0, False
        self._rank_errors = {}
        self._result = None
        self._requested_stop = None
        self._stalled = self._waited = 0.0
        self.progressed = False

    def record_stop(self, kind: Kind, why: str) -> None:
        """Record that the driver is about to stop the attempt, and why."""
        self._requested_stop = (kind, why)

    def on_line(self, raw: dict[str, Any], now: float) -> RankEvent | None:
        """Process one line of a rank; return the event, None for other lines and old attempts."""
        try:
            event = RankEvent.model_validate(raw)
        except ValidationError:
            return None
        if event.attempt != self._attempt:
            return None
        if event.event == "failed":
            self._rank_errors[event.rank] = {"step": event.step, **event.data}
        data: dict[str, Any] = event.data
        self._shards |= dict.fromkeys(data.get("quarantined_shards", ()), 1)  # from any rank
        self._quarantine_reasons |= data.get("quarantined_why", {})
        if isinstance(read := data.get("read_bytes"), int):
            self._read_bytes[event.attempt, event.rank] = read  # of one process, so far
        if event.rank == 0:
            if "read_bytes" in data:  # those of rank 0 carry the sum of all ranks
                data["read_bytes"] = sum(self._read_bytes.values())
            self._on_rank0_event(event, now)
        return event

    def _on_rank0_event(self, event: RankEvent, now: float) -> None:
        if event.event == "resumed":
            self._resumed, self._has_resumed = event.step, True
            self._accounts.record_resume(event.step)
            if self._first_resumed is None:
                self._first_resumed = event.step
        elif event.event == "step":
            data = event.data
            waited, stalled = _seconds(data, "waited_s"), _seconds(data, "stalled_s")
            self._accounts.record_step(
                now,
                event.step,
                seconds=_seconds(data, "step_seconds"),
                data_wait_s=waited - self._waited,
                stall_s=stalled - self._stalled,
            )
            self._waited, self._stalled = waited, stalled
            self._complete_restart(now)
            self.progressed = True
            self._attempt_step = event.step
            self._step = max(self._step, event.step)
        elif event.event == "result":
            self._complete_restart(now)
            self._step = max(self._step, event.step)
            self._result = event

    def record_failure(self, outcome: GangResult, now: float, stacks_url: str = "") -> bool:
        """Record a failed attempt; return whether it uses up a restart.

        Raises TrainingFailed where another attempt cannot succeed.
        """
        self._complete_restart(now)
        kind = self._kind(outcome)
        was_requested = self._requested_stop is not None and self._requested_stop[0] == kind
        reason = (
            self._requested_stop[1] if self._requested_stop and was_requested else outcome.reason
        )
        if outcome.stopped:
            self._accounts.record_stop(now)
        else:
            self._accounts.record_failure(now, outcome.found_at)
        self._unresumed_restart = (
            len(self._restarts),
            now if outcome.found_at is None else outcome.found_at,
        )
        self._restarts.append(
            Restart(
                attempt=self._attempt,
                failed_rank=outcome.failed_rank,
                worker_id=outcome.failed_worker,
                reason=reason[:2000],
                lost_steps=0,
                seconds=0.0,  # set, as steps are, once a step is completed again
                kind=kind,
                ranks=self._ranks,
                stacks_url=stacks_url,
                resumed_step=self._attempt_step,
            )
        )
        if kind in COUNTED:
            self.counted += 1
            self._counted_at = [*(e for e in self._counted_at if now - e < FAILURE_MEMORY_S), now]
        if kind == "bad-step":
            self._skip_bad_batch()
        else:
            self._require_another_try(outcome)
        return kind in COUNTED

    def _require_another_try(self, outcome: GangResult) -> None:
        for rank_error in self._rank_errors.values():
            if rank_error.get("code") not in PERMANENT_ERRORS:
                continue
            if rank_error["code"] == NOT_SAVED and (outcome.preempted or self._stopped_unsaved):
                continue  # steps are lost, but another node or freed disk space can save again
            if rank_error.get("code") == DIVERGED and self._diverged_at is None:
                self._diverged_at = self._step  # the first may be a hardware error: try again once
                continue
            raise TrainingFailed(
                "training cannot succeed as asked",
                got=rank_error.get("message"),
                where=join_url(self._job.checkpoint_url, self._job.job_id),
            )

    @property
    def _stopped_unsaved(self) -> bool:
        """Return whether ranks stopped on request but could not save."""
        return any(rank_error.get("stopped") for rank_error in self._rank_errors.values())

    def _kind(self, outcome: GangResult) -> Kind:
        if any(rank_error.get("code") == BAD_STEP for rank_error in self._rank_errors.values()):
            return "bad-step"
        if outcome.hung:
            return "hung"
        if self._requested_stop is None and outcome.lost - outcome.preempted:
            return "lost"
        if outcome.stopped or self._stopped_unsaved:
            return self._requested_stop[0] if self._requested_stop is not None else "preempted"
        if outcome.lost - outcome.preempted:
            return "lost"
        if outcome.preempted:
            return "preempted"
        # Stopped on request but too slow to save: the steps are lost, but nothing failed.
        return (
            self._requested_stop[0]
            if outcome.overdue and self._requested_stop is not None
            else "failed"
        )

    def _skip_bad_batch(self) -> None:
        bad = {
            int(rank_error["bad_batch"]): str(rank_error.get("message", ""))
            for rank_error in self._rank_errors.values()
            if rank_error.get("code") == BAD_STEP and "bad_batch" in rank_error
        }
        allowed = self._job.settings.guard.max_bad_steps
        if bad.keys() <= self.skipped or len(self.skipped | bad.keys()) > allowed:
            raise TrainingFailed(
                "too many bad steps",
                got=f"batches {sorted(self.skipped | bad.keys())}: {'; '.join(bad.values())}",
                wanted=f"at most {allowed}, training.guard.max_bad_steps",
                where=join_url(self._job.checkpoint_url, self._job.job_id),
                do="Lower training.learning_rate or training.clip_norm, or look at those batches; "
                "the last healthy checkpoint is intact.",
            )
        self.skipped |= bad.keys()

    @property
    def recent(self) -> int:
        """Return the failures that count against ``max_restarts``: those of the last day."""
        return len(self._counted_at)

    @property
    def failures(self) -> int:
        """Return the job's failures, including those under earlier drivers."""
        return self._history.failures + self.counted

    def loss_event(self) -> RankEvent:
        """Return the event of the attempt that ``record_failure`` recorded last."""
        last = self._restarts[-1]
        why: dict[str, object] = {
            "kind": last.kind,
            "worker_id": last.worker_id or "",
            "reason": last.reason[:500],
        }
        return RankEvent(
            event="lost",
            rank=last.failed_rank or 0,
            attempt=self._attempt,
            step=self._step,
            data=why,
        )

    def running_s(self, now: float) -> float:
        """Return the job's running time in seconds, including earlier drivers."""
        return self._history.running_s + now - self._started

    def history(self, now: float, pool: NodePool) -> JobHistory:
        """Return the history for the next driver of this job."""
        return JobHistory(
            attempts=max(self._history.attempts, self._attempt),
            failures=self.failures,
            running_s=self.running_s(now),
            hosts=self._history.with_hosts(pool.failures),
            shards=self._history.with_shards(self._shards),
            skipped_batches=tuple(sorted(self.skipped)),
        )

    def reasons(self) -> str:
        """Return the end reasons of the last attempts, as one line."""
        shown = [each.reason for each in self._restarts[-MAX_REASONS_SHOWN:]]
        more = len(self._restarts) - len(shown)
        return "; ".join([*([f"({more} before)"] if more else []), *shown])

    def result(self, now: float, pool: NodePool, ranks: int) -> TrainResult:
        """Return the job's result; raises TrainingFailed where rank 0 sent none."""
        if self._result is None:
            raise TrainingFailed("rank 0 ended without a result", where=self._job.job_id)
        fields = {
            key: value
            for key, value in self._result.data.items()
            if key in TrainResult.model_fields
        }
        fields["resumed_from_step"] = self._first_resumed or 0
        fields["quarantined_shards"] = sorted(self._history.with_shards(self._shards))
        fields["quarantined_why"] = self._quarantine_reasons
        return TrainResult.model_validate(
            fields
            | {
                **training_inputs(self._job),
                "job_id": self._job.job_id,
                "restarts": [each.model_dump() for each in self._restarts],
                "seconds": now - self._started,
                "read_bytes": sum(self._read_bytes.values()),
                "skipped_batches": sorted(self.skipped),
                "ranks": ranks,
                "ledger": self._accounts.finished(now).model_dump(),
                "failures": Failures(
                    job=self.failures,
                    hosts=self._history.with_hosts(pool.failures),
                    shards=self._history.with_shards(self._shards),
                    left_out=tuple(sorted(pool.excluded)),
                ).model_dump(),
            }
        )

    def _complete_restart(self, now: float) -> None:
        if self._unresumed_restart is None:
            return
        (number, found_at), self._unresumed_restart = self._unresumed_restart, None
        reached = self._restarts[number].resumed_step
        resumed = self._resumed if self._has_resumed else reached
        if not self._has_resumed:  # it ended before; the next restart shows what was lost
            self._attempt_step = reached
        self._restarts[number] = self._restarts[number].model_copy(
            update={
                "attempt": self._attempt,
                "ranks": self._ranks,
                "resumed_step": resumed,
                "lost_steps": max(0, reached - resumed),
                "seconds": now - found_at,
            }
        )


def _seconds(data: dict[str, Any], name: str) -> float:
    value = data.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
