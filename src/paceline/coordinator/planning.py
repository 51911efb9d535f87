"""From a call to a deployment's record, and from its facts to a plan: who takes part, with what.

Plans and estimates are made by ``paceline.plan``; here is only what is handed to it.
"""

from __future__ import annotations

from math import log2
from statistics import median_low

from paceline.coordinator.deployment import DeploymentRun
from paceline.coordinator.membership import Membership
from paceline.coordinator.messages import Create
from paceline.coordinator.parts import Tally
from paceline.coordinator.settings import Patience
from paceline.errors import InvalidInput
from paceline.plan import (
    PlanWorker,
    Prediction,
    Standing,
    make_plan,
    origin_cap_bytes,
    predict,
)
from paceline.wire.plan import Plan, Topology, WorkerLanes
from paceline.wire.records import Deployment, DeploymentStatus


def new_deployment(event: Create, fleet: Membership, patience: Patience) -> Deployment:
    """Return the record of a deployment that begins; raises InvalidInput where it cannot be."""
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
    expected = _estimate(event, fleet, patience)
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
        run_id=call.run_id,
    )


def _estimate(event: Create, fleet: Membership, patience: Patience) -> Prediction:
    records = [fleet.find(worker_id) for worker_id in event.call.target_workers]
    links = [record.link_mbit for record in records if record is not None]
    return predict(
        event.call.topology,
        total_bytes=event.manifest.total_size,
        workers=len(records),
        piece_bytes=event.manifest.piece_bytes,
        link_mbit=min(links, default=patience.link_mbit),
    )


def next_plan(
    run: DeploymentRun, tally: Tally, fleet: Membership, patience: Patience
) -> tuple[Plan, dict[str, int]]:
    """Return the plan of the next epoch, and who came back too late to stand in the line any more
    (with the pieces it lacked); raises InvalidPlan.

    Everybody who ever was here is named to the planner, the dead too, so that the others keep
    their places. Whose lanes come out as they were keeps them as they are, epoch and budget too:
    it need not be told, and at 10,000 workers nobody could tell everybody of each death.
    """
    late = _latecomers(run, tally, patience)
    living = set(tally.living)
    everybody = [*run.order, *(each for each in run.parts if each not in run.order)]
    wants_holdings = run.deployment.topology in (Topology.MESH, Topology.AUTO)
    workers = []
    for worker_id in everybody:
        record, part = fleet.find(worker_id), run.parts[worker_id]
        if record is None:
            continue  # never here: nobody can be told where it is
        standing = run.standing_of(worker_id) if worker_id in living else Standing.GONE
        if standing is Standing.GONE:
            continue  # until the planner keeps the places of the dead
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
                held_chunks=frozenset(part.chunks if wants_holdings else ()),
                standing=standing,
            )
        )
    deployment = run.deployment
    plan = make_plan(
        deployment.topology,
        deployment_id=deployment.deployment_id,
        epoch=deployment.epoch + 1,
        manifest=run.manifest,
        workers=workers,
        source_url=deployment.source_url,
        seed=run.memo.seed,
        origin_spent_bytes=run.origin_bytes,
        order=run.order,
    )
    kept = tuple(_kept(run, each) for each in plan.workers)
    return plan.model_copy(update={"workers": kept}), late


def _latecomers(run: DeploymentRun, tally: Tally, patience: Patience) -> dict[str, int]:
    """Return who came back with a gap: in its old place everybody behind it would wait for that."""
    back = [each for each in tally.pending if each in run.fresh or each not in run.lanes]
    others = [run.parts[each].pieces_known for each in tally.living if each not in run.fresh]
    if run.plan is None or not back or not others:
        return {}
    usual = median_low(others)
    gaps = {worker_id: usual - run.parts[worker_id].pieces_known for worker_id in back}
    return {each: gap for each, gap in gaps.items() if gap > patience.return_gap_pieces}


def _kept(run: DeploymentRun, planned: WorkerLanes) -> WorkerLanes:
    """Return the lanes that the worker has, where ``planned`` says the same, else those.

    The origin fuse is one for all epochs: who keeps its budget may go on reading what is left of
    it, so that must not be more than this plan counts with, nor, for who seeds, far less.
    """
    worker_id = planned.worker_id
    before, part = run.lanes.get(worker_id), run.parts[worker_id]
    if before is None or worker_id in run.fresh or worker_id in run.short:
        return planned
    if _gist(before) != _gist(planned):
        return planned
    if not run.fused:
        return before
    if part.spent_before is None:  # told by an earlier coordinator: what is left is not known
        return planned if _seeds(planned) else before
    left = before.origin_budget_bytes - (part.spent_bytes - part.spent_before)
    share, total = planned.origin_budget_bytes, run.deployment.total_bytes
    slack = origin_cap_bytes(total) - total
    if _seeds(planned):
        fits = share - slack // 4 <= left <= share + slack // 16
    else:
        fits = left <= share + share // 4 + run.manifest.piece_bytes
    return before if fits else planned


def _gist(lanes: WorkerLanes) -> list[tuple[object, ...]]:
    return [
        (
            lane.first_chunk,
            lane.last_chunk,
            round(log2(lane.expected_bytes_s + 1)),  # deadlines follow it, coarsely
            *((each.key, each.address) for each in (lane.source, *lane.spares)),
        )
        for lane in lanes.lanes
    ]


def _seeds(lanes: WorkerLanes) -> bool:
    return any(lane.source.kind == "origin" for lane in lanes.lanes)
