"""What a topology would take: closed formulas, before a byte moves.

B is goodput (on paced loopback agents the link rate itself; on shaped hosts rate x 1448 / 1514).
chain = S/B + (N-1) p/B; binary tree = 2 S/B + ceil(log2 N) 2p/B; direct = N S / B_external.
Nobody can be faster than S/B. Knows numbers only, no workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import InvalidPlan
from paceline.wire.plan import Topology

MIB = 1024 * 1024
SLACK_SHARE = 0.02  # the origin fuse: 2 % beyond the model,
SLACK_BYTES = 64 * MIB  # or this much for a small one


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds and bytes; ``depth`` is the longest path from the origin, in hops."""

    seconds: float
    bound_seconds: float
    cross_rack_bytes: int
    origin_bytes: int
    depth: int


def predict(
    topology: Topology | str,
    *,
    total_bytes: int,
    workers: int,
    piece_bytes: int,
    link_mbit: float,
    external_mbit: float | None = None,
    racks: int = 1,
    depth: int | None = None,
) -> Prediction:
    """Return what ``topology`` takes for ``workers`` equal workers that hold nothing yet.

    ``external_mbit`` (the origin's link) defaults to ``link_mbit``; ``depth`` to the topology's
    own. ``cross_rack_bytes`` is the least possible; a plan states its own.
    """
    topology = Topology(topology)
    if topology not in (Topology.DIRECT, Topology.TREE):
        topology = Topology.CHAIN
    if workers < 1 or total_bytes < 0 or piece_bytes < 1 or link_mbit <= 0:
        raise InvalidPlan(
            "nothing to predict",
            got=f"{workers} workers, {total_bytes} bytes, {link_mbit} Mbit/s",
            wanted="at least one worker and a link",
        )
    link = link_mbit * 1e6 / 8
    external = (external_mbit or link_mbit) * 1e6 / 8
    bound = total_bytes / min(link, external)
    crossings = min(racks, workers) - 1
    if topology is Topology.DIRECT:
        origin = workers * total_bytes
        seconds = max(bound, origin / external)
        return Prediction(seconds, bound, 0, origin, 1)
    if topology is Topology.CHAIN:
        depth = depth or workers
        fanout = 1
    else:
        depth = depth or (workers - 1).bit_length() + 1
        fanout = min(2, max(1, workers - 1))
    piece = min(piece_bytes, total_bytes)
    seconds = max(bound, fanout * total_bytes / link) + (depth - 1) * fanout * piece / link
    return Prediction(seconds, bound, crossings * total_bytes, total_bytes, depth)


def origin_cap_bytes(total_bytes: int) -> int:
    """Return the origin fuse: the most that one deployment may read from the source, all told."""
    return max(int(total_bytes * (1 + SLACK_SHARE)), total_bytes + SLACK_BYTES)


def origin_shares(total_bytes: int, spent_bytes: int, workers: int) -> list[int]:
    """Return each worker's share of what the fuse still allows, in the order of the line.

    The first one reads the origin and gets nearly all; half of the slack is spread over the
    others, for a piece that only the origin still has while the coordinator is away.
    """
    cap = origin_cap_bytes(total_bytes)
    left = max(0, cap - spent_bytes)
    if workers < 2:
        return [left][:workers]
    share = min(left, cap - total_bytes) // 2 // (workers - 1)
    return [left - share * (workers - 1), *[share] * (workers - 1)]
