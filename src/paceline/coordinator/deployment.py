"""One deployment: what its targets reported, and what follows from that.

``assess`` turns facts into a status: it never guesses and keeps no history of its own, so the same
facts give the same status before and after a restart. Who is alive is told to it; it knows neither
clock nor store nor how plans are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import floor

from paceline.coordinator.messages import KeepReceipt, Memo, Observed
from paceline.coordinator.settings import Patience
from paceline.manifest import Manifest
from paceline.plan import origin_cap_bytes
from paceline.wire.calls import DeploymentBeat, DeploymentView
from paceline.wire.events import EventName
from paceline.wire.plan import Plan, Topology, WorkerLanes
from paceline.wire.records import (
    Deployment,
    DeploymentStatus,
    Failure,
    Receipt,
    Worker,
    WorkerProgress,
    WorkerStatus,
)

FAILED = (WorkerStatus.FAILED, WorkerStatus.VERIFICATION_FAILED)
ORIGIN_STEP = 0.05  # origin bytes are kept each time they grew by this share of the model
RESCUES = 3  # then it is stalled until an operator or the deadline ends it
NAMED = 20  # workers named in one message; the rest is counted


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


@dataclass(slots=True)
class Tally:
    """The targets of one deployment by how they stand."""

    living: list[str] = field(default_factory=list)  # alive and able to finish
    pending: list[str] = field(default_factory=list)  # of these, without a receipt
    done: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)  # silent and without a receipt
    failed: list[str] = field(default_factory=list)  # gave up


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
        self._short_since_s: float | None = None  # somebody needs the origin and may not read it
        self._rescues = 0  # plans made because of that

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
        self.plan, self.replan, self._short_since_s = plan, False, None
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

    def everybody_here(self, tally: Tally, now_s: float, patience: Patience) -> bool:
        """Return whether to plan: all targets are here, or enough, and the rest had their time."""
        missing = [each for each in tally.dead if not self._expired(each, now_s, patience)]
        absent = len(tally.dead) + len(tally.failed)
        return not missing and absent <= self.allowed_dead()

    def _expired(self, worker_id: str, now_s: float, patience: Patience) -> bool:
        since_s = self.parts[worker_id].dead_since_s
        return since_s is not None and now_s - since_s >= patience.return_grace_s

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
        effects = self._pass_on(part, worker_id, beat, at)
        if self.final:
            return effects
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

    def tally(self, alive: Callable[[str], bool]) -> Tally:
        """Sort the targets by how they stand."""
        tally = Tally()
        for worker_id, part in self.parts.items():
            if part.receipt is not None:
                tally.done.append(worker_id)
                if alive(worker_id):
                    tally.living.append(worker_id)
            elif worker_id in self.memo.failures:
                tally.failed.append(worker_id)
            elif alive(worker_id):
                tally.living.append(worker_id)
                tally.pending.append(worker_id)
            else:
                tally.dead.append(worker_id)
        return tally

    def assess(
        self, tally: Tally, now_s: float, patience: Patience
    ) -> tuple[DeploymentStatus, Failure | None]:
        """Return the status that the facts amount to, with its reason where there is one."""
        stall = self._stall(tally, now_s, patience)
        if now_s - self.memo.created_s > patience.deadline_s:
            waiting = _names([*tally.pending, *tally.dead, *tally.failed])
            message = f"not complete within {patience.deadline_s:g} s; waiting for {waiting}"
            reason = stall or Failure(code="DeploymentFailed", message=message[:2000])
            return DeploymentStatus.FAILED, reason
        if not tally.pending or self.plan is None:
            # Survivors finish first: while any of them still moves, nobody is given up for good.
            allowed = self.allowed_dead()
            if not tally.pending and tally.done and len(tally.dead) + len(tally.failed) <= allowed:
                return DeploymentStatus.COMPLETE, None
            expired = [each for each in tally.dead if self._expired(each, now_s, patience)]
            if len(expired) + len(tally.failed) > allowed:
                return DeploymentStatus.FAILED, self._too_many(expired, tally.failed, allowed)
        if self.plan is None:
            return DeploymentStatus.INIT, None
        if stall is not None:
            return DeploymentStatus.STALLED, stall
        return self._stage(tally), None

    def _stage(self, tally: Tally) -> DeploymentStatus:
        if self.deployment.status is DeploymentStatus.INIT:
            unready = [each for each in tally.pending if not self.parts[each].ready]
            if unready:
                return DeploymentStatus.INIT
        total = self.deployment.total_pieces
        held = [self.parts[worker_id] for worker_id in tally.living]
        if held and all(part.pieces_held >= total for part in held):
            return DeploymentStatus.VERIFYING
        if any(part.pieces_held >= total for part in held):
            return DeploymentStatus.DISTRIBUTING
        chunks = set().union(*(part.chunks for part in held)) if held else set()
        if len(chunks) >= self.deployment.total_chunks:
            return DeploymentStatus.DISTRIBUTING
        return DeploymentStatus.DOWNLOADING

    def rescue(self, tally: Tally, now_s: float, patience: Patience) -> None:
        """Ask for a new plan where somebody may not read what only the origin has.

        For a moment that is normal: the head died, and its heir has a small share until the loss
        is noticed. Then a new plan shares out what the fuse still allows.
        """
        if self._short(tally) is None:
            self._short_since_s = None
        elif self._short_since_s is None:
            self._short_since_s = now_s
        elif self._rescues < RESCUES and now_s - self._short_since_s > patience.lost_s:
            self._rescues += 1
            self.replan = True

    def _short(self, tally: Tally) -> Failure | None:
        for worker_id in tally.pending:
            failure = self.parts[worker_id].failure
            if failure is not None and failure.code == "OriginBudgetExceeded":
                message = f"{worker_id}: {failure.message}"[:2000]
                return Failure(code=failure.code, message=message)
        return None

    def _stall(self, tally: Tally, now_s: float, patience: Patience) -> Failure | None:
        fuse = origin_cap_bytes(self.deployment.total_bytes)
        read = self.origin_bytes
        if self.deployment.topology is not Topology.DIRECT and read > fuse:
            message = f"the origin fuse: got {read} bytes read, wanted at most {fuse}"
            return Failure(code="OriginBudgetExceeded", message=message)
        if self._short_since_s is not None and now_s - self._short_since_s > 2 * patience.lost_s:
            return self._short(tally)
        return None

    def _too_many(self, dead: list[str], failed: list[str], allowed: int) -> Failure:
        reasons = [f"{worker_id} did not come back" for worker_id in dead]
        for worker_id in failed:
            failure = self.memo.failures[worker_id]
            reasons.append(f"{worker_id} {failure.code}: {failure.message}")
        more = f" and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
        named = "; ".join(reasons[:NAMED])
        message = (
            f"got {len(reasons)} of {len(self.parts)} workers lost, wanted at most {allowed}: "
        )
        return Failure(code="DeploymentFailed", message=(message + named)[:1960] + more)

    def view(self, tally: Tally) -> DeploymentView:
        """Return how far the deployment is."""
        total = self.deployment.total_bytes
        held = sum(min(self.parts[each].bytes_held, total) for each in tally.living)
        wanted = total * len(tally.living)
        finished = self.deployment.status is DeploymentStatus.COMPLETE
        return DeploymentView(
            deployment_id=self.deployment.deployment_id,
            status=self.deployment.status,
            progress=1.0 if finished else held / wanted if wanted else 0.0,
            workers_complete=tuple(tally.done),
            workers_failed=(*tally.failed, *tally.dead),
            deployment=self.shown(),
        )

    def progress(self, alive: Callable[[str], bool]) -> Iterable[WorkerProgress]:
        """Return each target's part, with its neighbours in the newest plan."""
        upstream: dict[str, str] = {}
        downstream: dict[str, str] = {}
        for lanes in self.plan.workers if self.plan else ():
            source = lanes.lanes[0].source if lanes.lanes else None
            if source is not None:
                upstream[lanes.worker_id] = source.key
                if source.worker_id is not None:
                    downstream.setdefault(source.worker_id, lanes.worker_id)
        for worker_id, part in self.parts.items():
            status, failure = part.status, part.failure
            if part.receipt is None and failure is None and not alive(worker_id):
                silent = part.incarnation or self.plan is not None
                message = "its agent is silent" if silent else "its agent never registered"
                status, failure = WorkerStatus.FAILED, Failure(code="WorkerLost", message=message)
            chunks = part.chunks
            if part.receipt is not None:
                chunks = tuple(range(self.deployment.total_chunks))
            yield WorkerProgress(
                worker_id=worker_id,
                status=status,
                chunks_received=chunks,
                pieces_held=part.pieces_held,
                bytes_held=part.bytes_held,
                upstream_worker=upstream.get(worker_id),
                downstream_worker=downstream.get(worker_id),
                failure=failure,
                receipt=part.receipt,
                activated=part.activated,
            )


def _names(workers: list[str]) -> str:
    more = f" and {len(workers) - NAMED} more" if len(workers) > NAMED else ""
    return ", ".join(workers[:NAMED]) + more
