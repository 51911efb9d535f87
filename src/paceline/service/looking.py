"""One look at the state for all who watch: what is to be shown, copied under the lock and no more.

What has ended is copied once, whom each worker reads from once for each plan. What watchers are
told of a look is decided in ``observe.moments``, and told in ``stream``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

from paceline.coordinator import CoordinatorState
from paceline.coordinator.deployment import DeploymentRun
from paceline.observe import DeploymentSeen, Look, PartSeen
from paceline.wire.plan import Plan
from paceline.wire.records import Deployment, Failure, WorkerStatus
from paceline.wire.stream import LeaderView

SHOWN_FINAL = 20  # of the newest deployments that have ended,
SHOWN_FINAL_PARTS = 20_000  # and no more parts than these

Answer = TypeVar("Answer")


class Seen(Protocol):
    """What looks need of a coordinator."""

    def read(self, question: Callable[[CoordinatorState], Answer]) -> Answer: ...
    def now(self) -> float: ...


class Looks:
    """Takes them; used by one thread at a time."""

    def __init__(self, coordinator: Seen, leader: Callable[[], LeaderView]) -> None:
        self._coordinator, self._leader = coordinator, leader
        self._upstream: dict[tuple[str, int], dict[str, str]] = {}
        self._ended: dict[str, DeploymentSeen] = {}

    def take(self, wanted: set[str]) -> Look:
        """Return what is to be shown now: all that is under way, the newest of what has ended, and
        what is ``wanted``.
        """
        leader = self._leader()
        look = self._coordinator.read(lambda state: self._seen(state, wanted, leader))
        shown = {each.deployment.deployment_id: each for each in look.deployments}
        for key in [each for each in self._upstream if each[0] not in shown]:
            del self._upstream[key]
        self._ended = {key: each for key, each in shown.items() if _is_over(each)}
        return look

    def _seen(self, state: CoordinatorState, wanted: set[str], leader: LeaderView) -> Look:
        """Copy what is to be shown; under the coordinator's lock, so no more than that."""
        every = state.deployments()
        shown, room = set(wanted), SHOWN_FINAL_PARTS
        for each in reversed([each for each in every if each.status.is_final][-SHOWN_FINAL:]):
            room -= len(each.target_workers)
            if room >= 0:
                shown.add(each.deployment_id)
        newest: dict[str, int] = {}
        for each in every:
            number = state.run(each.deployment_id).memo.number
            newest[each.model_id] = max(newest.get(each.model_id, 0), number)
        deployments = [
            self._deployment(state, each, newest[each.model_id])
            for each in every
            if not each.status.is_final or each.deployment_id in shown
        ]
        return Look(
            at=self._coordinator.now(),
            now_s=time.monotonic(),
            leader=leader,
            deployments=deployments,
            workers=state.fleet.workers(),
            beat_s=state.fleet.beat_interval_s(),
        )

    def _deployment(
        self, state: CoordinatorState, deployment: Deployment, newest: int
    ) -> DeploymentSeen:
        run = state.run(deployment.deployment_id)
        activation = _activation(run, newest)
        ended = self._ended.get(deployment.deployment_id)
        if ended and ended.deployment == deployment and ended.activation == activation:
            return ended  # nothing of it changes any more: it is not copied again
        upstream = self._sources(deployment, run.plan)
        everything = tuple(range(deployment.total_chunks))
        parts = {}
        for worker_id, part in run.parts.items():
            alive = state.fleet.alive(worker_id)
            status, failure = part.status, part.failure
            verified = part.receipt is not None
            if not verified and failure is None and not alive:
                lost = "its agent is silent" if part.incarnation else "it has not registered"
                status, failure = WorkerStatus.FAILED, Failure(code="WorkerLost", message=lost)
            parts[worker_id] = PartSeen(
                status=status,
                alive=alive,
                chunks=everything if verified else part.chunks,
                bytes_held=part.bytes_held,
                upstream=upstream.get(worker_id),
                standing=run.standing_of(worker_id).value,
                verified=verified,
                activated=part.activated,
                failure=failure,
            )
        return DeploymentSeen(deployment, parts, activation)

    def _sources(self, deployment: Deployment, plan: Plan | None) -> dict[str, str]:
        """Return whom each worker takes its first lane from; found once for each plan."""
        key = (deployment.deployment_id, 0 if plan is None else plan.epoch)
        if key not in self._upstream:
            workers = () if plan is None else plan.workers
            self._upstream = {
                other: known for other, known in self._upstream.items() if other[0] != key[0]
            }
            self._upstream[key] = {
                each.worker_id: each.lanes[0].source.key for each in workers if each.lanes
            }
        return self._upstream[key]


def _activation(run: DeploymentRun, newest: int) -> Literal["none", "switching", "active"]:
    """Return how its version stands; of a model's activations the ``newest`` number is active."""
    if run.memo.switch is not None and run.memo.switch.open:
        return "switching"
    return "active" if 0 < run.memo.number == newest else "none"


def _is_over(seen: DeploymentSeen) -> bool:
    return seen.deployment.status.is_final and seen.activation != "switching"
