"""The coordinator's decisions: events and a time go in, effects come out.

It follows every deployment, notices what a loss or a return means for it, replans with whoever is
there, and answers calls. It has no clock, no socket, no file and no thread: the driver gives it the
time and carries out what it returns, so tests and simulations run exactly this code. An event that
is refused raises a PacelineError and has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.coordinator.course import advance, turn
from paceline.coordinator.deployment import DeploymentRun
from paceline.coordinator.membership import Membership
from paceline.coordinator.messages import (
    Activate,
    AdmitWorker,
    Answer,
    Beat,
    Cancel,
    Create,
    Effect,
    Event,
    FetchLanes,
    FlowTold,
    IssueToken,
    KeepDeployment,
    KeepKey,
    KeepWorker,
    Kept,
    Listen,
    Memo,
    Observed,
    Register,
    RevokeToken,
    Tick,
    TokensUsed,
)
from paceline.coordinator.parts import tally_of
from paceline.coordinator.planning import new_deployment
from paceline.coordinator.settings import Patience
from paceline.coordinator.shown import progress_of, view_of
from paceline.coordinator.tokens import TokenBook
from paceline.errors import (
    Cancelled,
    Conflict,
    DeploymentFailed,
    NotFound,
)
from paceline.wire.calls import (
    Command,
    CreatedDeployment,
    DeploymentBeat,
    DeploymentView,
    HeartbeatAnswer,
    Registered,
    Success,
)
from paceline.wire.events import EventName
from paceline.wire.plan import Plan
from paceline.wire.records import (
    Deployment,
    DeploymentStatus,
    Failure,
    WorkerProgress,
    WorkerStatus,
)

CLOSED = (DeploymentStatus.CANCELLED, DeploymentStatus.FAILED)
RESTORED_CLOSED = (
    20  # after a restart, so many of the newest closed deployments are still announced
)


class CoordinatorState:
    """The fleet and its deployments; ``handle`` is the only way to change them."""

    def __init__(self, patience: Patience | None = None, *, leader_epoch: int = 1) -> None:
        self.patience = patience or Patience()
        self.leader_epoch = leader_epoch
        self.fleet = Membership(self.patience)
        self.tokens = TokenBook()
        self._runs: dict[str, DeploymentRun] = {}
        self._keys: dict[str, KeepKey] = {}
        # Which deployments a worker may still hear about, and which the passing of time may change.
        self._open: dict[str, set[str]] = {}
        self._ticking: set[str] = set()
        self._last_s: float | None = None
        self.beats = self.beats_refused = 0  # since this process began

    @classmethod
    def restore(
        cls, kept: Kept, now_s: float, patience: Patience | None = None, *, leader_epoch: int = 1
    ) -> CoordinatorState:
        """Return the state that the kept records amount to; progress comes back with the beats."""
        state = cls(patience, leader_epoch=leader_epoch)
        state.fleet.restore(kept.workers, now_s)
        state.tokens.restore(kept.tokens)
        newest = {each.deployment.deployment_id for each in kept.deployments[-RESTORED_CLOSED:]}
        for each in kept.deployments:
            deployment = each.deployment
            run = DeploymentRun(deployment, each.manifest, each.memo, state.patience)
            if each.plan is not None:
                run.follow(each.plan)
            for receipt in each.receipts:
                part = run.parts[receipt.worker_id]
                part.receipt, part.status = receipt, WorkerStatus.COMPLETE
                part.pieces_held = deployment.total_pieces
                part.bytes_held = deployment.total_bytes
            announced = deployment.status not in CLOSED or deployment.deployment_id in newest
            state._follow(run, now_s, announced=announced)
        state._keys = {each.key: each for each in kept.keys}
        return state

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event and return what must be kept, told and answered."""
        match event:
            case Beat():
                return self._beat(event, now_s)
            case Listen():
                return self._listen(event)
            case Tick():
                return self._tick(event, now_s)
            case Register():
                return self._register(event, now_s)
            case FetchLanes():
                return self._fetch_lanes(event, now_s)
            case Create():
                return self._create(event, now_s)
            case Cancel():
                return self._cancel(event)
            case Activate():
                return self._activate(event)
            case FlowTold():
                return self._flow_told(event)
            case IssueToken() | RevokeToken() | AdmitWorker() | TokensUsed():
                return self.tokens.handle(event)

    # --- reading ---------------------------------------------------------------------------------

    def run(self, deployment_id: str) -> DeploymentRun:
        """Return the deployment's facts; raises NotFound."""
        run = self._runs.get(deployment_id)
        if run is None:
            raise NotFound("no such deployment", got=deployment_id[:200])
        return run

    def deployments(self) -> list[Deployment]:
        """Return every deployment, oldest first."""
        return [run.shown() for run in self._runs.values()]

    def view(self, deployment_id: str) -> DeploymentView:
        """Return the deployment and how far it is."""
        run = self.run(deployment_id)
        return view_of(run, tally_of(run.parts, run.memo.failures, self.fleet.alive))

    def progress(self, deployment_id: str) -> list[WorkerProgress]:
        """Return each target's part."""
        return list(progress_of(self.run(deployment_id), self.fleet.alive))

    def plan(self, deployment_id: str) -> Plan:
        """Return the newest plan; raises NotFound before there is one."""
        plan = self.run(deployment_id).plan
        if plan is None:
            raise NotFound(
                "the deployment has no plan yet",
                got=deployment_id,
                wanted="every target registered",
                do="Ask again when it has left init.",
            )
        return plan

    def unstopped(self, deployment_id: str) -> list[str]:
        """Return the living targets that may still publish a cancelled deployment."""
        run = self.run(deployment_id)
        return [
            worker_id
            for worker_id, part in run.parts.items()
            if run.plan is not None
            and part.receipt is None
            and not part.stopped
            and self.fleet.alive(worker_id)
        ]

    def known_key(self, key: str | None, body_digest: str) -> CreatedDeployment | None:
        """Return what this idempotency key was answered; raises Conflict for another body."""
        kept = self._keys.get(key) if key is not None else None
        if kept is None:
            return None
        if kept.body_digest != body_digest:
            raise Conflict(
                "this Idempotency-Key was used with another request",
                got=key,
                wanted=f"the body that made {kept.deployment_id}, or a new key",
                do="Use a new key for a new request.",
            )
        return _created(self._runs[kept.deployment_id].deployment)

    # --- the fleet -------------------------------------------------------------------------------

    def _register(self, event: Register, now_s: float) -> list[Effect]:
        call = event.call
        old = self.fleet.find(call.worker_id)
        worker = self.fleet.register(call, event.at, now_s)
        answer = Answer(Registered(worker_id=call.worker_id, incarnation=call.incarnation))
        if old is not None and old.alive and old.incarnation == call.incarnation:
            return [KeepWorker(worker), answer]
        for run in self._open_runs(call.worker_id):
            run.returned(call.worker_id, call.incarnation)
        name = EventName.WORKER_REGISTERED if old is None else EventName.WORKER_RETURNED
        data: dict[str, object] = {"incarnation": call.incarnation, "address": call.address}
        return [KeepWorker(worker), Observed(name, event.at, None, call.worker_id, data), answer]

    def _beat(self, event: Beat, now_s: float) -> list[Effect]:
        beat = event.beat
        worker = self.fleet.hear(beat, event.at, now_s)
        if worker is None:
            self.beats_refused += 1
            return [self._stranger()]
        self.beats += 1
        effects: list[Effect] = []
        listed = {each.deployment_id: each for each in beat.deployments}
        for deployment_id, each in listed.items():
            run = self._runs.get(deployment_id)
            if run is None or beat.worker_id not in run.parts:
                continue
            effects += run.report(worker, each, now_s, event.at)
            for key in each.lost_sources:
                self.fleet.suspect(key)
        return [*effects, self._answer(beat.worker_id, listed)]

    def _listen(self, event: Listen) -> list[Effect]:
        worker = self.fleet.find(event.worker_id)
        if worker is None or not worker.alive or worker.incarnation != event.incarnation:
            return [self._stranger()]
        return [self._answer(event.worker_id, {})]

    def _answer(self, worker_id: str, listed: Mapping[str, DeploymentBeat]) -> Answer:
        commands = []
        for run in list(self._open_runs(worker_id)):
            entry = listed.get(run.deployment.deployment_id)
            moving = entry is not None and entry.status is WorkerStatus.RECEIVING
            command = self._command(run, worker_id, moving)
            if command is not None:
                commands.append(command)
        return Answer(
            HeartbeatAnswer(
                epoch=self.leader_epoch,
                next_beat_s=self.fleet.beat_interval_s(),
                commands=tuple(commands),
            )
        )

    def _stranger(self) -> Answer:
        """Return what has an agent register (again)."""
        interval_s = self.fleet.beat_interval_s()
        stranger = {"continue": False, "epoch": self.leader_epoch, "next_beat_s": interval_s}
        return Answer(HeartbeatAnswer.model_validate(stranger))

    def _command(self, run: DeploymentRun, worker_id: str, moving: bool) -> Command | None:
        deployment, part = run.deployment, run.parts[worker_id]
        if deployment.status in CLOSED:
            told, part.command_sent = part.command_sent, True
            if part.receipt is None and (moving or not told):
                return _command("cancel", deployment)
            # It beat again after it was told, and does not move: it publishes nothing from here on.
            part.stopped = True
            self._close(worker_id, deployment.deployment_id)
            return None
        if deployment.status is DeploymentStatus.COMPLETE:
            if run.memo.activating and part.receipt is not None and not part.activated:
                part.command_sent = True
                return _command("activate", deployment)
            self._close(worker_id, deployment.deployment_id)
            return None
        return _command("fetch_lanes", deployment) if run.behind(worker_id) else None

    def _fetch_lanes(self, event: FetchLanes, now_s: float) -> list[Effect]:
        run = self.run(event.deployment_id)
        deployment = run.deployment
        where = f"{event.worker_id} of {event.deployment_id}"
        if deployment.status is DeploymentStatus.CANCELLED:
            raise Cancelled("the deployment was cancelled", where=where)
        if deployment.status is DeploymentStatus.FAILED:
            raise DeploymentFailed("the deployment has failed", where=where)
        lanes = run.lanes_of(event.worker_id)
        member = self.fleet.find(event.worker_id)
        if lanes is None or member is None:
            raise NotFound(
                "no lanes for this worker",
                where=where,
                wanted="a registered target once its deployment is planned",
                do="Ask again when a beat's answer says fetch_lanes.",
            )
        run.took_lanes(event.worker_id, member.incarnation, now_s)
        return [Answer(lanes)]

    # --- deployments -----------------------------------------------------------------------------

    def _create(self, event: Create, now_s: float) -> list[Effect]:
        call, manifest = event.call, event.manifest
        known = self.known_key(event.key, event.body_digest)
        if known is not None:
            return [Answer(known)]
        deployment = new_deployment(event, self.fleet, self.patience)
        run = DeploymentRun(
            deployment, manifest, Memo(created_s=now_s, seed=call.seed), self.patience
        )
        self._follow(run, now_s, announced=True)
        effects: list[Effect] = [KeepDeployment(deployment, run.memo, manifest)]
        if event.key is not None:
            self._keys[event.key] = KeepKey(event.key, event.body_digest, event.deployment_id)
            effects.append(self._keys[event.key])
        data: dict[str, object] = {
            "model_id": call.model_id,
            "version": call.version,
            "targets": len(call.target_workers),
            "topology": call.topology.value,
        }
        created = EventName.DEPLOYMENT_CREATED
        effects.append(Observed(created, event.at, event.deployment_id, None, data))
        effects += self._advance(run, event.at, now_s)
        return [*effects, Answer(_created(run.deployment))]

    def _cancel(self, event: Cancel) -> list[Effect]:
        run = self.run(event.deployment_id)
        if run.deployment.status is DeploymentStatus.COMPLETE:
            raise Conflict(
                "the deployment is complete already",
                got=event.deployment_id,
                do="Activate another version to switch back.",
            )
        if run.final:
            return [Answer(Success())]
        reason = Failure(code="Cancelled", message="cancelled by a caller")
        self._ticking.discard(event.deployment_id)
        return [*turn(run, DeploymentStatus.CANCELLED, reason, event.at), Answer(Success())]

    def _activate(self, event: Activate) -> list[Effect]:
        run = self.run(event.deployment_id)
        deployment = run.deployment
        if deployment.status is not DeploymentStatus.COMPLETE:
            raise Conflict(
                "only a complete deployment can be activated",
                got=deployment.status.value,
                wanted=DeploymentStatus.COMPLETE.value,
                where=event.deployment_id,
                do="Wait until it is complete.",
            )
        if run.memo.activating and not run.memo.activated_told:
            return [Answer(Success())]  # on its way; once it was told, asking again repeats it
        effects: list[Effect] = []
        for other in self._runs.values():
            # One version of a model is active on a worker: a late agent must not switch back.
            same = other.deployment.model_id == deployment.model_id
            if (
                other is not run
                and same
                and other.memo.activating
                and not run.parts.keys().isdisjoint(other.parts)
            ):
                other.set_activating(False)
                self._ticking.discard(other.deployment.deployment_id)
                effects.append(KeepDeployment(other.deployment, other.memo))
        run.set_activating(True)
        self._ticking.add(event.deployment_id)
        for worker_id in run.parts:
            self._open.setdefault(worker_id, set()).add(event.deployment_id)
        return [*effects, KeepDeployment(deployment, run.memo), Answer(Success())]

    def _flow_told(self, event: FlowTold) -> list[Effect]:
        run = self.run(event.deployment_id)
        effects: list[Effect] = []
        driver = event.flow_run_id
        if driver is not None and driver != run.deployment.flow_run_id:
            run.deployment = run.shown().model_copy(update={"flow_run_id": driver})
            effects.append(KeepDeployment(run.deployment, run.memo))
        told = Observed(event.name, event.at, event.deployment_id, None, dict(event.data))
        return [*effects, told, Answer(Success())]

    # --- time ------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now_s: float) -> list[Effect]:
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if gap_s > self.patience.lost_after_beats * self.fleet.beat_interval_s() / 2:
            # Nobody listened meanwhile (frozen, suspended): their silence proves nothing.
            self.fleet.forgive(gap_s, now_s)
        effects: list[Effect] = []
        for worker in self.fleet.lose_silent(now_s):
            effects.append(KeepWorker(worker))
            data: dict[str, object] = {"incarnation": worker.incarnation}
            lost = EventName.WORKER_LOST
            effects.append(Observed(lost, event.at, None, worker.worker_id, data))
            for run in self._open_runs(worker.worker_id):
                run.lost(worker.worker_id, now_s)
        for deployment_id in sorted(self._ticking):
            effects += self._advance(self._runs[deployment_id], event.at, now_s)
        return effects

    def _advance(self, run: DeploymentRun, at: float, now_s: float) -> list[Effect]:
        effects = advance(run, self.fleet, self.patience, at, now_s)
        if not _ticks(run):
            self._ticking.discard(run.deployment.deployment_id)
        return effects

    def _follow(self, run: DeploymentRun, now_s: float, *, announced: bool) -> None:
        identity = run.deployment.deployment_id
        self._runs[identity] = run
        if _ticks(run):
            self._ticking.add(identity)
        for worker_id in run.parts:
            if not self.fleet.alive(worker_id):
                run.lost(worker_id, now_s)
            if announced:
                self._open.setdefault(worker_id, set()).add(identity)

    def _open_runs(self, worker_id: str) -> Iterator[DeploymentRun]:
        for deployment_id in sorted(self._open.get(worker_id, ())):
            yield self._runs[deployment_id]

    def _close(self, worker_id: str, deployment_id: str) -> None:
        self._open[worker_id].discard(deployment_id)


def _ticks(run: DeploymentRun) -> bool:
    """Return whether the passing of time may change the deployment."""
    return not run.final or (run.memo.activating and not run.memo.activated_told)


def _created(deployment: Deployment) -> CreatedDeployment:
    return CreatedDeployment(
        deployment_id=deployment.deployment_id,
        status=deployment.status,
        estimated_time_seconds=deployment.predicted_seconds,
    )


def _command(kind: str, deployment: Deployment) -> Command:
    return Command.model_validate(
        {"kind": kind, "deployment_id": deployment.deployment_id, "epoch": deployment.epoch}
    )
