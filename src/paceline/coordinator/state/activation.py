"""Which version is active on each worker: the fleet switches together, forwards and back.

A switch has two phases. First every worker is asked to report that it holds its target version.
Once a quorum has, the switch is decided in one write and every worker gets the command; a worker
that is away gets it when it returns. Without a quorum in time, no worker switches.

Activations of a model are numbered. On each worker the highest number is active; a rollback
removes the deployment's number, and the next highest is active again, without a transfer. No clock
and no store; worker reports are the only wire messages used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from paceline.coordinator.state.deployment import DeploymentState
from paceline.coordinator.state.deployment_index import DeploymentIndex
from paceline.coordinator.state.membership import Membership
from paceline.coordinator.state.messages import Effect, EmitEvent, SaveDeployment
from paceline.coordinator.state.persisted_state import Switch
from paceline.coordinator.state.settings import CoordinatorSettings
from paceline.errors import Conflict
from paceline.manifest import is_older, version_key
from paceline.schemas import (
    DeploymentStatus,
    EventName,
    Failure,
    SwitchKind,
    SwitchPhase,
    SwitchView,
    WorkerSwitch,
)

MAX_NAMED_WORKERS = 20  # workers that an event names; the rest is counted
SWITCH_EVENTS = {
    SwitchKind.ACTIVATE: EventName.DEPLOYMENT_ACTIVATED,
    SwitchKind.ROLLBACK: EventName.DEPLOYMENT_ROLLED_BACK,
}

SwitchTargets = dict[str, DeploymentState]  # by worker: the deployment that it switches to


class ActivationManager:
    """Decides switches of the deployments in ``index``."""

    def __init__(
        self, index: DeploymentIndex, fleet: Membership, settings: CoordinatorSettings
    ) -> None:
        self._index, self._fleet, self._settings = index, fleet, settings

    def restore(self) -> None:
        """Resume the switches that an earlier coordinator left in progress."""
        for state in self._index:
            switch = state.persisted.switch
            if switch is None:
                continue
            goals = self._goals(state)
            if switch.phase is SwitchPhase.PREPARING:
                self._begin(goals)
            elif switch.phase is SwitchPhase.SWITCHING:
                self._call(goals)
            elif switch.phase is SwitchPhase.SWITCHED:
                self._call({each: goals[each] for each in switch.missing if each in goals})

    # --- requests --------------------------------------------------------------------------------

    def activate(
        self, state: DeploymentState, at: float, now_s: float, *, allow_older: bool
    ) -> list[Effect]:
        """Begin to switch to ``state``'s version; raises Conflict unless it is complete."""
        self._require_complete(state)
        if self._under_way(state, SwitchKind.ACTIVATE):
            return []
        if not (allow_older or state.persisted.allow_older):
            self.require_not_older(
                state.deployment.version, state.deployment.model_id, set(state.parts)
            )
        return self._ask(state, SwitchKind.ACTIVATE, dict.fromkeys(state.parts, state), at, now_s)

    def roll_back(self, state: DeploymentState, at: float, now_s: float) -> list[Effect]:
        """Begin to switch from ``state``'s version to the previous one; raises Conflict where it is
        not active, or too few of its workers have a previous version.
        """
        self._require_complete(state)
        switch = state.persisted.switch
        if self._under_way(state, SwitchKind.ROLLBACK) or (
            switch is not None
            and (switch.kind, switch.phase) == (SwitchKind.ROLLBACK, SwitchPhase.SWITCHED)
        ):
            return []  # a repeated call, because an answer was lost
        deployment = state.deployment
        where = deployment.deployment_id
        active = self._index.active(deployment.model_id, state.parts.keys())
        on = sum(each is state for each in active.values())
        if on < self._quorum(state):
            raise Conflict(
                "only the active version can be rolled back",
                got=f"{deployment.version} active on {on} of {len(state.parts)} workers",
                wanted=f"at least {self._quorum(state)}",
                where=where,
                do="Roll back the deployment that is active now.",
            )
        goals = self._previous(state)
        if len(goals) < self._quorum(state):
            raise Conflict(
                "nothing was active before on too many workers",
                got=f"{len(goals)} of {len(state.parts)} workers have something to return to",
                wanted=f"at least {self._quorum(state)}",
                where=where,
                do="Deploy the version that is wanted, and activate it.",
            )
        return self._ask(state, SwitchKind.ROLLBACK, goals, at, now_s)

    def require_not_older(self, version: str, model_id: str, workers: set[str]) -> None:
        """Raise Conflict where a newer version is active on one of ``workers``."""
        active = self._index.active(model_id, workers).values()
        versions = {each.deployment.version for each in active}
        newer = sorted((each for each in versions if is_older(version, each)), key=version_key)
        if newer:
            raise Conflict(
                "a newer version is active",
                got=version,
                wanted=f"nothing older than {newer[-1]}",
                where=model_id,
                do="Roll back, or ask with allow_older if going back is what you want.",
            )

    def _require_complete(self, state: DeploymentState) -> None:
        if state.deployment.status is not DeploymentStatus.COMPLETE:
            raise Conflict(
                "only a complete deployment can be activated",
                got=state.deployment.status.value,
                wanted=DeploymentStatus.COMPLETE.value,
                where=state.deployment.deployment_id,
                do="Wait until it is complete.",
            )

    def _under_way(self, state: DeploymentState, kind: SwitchKind) -> bool:
        switch = state.persisted.switch
        return switch is not None and switch.open and switch.kind is kind

    def _ask(
        self,
        state: DeploymentState,
        kind: SwitchKind,
        goals: SwitchTargets,
        at: float,
        now_s: float,
    ) -> list[Effect]:
        effects: list[Effect] = []
        for other in [*self._overlapping(state), state]:
            if self._phase(other) is SwitchPhase.PREPARING:
                effects += self._refuse(other, "another switch was asked for", at, now_s)
        switch = Switch(kind=kind, phase=SwitchPhase.PREPARING, since_s=now_s)
        effects.append(self._set(state, switch))
        self._begin(goals)
        return effects

    def _set(self, state: DeploymentState, switch: Switch) -> SaveDeployment:
        """Make ``switch`` the deployment's newest one; return the effect that stores it."""
        state.persisted = replace(state.persisted, switch=switch)
        self._index.update_ticking(state)
        return SaveDeployment(state.deployment, state.persisted)

    def _begin(self, goals: SwitchTargets) -> None:
        for worker_id, goal in goals.items():
            goal.parts[worker_id].reported_complete = False
            goal.asking.add(worker_id)
            self._index.announce(goal, (worker_id,))

    # --- deciding --------------------------------------------------------------------------------

    def advance(self, state: DeploymentState, at: float, now_s: float) -> list[Effect]:
        """Take the next step of the switch that ``state`` is in, if due; return the effects."""
        switch = state.persisted.switch
        if switch is None or not switch.open:
            return []
        goals, quorum = self._goals(state), self._quorum(state)
        waited_s = now_s - switch.since_s
        if switch.phase is SwitchPhase.PREPARING:
            ready = [each for each, goal in goals.items() if self._is_ready(each, goal)]
            is_within_deadline = waited_s < self._settings.prepare_s
            if len(ready) >= quorum and not (is_within_deadline and self._reports_missing(goals)):
                return self._decide(state, switch.kind, goals, at, now_s)
            if waited_s > self._settings.switch_s:
                return self._refuse(state, self._why_not(state, goals, len(ready)), at, now_s)
            return []
        done = [each for each, goal in goals.items() if goal.parts[each].activated]
        left = [each for each in goals if self._fleet.alive(each) and each not in set(done)]
        if len(done) >= quorum and (not left or waited_s > self._settings.switch_s):
            return self._finish(state, goals, done, at, now_s)
        if waited_s > self._settings.switch_s and not switch.late:
            data = self._data(state, goals)
            saved = self._set(state, replace(switch, late=True))
            return [saved, self._event(state, EventName.DEPLOYMENT_SWITCH_LATE, data, at)]
        return []

    def _decide(
        self,
        state: DeploymentState,
        kind: SwitchKind,
        goals: SwitchTargets,
        at: float,
        now_s: float,
    ) -> list[Effect]:
        """Renumber, so that the goals are the active versions, and command the switch."""
        effects: list[Effect] = []
        for other in self._overlapping(state):
            if other.persisted.switch is not None and self._phase(other) is SwitchPhase.SWITCHING:
                ended = replace(other.persisted.switch, phase=SwitchPhase.SUPERSEDED, since_s=now_s)
                effects.append(self._set(other, ended))
        number = 0
        if kind is SwitchKind.ACTIVATE:
            number = 1 + max(each.persisted.number for each in self._index)
        switch = Switch(kind=kind, phase=SwitchPhase.SWITCHING, since_s=now_s)
        data = self._data(state, goals)
        state.persisted = replace(state.persisted, number=number)
        effects.append(self._set(state, switch))
        for worker_id, goal in goals.items():
            goal.asking.discard(worker_id)
        self._call(self._goals(state))
        return [*effects, self._event(state, EventName.DEPLOYMENT_SWITCHING, data, at)]

    def _call(self, goals: SwitchTargets) -> None:
        """Command the workers to switch, and clear their other activations of the model."""
        models = {goal.deployment.model_id for goal in goals.values()}
        for other in self._index:
            if other.deployment.model_id not in models:
                continue
            for worker_id in other.parts.keys() & goals.keys():
                other.activating.discard(worker_id)
                other.parts[worker_id].activated = False
        for worker_id, goal in goals.items():
            goal.parts[worker_id].command_sent = False
            if goal.parts[worker_id].receipt is not None:
                goal.activating.add(worker_id)
                self._index.announce(goal, (worker_id,))

    def _finish(
        self, state: DeploymentState, goals: SwitchTargets, done: list[str], at: float, now_s: float
    ) -> list[Effect]:
        assert state.persisted.switch is not None
        kind = state.persisted.switch.kind
        missing = tuple(sorted(goals.keys() - set(done)))
        switch = Switch(kind=kind, phase=SwitchPhase.SWITCHED, since_s=now_s, missing=missing)
        data = self._data(state, goals)
        return [self._set(state, switch), self._event(state, SWITCH_EVENTS[kind], data, at)]

    def _refuse(self, state: DeploymentState, why: str, at: float, now_s: float) -> list[Effect]:
        assert state.persisted.switch is not None
        goals = self._goals(state)
        data = self._data(state, goals) | {"message": why}
        for worker_id, goal in goals.items():
            goal.asking.discard(worker_id)
        failure, phase = Failure(code="Conflict", message=why[:2000]), SwitchPhase.REFUSED
        refused = replace(state.persisted.switch, phase=phase, since_s=now_s, failure=failure)
        saved = self._set(state, refused)
        return [saved, self._event(state, EventName.DEPLOYMENT_SWITCH_REFUSED, data, at)]

    # --- views -----------------------------------------------------------------------------------

    def view(self, state: DeploymentState) -> SwitchView | None:
        """Return each worker's state in the newest switch of ``state``; None if there was none."""
        switch = state.persisted.switch
        if switch is None:
            return None
        goals = self._goals(state)
        workers = tuple(self._worker(state, goals, each) for each in state.parts)
        states = [each.state for each in workers]
        return SwitchView(
            deployment_id=state.deployment.deployment_id,
            kind=switch.kind,
            phase=switch.phase,
            quorum=self._quorum(state),
            ready=states.count("ready"),
            switched=states.count("switched"),
            failure=switch.failure,
            workers=workers,
        )

    def _worker(self, state: DeploymentState, goals: SwitchTargets, worker_id: str) -> WorkerSwitch:
        assert state.persisted.switch is not None
        goal = goals.get(worker_id)
        if goal is None:
            return WorkerSwitch(worker_id=worker_id, state="other")
        part = goal.parts[worker_id]
        decided = state.persisted.switch.phase in (SwitchPhase.SWITCHING, SwitchPhase.SWITCHED)
        switched: Literal["waiting", "switched", "lost", "failed", "told", "ready"] = "waiting"
        if part.activated and decided:
            switched = "switched"
        elif not self._fleet.alive(worker_id):
            switched = "lost"
        elif part.failure is not None:
            switched = "failed"
        elif decided:
            switched = "told"
        elif self._is_ready(worker_id, goal):
            switched = "ready"
        return WorkerSwitch(
            worker_id=worker_id,
            state=switched,
            deployment_id=goal.deployment.deployment_id,
            version=goal.deployment.version,
            failure=part.failure,
        )

    def _goals(self, state: DeploymentState) -> SwitchTargets:
        """Return what each worker switches to in the newest switch of ``state``."""
        assert state.persisted.switch is not None
        if state.persisted.switch.kind is SwitchKind.ROLLBACK:
            return self._previous(state)
        if state.persisted.switch.phase in (SwitchPhase.PREPARING, SwitchPhase.REFUSED):
            return dict.fromkeys(state.parts, state)
        active = self._index.active(state.deployment.model_id, state.parts.keys())
        return {each: goal for each, goal in active.items() if goal is state}

    def _previous(self, state: DeploymentState) -> SwitchTargets:
        """Return what was active before ``state`` on each worker where it is active (or was, until
        its rollback).
        """
        number, left = state.persisted.number, set(state.parts)
        found: SwitchTargets = {}
        for other in self._index.history(state.deployment.model_id):
            if other is state:
                continue
            here = left & other.holders()
            left -= here
            if number and other.persisted.number > number:
                continue  # a newer version is active there
            found |= dict.fromkeys(sorted(here), other)
        return found

    def _overlapping(self, state: DeploymentState) -> Iterator[DeploymentState]:
        """Yield the other deployments of the model that share workers with ``state``."""
        for other in self._index:
            same = other.deployment.model_id == state.deployment.model_id
            if other is not state and same and not state.parts.keys().isdisjoint(other.parts):
                yield other

    def _phase(self, state: DeploymentState) -> SwitchPhase | None:
        return None if state.persisted.switch is None else state.persisted.switch.phase

    def _quorum(self, state: DeploymentState) -> int:
        return len(state.parts) - state.allowed_dead()

    def _is_ready(self, worker_id: str, goal: DeploymentState) -> bool:
        part = goal.parts[worker_id]
        return part.reported_complete and part.receipt is not None and self._fleet.alive(worker_id)

    def _reports_missing(self, goals: SwitchTargets) -> bool:
        """Return whether a living worker with a receipt has yet to report what it holds."""
        return any(
            self._fleet.alive(each) and not goal.parts[each].reported_complete
            for each, goal in goals.items()
            if goal.parts[each].receipt is not None
        )

    def _why_not(self, state: DeploymentState, goals: SwitchTargets, ready: int) -> str:
        away = [each for each in goals if not self._is_ready(each, goals[each])]
        return (
            f"{ready} of {len(state.parts)} workers are ready to switch, wanted "
            f"{self._quorum(state)}; not ready: {', '.join(away[:MAX_NAMED_WORKERS])}"
        )

    def _data(self, state: DeploymentState, goals: SwitchTargets) -> dict[str, object]:
        states: dict[str, list[str]] = {}
        for worker_id in state.parts:
            states.setdefault(self._worker(state, goals, worker_id).state, []).append(worker_id)
        versions = sorted({goal.deployment.version for goal in goals.values()})
        deployment = state.deployment
        data: dict[str, object] = {
            "model_id": deployment.model_id,
            "version": deployment.version,
            "to": ", ".join(versions[:MAX_NAMED_WORKERS]),
            "quorum": self._quorum(state),
            "workers": len(states.get("switched", ())),
        }
        for reached in sorted(states.keys() - {"switched", "ready"}):
            data[reached] = states[reached][:MAX_NAMED_WORKERS]
            if len(states[reached]) > MAX_NAMED_WORKERS:
                data[f"{reached}_more"] = len(states[reached]) - MAX_NAMED_WORKERS
        return data

    def _event(
        self, state: DeploymentState, name: EventName, data: dict[str, object], at: float
    ) -> EmitEvent:
        return EmitEvent(name, at, state.deployment.deployment_id, None, data)
