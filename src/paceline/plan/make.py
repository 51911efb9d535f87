"""``make_plan``: the lanes of one epoch, from the living workers and what they hold.

After a death the coordinator calls it again with the same workers in the same order, the dead one
marked as gone, and the next epoch; there is no other recovery code. Complete workers feed the
others and have no lanes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import InvalidPlan
from paceline.manifest import Manifest
from paceline.plan.closing import close_up
from paceline.plan.cost import Network, PlanCost, deadline_s, origin_cap_bytes, origin_shares, price
from paceline.plan.flows import Flow, FlowBuilder, feed_leaves
from paceline.plan.inputs import ModelLayout, PlanWorker, Standing, Stripe
from paceline.plan.spares import MOST_SPARES, Spares
from paceline.plan.trees import NOWHERE, ORIGIN, SLOW_LINK, Trees, WorkerLine, build_trees, line_up
from paceline.schemas.plan import Lane, Plan, Source, Topology, WorkerLanes

RELAYED = (Topology.CHAIN, Topology.TREE_OF_CHAINS, Topology.MESH, Topology.TREE)  # ties: simplest


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """One topology worked out: its flows and their cost."""

    topology: Topology
    line: WorkerLine
    trees: Trees
    flows: list[Flow]
    price: PlanCost
    roots: list[int]  # by place in the line: bytes that it takes from the origin in the trees


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
    fanout: int = 2,
) -> Plan:
    """Return the plan that brings ``manifest`` to all ``workers``; pure and deterministic.

    ``order`` is ``next_order`` of the previous plan: every worker keeps its place, and where one
    worker is GONE only those it fed get another source. ``external_mbit`` is the origin's link
    (default: the slowest worker's own). ``origin_spent_bytes`` is what earlier epochs read from the
    origin: the whole deployment has one origin budget, and the shares of this plan are what it
    still allows. ``fanout`` is a tree's. Raises InvalidPlan for no workers, one named twice, or a
    link without speed.
    """
    topology = topology_of(topology)
    check_workers(workers)
    cargo = ModelLayout.of(manifest)
    line = line_up(workers, seed, order)
    network = Network(external_mbit, oversubscription)
    left = origin_cap_bytes(cargo.total) - origin_spent_bytes
    draft = draft_plan(topology, line, cargo, network, fanout=fanout, origin_left=left)
    pullers = [
        place
        for place in range(line.length)
        if not (line.is_gone(place) or line.workers[place].complete)
    ]
    if draft.topology is Topology.DIRECT:
        # Each worker reads the whole model from the origin, as requested.
        shares = dict.fromkeys(pullers, origin_cap_bytes(cargo.total))
    else:
        needs = [draft.roots[place] for place in pullers]
        given = origin_shares(cargo.total, origin_spent_bytes, needs)
        shares = dict(zip(pullers, given, strict=True))
    told = draft.price.prediction
    # Later epochs ignore holdings: every worker has some, and unchanged lanes need not be fetched
    # again.
    spares = Spares(line, draft.trees, returned=not order)
    writing = _Writing(draft, spares, manifest, deployment_id, epoch, source_url)
    return Plan.model_construct(
        plan_version=1,
        deployment_id=deployment_id,
        epoch=epoch,
        topology=draft.topology,
        manifest_digest=manifest.digest,
        seed=seed,
        workers=writing.parts(shares),
        predicted_seconds=told.seconds,
        bound_seconds=told.bound_seconds,
        cross_rack_bytes=told.cross_rack_bytes,
        origin_bytes=told.origin_bytes,
        depth=told.depth,
    )


def draft_plan(
    topology: Topology,
    line: WorkerLine,
    cargo: ModelLayout,
    network: Network,
    *,
    fanout: int = 2,
    origin_left: int | None = None,
) -> PlanDraft:
    """Return ``topology`` on ``line`` with its cost; for AUTO the relayed one with the least
    expected seconds.
    """
    if topology is Topology.AUTO:
        drafts = [
            draft_plan(each, line, cargo, network, fanout=fanout, origin_left=origin_left)
            for each in RELAYED
        ]
        return min(drafts, key=lambda draft: draft.price.prediction.expected_seconds)
    if topology is Topology.DIRECT:
        stripes = cargo.stripes(1)
        roots = [cargo.total] * line.length
        up = [
            ORIGIN if place < line.length and not line.is_gone(place) else NOWHERE
            for place in range(len(line.workers))
        ]
        trees = Trees([up], 1)
        flows = [
            Flow(place, ORIGIN, 0, stripes[0].first, stripes[0].last, size)
            for place, source in enumerate(up)
            if source == ORIGIN and not line.workers[place].complete
            for size in cargo.missing(line.workers[place], stripes)
        ]
    else:
        striped = topology in (Topology.TREE_OF_CHAINS, Topology.MESH)
        stripes = cargo.stripes(cargo.stripe_count(len(line.core)) if striped else 1)
        trees = build_trees(topology, line.workers, line.core, len(stripes), fanout)
        trees = close_up(trees, line.out)
        feed_leaves(line, trees)
        roots = _begun(line, cargo, trees, stripes)
        scarce = origin_left is not None and origin_left < sum(roots)
        from_peers = topology is Topology.MESH
        feeding = FlowBuilder(line, trees, cargo, stripes, scarce=scarce, from_peers=from_peers)
        flows = feeding.flows()
    return PlanDraft(
        topology, line, trees, flows, price(topology, line, flows, cargo, network), roots
    )


def _begun(
    line: WorkerLine, cargo: ModelLayout, trees: Trees, stripes: Sequence[Stripe]
) -> list[int]:
    """Return, by place in the line, the bytes it lacks of the stripes that it takes from the
    origin.
    """
    roots = [0] * line.length
    for number, up in enumerate(trees.up):
        for place in range(line.length):
            if up[place] == ORIGIN:
                roots[place] += cargo.missing(line.workers[place], stripes)[number]
    return roots


class _Writing:
    """Writes a draft as the records that agents receive. All values are our own, so records are
    made without validation: 40,000 lanes of 10,000 workers in a second instead of ten.
    """

    def __init__(
        self,
        draft: PlanDraft,
        spares: Spares,
        manifest: Manifest,
        deployment_id: str,
        epoch: int,
        source_url: str,
    ) -> None:
        self._draft = draft
        self._manifest = manifest
        self._deployment_id = deployment_id
        self._epoch = epoch
        self._origin = Source(kind="origin", url=source_url)
        self._sources = [worker.source for worker in draft.line.workers]
        self._direct = draft.topology is Topology.DIRECT
        self._spares = spares

    def parts(self, shares: Mapping[int, int]) -> tuple[WorkerLanes, ...]:
        """Return every living worker's lanes: the workers beside the line first, then the line."""
        line, price = self._draft.line, self._draft.price
        lanes: list[list[tuple[Flow, float]]] = [[] for _ in line.workers]
        slowest = [float("inf")] * len(line.workers)
        for flow, rate, share in zip(self._draft.flows, price.rates, price.shares, strict=True):
            lanes[flow.reader].append((flow, rate))
            if share > 0:
                slowest[flow.reader] = min(slowest[flow.reader], share)
        parts = [self._part(place, [], 0, float("inf")) for place in line.beside]
        parts += [
            self._part(place, lanes[place], shares.get(place, 0), slowest[place])
            for place in range(line.length)
            if not line.is_gone(place)
        ]
        return tuple(parts)

    def _part(
        self, place: int, flows: list[tuple[Flow, float]], share: int, slowest: float
    ) -> WorkerLanes:
        worker = self._draft.line.workers[place]
        piece = min(self._manifest.piece_bytes, max(1, self._manifest.total_size))
        counted = SLOW_LINK if worker.standing is Standing.TAIL else 1.0
        return WorkerLanes.model_construct(
            deployment_id=self._deployment_id,
            epoch=self._epoch,
            manifest_digest=self._manifest.digest,
            worker_id=worker.worker_id,
            lanes=tuple(
                self._lane(flow, rate * counted)
                for flow, rate in sorted(flows, key=lambda each: each[0].first)
            ),
            origin_budget_bytes=share,
            piece_deadline_s=deadline_s(piece / slowest),
        )

    def _lane(self, flow: Flow, rate: float) -> Lane:
        sources = self._sources
        if self._direct:
            spares = self._spares.holders_for(flow.reader)[:MOST_SPARES]
        else:
            spares = self._spares.of(flow)
        from_origin = flow.source == ORIGIN
        others = tuple([sources[place] for place in spares])
        return Lane.model_construct(
            source=self._origin if from_origin else sources[flow.source],
            spares=others if from_origin else (*others, self._origin),
            first_chunk=flow.first,
            last_chunk=flow.last,
            expected_bytes_s=rate,
        )


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
