"""The coordinator's state machine: events and a time go in, effects come out.

It tracks every deployment, detects lost and returned workers, replans with the living ones and
answers calls. It has no clock, socket, file or thread: the driver passes the time and carries out
the effects, so tests and simulations run exactly this code. A refused event raises a PacelineError
and changes nothing.

Parts: ``agent_handlers`` (registrations, heartbeats and their answers), ``lifecycle`` (a
deployment's status and replanning), ``activation`` (which version is active), ``deployment_index``
(lookup and pruning).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.coordinator.state.activation import ActivationManager
from paceline.coordinator.state.agent_handlers import CLOSED, AgentHandlers
from paceline.coordinator.state.deployment import DeploymentState
from paceline.coordinator.state.deployment_index import (
    PRUNE_INTERVAL_FULL_S,
    PRUNE_INTERVAL_S,
    DeploymentIndex,
    kept_bytes,
    prune,
    prune_workers,
)
from paceline.coordinator.state.lifecycle import (
    advance,
    change_status,
    deployment_view,
    target_progress,
)
from paceline.coordinator.state.membership import Membership
from paceline.coordinator.state.messages import (
    Activate,
    AdmitWorker,
    Answer,
    AwaitCommands,
    Cancel,
    Create,
    Effect,
    EmitEvent,
    Event,
    FetchLanes,
    FlowReported,
    HeartbeatReceived,
    IssueToken,
    LoadedDeployment,
    LoadedState,
    RaiseBudget,
    Register,
    RevokeToken,
    Rollback,
    Save,
    SaveDeployment,
    SaveIdempotencyKey,
    Tick,
    TokenFirstUsed,
    TokensUsed,
)
from paceline.coordinator.state.persisted_state import PersistedState
from paceline.coordinator.state.planning import new_deployment
from paceline.coordinator.state.settings import CoordinatorSettings
from paceline.coordinator.state.targets import group_targets
from paceline.coordinator.tokens import TokenRegistry
from paceline.errors import Conflict, NotFound, ServiceUnavailable
from paceline.schemas import (
    CreatedDeployment,
    Deployment,
    DeploymentStatus,
    DeploymentView,
    EventName,
    Failure,
    Plan,
    Success,
    SwitchView,
    WorkerProgress,
    WorkerStatus,
)

RESTORED_CLOSED = 20  # newest closed deployments that are still announced after a restart


class CoordinatorState:
    """The fleet and its deployments; ``handle`` is the only way to change them."""

    def __init__(
        self, settings: CoordinatorSettings | None = None, *, leader_epoch: int = 1
    ) -> None:
        self.settings = settings or CoordinatorSettings()
        self.leader_epoch = leader_epoch
        self.fleet = Membership(self.settings)
        self.tokens = TokenRegistry(lambda each: self.fleet.find(each) is not None)
        self._index = DeploymentIndex()
        self._activations = ActivationManager(self._index, self.fleet, self.settings)
        self._last_s: float | None = None
        self._pruned_s = float("-inf")
        self.agents = AgentHandlers(self._index, self.fleet, self.tokens, leader_epoch)

    @classmethod
    def restore(
        cls,
        kept: LoadedState,
        now_s: float,
        settings: CoordinatorSettings | None = None,
        *,
        leader_epoch: int = 1,
    ) -> CoordinatorState:
        """Return the state built from stored records; progress arrives with the heartbeats."""
        state = cls(settings, leader_epoch=leader_epoch)
        state.fleet.restore(kept.workers, now_s)
        state.tokens.restore(kept.tokens)
        newest = {each.deployment.deployment_id for each in kept.deployments[-RESTORED_CLOSED:]}
        for each in kept.deployments:
            restored = _restored(each, state.settings)
            known = each.deployment.deployment_id in newest
            announced = known or each.deployment.status not in CLOSED
            state._follow(restored, now_s, announced=announced)
            restored.resume(state.fleet.alive, state.fleet.address, now_s)
        for key in kept.keys:
            state._index.keys[key.key] = key
        state._activations.restore()
        return state

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Apply one event and return the effects: records to store, audit events, the answer."""
        return [self._stamped(effect, now_s) for effect in self._handle(event, now_s)]

    def _handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case HeartbeatReceived():
                return self.agents.beat(event, now_s)
            case AwaitCommands():
                return self.agents.await_commands(event)
            case Tick():
                return self._tick(event, now_s)
            case Register():
                return self.agents.register(event, now_s)
            case FetchLanes():
                return self.agents.fetch_lanes(event, now_s)
            case Create():
                return self._create(event, now_s)
            case Cancel():
                return self._cancel(event)
            case Activate():
                state = self.deployment_state(event.deployment_id)
                older = event.allow_older
                effects = self._activations.activate(state, event.at, now_s, allow_older=older)
                return [*effects, Answer(Success())]
            case Rollback():
                state = self.deployment_state(event.deployment_id)
                effects = self._activations.roll_back(state, event.at, now_s)
                return [*effects, Answer(Success())]
            case RaiseBudget():
                return self._raise_budget(event)
            case FlowReported():
                return self._flow_reported(event)
            case IssueToken() | RevokeToken() | AdmitWorker() | TokenFirstUsed() | TokensUsed():
                return self.tokens.handle(event)

    def _stamped(self, effect: Effect, now_s: float) -> Effect:
        """Return ``effect`` with the time at which a deployment is stored and first was final."""
        if not isinstance(effect, SaveDeployment):
            return effect
        state = self._index.find(effect.deployment.deployment_id)
        if state is None:
            return effect
        closed_s = state.persisted.closed_s
        if state.final and closed_s is None:
            closed_s = now_s
        state.persisted = replace(state.persisted, kept_s=now_s, closed_s=closed_s)
        return replace(effect, persisted=state.persisted)

    # --- reading ---------------------------------------------------------------------------------

    def deployment_state(self, deployment_id: str) -> DeploymentState:
        """Return the deployment's facts; raises NotFound."""
        return self._index.deployment_state(deployment_id)

    def deployments(self) -> list[Deployment]:
        return [state.shown() for state in self._index]

    def view(self, deployment_id: str) -> DeploymentView:
        state = self.deployment_state(deployment_id)
        return deployment_view(
            state, group_targets(state.parts, state.persisted.failures, self.fleet.alive)
        )

    def progress(self, deployment_id: str) -> list[WorkerProgress]:
        return list(target_progress(self.deployment_state(deployment_id), self.fleet.alive))

    def plan(self, deployment_id: str) -> Plan:
        """Return the newest plan; raises NotFound before there is one."""
        plan = self.deployment_state(deployment_id).plan
        if plan is None:
            raise NotFound(
                "the deployment has no plan yet",
                got=deployment_id,
                wanted="every target registered",
                do="Ask again when it has left init.",
            )
        return plan

    def switch_of(self, deployment_id: str) -> SwitchView:
        """Return the newest switch to or from this deployment; raises NotFound where none was."""
        view = self._activations.view(self.deployment_state(deployment_id))
        if view is None:
            raise NotFound(
                "the deployment was never activated",
                got=deployment_id,
                do="Activate it once it is complete.",
            )
        return view

    def unstopped(self, deployment_id: str) -> list[str]:
        """Return the living targets that may still publish a cancelled deployment."""
        return self.deployment_state(deployment_id).unstopped(self.fleet.alive)

    def merge_progress(self, deployment_id: str, parts: Mapping[str, WorkerProgress]) -> None:
        """Fill in progress of workers whose heartbeats this process has yet to receive.

        Nothing is decided by it: each worker's next heartbeat overwrites it.
        """
        state = self._index.find(deployment_id)
        if state is not None:
            state.merge_progress(parts)

    def known_key(self, key: str | None, body_digest: str) -> CreatedDeployment | None:
        """Return the deployment that this idempotency key created, or None.

        Raises Conflict where the key came with another body.
        """
        state = self._index.known_key(key, body_digest)
        return None if state is None else _created(state.deployment)

    # --- deployments -----------------------------------------------------------------------------

    def _create(self, event: Create, now_s: float) -> list[Effect]:
        call, manifest = event.call, event.manifest
        known = self.known_key(event.key, event.body_digest)
        if known is not None:
            return [Answer(known)]
        if len(self._index.ticking) >= self.settings.open_at_most:
            raise ServiceUnavailable(
                "too many deployments are under way",
                got=len(self._index.ticking),
                wanted=f"fewer than {self.settings.open_at_most}",
                do="Call again once some have ended, or cancel what is not needed.",
            )
        if len(self._index) >= self.settings.open_at_most + self.settings.kept_at_most:
            raise ServiceUnavailable(
                "too many deployments are kept",
                got=len(self._index),
                wanted=f"fewer than {self.settings.open_at_most + self.settings.kept_at_most}",
                do="Call again; closed ones are forgotten within seconds.",
            )
        if not call.allow_older:
            targets = set(call.target_workers)
            self._activations.require_not_older(call.version, call.model_id, targets)
        deployment = new_deployment(event, self.fleet, self.settings)
        persisted = PersistedState(created_s=now_s, seed=call.seed, allow_older=call.allow_older)
        state = DeploymentState(deployment, manifest, persisted, self.settings)
        size = kept_bytes([*self._index, state])
        if size > self.settings.kept_bytes_at_most:
            raise ServiceUnavailable(
                "the deployments that are kept take too much room",
                got=f"{size} bytes",
                wanted=f"at most {self.settings.kept_bytes_at_most}",
                do="Call again once some have ended, or name fewer workers or pieces.",
            )
        self._follow(state, now_s, announced=True)
        effects: list[Effect] = [SaveDeployment(deployment, state.persisted, manifest)]
        effects += self._saved_key(event)
        data: dict[str, object] = {
            "model_id": call.model_id,
            "version": call.version,
            "targets": len(call.target_workers),
            "topology": call.topology.value,
        }
        if call.run_id:
            data["run_id"] = call.run_id
        created = EventName.DEPLOYMENT_CREATED
        effects.append(EmitEvent(created, event.at, event.deployment_id, None, data))
        effects += self._advance(state, event.at, now_s)
        return [*effects, Answer(_created(state.deployment))]

    def _cancel(self, event: Cancel) -> list[Effect]:
        state = self.deployment_state(event.deployment_id)
        if state.deployment.status is DeploymentStatus.COMPLETE:
            raise Conflict(
                "the deployment is complete already",
                got=event.deployment_id,
                do="Roll it back, or activate another version.",
            )
        if state.final:
            self._index.announce(state, self.unstopped(event.deployment_id))
            return [Answer(Success())]
        reason = Failure(code="Cancelled", message="cancelled by a caller")
        effects = change_status(state, DeploymentStatus.CANCELLED, reason, event.at)
        self._index.update_ticking(state)
        return [*effects, Answer(Success())]

    def _raise_budget(self, event: RaiseBudget) -> list[Effect]:
        if self._index.known_key(event.key, event.body_digest) is not None:
            return [Answer(Success())]
        state = self.deployment_state(event.deployment_id)
        if state.final or not state.has_origin_budget:
            raise Conflict(
                "this deployment has no origin budget to raise",
                got=(state.deployment.status if state.final else state.deployment.topology).value,
                wanted="one that is under way and within the origin budget",
                where=event.deployment_id,
                do="Begin another deployment: what is on the disks already is not read again.",
            )
        state.raise_budget(event.extra_bytes)
        data: dict[str, object] = {
            "extra_bytes": event.extra_bytes,
            "extra_bytes_in_all": state.persisted.extra_bytes,
            "origin_bytes": state.origin_bytes,
        }
        name = EventName.BUDGET_RAISED
        return [
            SaveDeployment(state.shown(), state.persisted),
            EmitEvent(name, event.at, event.deployment_id, None, data),
            *self._saved_key(event),
            Answer(Success()),
        ]

    def _saved_key(self, event: Create | RaiseBudget) -> list[SaveIdempotencyKey]:
        if event.key is None:
            return []
        key = SaveIdempotencyKey(event.key, event.body_digest, event.deployment_id)
        self._index.keys[key.key] = key
        return [key]

    def _flow_reported(self, event: FlowReported) -> list[Effect]:
        state = self.deployment_state(event.deployment_id)
        effects: list[Effect] = []
        driver = event.flow_run_id
        if driver is not None and driver != state.deployment.flow_run_id:
            state.deployment = state.shown().model_copy(update={"flow_run_id": driver})
            effects.append(SaveDeployment(state.deployment, state.persisted))
        emitted = EmitEvent(event.name, event.at, event.deployment_id, None, dict(event.data))
        return [*effects, emitted, Answer(Success())]

    # --- time ------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now_s: float) -> list[Effect]:
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if gap_s > self.settings.lost_after_beats * self.fleet.beat_interval_s() / 2:
            # No heartbeats were handled meanwhile (frozen, suspended): silence proves no loss.
            self.fleet.discount_gap(gap_s, now_s)
        effects: list[Effect] = []
        for worker in self.fleet.mark_lost(now_s):
            effects.append(Save(worker))
            data: dict[str, object] = {"incarnation": worker.incarnation}
            lost = EventName.WORKER_LOST
            effects.append(EmitEvent(lost, event.at, None, worker.worker_id, data))
            for state in self._index.runs_for(worker.worker_id):
                state.lost(worker.worker_id, now_s)
        for deployment_id in sorted(self._index.ticking):
            effects += self._advance(self._index.deployment_state(deployment_id), event.at, now_s)
        many = len(self._index) > self.settings.kept_at_most
        if now_s - self._pruned_s >= (PRUNE_INTERVAL_FULL_S if many else PRUNE_INTERVAL_S):
            pruned = prune(self._index, self.fleet, self.settings, event.at, now_s)
            if not pruned:  # where some were pruned, there may be more
                self._pruned_s = now_s
            effects += pruned
            effects += prune_workers(self._index, self.fleet, event.at)
        return effects

    def _advance(self, state: DeploymentState, at: float, now_s: float) -> list[Effect]:
        if state.final:
            return self._activations.advance(state, at, now_s)
        effects = advance(state, self.fleet, at, now_s)
        self._index.update_ticking(state)
        return effects

    def _follow(self, state: DeploymentState, now_s: float, *, announced: bool) -> None:
        self._index.add(state, announced=announced)
        for worker_id in state.parts:
            if not self.fleet.alive(worker_id):
                state.lost(worker_id, now_s)


def _restored(kept: LoadedDeployment, settings: CoordinatorSettings) -> DeploymentState:
    deployment = kept.deployment
    state = DeploymentState(deployment, kept.manifest, kept.persisted, settings)
    if kept.plan is not None:
        state.follow(kept.plan)
    for receipt in kept.receipts:
        part = state.parts[receipt.worker_id]
        part.receipt, part.status = receipt, WorkerStatus.COMPLETE
        part.pieces_held = deployment.total_pieces
        part.bytes_held = deployment.total_bytes
    return state


def _created(deployment: Deployment) -> CreatedDeployment:
    return CreatedDeployment(
        deployment_id=deployment.deployment_id,
        status=deployment.status,
        estimated_time_seconds=deployment.predicted_seconds,
    )
