"""Which closed deployments and lost workers may be forgotten, so that what is kept stays bounded.

Of deployments the newest are kept, and those that closed lately: their keys may still be asked for.
Never forgotten is what is active on some worker, what a rollback would return to, and what a living
worker has yet to stop. Workers go a month after they were heard last: where each start has a name
of its own (pods), the dead would be more than the living.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from paceline.coordinator.book import Book
from paceline.coordinator.deployment import DeploymentRun
from paceline.coordinator.membership import Membership
from paceline.coordinator.messages import DropDeployment, DropWorker, Effect, Observed
from paceline.coordinator.settings import Patience
from paceline.wire.events import EventName
from paceline.wire.records import DeploymentStatus

AT_ONCE = 8  # deployments forgotten in one transaction,
WORKERS_AT_ONCE = 40  # and workers
LOOK_S = 60.0  # between two looks, where the last one found nothing to forget,
LOOK_MANY_S = 1.0  # and where calls make more deployments than may be kept
TARGET_BYTES, PIECE_BYTES, ENTRY_BYTES = 200, 68, 300  # of a target, a piece, a file or chunk


def prune(book: Book, patience: Patience, at: float, now_s: float) -> list[Effect]:
    """Forget a few of those that may be forgotten."""
    closed = [run for run in book if run.final and run.deployment.deployment_id not in book.ticking]
    surplus = _surplus(closed, patience)
    old = closed[: max(surplus, len(closed) - patience.kept_closed)]
    if not old:
        return []
    needed = _needed(book)
    effects: list[Effect] = []
    due = [
        run
        for place, run in enumerate(old)
        if run.deployment.deployment_id not in needed
        and (place < surplus or _closed_for_s(run, now_s) > patience.kept_closed_s)
    ]
    # A leader that took over has not heard who stopped, and announced the newest cancels only.
    for run in islice(filter(_unstopped, due), AT_ONCE):
        book.announce(run, _unstopped(run))
    for run in list(islice((each for each in due if not _unstopped(each)), AT_ONCE)):
        book.drop(run)
        deployment = run.deployment
        data: dict[str, object] = {
            "model_id": deployment.model_id,
            "version": deployment.version,
            "status": deployment.status.value,
        }
        identity = deployment.deployment_id
        told = Observed(EventName.DEPLOYMENT_FORGOTTEN, at, identity, None, data)
        effects += [DropDeployment(identity), told]
    return effects


def kept_bytes(runs: Iterable[DeploymentRun]) -> int:
    """Return about how many bytes the records and manifests of ``runs`` take in a store."""
    return sum(
        TARGET_BYTES * len(run.parts)
        + PIECE_BYTES * run.manifest.piece_count
        + ENTRY_BYTES * (len(run.manifest.files) + len(run.manifest.chunks))
        for run in runs
    )


def _surplus(closed: Sequence[DeploymentRun], patience: Patience) -> int:
    """Return how many of the oldest are too many, whatever their age."""
    left = patience.kept_bytes_at_most // 2
    for place in range(len(closed) - 1, -1, -1):
        left -= kept_bytes([closed[place]])
        if left < 0 or len(closed) - place > patience.kept_at_most:
            return place + 1
    return 0


def prune_workers(book: Book, fleet: Membership, at: float) -> list[Effect]:
    """Forget a few of the workers that were lost long ago and are named by no deployment."""
    gone = fleet.long_gone(at)
    if not gone:
        return []
    named = {worker_id for run in book for worker_id in run.parts}
    effects: list[Effect] = []
    for worker_id in islice((each for each in gone if each not in named), WORKERS_AT_ONCE):
        fleet.forget(worker_id)
        book.forget(worker_id)
        effects += [
            DropWorker(worker_id),
            Observed(EventName.WORKER_FORGOTTEN, at, None, worker_id),
        ]
    return effects


def _closed_for_s(run: DeploymentRun, now_s: float) -> float:
    closed_s = run.memo.closed_s
    return 0.0 if closed_s is None else now_s - closed_s


def _needed(book: Book) -> set[str]:
    """Return what is active on some worker, or was before what is."""
    needed: set[str] = set()
    for model_id in {run.deployment.model_id for run in book if run.memo.number}:
        once: set[str] = set()
        twice: set[str] = set()
        for run in book.history(model_id):
            holders = run.holders()
            if not holders <= twice:
                needed.add(run.deployment.deployment_id)
            twice |= once & holders
            once |= holders
    return needed


def _unstopped(run: DeploymentRun) -> list[str]:
    """Return who has yet to stop, of a deployment that was cancelled, as far as it is known."""
    if run.deployment.status is not DeploymentStatus.CANCELLED or run.plan is None:
        return []
    return [
        worker_id
        for worker_id, part in run.parts.items()
        if part.receipt is None and not part.stopped and part.dead_since_s is None
    ]
