"""All stored deployments, indexed by worker, model, idempotency key and whether time changes them.

It also prunes old deployments and workers. It makes no other decisions; code that changes a
deployment updates the indexes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from paceline.coordinator.state.deployment import DeploymentState
from paceline.coordinator.state.membership import Membership
from paceline.coordinator.state.messages import (
    Drop,
    DropDeployment,
    Effect,
    EmitEvent,
    SaveIdempotencyKey,
)
from paceline.coordinator.state.settings import CoordinatorSettings
from paceline.errors import Conflict, NotFound
from paceline.schemas import DeploymentStatus, EventName, Worker


class DeploymentIndex:
    """All deployments of a fleet, oldest first, and the idempotency keys that created them."""

    def __init__(self) -> None:
        self.keys: dict[str, SaveIdempotencyKey] = {}
        self.ticking: set[str] = set()  # deployments that a tick may change
        self._states: dict[str, DeploymentState] = {}
        self._open: dict[str, set[str]] = {}  # by worker: with possible commands

    def __iter__(self) -> Iterator[DeploymentState]:
        return iter(self._states.values())

    def __len__(self) -> int:
        return len(self._states)

    def find(self, deployment_id: str) -> DeploymentState | None:
        return self._states.get(deployment_id)

    def deployment_state(self, deployment_id: str) -> DeploymentState:
        state = self._states.get(deployment_id)
        if state is None:
            raise NotFound("no such deployment", got=deployment_id[:200])
        return state

    def add(self, state: DeploymentState, *, announced: bool) -> None:
        """Add a deployment; where ``announced``, its workers get commands for it."""
        identity, digest = state.deployment.deployment_id, state.deployment.manifest_digest
        for other in self._states.values():
            if other.deployment.manifest_digest == digest:
                state.manifest = other.manifest  # 120,000 pieces are 15 MB: share one object
                break
        self._states[identity] = state
        self.update_ticking(state)
        if announced:
            self.announce(state, state.parts)

    def update_ticking(self, state: DeploymentState) -> None:
        """Update whether a tick may change the deployment."""
        identity = state.deployment.deployment_id
        switch = state.persisted.switch
        if not state.final or (switch is not None and switch.open):
            self.ticking.add(identity)
        else:
            self.ticking.discard(identity)

    def announce(self, state: DeploymentState, workers: Iterable[str]) -> None:
        identity = state.deployment.deployment_id
        for worker_id in workers:
            self._open.setdefault(worker_id, set()).add(identity)

    def close(self, worker_id: str, deployment_id: str) -> None:
        """Stop commands for a deployment to a worker."""
        self._open[worker_id].discard(deployment_id)

    def runs_for(self, worker_id: str) -> list[DeploymentState]:
        """Return the deployments that may have commands for a worker, in a fixed order."""
        opened = self._open.get(worker_id)
        if not opened:
            return []
        if len(opened) == 1:
            return [self._states[next(iter(opened))]]
        return [self._states[deployment_id] for deployment_id in sorted(opened)]

    def drop(self, state: DeploymentState) -> None:
        identity = state.deployment.deployment_id
        del self._states[identity]
        self.ticking.discard(identity)
        for worker_id in state.parts:
            self._open.get(worker_id, set()).discard(identity)
        for each in [each for each in self.keys.values() if each.deployment_id == identity]:
            del self.keys[each.key]

    def forget(self, worker_id: str) -> None:
        """Delete the index entries of a worker that no deployment names."""
        self._open.pop(worker_id, None)

    def history(self, model_id: str) -> list[DeploymentState]:
        """Return the model's activations that were not rolled back, newest first."""
        found = [r for r in self if r.persisted.number and r.deployment.model_id == model_id]
        return sorted(found, key=lambda state: -state.persisted.number)

    def active(self, model_id: str, workers: Collection[str]) -> dict[str, DeploymentState]:
        """Return the deployment that is active on each of ``workers``, where there is one."""
        left = set(workers)
        found: dict[str, DeploymentState] = {}
        for state in self.history(model_id):
            here = left & state.holders()
            found |= dict.fromkeys(here, state)
            left -= here
            if not left:
                break
        return found

    def known_key(self, key: str | None, body_digest: str) -> DeploymentState | None:
        """Return the deployment of this key, or None; raises Conflict for another body."""
        kept = self.keys.get(key) if key is not None else None
        if kept is None:
            return None
        if kept.body_digest != body_digest:
            raise Conflict(
                "this Idempotency-Key was used with another request",
                got=key,
                wanted=f"the body that made {kept.deployment_id}, or a new key",
                do="Use a new key for a new request.",
            )
        return self._states[kept.deployment_id]


# Pruning of closed deployments and lost workers, so that the stored state stays bounded.
#
# The newest deployments are kept, and those that closed lately, because their keys may be used
# again. Never pruned: a version that is active on some worker, one that a rollback would return to,
# and one that a living worker has yet to stop. Workers are pruned a month after their last
# heartbeat: where each start has a new name (pods), lost ones would outnumber the living.

MAX_PRUNED_DEPLOYMENTS = 8  # deployments deleted in one transaction,
MAX_PRUNED_WORKERS = 40  # and workers
PRUNE_INTERVAL_S = 60.0  # between two scans, where the last one found nothing to prune,
PRUNE_INTERVAL_FULL_S = 1.0  # and where there are more deployments than may be kept
TARGET_BYTES, PIECE_BYTES, ENTRY_BYTES = 200, 68, 300  # a target; piece; file or chunk


def prune(
    index: DeploymentIndex,
    fleet: Membership,
    settings: CoordinatorSettings,
    at: float,
    now_s: float,
) -> list[Effect]:
    """Delete a few of the deployments that may be deleted; return the effects."""
    closed = [
        state
        for state in index
        if state.final and state.deployment.deployment_id not in index.ticking
    ]
    surplus = _surplus(closed, settings)
    old = closed[: max(surplus, len(closed) - settings.kept_closed)]
    if not old:
        return []
    needed = _needed(index)
    effects: list[Effect] = []
    due = [
        state
        for place, state in enumerate(old)
        if state.deployment.deployment_id not in needed
        and (
            place < surplus or now_s - (state.persisted.closed_s or now_s) > settings.kept_closed_s
        )
    ]
    # A new leader has no stop confirmations, and announced only the newest cancelled ones.
    unstopped = {
        id(state): state.unstopped(fleet.alive)
        for state in due
        if state.deployment.status is DeploymentStatus.CANCELLED
    }
    for state in islice((each for each in due if unstopped.get(id(each))), MAX_PRUNED_DEPLOYMENTS):
        index.announce(state, unstopped[id(state)])
    stopped = (each for each in due if not unstopped.get(id(each)))
    for state in islice(stopped, MAX_PRUNED_DEPLOYMENTS):
        index.drop(state)
        deployment = state.deployment
        data: dict[str, object] = {
            "model_id": deployment.model_id,
            "version": deployment.version,
            "status": deployment.status.value,
        }
        identity = deployment.deployment_id
        forgotten = EmitEvent(EventName.DEPLOYMENT_FORGOTTEN, at, identity, None, data)
        effects += [DropDeployment(identity), forgotten]
    return effects


def kept_bytes(states: Iterable[DeploymentState]) -> int:
    """Return about how many bytes the records and manifests of ``states`` take in a store."""
    return sum(
        TARGET_BYTES * len(state.parts)
        + PIECE_BYTES * state.manifest.piece_count
        + ENTRY_BYTES * (len(state.manifest.files) + len(state.manifest.chunks))
        for state in states
    )


def _surplus(closed: Sequence[DeploymentState], settings: CoordinatorSettings) -> int:
    """Return how many of the oldest are over the limits, whatever their age."""
    left = settings.kept_bytes_at_most // 2
    for place in range(len(closed) - 1, -1, -1):
        left -= kept_bytes([closed[place]])
        if left < 0 or len(closed) - place > settings.kept_at_most:
            return place + 1
    return 0


def prune_workers(index: DeploymentIndex, fleet: Membership, at: float) -> list[Effect]:
    """Delete a few of the workers that were lost long ago and that no deployment names."""
    gone = fleet.expired_workers(at)
    if not gone:
        return []
    named = {worker_id for state in index for worker_id in state.parts}
    effects: list[Effect] = []
    for worker_id in islice((each for each in gone if each not in named), MAX_PRUNED_WORKERS):
        fleet.forget(worker_id)
        index.forget(worker_id)
        effects += [
            Drop(Worker, (worker_id,)),
            EmitEvent(EventName.WORKER_FORGOTTEN, at, None, worker_id),
        ]
    return effects


def _needed(index: DeploymentIndex) -> set[str]:
    """Return the deployments that are active on some worker, or were just before the active one."""
    needed: set[str] = set()
    for model_id in {state.deployment.model_id for state in index if state.persisted.number}:
        once: set[str] = set()
        twice: set[str] = set()
        for state in index.history(model_id):
            holders = state.holders()
            if not holders <= twice:
                needed.add(state.deployment.deployment_id)
            twice |= once & holders
            once |= holders
    return needed
