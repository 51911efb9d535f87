"""The cost model: what a plan takes, from the loads on its links; for plans, tables and estimates.

seconds = the most loaded resource (each link in and out, the origin's, each rack's uplink in and
out, each disk) x the cost of sharing links + the longest path, one piece per hop without the
slowest hop, whose time the load covers. A chain of N equal workers takes S/B + (N-1) p/B (S model
bytes, p piece bytes). B is goodput (on paced loopback agents the link rate itself; on shaped hosts
rate x 1448 / 1514). S/B is the lower bound. Topologies are compared by these seconds + what the
expected deaths add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.plan.inputs import ModelLayout, rack_of
from paceline.plan.transfers import Transfer, leaf_link_share
from paceline.plan.trees import ORIGIN, WorkerLine
from paceline.schemas import Topology

MIB = 1024 * 1024
SLACK_SHARE = 0.02  # the origin budget: 2 % beyond the model,
SLACK_BYTES = 64 * MIB  # or this much for a small one

# Streams that share links take longer than their loads: each topology took so much longer than its
# own plan on 8 hosts at 50 Mbit/s with bursts of ten segments, in two quiet runs
# (benchmarks/link_bound.py): tree-of-chains 1.020 and 1.046, the mesh 1.048 and 1.050.
# A chain's streams share nothing.
SHARING_OVERHEAD = {Topology.TREE_OF_CHAINS: 0.035, Topology.MESH: 0.05}

# ``DEATH_SHARE`` is the fraction of workers assumed to die in a deployment (decision 2: one to five
# in a hundred). Each death costs every worker behind it RECONNECT_S, the time to replace a reset
# connection (measured on the 8 hosts above). In the fraction SILENT_DEATH_SHARE of the deaths the
# host disappears silently, which costs one piece deadline more.
DEATH_SHARE, SILENT_DEATH_SHARE = 0.01, 0.2
RECONNECT_S = 0.2
PIECE_TIMES = 20  # a source that is this many piece times late counts as lost,
LEAST_DEADLINE_S = 1.0  # but never sooner: a busy machine pauses for longer than a piece
DEPTH_LIMIT_SHARE = 0.01  # of the bound: a longer path limits the plan


@dataclass(frozen=True, slots=True)
class Network:
    """The shared resources. ``external_mbit`` None: the origin is as fast as one worker."""

    external_mbit: float | None = None
    oversubscription: float = 1.0  # a rack's links together / its uplink


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds and bytes; ``depth`` is the longest path from the origin, in hops.

    ``seconds`` is without failures; ``death_seconds`` is what deaths are expected to add for the
    last worker. ``limited_by`` is "link", "origin", "uplink", "disk" or "depth".
    """

    seconds: float
    bound_seconds: float
    cross_rack_bytes: int
    origin_bytes: int
    depth: int
    limited_by: str = "link"
    death_seconds: float = 0.0

    @property
    def expected_seconds(self) -> float:
        """Return the figure by which topologies are compared."""
        return self.seconds + self.death_seconds


@dataclass(frozen=True, slots=True)
class PlanCost:
    """The cost of all transfers together, and the rates that each can expect, in their order.

    ``rates`` divides each link by the sizes of its transfers, so that all end together: a lane of
    one chunk beside one of a hundred is not expected to carry half. ``shares`` divides it evenly.
    """

    prediction: Prediction
    rates: list[float]  # bytes/s
    shares: list[float]


def plan_cost(
    topology: Topology,
    line: WorkerLine,
    transfers: Sequence[Transfer],
    layout: ModelLayout,
    network: Network,
) -> PlanCost:
    """Return the cost of ``transfers`` (each worker's after its source's, in every stripe)."""
    workers = line.workers
    speed = [worker.link_mbit * 1e6 / 8 for worker in workers]
    external = _external(line, network)
    bound = layout.total / min(external, min(speed[: line.length], default=external))
    loads = _Loads.of(line, transfers)
    origin = loads.origin_bytes
    by_line, by_leaf = _link_seconds(line, loads, speed)
    crossing, by_uplink = _uplinks(line, transfers, network)
    shared = max(by_line, origin / external, by_uplink)
    even = by_line / shared if shared else 1.0  # other links idle for the most loaded one
    hop_rates = [_hop_rate(transfer, speed, loads.sources, loads.readers) for transfer in transfers]
    from_origin = external / max(1, loads.origin_readers)
    shares = [
        even * rate if transfer.source >= 0 else min(even * rate, from_origin)
        for transfer, rate in zip(transfers, hop_rates, strict=True)
    ]
    rates = [
        _part_of_links(
            transfer, share, even, speed, loads.received, loads.sent, external / max(1, origin)
        )
        for transfer, share in zip(transfers, shares, strict=True)
    ]
    depth, path, dying = _longest_path(transfers, hop_rates, from_origin, layout)
    by = {
        "link": max(by_line, by_leaf),
        "origin": origin / external,
        "uplink": by_uplink,
        "disk": max(
            (
                loads.received[place] / (worker.disk_mbit * 1e6 / 8)
                for place, worker in enumerate(workers)
                if worker.disk_mbit
            ),
            default=0.0,
        ),
    }
    limit = max(by, key=lambda name: by[name])
    seconds = by[limit]
    if any(transfer.stripe for transfer in transfers):
        seconds *= 1 + SHARING_OVERHEAD.get(topology, 0.0)
    if path > max(DEPTH_LIMIT_SHARE * bound, seconds - bound):
        limit = "depth"
    prediction = Prediction(seconds + path, bound, crossing, origin, depth, limit, dying)
    return PlanCost(prediction, rates, shares)


@dataclass(frozen=True, slots=True)
class _Loads:
    """Bytes and transfers of each worker, by its place in the line, and of the origin."""

    received: list[int]  # bytes
    sent: list[int]  # bytes,
    sent_to_leaves: list[int]  # and the part of them that goes to leaves
    sources: list[int]  # transfers into the worker
    readers: list[int]  # transfers out of it
    origin_bytes: int
    origin_readers: int

    @classmethod
    def of(cls, line: WorkerLine, transfers: Iterable[Transfer]) -> _Loads:
        leaves, count = set(line.leaves), len(line.workers)
        received, sent, to_leaves, sources, readers = ([0] * count for _ in range(5))
        origin_bytes = origin_readers = 0
        for transfer in transfers:
            counts = transfer.size > 0
            received[transfer.reader] += transfer.size
            sources[transfer.reader] += counts
            if transfer.source >= 0:
                sent[transfer.source] += transfer.size
                readers[transfer.source] += counts
                if transfer.reader in leaves:
                    to_leaves[transfer.source] += transfer.size
            else:
                origin_bytes += transfer.size
                origin_readers += counts
        return cls(received, sent, to_leaves, sources, readers, origin_bytes, origin_readers)


def _link_seconds(line: WorkerLine, loads: _Loads, speed: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of the most loaded link inside the line, and of one that feeds leaves."""
    leaves = set(line.leaves)
    by_line = by_leaf = 0.0
    for place, rate in enumerate(speed):
        sent_s = loads.sent[place] / rate
        if place in leaves:
            share = leaf_link_share(line, line.workers[place]) * line.link_mbit * 1e6 / 8
            by_leaf = max(by_leaf, loads.received[place] / share, sent_s)
        else:
            inside = loads.sent[place] - loads.sent_to_leaves[place]
            by_line = max(by_line, loads.received[place] / rate, inside / rate)
            by_leaf = max(by_leaf, sent_s)
    return by_line, by_leaf


def _external(line: WorkerLine, network: Network) -> float:
    if network.external_mbit is not None:
        return network.external_mbit * 1e6 / 8
    links = [line.workers[place].link_mbit for place in line.core]
    return min(links or [worker.link_mbit for worker in line.workers]) * 1e6 / 8


def _uplinks(
    line: WorkerLine, transfers: Iterable[Transfer], network: Network
) -> tuple[int, float]:
    """Return how many bytes cross between racks, and the seconds of the busiest uplink."""
    racks = [rack_of(worker) for worker in line.workers]
    links: dict[tuple[str, str], float] = {}
    for rack, worker in zip(racks, line.workers, strict=True):
        links[rack] = links.get(rack, 0.0) + worker.link_mbit * 1e6 / 8
    into: Counter[tuple[str, str]] = Counter()
    out: Counter[tuple[str, str]] = Counter()
    crossing = 0
    for transfer in transfers:
        rack = racks[transfer.reader]
        if transfer.source == ORIGIN:
            into[rack] += transfer.size
        elif racks[transfer.source] != rack:
            into[rack] += transfer.size
            out[racks[transfer.source]] += transfer.size
            crossing += transfer.size
    most = max(
        (
            load / (links[rack] / network.oversubscription)
            for loads in (into, out)
            for rack, load in loads.items()
            if rack[1]  # a rack without a name has no known uplink
        ),
        default=0.0,
    )
    return crossing, most


def _hop_rate(
    transfer: Transfer, speed: Sequence[float], sources: Sequence[int], readers: Sequence[int]
) -> float:
    """Return an even share, for this transfer, of the two links it uses, in bytes/s."""
    rate = speed[transfer.reader] / max(1, sources[transfer.reader])
    if transfer.source >= 0:
        rate = min(rate, speed[transfer.source] / max(1, readers[transfer.source]))
    return rate


def _part_of_links(
    transfer: Transfer,
    share: float,
    even: float,
    speed: Sequence[float],
    taken: Sequence[int],
    sent: Sequence[int],
    per_origin_byte: float,
) -> float:
    """Return a transfer's share of its links by size, in bytes/s; ``share`` where empty."""
    if not transfer.size:
        return share
    rate = even * speed[transfer.reader] * transfer.size / taken[transfer.reader]
    if transfer.source >= 0:
        return min(rate, even * speed[transfer.source] * transfer.size / sent[transfer.source])
    return min(rate, per_origin_byte * transfer.size)


def _longest_path(
    transfers: Iterable[Transfer], rates: Sequence[float], from_origin: float, layout: ModelLayout
) -> tuple[int, float, float]:
    """Return the longest path in hops, the seconds of a piece on it, and the expected cost of
    deaths on it.

    Without the slowest hop: all bytes pass it, and it is counted already. Deaths add up: every
    worker behind waits for each of them.
    """
    piece = min(layout.piece_bytes, layout.total)
    paths: dict[tuple[int, int], tuple[int, float, float]] = {}  # hops, seconds, slowest hop
    deepest, longest, dying = 1, 0.0, 0.0
    for transfer, rate in zip(transfers, rates, strict=True):
        hop_s = piece / (rate if transfer.source >= 0 else min(rate, from_origin))
        hops, total_s, slowest_s = 1, hop_s, hop_s
        above = None if transfer.from_holder else paths.get((transfer.stripe, transfer.source))
        if above is not None:
            hops, total_s, slowest_s = above[0] + 1, above[1] + hop_s, max(above[2], hop_s)
        known = paths.get((transfer.stripe, transfer.reader))
        if known is None or total_s - slowest_s > known[1] - known[2]:
            paths[transfer.stripe, transfer.reader] = hops, total_s, slowest_s
        if transfer.size:
            deepest, longest = max(deepest, hops), max(longest, total_s - slowest_s)
            dying = max(dying, (hops - 1) * death_cost_s(slowest_s))
    return deepest, longest, dying


def death_cost_s(piece_s: float) -> float:
    """Return what one death above a worker is expected to cost it, at ``piece_s`` a hop."""
    return DEATH_SHARE * (RECONNECT_S + SILENT_DEATH_SHARE * deadline_s(piece_s))


def deadline_s(piece_s: float) -> float:
    """Return the silence after which a source counts as lost, at ``piece_s`` a piece."""
    return max(LEAST_DEADLINE_S, PIECE_TIMES * piece_s)


def origin_cap_bytes(total_bytes: int) -> int:
    """Return the origin budget: the most that one deployment may read from the source in total."""
    return max(int(total_bytes * (1 + SLACK_SHARE)), total_bytes + SLACK_BYTES)


def origin_shares(total_bytes: int, spent_bytes: int, needs: Sequence[int]) -> list[int]:
    """Return each worker's share of what the origin budget still allows; the sum never exceeds it.

    ``needs`` is what each worker takes from the origin: those workers get nearly all, in
    proportion. A quarter of the slack is spread over the others, for a piece that only the origin
    still has while the coordinator is away. Half was too much: with one transfer in a hundred
    corrupt a head requests 1 % more than the model, which was then its whole share, and the last
    pieces of every second fleet waited for another plan.
    """
    if not needs:
        return []
    cap = origin_cap_bytes(total_bytes)
    left = max(0, cap - spent_bytes)
    wanted = sum(needs)
    if not wanted:
        return [left // len(needs)] * len(needs)
    others = sum(1 for need in needs if not need)
    share = min(left, cap - total_bytes) // 4 // others if others else 0
    rest = left - share * others
    return [rest * need // wanted if need else share for need in needs]
