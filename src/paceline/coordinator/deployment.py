"""One deployment's facts: what was asked for, what its targets reported, what is to be kept.

What follows from the facts is in ``verdict``. It knows neither clock nor store, nor who is alive,
nor how plans are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import floor

from paceline.coordinator.messages import KeepReceipt, Memo, Observed
from paceline.manifest import Manifest
from paceline.wire.calls import DeploymentBeat
from paceline.wire.events import EventName
from paceline.wire.plan import Plan, WorkerLanes
from paceline.wire.records import (
    Deployment,
    DeploymentStatus,
    Failure,
    Receipt,
    Worker,
    WorkerStatus,
)

FAILED = (WorkerStatus.FAILED, WorkerStatus.VERIFICATION_FAILED)
ORIGIN_STEP = 0.05  # origin bytes are kept each time they grew by this share of the model


@dataclass(slots=True)
class Part:
    """One target's part, as its newest incarnation reported it."""

    incarnation: int = 0
    epoch: int = 0  # of the lanes it says it follows
    ready: bool = False  # it acknowledged the manifest: fetched lanes, or says it follows some
    status: WorkerStatus = WorkerStatus.IDLE
    pieces_held: int = 0
    bytes_held: int = 0
    chunks: tuple[int, ...] = ()
    failure: Failure | None = None
    receipt: Receipt | None = None
    activated: bool = False
    lanes_s: float | None = None  # when this incarnation first took lanes
    dead_since_s: float | None = None
    told: frozenset[str] = frozenset()  # sources it reported lost or corrupt, already passed on
    command_sent: bool = False  # the cancel or activate in force rode on an answer already
    stopped: bool = False  # it confirmed a cancel

    def begin_again(self, incarnation: int) -> None:
        """Forget what the previous incarnation said; its receipt stands until contradicted."""
        self.incarnation, self.epoch, self.status = incarnation, 0, WorkerStatus.IDLE
        self.ready = False
        self.pieces_held = self.bytes_held = 0
        self.chunks, self.failure, self.lanes_s = (), None, None
        self.activated, self.told, self.command_sent = False, frozenset(), False


class DeploymentRun:
    """The facts of one deployment and the decisions they lead to."""

    def __init__(self, deployment: Deployment, manifest: Manifest, memo: Memo) -> None:
        self.deployment = deployment
        self.manifest = manifest
        self.memo = memo
        self.plan: Plan | None = None
        self.parts = {worker_id: Part() for worker_id in deployment.target_workers}
        for worker_id, failure in memo.failures.items():
            self.parts[worker_id].failure = failure
            self.parts[worker_id].status = WorkerStatus.FAILED
        self.replan = False  # membership changed since the plan was made
        self.unkept = False  # the memo changed since it was kept
        self.short_since_s: float | None = None  # somebody needs the origin and may not read it
        self.rescues = 0  # plans made because of that

    @cached_property
    def manifest_bytes(self) -> bytes:
        """Return the manifest as it was published; written once for all the agents that ask."""
        return self.manifest.to_bytes()

    @property
    def final(self) -> bool:
        """Return whether nothing changes any more."""
        return self.deployment.status.is_final

    @property
    def origin_bytes(self) -> int:
        """Return what was read from the source so far, by every incarnation of every worker."""
        return sum(self.memo.spent.values())

    def shown(self) -> Deployment:
        """Return the record with what is counted between its changes."""
        read = self.origin_bytes
        if read == self.deployment.origin_bytes:
            return self.deployment
        return self.deployment.model_copy(update={"origin_bytes": read})

    def lost(self, worker_id: str, now_s: float) -> None:
        """Take note that a target is silent (or was never there)."""
        self.parts[worker_id].dead_since_s = now_s
        if self.plan is not None and self.plan.lanes_of(worker_id) is not None:
            self.replan = True

    def returned(self, worker_id: str, incarnation: int) -> None:
        """Take note that a target registered, perhaps after a failure of its own."""
        part = self.parts[worker_id]
        part.dead_since_s = None
        part.begin_again(incarnation)
        self.unkept = self.memo.failures.pop(worker_id, None) is not None or self.unkept
        self.replan = True

    def took_lanes(self, worker_id: str, incarnation: int, now_s: float) -> None:
        """Take note that a target fetched lanes; only its beats tell whether they arrived."""
        part = self.parts[worker_id]
        if incarnation != part.incarnation:
            part.begin_again(incarnation)
        part.ready = True
        part.lanes_s = now_s if part.lanes_s is None else part.lanes_s

    def lanes_of(self, worker_id: str) -> WorkerLanes | None:
        """Return the worker's lanes; whoever finished gets lanes without work even if planned out.

        An agent that was restarted after it finished learns of the deployment this way.
        """
        if self.plan is None or worker_id not in self.parts:
            return None
        lanes = self.plan.lanes_of(worker_id)
        if lanes is None and self.parts[worker_id].receipt is not None:
            idle = {"worker_id": worker_id, "lanes": (), "origin_budget_bytes": 0}
            return self.plan.workers[0].model_copy(update=idle)
        return lanes

    def adopt(self, plan: Plan, now_s: float) -> None:
        """Follow a new plan."""
        self.plan, self.replan, self.short_since_s = plan, False, None
        update: dict[str, object] = {"epoch": plan.epoch}
        if self.memo.planned_s is None:
            self.memo = replace(self.memo, planned_s=now_s)
            update |= {
                "predicted_seconds": plan.predicted_seconds,
                "bound_seconds": plan.bound_seconds,
            }
        self.deployment = self.deployment.model_copy(update=update)

    def turn(self, status: DeploymentStatus, failure: Failure | None, at: float) -> None:
        """Take a new status; a final one also takes the time."""
        update: dict[str, object] = {"status": status, "failure": failure}
        if status.is_final:
            update["completed_at"] = at
            for part in self.parts.values():
                part.command_sent = False
        memo = self.memo
        if status is DeploymentStatus.COMPLETE and None not in (memo.done_s, memo.planned_s):
            update["seconds"] = max(0.0, (memo.done_s or 0.0) - (memo.planned_s or 0.0))
        self.deployment = self.shown().model_copy(update=update)
        self.unkept = False

    def set_activating(self, activating: bool) -> None:
        """Begin (or give up) the switch to this version."""
        self.memo = replace(self.memo, activating=activating, activated_told=False)
        for part in self.parts.values():
            part.activated = part.command_sent = False

    def allowed_dead(self) -> int:
        """Return how many targets may be lost for good."""
        # 0.29 * 100 is 28.999… in floating point, and means 29.
        return floor(self.deployment.max_failed * len(self.parts) + 1e-9)

    def report(
        self, worker: Worker, beat: DeploymentBeat, now_s: float, at: float
    ) -> list[KeepReceipt | Observed]:
        """Take one worker's report and return what must be kept and told."""
        worker_id, incarnation = worker.worker_id, worker.incarnation
        part = self.parts[worker_id]
        if incarnation != part.incarnation:
            part.begin_again(incarnation)
        if beat.epoch < part.epoch and beat.receipt is None:
            return []  # a beat that was overtaken by a newer one, or a replay
        part.epoch = max(part.epoch, beat.epoch)
        if beat.epoch and part.lanes_s is None:
            part.ready, part.lanes_s = True, now_s
        part.pieces_held, part.bytes_held = beat.pieces_held, beat.bytes_held
        part.chunks = beat.chunks_received
        part.activated = beat.activated and part.command_sent
        # By process, not incarnation: one that was thought lost goes on counting where it was.
        key = f"{worker_id} {worker.address} {worker.pid}"
        if beat.origin_bytes > self.memo.spent.get(key, 0):
            self.memo.spent[key] = beat.origin_bytes
            if (
                self.origin_bytes - self.deployment.origin_bytes
                > ORIGIN_STEP * self.deployment.total_bytes
            ):
                self.unkept = True
        if self.final:
            return []
        effects = self._pass_on(part, worker_id, beat, at)
        if part.receipt is not None:
            if beat.status is WorkerStatus.RECEIVING and incarnation > part.receipt.incarnation:
                part.receipt = None  # it came back without what it had: its disk is another one
                self.replan = True
            return effects
        if beat.receipt is not None:
            return effects + self._take_receipt(part, beat.receipt, worker_id, now_s, at)
        part.status = beat.status
        if beat.status in FAILED:
            failure = beat.failure or Failure(code="DeploymentFailed", message="gave no reason")
            return effects + self._fail(part, worker_id, failure, at)
        part.failure = beat.failure
        return effects

    def _pass_on(
        self, part: Part, worker_id: str, beat: DeploymentBeat, at: float
    ) -> list[KeepReceipt | Observed]:
        """Tell once of each source that this worker gave up or caught corrupting."""
        reports = {f"lost {key}": (EventName.SOURCE_LOST, key) for key in beat.lost_sources}
        reports |= {
            f"corrupt {key}": (EventName.PIECE_CORRUPT, key) for key in beat.corrupt_sources
        }
        fresh = [reports[key] for key in reports if key not in part.told]
        part.told = frozenset(reports)
        identity = self.deployment.deployment_id
        return [Observed(name, at, identity, worker_id, {"source": key}) for name, key in fresh]

    def _take_receipt(
        self, part: Part, receipt: Receipt, worker_id: str, now_s: float, at: float
    ) -> list[KeepReceipt | Observed]:
        ours = self.deployment
        wanted = (ours.deployment_id, worker_id, ours.manifest_digest, ours.total_bytes)
        got = (
            receipt.deployment_id,
            receipt.worker_id,
            receipt.manifest_digest,
            receipt.total_bytes,
        )
        if got != wanted or receipt.incarnation > part.incarnation:
            part.status = WorkerStatus.VERIFICATION_FAILED
            message = f"the receipt does not match: got {got}, wanted {wanted}"
            failure = Failure(code="CorruptData", message=message[:2000])
            return self._fail(part, worker_id, failure, at)
        part.receipt, part.failure, part.status = receipt, None, WorkerStatus.COMPLETE
        part.pieces_held, part.bytes_held = ours.total_pieces, ours.total_bytes
        self.memo.failures.pop(worker_id, None)
        # The rename was before this beat: the agent's own count says how long after its lanes.
        done_s = now_s if part.lanes_s is None else min(now_s, part.lanes_s + receipt.seconds)
        self.memo = replace(self.memo, done_s=max(done_s, self.memo.done_s or done_s))
        self.unkept = True
        told = Observed(
            EventName.WORKER_COMPLETED,
            at,
            ours.deployment_id,
            worker_id,
            {"seconds": receipt.seconds, "reused_bytes": receipt.reused_bytes},
        )
        return [KeepReceipt(receipt), told]

    def _fail(
        self, part: Part, worker_id: str, failure: Failure, at: float
    ) -> list[KeepReceipt | Observed]:
        changed = part.failure != failure
        part.failure = failure
        if failure.code == "OriginBudgetExceeded":
            return []  # stalls the deployment; the worker goes on when others can feed it
        self.memo.failures[worker_id] = failure
        if not changed:
            return []
        self.unkept = self.replan = True  # the others must not wait for it
        identity = self.deployment.deployment_id
        data: dict[str, object] = {"code": failure.code, "message": failure.message}
        return [Observed(EventName.WORKER_FAILED, at, identity, worker_id, data)]
