"""The origin fuse, shared out over a plan's new lanes and the lanes that are kept from before it.

A plan's own shares fit under the fuse by construction. Lanes that are kept go on with a budget of
an earlier plan, which counted with another division: so what all may still read, together with what
was read, is brought under the fuse here, whatever came before. Pure arithmetic.

What was read is what was told, and what those who are gone may have read since their last word. A
grant goes on from what was told when it was made, whatever its worker has read by the time it hears
of it (decision 36).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.coordinator.deployment import DeploymentRun, process_of
from paceline.coordinator.membership import Membership
from paceline.coordinator.parts import left_bytes, untold_bytes
from paceline.plan import origin_cap_bytes
from paceline.wire.plan import WorkerLanes

TELLINGS = 32  # a seed tells at once of such a part of the fuse's slack


def told_at_once(total_bytes: int) -> int:
    """Return how much a seed may read before it says so, with no beat due."""
    return max(1, (origin_cap_bytes(total_bytes) - total_bytes) // TELLINGS)


def spent_bytes(run: DeploymentRun) -> int:
    """Return the most that can have been read from the origin so far beyond what the living, who
    go on from what they told, may still read.
    """
    return run.origin_bytes + sum(run.memo.untold.values())


def open_bytes(run: DeploymentRun) -> int:
    """Return how much may still be read from the origin by all together."""
    fuse = origin_cap_bytes(run.deployment.total_bytes) + run.memo.extra_bytes
    return max(0, fuse - spent_bytes(run))


def under_the_fuse(
    run: DeploymentRun,
    planned: Sequence[WorkerLanes],
    kept: Mapping[str, WorkerLanes],
    fleet: Membership,
) -> tuple[WorkerLanes, ...]:
    """Return the lanes of ``planned``, or those ``kept`` in their place, so that together they may
    read no more than is open.

    What is too much comes first out of what new seeds have beyond what they begin. Then whoever has
    most over what this plan gives it gets the plan's lanes after all: a head, as a rule, so that
    hardly anybody has to be told. The plan's own shares fit, but for what those who read no longer
    may have read before they hear of it; that is taken from the new seeds in the end.
    """
    kept = dict(kept)
    if not run.fused:
        return tuple(kept.get(each.worker_id, each) for each in planned)
    given = {name: left_bytes(lanes, run.parts[name]) for name, lanes in kept.items()}
    shares = {each.worker_id: _share_bytes(run, each) for each in planned}
    fresh = [each for each in planned if each.worker_id not in kept]
    excess = sum(given.values()) + sum(shares[each.worker_id] for each in fresh) - open_bytes(run)
    excess = _cut(shares, {each.worker_id: _begun_bytes(run, each) for each in fresh}, excess)
    for name in sorted(kept, key=lambda name: shares[name] - given[name]):
        if excess <= 0:
            break
        excess -= given[name] - shares[name]
        del kept[name]
    seeds = [each.worker_id for each in planned if each.origin_lanes and each.worker_id not in kept]
    _cut(shares, dict.fromkeys(seeds, 0), excess)
    return tuple(
        kept.get(each.worker_id) or _granted(run, each, shares[each.worker_id], fleet)
        for each in planned
    )


def _share_bytes(run: DeploymentRun, planned: WorkerLanes) -> int:
    """Return a worker's share of this plan; at least what it may have read by when it hears."""
    worker_id = planned.worker_id
    untold = untold_bytes(run.lanes.get(worker_id), run.parts[worker_id])
    return max(planned.origin_budget_bytes, untold)


def _cut(shares: dict[str, int], least: Mapping[str, int], excess: int) -> int:
    """Take ``excess`` out of the ``shares`` of those in ``least``, and leave them that; return what
    is too much still.
    """
    for name, needed in least.items():
        if excess <= 0:
            break
        cut = max(0, min(excess, shares[name] - needed))
        shares[name] -= cut
        excess -= cut
    return excess


def _granted(run: DeploymentRun, lanes: WorkerLanes, share: int, fleet: Membership) -> WorkerLanes:
    """Return ``lanes`` with a budget of ``share``, from what its reader had told on, and with how
    much it is to tell of at once.
    """
    worker_id, seeds = lanes.worker_id, bool(lanes.origin_lanes)
    if share == lanes.origin_budget_bytes and not seeds and worker_id not in run.lanes:
        return lanes  # its first ones: it has read nothing
    worker = fleet.find(worker_id)
    told = 0 if worker is None else run.memo.spent.get(process_of(worker), 0)
    update = {"origin_budget_bytes": share, "origin_counted_bytes": told}
    if seeds:
        update["origin_tell_bytes"] = told_at_once(run.deployment.total_bytes)
    return lanes.model_copy(update=update)


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
        for lane in lanes.origin_lanes
    ]
    return sum(begun) if begun else lanes.origin_budget_bytes
