"""Builds the inputs of ``paceline.plan``: a new deployment's record, and each next plan.

It also distributes the origin budget over a plan. Plans and estimates are computed by
``paceline.plan``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low

from paceline.coordinator.state.deployment import DeploymentState, process_key
from paceline.coordinator.state.membership import Membership
from paceline.coordinator.state.messages import Create
from paceline.coordinator.state.settings import CoordinatorSettings
from paceline.coordinator.state.targets import (
    TargetGroups,
    remaining_budget_bytes,
    unreported_bytes,
)
from paceline.errors import InvalidInput
from paceline.plan import PlanWorker, Prediction, Standing, make_plan, origin_cap_bytes, predict
from paceline.schemas import Deployment, DeploymentStatus, Plan, WorkerLanes

# The origin budget, distributed over a plan's new lanes and the lanes kept from earlier plans.
#
# The budgets of one plan fit into the origin budget by construction. Kept lanes have a budget of an
# earlier plan with another division. So the sum of what was read and what all workers may still
# read is brought under the origin budget here, whatever came before. Pure arithmetic.
#
# What was read is what was reported, plus what lost workers may have read after their last report.
# A new budget counts from the bytes reported when it was made, whatever its worker has read by the
# time it receives it (docs/decisions/0005-origin-budget.md).

REPORTS_PER_SLACK = 32  # a seeder reports after each such part of the budget's slack


def origin_report_bytes(total_bytes: int) -> int:
    """Return after how many bytes a seeder reports its reads, with no heartbeat due."""
    return max(1, (origin_cap_bytes(total_bytes) - total_bytes) // REPORTS_PER_SLACK)


def origin_spent_bytes(state: DeploymentState) -> int:
    """Return the most bytes read from the origin so far, unreported reads of living workers
    excepted: their budgets count from what they reported.
    """
    return state.origin_bytes + sum(state.persisted.unreported.values())


def remaining_origin_bytes(state: DeploymentState) -> int:
    """Return how many bytes all workers together may still read from the origin."""
    cap_bytes = origin_cap_bytes(state.deployment.total_bytes) + state.persisted.extra_bytes
    return max(0, cap_bytes - origin_spent_bytes(state))


def fit_origin_budget(
    state: DeploymentState,
    planned: Sequence[WorkerLanes],
    kept: Mapping[str, WorkerLanes],
    fleet: Membership,
) -> tuple[WorkerLanes, ...]:
    """Return the lanes of ``planned``, or those ``kept`` in their place, so that together they stay
    within the origin budget.

    An excess is taken first from what new seeders have beyond their assigned reads. Then the
    workers whose kept budget exceeds this plan's share the most get the plan's lanes: usually the
    first of the line, so that few workers must be notified. The plan's own shares fit, except for
    what former seeders may read before they receive it; that is taken from the new seeders last.
    """
    kept = dict(kept)
    if not state.has_origin_budget:
        return tuple(kept.get(each.worker_id, each) for each in planned)
    given = {name: remaining_budget_bytes(lanes, state.parts[name]) for name, lanes in kept.items()}
    shares = {each.worker_id: _share_bytes(state, each) for each in planned}
    fresh = [each for each in planned if each.worker_id not in kept]
    excess = (
        sum(given.values())
        + sum(shares[each.worker_id] for each in fresh)
        - remaining_origin_bytes(state)
    )
    excess = _cut(shares, {each.worker_id: _begun_bytes(state, each) for each in fresh}, excess)
    for name in sorted(kept, key=lambda name: shares[name] - given[name]):
        if excess <= 0:
            break
        excess -= given[name] - shares[name]
        del kept[name]
    seeds = [each.worker_id for each in planned if each.origin_lanes and each.worker_id not in kept]
    _cut(shares, dict.fromkeys(seeds, 0), excess)
    return tuple(
        kept.get(each.worker_id) or _granted(state, each, shares[each.worker_id], fleet)
        for each in planned
    )


def _share_bytes(state: DeploymentState, planned: WorkerLanes) -> int:
    """Return a worker's share of this plan; at least what it may have read by its arrival."""
    worker_id = planned.worker_id
    unreported = unreported_bytes(state.lanes.get(worker_id), state.parts[worker_id])
    return max(planned.origin_budget_bytes, unreported)


def _cut(shares: dict[str, int], least: Mapping[str, int], excess: int) -> int:
    """Take ``excess`` out of the ``shares`` of the workers in ``least``, down to that minimum;
    return what remains of the excess.
    """
    for name, needed in least.items():
        if excess <= 0:
            break
        cut = max(0, min(excess, shares[name] - needed))
        shares[name] -= cut
        excess -= cut
    return excess


def _granted(
    state: DeploymentState, lanes: WorkerLanes, share: int, fleet: Membership
) -> WorkerLanes:
    """Return ``lanes`` with a budget of ``share``, counted from its worker's reported bytes, and
    for a seeder with its reporting interval in bytes.
    """
    worker_id, seeds = lanes.worker_id, bool(lanes.origin_lanes)
    if share == lanes.origin_budget_bytes and not seeds and worker_id not in state.lanes:
        return lanes  # its first lanes: it has read nothing
    worker = fleet.find(worker_id)
    counted = 0 if worker is None else state.persisted.spent.get(process_key(worker), 0)
    update = {"origin_budget_bytes": share, "origin_counted_bytes": counted}
    if seeds:
        update["origin_tell_bytes"] = origin_report_bytes(state.deployment.total_bytes)
    return lanes.model_copy(update=update)


def _begun_bytes(state: DeploymentState, lanes: WorkerLanes) -> int:
    """Return the bytes that ``lanes`` assign at the origin; for a worker that is no seeder its
    whole budget, which is small and for the last resort.
    """
    chunks, held = state.manifest.chunks, set(state.parts[lanes.worker_id].chunks)
    begun = [
        sum(
            chunk.size
            for chunk in chunks[lane.first_chunk : lane.last_chunk + 1]
            if chunk.chunk_id not in held
        )
        for lane in lanes.origin_lanes
    ]
    return sum(begun) if begun else lanes.origin_budget_bytes


PeerAddresses = Mapping[str, tuple[str, bool]]  # of living workers: address, and whether usable

NEAR_SPARES = 2  # of each lane, that must be usable; a lost worker is a far spare of many others


def new_deployment(event: Create, fleet: Membership, settings: CoordinatorSettings) -> Deployment:
    """Return the record of a new deployment; raises InvalidInput for an impossible request,
    CorruptData for another manifest than the one that it names.
    """
    call, manifest = event.call, event.manifest
    if len(set(call.target_workers)) != len(call.target_workers):
        raise InvalidInput("a target worker is named twice", wanted="each target once")
    if (manifest.model_id, manifest.version) != (call.model_id, call.version):
        raise InvalidInput(
            "the source holds another model",
            got=f"{manifest.model_id} {manifest.version}",
            wanted=f"{call.model_id} {call.version}",
            where=call.source_url,
        )
    manifest.require_digest(call.manifest_digest, call.source_url)
    expected = _estimate(event, fleet, settings)
    return Deployment(
        deployment_id=event.deployment_id,
        model_id=call.model_id,
        version=call.version,
        status=DeploymentStatus.INIT,
        source_url=call.source_url,
        manifest_digest=manifest.digest,
        total_bytes=manifest.total_size,
        total_chunks=len(manifest.chunks),
        total_pieces=manifest.piece_count,
        target_workers=call.target_workers,
        topology=call.topology,
        epoch=0,
        max_failed=call.max_failed,
        started_at=event.at,
        predicted_seconds=expected.seconds,
        bound_seconds=expected.bound_seconds,
        flow_run_id=call.flow_run_id,
        flow_wanted=settings.starts_flows and call.flow_run_id is None,
        run_id=call.run_id,
    )


def _estimate(event: Create, fleet: Membership, settings: CoordinatorSettings) -> Prediction:
    records = [fleet.find(worker_id) for worker_id in event.call.target_workers]
    here = [record for record in records if record is not None]
    return predict(
        event.call.topology,
        total_bytes=event.manifest.total_size,
        workers=len(records),
        piece_bytes=event.manifest.piece_bytes,
        chunk_bytes=event.manifest.chunk_bytes,
        link_mbit=min((record.link_mbit for record in here), default=settings.link_mbit),
        external_mbit=settings.external_mbit,
        racks=len({(record.labels.zone, record.labels.rack) for record in here}) or 1,
        oversubscription=settings.oversubscription,
    )


def next_plan(
    state: DeploymentState, tally: TargetGroups, fleet: Membership
) -> tuple[Plan, dict[str, int]]:
    """Return the plan of the next epoch, and the workers that returned too late for their place in
    the line, with the pieces that they lacked; raises InvalidPlan.

    The planner gets every worker that ever registered, lost ones too, so that the others keep
    their places. A worker whose lanes are unchanged keeps them with epoch and budget: it need not
    be notified, and at 10,000 workers not all can be notified of each loss.
    """
    late = _late_joiners(state, tally)
    living = set(tally.living)
    placed = set(state.order)
    all_workers = [*state.order, *(each for each in state.parts if each not in placed)]
    workers = []
    for worker_id in all_workers:
        record, part = fleet.find(worker_id), state.parts[worker_id]
        if record is None:
            continue  # it never registered: its address is unknown
        standing = state.standing_of(worker_id) if worker_id in living else Standing.GONE
        if standing is Standing.LINE and worker_id in late:
            standing = Standing.TAIL
        workers.append(
            PlanWorker(
                worker_id=worker_id,
                labels=record.labels,
                address=record.address,
                link_mbit=record.link_mbit,
                complete=part.receipt is not None,
                held_pieces=part.pieces_known,
                held_chunks=frozenset(part.chunks),
                standing=standing,
            )
        )
    deployment = state.deployment
    plan = make_plan(
        deployment.topology,
        deployment_id=deployment.deployment_id,
        epoch=deployment.epoch + 1,
        manifest=state.manifest,
        workers=workers,
        source_url=deployment.source_url,
        seed=state.persisted.seed,
        external_mbit=state.settings.external_mbit,
        oversubscription=state.settings.oversubscription,
        origin_spent_bytes=origin_spent_bytes(state) - state.persisted.extra_bytes,
        order=state.order,
    )
    places = {
        each.worker_id: (each.address, each.standing is not Standing.QUARANTINED)
        for each in workers
        if each.standing is not Standing.GONE
    }
    kept = {
        each.worker_id: state.lanes[each.worker_id]
        for each in plan.workers
        if _is_kept(state, each, places)
    }
    parts = fit_origin_budget(state, plan.workers, kept, fleet)
    return plan.model_copy(update={"workers": parts}), late


def _late_joiners(state: DeploymentState, tally: TargetGroups) -> dict[str, int]:
    """Return the workers that returned with a gap: workers behind them would wait for it."""
    back = [each for each in tally.pending if each in state.fresh or each not in state.lanes]
    others = [state.parts[each].pieces_known for each in tally.living if each not in state.fresh]
    if state.plan is None or not back or not others:
        return {}
    usual = median_low(others)
    gaps = {worker_id: usual - state.parts[worker_id].pieces_known for worker_id in back}
    return {each: gap for each, gap in gaps.items() if gap > state.settings.return_gap_pieces}


def _is_kept(state: DeploymentState, planned: WorkerLanes, places: PeerAddresses) -> bool:
    """Return whether the worker keeps its lanes, because ``planned`` is equivalent.

    The origin budget is shared by all epochs, and a worker that keeps its lanes may read the rest
    of its budget. So that rest must not be much more than its share of this plan, nor, for a
    seeder, far less. ``fit_origin_budget`` makes all of them together fit.
    """
    worker_id = planned.worker_id
    before, part = state.lanes.get(worker_id), state.parts[worker_id]
    if before is None or worker_id in state.fresh or worker_id in state.short:
        return False
    if not _serves(before, planned, places):
        return False
    if not state.has_origin_budget:
        return True
    seeds = bool(planned.origin_lanes)
    if part.spent_before is None:  # planned by an earlier coordinator: the rest is unknown
        return not seeds
    left = before.origin_budget_bytes - (part.spent_bytes - part.spent_before)
    share, total = planned.origin_budget_bytes, state.deployment.total_bytes
    slack = origin_cap_bytes(total) - total
    if seeds:
        return share - slack // 4 <= left <= share + slack // 16
    return left <= share + share // 4 + state.manifest.piece_bytes


def _serves(before: WorkerLanes, planned: WorkerLanes, places: PeerAddresses) -> bool:
    """Return whether a worker's lanes are as good as ``planned``: the same chunks and sources, near
    spares that are alive at the same address, and no quarantined spare.
    """
    if len(before.lanes) != len(planned.lanes):
        return False
    for old, new in zip(before.lanes, planned.lanes, strict=True):
        if (old.first_chunk, old.last_chunk) != (new.first_chunk, new.last_chunk):
            return False
        if (old.source.key, old.source.address) != (new.source.key, new.source.address):
            return False
        peers = [spare for spare in old.spares if spare.worker_id is not None]
        wanted = sum(spare.worker_id is not None for spare in new.spares)
        if len(peers) < min(NEAR_SPARES, wanted):
            return False
        if any((each.address, True) != places.get(each.key) for each in peers[:NEAR_SPARES]):
            return False
        if any(not places.get(each.key, ("", True))[1] for each in peers):
            return False
    return True
