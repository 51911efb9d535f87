"""The origin fuse, shared out over a plan's new lanes and the lanes that are kept from before it.

A plan's own shares fit under the fuse by construction. Lanes that are kept go on with a budget of
an earlier plan, which counted with another division: so what all may still read, together with what
was read, is brought under the fuse here, whatever came before. Pure arithmetic.

Who is gone is not counted: what it may still have been reading when it fell silent, nobody can take
back from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.coordinator.deployment import DeploymentRun
from paceline.plan import origin_cap_bytes
from paceline.wire.plan import WorkerLanes


def left_bytes(run: DeploymentRun, worker_id: str) -> int:
    """Return the most that a worker may still read from the origin under the lanes that it has.

    One that an earlier coordinator planned for may have its whole budget left: it is not known when
    it was granted.
    """
    lanes, part = run.lanes.get(worker_id), run.parts[worker_id]
    if lanes is None or part.receipt is not None:
        return 0  # whoever has everything reads nothing
    spent = 0 if part.spent_before is None else part.spent_bytes - part.spent_before
    return max(0, lanes.origin_budget_bytes - spent)


def open_bytes(run: DeploymentRun) -> int:
    """Return how much may still be read from the origin by all together."""
    fuse = origin_cap_bytes(run.deployment.total_bytes) + run.memo.extra_bytes
    return max(0, fuse - run.origin_bytes)


def under_the_fuse(
    run: DeploymentRun, planned: Sequence[WorkerLanes], kept: Mapping[str, WorkerLanes]
) -> tuple[WorkerLanes, ...]:
    """Return the lanes of ``planned``, or those ``kept`` in their place, so that together they may
    read no more than is open.

    What is too much comes first out of what new seeds have beyond what they begin. Then whoever has
    most over what this plan gives it gets the plan's lanes after all: a head, as a rule, so that
    hardly anybody has to be told. The plan's own shares fit, so this ends.
    """
    kept = dict(kept)
    if not run.fused:
        return tuple(kept.get(each.worker_id, each) for each in planned)
    shares = {each.worker_id: each.origin_budget_bytes for each in planned}
    given = {
        name: left_bytes(run, name) if name in kept else share for name, share in shares.items()
    }
    excess = sum(given.values()) - open_bytes(run)
    for each in planned:
        if excess > 0 and each.worker_id not in kept:
            cut = max(0, min(excess, each.origin_budget_bytes - _begun_bytes(run, each)))
            shares[each.worker_id] -= cut
            excess -= cut
    for name in sorted(kept, key=lambda name: shares[name] - given[name]):
        if excess <= 0:
            break
        excess -= given[name] - shares[name]
        del kept[name]
    return tuple(
        kept.get(each.worker_id) or _with_budget(each, shares[each.worker_id]) for each in planned
    )


def _begun_bytes(run: DeploymentRun, lanes: WorkerLanes) -> int:
    """Return what is to be read at the origin as ``lanes`` say, and all of it for who is no seed:
    its small share is for the last resort.
    """
    chunks, held = run.manifest.chunks, set(run.parts[lanes.worker_id].chunks)
    begun = [
        sum(
            chunk.size
            for chunk in chunks[lane.first_chunk : lane.last_chunk + 1]
            if chunk.chunk_id not in held
        )
        for lane in lanes.lanes
        if lane.source.kind == "origin"
    ]
    return sum(begun) if begun else lanes.origin_budget_bytes


def _with_budget(lanes: WorkerLanes, budget_bytes: int) -> WorkerLanes:
    if budget_bytes == lanes.origin_budget_bytes:
        return lanes
    return lanes.model_copy(update={"origin_budget_bytes": budget_bytes})
