"""The port to what decides when a gang gets nodes, and what all engines have in common.

An engine gets requests and says where each job stands with it; ``JobScheduler`` turns that into the
states of jobs, the same for every engine. An engine knows neither flows nor the table of jobs.
"""

from __future__ import annotations

import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from paceline.config import Runtime
from paceline.errors import AccessDenied, InvalidInput, PacelineError, TemporaryError
from paceline.jobs.admission import why_never
from paceline.jobs.placement import Demand, Gang, Host, Placement, is_kind
from paceline.jobs.preemption import Reservation
from paceline.schemas import JobAllocation, TrainingJob

log = logging.getLogger(__name__)

RETRY_S = 30.0  # between two requests for one training job
LOST_S = 2.0  # of a round, in requests that failed for now: it makes no others
KIND = re.compile(r"[\w .:+-]*", re.ASCII)  # a comma would begin another resource of Slurm's
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A waiting job, and the gang that it asks for."""

    job: TrainingJob
    gang: Gang
    ranks_per_node: int  # 0: one for each accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a job stands with its engine.

    waiting: its gang has no nodes yet. granted: ``placement`` is its own, until it is ``revoked``:
    the job saves, leaves and waits again. failed: no further attempt would get nodes.
    cancelled: a person ended it there. ``avoid``: its nodes, of a kind of accelerator that the job
    cannot go on with, are given back, and others are requested.
    """

    phase: Literal["waiting", "granted", "revoked", "failed", "cancelled"]
    reason: str = ""
    placement: Placement | None = None
    allocation: JobAllocation | None = None
    avoid: tuple[str, ...] = ()


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


class ForeignEngine(ABC):
    """What the engines have in common that keep a queue of their own."""

    has_own_queue = True
    name: str
    instead: Mapping[str, str]  # by field: what to use in place of what cannot be asked for
    poll_s = 3.0

    def __init__(self, runtime: Runtime, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._runtime, self._monotonic = runtime, monotonic
        self._reads = 0  # answers of it so far
        self._problem = ""  # why its last answer is missing; "": it is not
        self._read_s = -math.inf
        self._was_read = False  # in this round, which ends with ``status``
        self._lost_s = 0.0  # of this round, in requests that failed
        self._stopped = ""  # why no more is requested in this round
        self._asked: dict[str, tuple[float, int]] = {}  # job → when again; reads before
        self._avoid: dict[str, tuple[str, ...]] = {}  # job → nodes of a kind that is not its own
        self._reasons: dict[str, str] = {}

    def why_never(self, request: Request, hosts: Sequence[Host]) -> str:  # noqa: ARG002
        """Return the engine's refusal, or "" where it would take the request, or is away. Raises
        AccessDenied for the queue of another team."""
        try:
            self._require_supported(request)
            self._test(request)
        except AccessDenied:
            raise
        except InvalidInput as error:
            return error.one_line()
        except PacelineError as error:
            log.warning("%s is not asked whether it takes a job: %s", self.name, error)
        return ""

    def reasons(self) -> Mapping[str, str]:
        """Return the engine's reason for each job that waits, or why the engine is not reached."""
        return self._reasons

    @abstractmethod
    def cancel(self, job_id: str) -> None:
        """Give back all that is held or requested for the job."""

    @abstractmethod
    def _queues(self) -> tuple[str, Mapping[str, str]]:
        """Return the queue of everyone, and of teams: their queues, with commas between."""

    def _test(self, request: Request) -> None:  # noqa: B027  (some engines have no such question)
        """Ask the engine whether it would take ``request``; raises its refusal."""

    @abstractmethod
    def _fetch(self) -> None:
        """Read what the engine has; raises PacelineError where it does not answer."""

    def _read(self, every_s: float | None = None) -> bool:
        """Read what the engine has, once a round and at most every ``every_s``; return whether the
        last attempt was answered."""
        if not self._was_read and self._monotonic() - self._read_s >= (every_s or self.poll_s):
            try:
                self._fetch()
                self._reads, self._problem = self._reads + 1, ""
            except PacelineError as error:
                log.warning("what %s has is unknown: %s", self.name, error)
                self._problem = error.one_line()
            self._read_s = self._monotonic()  # afterwards: an attempt may last for seconds
        self._was_read = True
        return self._reads > 0 and not self._problem

    def _may_ask(self, job_id: str) -> bool:
        """Return whether a job's nodes may be requested now: only by an answer after the last
        request, which the engine may have taken though its command failed."""
        is_fresh = self._read()
        again_s, reads = self._asked.get(job_id, (-math.inf, -1))
        if why := self._stopped or self._problem:
            self._reasons[job_id] = why
        return is_fresh and not why and self._reads > reads and self._monotonic() >= again_s

    def _ask(self, job_id: str, call: Callable[[], _Answer]) -> _Answer | None:
        """Return what ``call`` does, which requests a job's nodes; None where that failed for now:
        the reason is kept. A limit of one job is said at once; where the engine is away, a command
        lasts for seconds, and the round requests no more."""
        began_s = self._monotonic()
        self._asked[job_id] = (began_s + RETRY_S, self._reads)
        try:
            return call()
        except TemporaryError as error:
            self._reasons[job_id] = why = error.one_line()
            self._lost_s += self._monotonic() - began_s
            self._stopped = why if self._lost_s >= LOST_S else ""
            return None

    def _end_round(self, waiting: Sequence[Request], every_s: float | None = None) -> bool:
        """Read what the engine has, unless this round has; forget what concerns jobs that wait no
        longer. Return whether the engine has ever answered."""
        self._read(every_s)
        self._was_read, self._stopped, self._lost_s = False, "", 0.0
        jobs = {each.job.job_id for each in waiting}
        self._reasons = {key: why for key, why in self._reasons.items() if key in jobs}
        self._asked = {key: each for key, each in self._asked.items() if key in jobs}
        self._avoid = {key: each for key, each in self._avoid.items() if key in jobs}
        if not self._reads:
            self._reasons |= dict.fromkeys(jobs, self._problem)
        return self._reads > 0

    def _stands(self, job_id: str, found: Standing) -> Standing:
        """Return where a waiting job stands, and keep its reason; nodes to avoid are given back."""
        self._reasons[job_id] = found.reason
        if found.avoid:
            log.warning("%s gives its nodes back: %s", job_id, found.reason)
            self._avoid[job_id] = tuple(sorted({*self._avoid.get(job_id, ()), *found.avoid}))
            self.cancel(job_id)
        return found

    def _require_supported(self, request: Request) -> None:
        """Raise InvalidInput for what a job asks for and this engine cannot be asked for,
        AccessDenied for the queue of another team."""
        asked, is_one = request.job.spec.resources, nodes_of(request) == 1
        given = {
            "resources.memory_bytes": asked.memory_bytes,
            "resources.capacity": asked.capacity,
            "resources.node_labels": asked.node_labels,
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
        if not KIND.fullmatch(asked.accelerator):
            raise InvalidInput(
                f"{self.name} has no such kind of accelerator",
                got=asked.accelerator,
                wanted="letters, digits, spaces and any of . : + - _",
                where="resources.accelerator",
            )
        common, queues = self._queues()
        owners = [team for team, named in queues.items() if asked.queue in named.split(",")]
        if (
            asked.queue
            and owners
            and request.job.spec.team not in owners
            and asked.queue not in common.split(",")
        ):
            raise AccessDenied(
                "the queue is another team's",
                got=asked.queue,
                wanted=f"none, or a queue that is not of {', '.join(owners)} alone",
                where="resources.queue",
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


def on_nodes(
    names: Sequence[str],
    said: str,
    request: Request,
    hosts: Mapping[str, Host],
    allocation: JobAllocation,
) -> Standing:
    """Return where a job stands that was given the nodes ``names``, all of them alive; ``said`` is
    what the engine says of it."""
    if avoid := not_its_kind(names, request, hosts):
        kind = request.job.kind or "one kind"
        why = f"{said}, {', '.join(avoid[:5])} not of {kind}: it asks for other nodes"
        return Standing(phase="waiting", reason=why, allocation=allocation, avoid=tuple(avoid))
    placed = placed_on(names, request, hosts)
    if isinstance(placed, str):
        return Standing(phase="failed", reason=f"{said}: {placed}", allocation=allocation)
    return Standing(phase="granted", placement=placed, allocation=allocation)


def placed_on(names: Sequence[str], request: Request, hosts: Mapping[str, Host]) -> Placement | str:
    """Return where the gang's ranks run on the nodes that it was granted, all of them alive, or
    why they cannot hold it."""
    gang, per_node = request.gang, request.ranks_per_node
    held = [
        replace(host, slots=per_node or host.slots) if host.kind == "cpu" else host
        for host in map(hosts.__getitem__, names)
    ]
    if not request.job.kind and is_kind(gang.kind, held[0].kind):
        gang = replace(gang, kind=held[0].kind)  # of several kinds that it may mean: the given one
    demand = Demand(held, gang)
    slots = {each.name: each.slots for each in held}
    return demand.place(gang.ranks, slots) or (
        f"{', '.join(names)} cannot hold it: {why_never(held, gang, {}) or 'ranks per node'}"
    )


def not_its_kind(names: Sequence[str], request: Request, hosts: Mapping[str, Host]) -> list[str]:
    """Return the granted nodes, all of them alive, of another kind of accelerator than the job's:
    the one on which it began, else what it asks for and most of them are."""
    kinds = [hosts[name].kind for name in names]
    wanted = request.job.kind or max(
        sorted({*kinds}), key=lambda kind: (is_kind(request.gang.kind, kind), kinds.count(kind))
    )
    return [name for name in names if hosts[name].kind != wanted]
