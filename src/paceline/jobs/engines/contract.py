"""The port to what decides when a gang gets nodes, and what all engines have in common.

An engine gets requests and says where each job stands with it; ``JobScheduler`` turns that into the
states of jobs, the same for every engine. An engine knows neither flows nor the table of jobs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from paceline.config import Runtime
from paceline.errors import InvalidInput, PacelineError
from paceline.jobs.admission import why_never
from paceline.jobs.placement import Demand, Gang, Host, Placement
from paceline.jobs.preemption import Reservation
from paceline.schemas import JobAllocation, TrainingJob

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A waiting job, and the gang that it asks for."""

    job: TrainingJob
    gang: Gang
    ranks_per_node: int  # 0: one for each accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a job stands with its engine.

    waiting: its gang has no nodes yet. granted: ``placement`` is its own, until it is ``taken``
    back: the job saves, leaves and waits again. failed: no further attempt would get nodes.
    cancelled: a person ended it there.
    """

    phase: Literal["waiting", "granted", "taken", "failed", "cancelled"]
    reason: str = ""
    placement: Placement | None = None
    allocation: JobAllocation | None = None


class Engine(Protocol):
    """Decides when a gang gets nodes. Called by one thread, once a second."""

    has_own_queue: bool  # it keeps requests itself, and is to be read while no job waits, too

    def why_never(self, request: Request, hosts: Sequence[Host]) -> str:
        """Return why the engine would never grant this, or "" where it may; asks for nothing."""
        ...

    def submit(self, request: Request) -> None:
        """Ask for the gang's nodes; does nothing where that is done. Raises InvalidInput where the
        engine refuses it for good."""
        ...

    def status(
        self,
        hosts: Sequence[Host],
        waiting: Sequence[Request],
        running: Sequence[Reservation],
        now: float,
    ) -> Mapping[str, Standing]:
        """Return where jobs stand: those that changed, and every one for which it holds something.

        ``hosts`` have a living agent. What is not known now is left out.
        """
        ...

    def reasons(self) -> Mapping[str, str]:
        """Return why each requested gang has no nodes yet, as ``status`` found it."""
        ...

    def cancel(self, job_id: str) -> None:
        """Give back all that is held or requested for the job; repeated until that is so."""
        ...


class ForeignEngine:
    """What the engines have in common that keep a queue of their own."""

    has_own_queue = True
    name: str
    instead: Mapping[str, str]  # by field: what to use in place of what cannot be asked for
    poll_s = 3.0

    def __init__(self, runtime: Runtime, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._runtime, self._monotonic = runtime, monotonic
        self._is_known = False  # it has answered
        self._problem = ""  # why its last answer is missing
        self._read_s = -math.inf
        self._reasons: dict[str, str] = {}

    def why_never(self, request: Request, hosts: Sequence[Host]) -> str:  # noqa: ARG002
        """Return the engine's refusal, or "" where it would take the request, or is away."""
        try:
            self._require_supported(request)
            self._test(request)
        except InvalidInput as error:
            return error.one_line()
        except PacelineError as error:
            log.warning("%s is not asked whether it takes a job: %s", self.name, error)
        return ""

    def reasons(self) -> Mapping[str, str]:
        """Return the engine's reason for each job that waits, or why the engine is not reached."""
        return self._reasons

    def _test(self, request: Request) -> None:
        """Ask the engine whether it would take ``request``; raises its refusal."""

    def _fetch(self) -> None:
        """Read what the engine has; raises PacelineError where it does not answer."""
        raise NotImplementedError

    def _read(self, every_s: float | None = None) -> bool:
        """Read what the engine has, at most every ``every_s``; return whether that is known."""
        now_s = self._monotonic()
        if now_s - self._read_s >= (every_s or self.poll_s):
            self._read_s = now_s
            try:
                self._fetch()
                self._is_known = True
            except PacelineError as error:
                log.warning("what %s has is unknown: %s", self.name, error)
                self._problem = error.one_line()
        return self._is_known

    def _keep_reasons(self, waiting: Sequence[Request]) -> None:
        """Forget the reasons of jobs that wait no longer."""
        jobs = {each.job.job_id for each in waiting}
        self._reasons = {key: why for key, why in self._reasons.items() if key in jobs}
        if not self._is_known:
            self._reasons |= dict.fromkeys(jobs, self._problem)

    def _require_supported(self, request: Request) -> None:
        """Raise InvalidInput for what a job asks for and this engine cannot be asked for."""
        asked, is_one = request.job.spec.resources, nodes_of(request) == 1
        given = {
            "resources.memory_bytes": asked.memory_bytes,
            "resources.capacity": asked.capacity,
            "resources.within": asked.within != "fleet" and not (asked.within == "host" and is_one),
            "priority": request.gang.priority > 0,
        }
        for field, value in given.items():
            if value:
                raise InvalidInput(
                    f"{self.name} decides where and when jobs run here",
                    got=field,
                    wanted=self.instead[field],
                    where=field,
                )


def engine_of(runtime: Runtime) -> Engine:
    """Return the engine that the profile names."""
    from paceline.jobs.engines import KubernetesEngine, OwnAdmission, SlurmEngine

    cluster = runtime.profile.cluster
    if not cluster.per_job:
        return OwnAdmission(runtime.profile)
    return SlurmEngine(runtime) if cluster.kind == "slurm" else KubernetesEngine(runtime)


def nodes_of(request: Request) -> int:
    """Return how many whole nodes the gang needs."""
    return -(-request.gang.ranks // (request.ranks_per_node or 1))


def placed_on(names: Sequence[str], request: Request, hosts: Mapping[str, Host]) -> Placement | str:
    """Return where the gang's ranks run on the nodes that it was granted, all of them alive, or
    why they cannot hold it."""
    gang, per_node = request.gang, request.ranks_per_node
    held = [
        replace(host, slots=per_node or host.slots) if host.kind == "cpu" else host
        for host in map(hosts.__getitem__, names)
    ]
    demand = Demand(held, gang)
    slots = {each.name: each.slots for each in held}
    return demand.place(gang.ranks, slots) or (
        f"{', '.join(names)} cannot hold it: {why_never(held, gang, {}) or 'ranks per node'}"
    )
