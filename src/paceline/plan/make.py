"""``make_plan``: the lanes of one epoch, from the living workers and what they hold.

After a death the coordinator calls it again with the same workers in the same order, the dead one
marked as gone, and the next epoch; there is no other recovery code. Complete workers feed the
others and have no lanes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidPlan
from paceline.manifest import Manifest
from paceline.plan.cost import (
    Network,
    PlanCost,
    deadline_s,
    origin_cap_bytes,
    origin_shares,
    plan_cost,
)
from paceline.plan.inputs import ModelLayout, PlanWorker, Standing, Stripe
from paceline.plan.spares import MAX_SPARES, Spares
from paceline.plan.transfers import Transfer, TransferBuilder, attach_leaves
from paceline.plan.tree_repair import repair_trees
from paceline.plan.trees import (
    NO_PARENT,
    ORIGIN,
    SLOW_LINK,
    Trees,
    WorkerLine,
    build_line,
    build_trees,
)
from paceline.schemas import Lane, Plan, Source, Topology, WorkerLanes

RELAYED = (Topology.CHAIN, Topology.TREE_OF_CHAINS, Topology.MESH, Topology.TREE)  # ties: simplest


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """One topology worked out: its transfers and their cost."""

    topology: Topology
    line: WorkerLine
    trees: Trees
    transfers: list[Transfer]
    cost: PlanCost
    roots: list[int]  # by place in the line: bytes that it takes from the origin in the trees
    piece_bytes: int  # of the largest piece there is


def make_plan(
    topology: Topology | str,
    *,
    deployment_id: str,
    epoch: int,
    manifest: Manifest,
    workers: Sequence[PlanWorker],
    source_url: str,
    seed: int = 0,
    external_mbit: float | None = None,
    oversubscription: float = 1.0,
    origin_spent_bytes: int = 0,
    order: Sequence[str] = (),
) -> Plan:
    """Return the plan that brings ``manifest`` to all ``workers``; pure and deterministic.

    ``order`` is ``next_order`` of the previous plan: every worker keeps its place, and where one
    worker is GONE only those it fed get another source. ``external_mbit`` is the origin's link
    (default: the slowest worker's own). ``origin_spent_bytes`` is what earlier epochs read from the
    origin: the whole deployment has one origin budget, and the shares of this plan are what it
    still allows. Raises InvalidPlan for no workers, one named twice, or a
    link without speed.
    """
    topology = topology_of(topology)
    check_workers(workers)
    layout = ModelLayout.of(manifest)
    line = build_line(workers, seed, order)
    network = Network(external_mbit, oversubscription)
    left = origin_cap_bytes(layout.total) - origin_spent_bytes
    draft = draft_plan(topology, line, layout, network, origin_left=left)
    pullers = [
        place
        for place in range(line.length)
        if not (line.is_gone(place) or line.workers[place].complete)
    ]
    if draft.topology is Topology.DIRECT:
        # Each worker reads the whole model from the origin, as requested.
        shares = dict.fromkeys(pullers, origin_cap_bytes(layout.total))
    else:
        needs = [draft.roots[place] for place in pullers]
        given = origin_shares(layout.total, origin_spent_bytes, needs)
        shares = dict(zip(pullers, given, strict=True))
    predicted = draft.cost.prediction
    # Later epochs ignore holdings: every worker has some, and unchanged lanes need not be fetched
    # again.
    spares = Spares(line, draft.trees, returned=not order)
    named: dict[str, Any] = {
        "deployment_id": deployment_id,
        "epoch": epoch,
        "manifest_digest": manifest.digest,
    }
    return Plan.model_construct(
        **named,
        plan_version=1,
        topology=draft.topology,
        seed=seed,
        workers=_lanes_of_workers(draft, spares, shares, source_url, **named),
        predicted_seconds=predicted.seconds,
        bound_seconds=predicted.bound_seconds,
        cross_rack_bytes=predicted.cross_rack_bytes,
        origin_bytes=predicted.origin_bytes,
        depth=predicted.depth,
    )


def draft_plan(
    topology: Topology,
    line: WorkerLine,
    layout: ModelLayout,
    network: Network,
    *,
    origin_left: int | None = None,
) -> PlanDraft:
    """Return ``topology`` (AUTO: the cheapest relayed one) on ``line`` with its cost."""
    if topology is Topology.AUTO:
        drafts = [
            draft_plan(each, line, layout, network, origin_left=origin_left) for each in RELAYED
        ]
        return min(drafts, key=lambda draft: draft.cost.prediction.expected_seconds)
    if topology is Topology.DIRECT:
        stripes = layout.stripes(1)
        roots = [layout.total] * line.length
        up = [
            ORIGIN if place < line.length and not line.is_gone(place) else NO_PARENT
            for place in range(len(line.workers))
        ]
        trees = Trees([up], 1)
        transfers = [
            Transfer(place, ORIGIN, 0, stripes[0].first, stripes[0].last, size)
            for place, source in enumerate(up)
            if source == ORIGIN and not line.workers[place].complete
            for size in layout.missing(line.workers[place], stripes)
        ]
    else:
        striped = topology in (Topology.TREE_OF_CHAINS, Topology.MESH)
        stripes = layout.stripes(layout.stripe_count(len(line.core)) if striped else 1)
        trees = build_trees(topology, line.workers, line.core, len(stripes))
        trees = repair_trees(trees, line.out)
        attach_leaves(line, trees)
        roots = _origin_bytes(line, layout, trees, stripes)
        scarce = origin_left is not None and origin_left < sum(roots)
        from_peers = topology is Topology.MESH
        feeding = TransferBuilder(
            line, trees, layout, stripes, scarce=scarce, from_peers=from_peers
        )
        transfers = feeding.transfers()
    cost = plan_cost(topology, line, transfers, layout, network)
    piece_bytes = min(layout.piece_bytes, max(1, layout.total))
    return PlanDraft(topology, line, trees, transfers, cost, roots, piece_bytes)


def _origin_bytes(
    line: WorkerLine, layout: ModelLayout, trees: Trees, stripes: Sequence[Stripe]
) -> list[int]:
    """Return, by place in the line, the bytes that it takes from the origin."""
    roots = [0] * line.length
    for number, up in enumerate(trees.up):
        for place in range(line.length):
            if up[place] == ORIGIN:
                roots[place] += layout.missing(line.workers[place], stripes)[number]
    return roots


def _lanes_of_workers(
    draft: PlanDraft, spares: Spares, shares: Mapping[int, int], source_url: str, **named: Any
) -> tuple[WorkerLanes, ...]:
    """Return the lanes of every living worker, as agents receive them: the workers beside the line
    first, then the line. ``named`` are the fields that all have in common.

    All values are our own, so records are made without validation: 40,000 lanes of 10,000 workers
    in a second instead of ten.
    """
    line, cost = draft.line, draft.cost
    origin = Source(kind="origin", url=source_url)
    sources = [worker.source for worker in line.workers]
    by_reader: list[list[tuple[Transfer, float]]] = [[] for _ in line.workers]
    slowest = [float("inf")] * len(line.workers)
    for transfer, rate, share in zip(draft.transfers, cost.rates, cost.shares, strict=True):
        by_reader[transfer.reader].append((transfer, rate))
        if share > 0:
            slowest[transfer.reader] = min(slowest[transfer.reader], share)

    def lane(transfer: Transfer, rate: float) -> Lane:
        direct = draft.topology is Topology.DIRECT
        places = spares.holders_for(transfer.reader)[:MAX_SPARES] if direct else spares.of(transfer)
        others = tuple([sources[place] for place in places])
        from_origin = transfer.source == ORIGIN
        return Lane.model_construct(
            source=origin if from_origin else sources[transfer.source],
            spares=others if from_origin else (*others, origin),
            first_chunk=transfer.first,
            last_chunk=transfer.last,
            expected_bytes_s=rate,
        )

    def part(place: int) -> WorkerLanes:
        worker = line.workers[place]
        counted = SLOW_LINK if worker.standing is Standing.TAIL else 1.0
        transfers = sorted(by_reader[place], key=lambda each: each[0].first)
        return WorkerLanes.model_construct(
            **named,
            worker_id=worker.worker_id,
            lanes=tuple([lane(transfer, rate * counted) for transfer, rate in transfers]),
            origin_budget_bytes=shares.get(place, 0),
            piece_deadline_s=deadline_s(draft.piece_bytes / slowest[place]),
        )

    living = (place for place in range(line.length) if not line.is_gone(place))
    return tuple([part(place) for place in (*line.beside, *living)])


def topology_of(topology: Topology | str) -> Topology:
    """Return the topology of that name; raises InvalidPlan for an unknown name."""
    try:
        return Topology(topology)
    except ValueError as error:
        wanted = "one of " + ", ".join(Topology)
        raise InvalidPlan("no such topology", got=topology, wanted=wanted) from error


def check_workers(workers: Sequence[PlanWorker]) -> None:
    """Raise InvalidPlan for no living workers, one named twice, or a link without speed."""
    if not any(worker.standing is not Standing.GONE for worker in workers):
        raise InvalidPlan(
            "no workers to plan for",
            got="none",
            wanted="at least one living worker",
            do="Start agents, or name other targets.",
        )
    seen: set[str] = set()
    for worker in workers:
        if worker.worker_id in seen:
            raise InvalidPlan("worker is named twice", got=worker.worker_id, wanted="each once")
        seen.add(worker.worker_id)
        if not worker.link_mbit > 0:
            raise InvalidPlan(
                "worker's link has no speed", got=worker.link_mbit, where=worker.worker_id
            )
