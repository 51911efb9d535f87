"""One deployment's facts: the request, what its targets reported, and what must be stored.

Its status and plans are derived in ``lifecycle`` and ``planning``. No clock, no store, no
knowledge of which workers are alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from math import floor

from paceline.coordinator.state.messages import EmitEvent, Save
from paceline.coordinator.state.peer_health import PeerHealth
from paceline.coordinator.state.persisted_state import PersistedState
from paceline.coordinator.state.settings import CoordinatorSettings
from paceline.coordinator.state.targets import (
    TargetGroups,
    TargetProgress,
    group_targets,
    is_participant,
    unreported_bytes,
)
from paceline.manifest import Manifest
from paceline.plan import Standing, next_order
from paceline.schemas import (
    Deployment,
    DeploymentBeat,
    DeploymentStatus,
    EventName,
    Failure,
    Plan,
    Receipt,
    Topology,
    Worker,
    WorkerLanes,
    WorkerProgress,
    WorkerStatus,
)

FAILED = (WorkerStatus.FAILED, WorkerStatus.VERIFICATION_FAILED)
OUT_OF_BUDGET = "OriginBudgetExceeded"
MAX_SOURCE_EVENTS = 64  # logged per heartbeat; a full outbox (10,000 events) refuses all commits
MAX_PROCESSES = 16  # of one worker, whose origin bytes are stored separately
ORIGIN_STEP = 0.05  # origin bytes are stored each time they grew by this share of the model


def process_key(worker: Worker) -> str:
    """Return the key by which a worker's current process counts its origin bytes."""
    return f"{worker.worker_id} {worker.process or f'{worker.address} {worker.pid}'}"


class DeploymentState:
    """The facts of one deployment.

    Derived values are cached until the facts change: with 10,000 targets, nothing may be counted
    again for each heartbeat.
    """

    def __init__(
        self,
        deployment: Deployment,
        manifest: Manifest,
        persisted: PersistedState,
        settings: CoordinatorSettings,
    ) -> None:
        self.deployment = deployment
        self.manifest = manifest
        self.persisted = persisted
        self.settings = settings
        self.plan: Plan | None = None
        self.lanes: dict[str, WorkerLanes] = {}
        self.order = persisted.order
        self.parts = {worker_id: TargetProgress() for worker_id in deployment.target_workers}
        for worker_id, failure in persisted.failures.items():
            self.parts[worker_id].failure = failure
            self.parts[worker_id].status = WorkerStatus.FAILED
        for process, spent in persisted.spent.items():
            if (part := self.parts.get(process.partition(" ")[0])) is not None:
                part.spent_bytes += spent
                part.processes.append(process)
        self.origin_bytes = sum(persisted.spent.values())  # by every incarnation of every worker
        known = {worker_id: Standing(value) for worker_id, value in persisted.demoted.items()}
        self.standings = PeerHealth(len(self.parts), settings, known)
        self.replan = False  # membership or a standing changed since the plan was made
        self.replanned_s: float | None = None
        self.fresh: set[str] = set()  # returned after the plan was made: it does not apply to them
        self.persisted_changed = False  # the persisted state changed since it was stored
        self.short: set[str] = set()  # they need the origin, and their budget does not allow it
        self.out_of_budget_since_s: float | None = None
        self.origin_replans = 0  # plans made for that reason,
        self.replanned_origin_bytes = 0  # and the bytes read at the origin before the last of them
        self.tail_replanned = False  # the line is complete, and the tail was planned again
        self.stage: DeploymentStatus | None = None  # None: to be computed
        self.asking: set[str] = set()  # asked to report that they hold it, see ``activation``
        self.activating: set[str] = set()  # asked to make it their active version
        # After a restart: yet to report their progress. Until then nothing is judged by silence.
        self.unconfirmed: set[str] = set()
        self._tally: TargetGroups | None = None
        self._chunks_seen: set[int] = set()

    def tally(self, alive: Callable[[str], bool]) -> TargetGroups:
        if self._tally is None or self.final:
            self._tally = group_targets(self.parts, self.persisted.failures, alive)
            self.stage = None
        return self._tally

    def standing_of(self, worker_id: str) -> Standing:
        """Return how the planner may use a living target."""
        standing = self.standings.of(worker_id)
        if standing is Standing.LINE and worker_id in self.persisted.late:
            return Standing.TAIL
        return standing

    @property
    def origin_read(self) -> bool:
        """Return whether every chunk has arrived at some target."""
        return len(self._chunks_seen) >= self.deployment.total_chunks

    @property
    def has_origin_budget(self) -> bool:
        """Return whether the origin budget applies; only a requested ``direct`` has none."""
        return self.deployment.topology is not Topology.DIRECT or self.persisted.auto

    @cached_property
    def manifest_bytes(self) -> bytes:
        """Return the manifest as published; encoded once for all agents."""
        return self.manifest.to_bytes()

    @property
    def final(self) -> bool:
        return self.deployment.status.is_final

    def shown(self) -> Deployment:
        read = self.origin_bytes
        if read == self.deployment.origin_bytes:
            return self.deployment
        return self.deployment.model_copy(update={"origin_bytes": read})

    def lost(self, worker_id: str, now_s: float) -> None:
        """Record that a target is lost (or has yet to register)."""
        part = self.parts[worker_id]
        part.dead_since_s = now_s
        self._tally = None
        self.unconfirmed.discard(worker_id)
        # The last bytes it read may not be reported again, should this process end too: store them.
        self.persisted_changed = (
            self.persisted_changed or self.origin_bytes > self.deployment.origin_bytes
        )
        if unreported := unreported_bytes(self.lanes.get(worker_id), part):
            self.persisted.unreported[part.process or f"{worker_id} unheard"] = unreported
            self.persisted_changed = True
        if worker_id in self.lanes:
            self.replan = True

    def returned(self, worker_id: str, incarnation: int) -> None:
        """Record that a target registered, perhaps after a failure of its own."""
        part = self.parts[worker_id]
        part.dead_since_s = None
        part.reset_for(incarnation)
        self.persisted_changed = (
            self.persisted.failures.pop(worker_id, None) is not None or self.persisted_changed
        )
        self.replan = True
        self.fresh.add(worker_id)
        self.short.discard(worker_id)
        self._tally = None

    def record_lanes(self, worker_id: str, incarnation: int, now_s: float) -> None:
        """Record that a target fetched lanes; only its heartbeats show whether they arrived."""
        part = self.parts[worker_id]
        if incarnation != part.incarnation:
            part.reset_for(incarnation)
        if not part.ready:
            part.ready, self.stage = True, None
        part.lanes_s = now_s if part.lanes_s is None else part.lanes_s

    def lanes_of(self, worker_id: str) -> WorkerLanes | None:
        """Return the worker's lanes, or None; a complete worker always gets some, if without work.

        So an agent that was restarted after it completed receives the deployment again.
        """
        part = self.parts.get(worker_id)
        if self.plan is None or part is None:
            return None
        if part.receipt is None:
            return None if worker_id in self.fresh else self.lanes.get(worker_id)
        return self.lanes.get(worker_id) or self.plan.workers[0].model_copy(
            update={
                "worker_id": worker_id,
                "epoch": self.plan.epoch,
                "lanes": (),
                "origin_budget_bytes": 0,
            }
        )

    def behind(self, worker_id: str) -> bool:
        """Return whether a worker should fetch its lanes: they are newer than those it follows."""
        part, lanes = self.parts[worker_id], self.lanes.get(worker_id)
        if lanes is None or part.epoch >= lanes.epoch:
            return False
        if part.receipt is not None:
            return not part.ready
        return worker_id not in self.fresh

    def raise_budget(self, extra_bytes: int) -> None:
        """Raise the origin budget, and request a new plan that distributes it."""
        self.persisted = replace(
            self.persisted, extra_bytes=self.persisted.extra_bytes + extra_bytes
        )
        self.replan, self.out_of_budget_since_s, self.origin_replans = True, None, 0

    def resume(
        self, alive: Callable[[str], bool], address: Callable[[str], str], now_s: float
    ) -> None:
        """Continue from an earlier coordinator's state; progress arrives with the heartbeats.

        A worker keeps its lanes until it reports, except where its address differs from the plan's.
        """
        plan = self.plan
        if plan is None or self.final:
            return
        self.standings.resume(now_s)
        planned = {
            lane.source.worker_id: lane.source.address
            for each in plan.workers
            for lane in each.lanes
            if lane.source.worker_id is not None
        }
        for worker_id, part in self.parts.items():
            if part.receipt is not None or not alive(worker_id):
                continue
            if worker_id in self.persisted.failures:
                continue
            self.unconfirmed.add(worker_id)
            elsewhere = planned.get(worker_id) not in (None, address(worker_id))
            if worker_id not in self.lanes or elsewhere:
                self.fresh.add(worker_id)  # it returned, and was not planned again
                self.replan = True

    def merge_progress(self, known: Mapping[str, WorkerProgress]) -> None:
        """Fill in stored progress of targets that have not reported since a restart."""
        for worker_id, each in known.items():
            part = self.parts.get(worker_id)
            if part is None or part.receipt is not None or part.incarnation:
                continue
            part.pieces_held, part.bytes_held = each.pieces_held, each.bytes_held
            part.chunks = each.chunks_received
            if each.status is WorkerStatus.RECEIVING:  # final states are stored
                part.status = each.status

    def follow(self, plan: Plan) -> None:
        """Make a plan the current one, newly made or loaded from the store."""
        self.plan, self.stage = plan, None
        self.lanes = {each.worker_id: each for each in plan.workers}
        self.order = next_order(self.order, plan)
        expected: dict[tuple[str, str], float] = {}
        for worker_id, each in self.lanes.items():
            for lane in each.lanes:
                edge = (lane.source.key, worker_id)
                expected[edge] = expected.get(edge, 0.0) + lane.expected_bytes_s
        self.standings.follow(expected)

    def adopt(self, plan: Plan, now_s: float) -> None:
        """Follow a new plan; a worker that keeps older lanes also keeps its budget."""
        self.follow(plan)
        for worker_id, each in self.lanes.items():
            if each.epoch == plan.epoch:
                part = self.parts[worker_id]
                part.spent_before = part.spent_bytes
        self.replan, self.out_of_budget_since_s = False, None
        self.fresh.clear()
        update: dict[str, object] = {"epoch": plan.epoch}
        # Lost workers keep their place in the line; the plan does not list them, so this does.
        order = () if next_order((), plan) == self.order else self.order
        if order != self.persisted.order:
            self.persisted = replace(self.persisted, order=order)
        if self.persisted.planned_s is None:
            auto = self.deployment.topology is Topology.AUTO
            self.persisted = replace(self.persisted, planned_s=now_s, auto=auto)
            update |= {
                "topology": plan.topology,
                "predicted_seconds": plan.predicted_seconds,
                "bound_seconds": plan.bound_seconds,
            }
        else:
            self.replanned_s = now_s
        self.deployment = self.deployment.model_copy(update=update)

    def set_status(self, status: DeploymentStatus, failure: Failure | None, at: float) -> None:
        """Set the status; a final one also sets the time and frees memory."""
        update: dict[str, object] = {"status": status, "failure": failure}
        if status.is_final:
            update["completed_at"] = at
            for part in self.parts.values():
                part.command_sent = False
                part.chunks = ()
            # A hundred closed deployments are kept, of 10,000 workers each: edge counts and chunk
            # lists would take gigabytes, and are not needed any more.
            self.standings.close()
            self.__dict__.pop("manifest_bytes", None)
        persisted = self.persisted
        if status is DeploymentStatus.COMPLETE and None not in (
            persisted.done_s,
            persisted.planned_s,
        ):
            update["seconds"] = max(0.0, (persisted.done_s or 0.0) - (persisted.planned_s or 0.0))
        self.deployment = self.shown().model_copy(update=update)
        self.persisted_changed = False

    def holders(self) -> set[str]:
        """Return the targets that verified the whole model."""
        return {worker_id for worker_id, part in self.parts.items() if part.receipt is not None}

    def unstopped(self, alive: Callable[[str], bool]) -> list[str]:
        """Return the living targets that may still publish it after it was cancelled."""
        return [
            worker_id
            for worker_id, part in self.parts.items()
            if self.plan is not None
            and part.receipt is None
            and not part.stopped
            and alive(worker_id)
        ]

    def allowed_dead(self) -> int:
        # 0.29 * 100 is 28.999… in floating point, and means 29.
        return floor(self.deployment.max_failed * len(self.parts) + 1e-9)

    def report(
        self, worker: Worker, beat: DeploymentBeat, now_s: float, at: float
    ) -> list[Save | EmitEvent]:
        """Record one worker's report; return the receipts to store and the audit events."""
        worker_id, incarnation = worker.worker_id, worker.incarnation
        part = self.parts[worker_id]
        if incarnation != part.incarnation:
            part.reset_for(incarnation)
        if beat.epoch < part.epoch and beat.receipt is None:
            return []  # an overtaken or replayed heartbeat
        part.epoch = max(part.epoch, beat.epoch)
        if beat.epoch and part.lanes_s is None:
            part.ready, part.lanes_s, self.stage = True, now_s, None
        if beat.origin_bytes:
            # By process, not incarnation: a process that returns after a loss continues its count.
            self._spend(part, process_key(worker), beat.origin_bytes)
        if self.final:
            self._show(part, worker_id, beat)
            return []
        self._count(part, beat)
        if beat.edges:
            # Its own edges only: a worker must not report for others, nor any number of edges.
            known = (e for e in beat.edges if is_participant(self.deployment, self.parts, e.source))
            own = (each for each in known if worker_id in (each.source, each.reader))
            here = [each for each in own if each.reader in self.parts]
            self.standings.take(worker_id, here, now_s)
        effects = self._pass_on(part, worker_id, beat, at)
        if part.receipt is not None:
            if beat.status is WorkerStatus.RECEIVING and incarnation > part.receipt.incarnation:
                part.receipt = None  # it returned without the model: its disk is another one
                part.held_before = part.pieces_held
                self.replan, self._tally = True, None
            return effects
        if beat.receipt is not None:
            return effects + self._take_receipt(part, beat.receipt, worker_id, now_s, at)
        part.status = beat.status
        if beat.status in FAILED:
            failure = beat.failure or Failure(code="DeploymentFailed", message="gave no reason")
            return effects + self._fail(part, worker_id, failure, at)
        part.failure = beat.failure
        if beat.failure is not None and beat.failure.code == OUT_OF_BUDGET:
            self.short.add(worker_id)
        elif self.short:
            self.short.discard(worker_id)
        return effects

    def _show(self, part: TargetProgress, worker_id: str, beat: DeploymentBeat) -> None:
        """Record whether a worker holds the version, and whether it is the active one; a report
        older than the newest command is ignored.
        """
        part.failure = beat.failure
        part.reported_complete = beat.status is WorkerStatus.COMPLETE and beat.receipt is not None
        if worker_id in self.activating:
            if not (beat.activated and part.command_sent):
                return
            self.activating.discard(worker_id)
        part.activated = beat.activated

    def _count(self, part: TargetProgress, beat: DeploymentBeat) -> None:
        total = self.deployment.total_pieces
        if (beat.pieces_held >= total) != (part.pieces_held >= total):
            self.stage = None
        part.pieces_held, part.bytes_held = beat.pieces_held, beat.bytes_held
        if len(beat.chunks_received) > len(part.chunks) and not self.origin_read:
            self._chunks_seen.update(beat.chunks_received)
            self.stage = None
        part.chunks = beat.chunks_received

    def _spend(self, part: TargetProgress, process: str, spent: int) -> None:
        part.process = process
        self.persisted.unreported.pop(process, None)  # it is alive, and reports its bytes itself
        more = spent - self.persisted.spent.get(process, 0)
        if more <= 0:
            return
        if process not in self.persisted.spent:
            self._merge_oldest(part, process)
        self.persisted.spent[process] = spent
        part.spent_bytes += more
        self.origin_bytes += more
        step = ORIGIN_STEP * self.deployment.total_bytes
        self.persisted_changed = (
            self.persisted_changed or self.origin_bytes - self.deployment.origin_bytes > step
        )

    def _merge_oldest(self, part: TargetProgress, process: str) -> None:
        """Add one more process of a worker; merge the counts of its oldest ones."""
        part.processes.append(process)
        while len(part.processes) > MAX_PROCESSES:
            oldest = part.processes.pop(0)
            earlier = f"{oldest.partition(' ')[0]} earlier"
            read = self.persisted.spent.pop(oldest, 0)
            self.persisted.spent[earlier] = self.persisted.spent.get(earlier, 0) + read

    def _pass_on(
        self, part: TargetProgress, worker_id: str, beat: DeploymentBeat, at: float
    ) -> list[Save | EmitEvent]:
        """Return one audit event per source that this worker newly gave up or found corrupting; at
        most ``MAX_SOURCE_EVENTS``, because its next heartbeats name the rest again.
        """
        if not (beat.lost_sources or beat.corrupt_sources or part.reported_sources):
            return []
        reports = {f"lost {key}": (EventName.SOURCE_LOST, key) for key in beat.lost_sources}
        reports |= {
            f"corrupt {key}": (EventName.PIECE_CORRUPT, key) for key in beat.corrupt_sources
        }
        fresh = [each for each in reports if each not in part.reported_sources][:MAX_SOURCE_EVENTS]
        part.reported_sources = part.reported_sources & reports.keys() | frozenset(fresh)
        identity = self.deployment.deployment_id
        return [
            EmitEvent(name, at, identity, worker_id, {"source": key})
            for name, key in map(reports.__getitem__, fresh)
        ]

    def _take_receipt(
        self, part: TargetProgress, receipt: Receipt, worker_id: str, now_s: float, at: float
    ) -> list[Save | EmitEvent]:
        ours = self.deployment
        wanted = (ours.deployment_id, worker_id, ours.manifest_digest, ours.total_bytes)
        names = ("deployment_id", "worker_id", "manifest_digest", "total_bytes")
        got = tuple(getattr(receipt, name) for name in names)
        if got != wanted or receipt.incarnation > part.incarnation:
            part.status = WorkerStatus.VERIFICATION_FAILED
            message = f"the receipt does not match: got {got}, wanted {wanted}"
            failure = Failure(code="CorruptData", message=message[:2000])
            return self._fail(part, worker_id, failure, at)
        part.receipt, part.failure, part.status = receipt, None, WorkerStatus.COMPLETE
        part.pieces_held, part.bytes_held = ours.total_pieces, ours.total_bytes
        self.persisted.failures.pop(worker_id, None)
        self.short.discard(worker_id)
        self._tally = None
        # The rename was before this heartbeat: the receipt has the seconds since its lanes.
        done_s = now_s if part.lanes_s is None else min(now_s, part.lanes_s + receipt.seconds)
        self.persisted = replace(
            self.persisted, done_s=max(done_s, self.persisted.done_s or done_s)
        )
        self.persisted_changed = True
        completed = EmitEvent(
            EventName.WORKER_COMPLETED,
            at,
            ours.deployment_id,
            worker_id,
            {"seconds": receipt.seconds, "reused_bytes": receipt.reused_bytes},
        )
        return [Save(receipt), completed]

    def _fail(
        self, part: TargetProgress, worker_id: str, failure: Failure, at: float
    ) -> list[Save | EmitEvent]:
        changed = part.failure != failure
        part.failure = failure
        if failure.code == OUT_OF_BUDGET:
            self.short.add(worker_id)
            return []  # the deployment stalls; the worker continues when peers can feed it
        self.persisted.failures[worker_id] = failure
        self._tally = None
        if not changed:
            return []
        self.persisted_changed = self.replan = True  # the others must not wait for it
        identity = self.deployment.deployment_id
        data: dict[str, object] = {"code": failure.code, "message": failure.message}
        return [EmitEvent(EventName.WORKER_FAILED, at, identity, worker_id, data)]
