"""``make_plan``: the lanes of one epoch, from who lives now and what they hold.

After a death the coordinator calls it again with the survivors and the next epoch; there is no
other recovery code. Who is complete feeds the others and has no lanes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import InvalidPlan
from paceline.manifest import Manifest
from paceline.plan.cost import Prediction, origin_cap_bytes, origin_shares, predict
from paceline.plan.feeds import MOST_SPARES, Feeds, by_nearness, choose_feeds
from paceline.plan.shapes import line_order, parents_of
from paceline.plan.worker import PlanWorker, rack_of
from paceline.wire.plan import Lane, Plan, Source, Topology, WorkerLanes

PIECE_TIMES = 20  # a source this many piece times behind is lost,
LEAST_DEADLINE_S = 1.0  # but never sooner: a busy machine pauses for longer than a piece


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
    origin_spent_bytes: int = 0,
    order: Sequence[str] = (),
) -> Plan:
    """Return the plan that brings ``manifest`` to all ``workers``; pure and deterministic.

    ``external_mbit`` is the origin's link (default: the slowest worker's own).
    ``origin_spent_bytes`` is what earlier epochs read from the origin: the fuse is one for the
    whole deployment, and the shares of this plan are what it still allows.
    Raises InvalidPlan for no workers, one named twice, or a link without speed.
    """
    topology = _topology(topology)
    if topology not in (Topology.DIRECT, Topology.TREE):
        topology = Topology.CHAIN
    _check(workers)
    ordered = line_order(workers, seed)
    holders = [worker for worker in ordered if worker.complete]
    line = [worker for worker in ordered if not worker.complete]
    origin = Source(kind="origin", url=source_url)
    if topology is Topology.DIRECT:
        feeds = Feeds(tuple(line), tuple(holders), (None,) * len(line))
        spares = [by_nearness(worker, holders)[:MOST_SPARES] for worker in line]
        shares = [origin_cap_bytes(manifest.total_size)] * len(line)  # each reads it all: asked for
    else:
        fanout = 1 if topology is Topology.CHAIN else 2
        feeds = choose_feeds(line, parents_of(topology, line), holders, fanout)
        spares = feeds.spares()
        shares = origin_shares(manifest.total_size, origin_spent_bytes, len(line))
    links = [worker.link_mbit for worker in line] or [worker.link_mbit for worker in workers]
    deadline_s = _piece_deadline_s(manifest.piece_bytes, min(links))

    def lanes_of(worker: PlanWorker, lanes: tuple[Lane, ...], share: int) -> WorkerLanes:
        return WorkerLanes(
            deployment_id=deployment_id,
            epoch=epoch,
            manifest_digest=manifest.digest,
            worker_id=worker.worker_id,
            lanes=lanes,
            origin_budget_bytes=share,
            piece_deadline_s=deadline_s,
        )

    parts = [lanes_of(holder, (), 0) for holder in holders]
    for worker, source, others, share in zip(line, feeds.upstream, spares, shares, strict=True):
        lane = Lane(
            source=source.source if source else origin,
            spares=(*(each.source for each in others), *((origin,) if source else ())),
            first_chunk=0,
            last_chunk=len(manifest.chunks) - 1,
        )
        parts.append(lanes_of(worker, (lane,), share))
    cost = _cost(topology, feeds, manifest, min(links), external_mbit)
    return Plan(
        deployment_id=deployment_id,
        epoch=epoch,
        topology=topology,
        manifest_digest=manifest.digest,
        seed=seed,
        workers=tuple(parts),
        predicted_seconds=cost.seconds,
        bound_seconds=cost.bound_seconds,
        cross_rack_bytes=cost.cross_rack_bytes,
        origin_bytes=cost.origin_bytes,
        depth=cost.depth,
    )


def _cost(
    topology: Topology,
    feeds: Feeds,
    manifest: Manifest,
    link_mbit: float,
    external_mbit: float | None,
) -> Prediction:
    """Return what is still to be moved, by the same formulas as ``predict``.

    The bound stays that of the whole model, so that a deployment's epochs compare.
    """
    whole = predict(
        topology,
        total_bytes=manifest.total_size,
        workers=max(1, len(feeds.line)),
        piece_bytes=manifest.piece_bytes,
        link_mbit=link_mbit,
        external_mbit=external_mbit,
    )
    missing = [_missing(worker, manifest) for worker in feeds.line]
    if not missing:
        return Prediction(0.0, whole.bound_seconds, 0, 0, 1)
    from_peers = list(zip(feeds.line, feeds.upstream, missing, strict=True))
    origin = sum(size for _, source, size in from_peers if source is None)
    link = link_mbit * 1e6 / 8
    external = (external_mbit or link_mbit) * 1e6 / 8
    if topology is Topology.DIRECT:
        seconds = max(max(missing) / link, origin / external)
    else:
        piece = min(manifest.piece_bytes, manifest.total_size)
        seconds = (
            max(
                origin / external,
                feeds.fanout * max(missing) / link,
            )
            + (feeds.depth - 1) * feeds.fanout * piece / link
        )
    crossing = sum(
        size for worker, source, size in from_peers if source and rack_of(source) != rack_of(worker)
    )
    return Prediction(seconds, whole.bound_seconds, crossing, origin, feeds.depth)


def _missing(worker: PlanWorker, manifest: Manifest) -> int:
    held = min(worker.held_pieces, manifest.piece_count)
    return manifest.total_size - manifest.total_size * held // manifest.piece_count


def _piece_deadline_s(piece_bytes: int, link_mbit: float) -> float:
    return max(LEAST_DEADLINE_S, PIECE_TIMES * piece_bytes / (link_mbit * 1e6 / 8))


def _topology(topology: Topology | str) -> Topology:
    try:
        return Topology(topology)
    except ValueError as error:
        wanted = "one of " + ", ".join(Topology)
        raise InvalidPlan("no such topology", got=topology, wanted=wanted) from error


def _check(workers: Sequence[PlanWorker]) -> None:
    if not workers:
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
