"""One target's part in a deployment as it reported it, and all targets by how they stand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field

from paceline.errors import InvalidInput
from paceline.schemas.calls import NEWS_S, DeploymentBeat
from paceline.schemas.plan import WorkerLanes
from paceline.schemas.records import Deployment, Failure, Receipt, WorkerStatus


@dataclass(slots=True)
class Part:
    """One target's part, as its newest incarnation reported it."""

    incarnation: int = 0
    epoch: int = 0  # of the lanes it says it follows
    ready: bool = False  # it acknowledged the manifest: fetched lanes, or says it follows some
    status: WorkerStatus = WorkerStatus.IDLE
    pieces_held: int = 0
    bytes_held: int = 0
    held_before: int = 0  # pieces that an earlier incarnation reported: they are on its disk
    chunks: tuple[int, ...] = ()
    failure: Failure | None = None
    receipt: Receipt | None = None
    activated: bool = False
    seen_whole: bool = False  # its newest word: the version is on its disk
    lanes_s: float | None = None  # when this incarnation first took lanes
    dead_since_s: float | None = None
    told: frozenset[str] = frozenset()  # sources it reported lost or corrupt, already passed on
    command_sent: bool = False  # the cancel or activate in force rode on an answer already
    stopped: bool = False  # it confirmed a cancel
    process: str = ""  # which of its processes told of reading from the origin last
    processes: list[str] = field(default_factory=list)  # that read from the origin, oldest first
    spent_bytes: int = 0  # read from the origin, by all its processes
    spent_before: int | None = None  # of these, before it got its present budget, where known

    def begin_again(self, incarnation: int) -> None:
        """Forget what the previous incarnation said; its receipt stands until contradicted."""
        self.incarnation, self.epoch, self.status = incarnation, 0, WorkerStatus.IDLE
        self.ready, self.process = False, ""
        self.held_before = max(self.held_before, self.pieces_held)
        self.pieces_held = self.bytes_held = 0
        self.chunks, self.failure, self.lanes_s = (), None, None
        self.seen_whole, self.told, self.command_sent = False, frozenset(), False

    @property
    def pieces_known(self) -> int:
        """Return how many pieces are on its disk, as far as it ever said."""
        return max(self.pieces_held, self.held_before)


def left_bytes(lanes: WorkerLanes | None, part: Part) -> int:
    """Return the most that a worker may still read from the origin under ``lanes``.

    One that an earlier coordinator planned for may have its whole budget left: it is not known when
    it was granted.
    """
    if lanes is None or part.receipt is not None:
        return 0  # whoever has everything reads nothing
    spent = 0 if part.spent_before is None else part.spent_bytes - part.spent_before
    return max(0, lanes.origin_budget_bytes - spent)


def untold_bytes(lanes: WorkerLanes | None, part: Part) -> int:
    """Return the most that a worker has read from the origin since its last word.

    A seed tells at once of ``origin_tell_bytes``, unless it spoke just before; while nobody hears
    it, it may read more, and that is not known. The share of who is no seed is passed over: it is
    small, and for the last resort.
    """
    if lanes is None or not lanes.origin_lanes:
        return 0
    rate = sum(lane.expected_bytes_s for lane in lanes.origin_lanes)
    untold = lanes.origin_tell_bytes + round(rate * NEWS_S)
    return min(left_bytes(lanes, part), untold)


@dataclass(slots=True)
class Tally:
    """The targets of one deployment by how they stand."""

    living: list[str] = field(default_factory=list)  # alive and able to finish
    pending: list[str] = field(default_factory=list)  # of these, without a receipt
    done: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)  # silent and without a receipt
    failed: list[str] = field(default_factory=list)  # gave up


def tally_of(
    parts: Mapping[str, Part], failed: Collection[str], alive: Callable[[str], bool]
) -> Tally:
    """Sort the targets by how they stand."""
    tally = Tally()
    for worker_id, part in parts.items():
        if part.receipt is not None:
            tally.done.append(worker_id)
            if alive(worker_id):
                tally.living.append(worker_id)
        elif worker_id in failed:
            tally.failed.append(worker_id)
        elif alive(worker_id):
            tally.living.append(worker_id)
            tally.pending.append(worker_id)
        else:
            tally.dead.append(worker_id)
    return tally


# Whether what a worker says of its part can be so at all.
#
# Asked before anything of a beat is taken: one worker's absurd number would otherwise be
# everybody's trouble, in plans, figures and metrics. What is possible is believed. Pure, and cheap:
# it is asked of each beat, so the list of chunks is looked through only where it changed.
#
# Edges are no part of it: who reads at a worker says its own name, so a stranger's must not cost
# that worker its beat. They are passed over (``has_part``).


def require_possible(
    deployment: Deployment, targets: Container[str], part: Part, beat: DeploymentBeat
) -> None:
    """Raise InvalidInput where ``beat`` says more than there is, or names who has no part in it."""
    if beat.pieces_held > deployment.total_pieces:
        raise _impossible(deployment, "pieces", beat.pieces_held, deployment.total_pieces)
    if beat.bytes_held > deployment.total_bytes:
        raise _impossible(deployment, "bytes", beat.bytes_held, deployment.total_bytes)
    chunks = beat.chunks_received
    if chunks and chunks != part.chunks:
        last = deployment.total_chunks - 1
        if min(chunks) < 0 or max(chunks) > last or len(set(chunks)) < len(chunks):
            raise InvalidInput(
                "there are no such chunks",
                got=f"{len(chunks)} from {min(chunks)} to {max(chunks)}",
                wanted=f"each once, from 0 to {last}",
                where=deployment.deployment_id,
            )
    for key in (*beat.lost_sources, *beat.corrupt_sources):
        if not has_part(deployment, targets, key):
            raise InvalidInput(
                "it has no part in this deployment",
                got=key[:200],
                wanted="a target worker, or the origin",
                where=deployment.deployment_id,
            )


def has_part(deployment: Deployment, targets: Container[str], key: str) -> bool:
    """Return whether ``key`` is a source or a reader that a deployment to ``targets`` can have."""
    return key in targets or key == f"origin:{deployment.source_url}"


def _impossible(deployment: Deployment, what: str, got: int, total: int) -> InvalidInput:
    return InvalidInput(
        f"nobody can hold so many {what} of it",
        got=got,
        wanted=f"at most {total}",
        where=deployment.deployment_id,
    )
