"""Predicts every topology for a described fleet, beside reference formulas of simpler schemes.

The reference rows are closed formulas of other schemes, never chosen (cost.py prices Paceline's
own, such as ``chain``): ``naive`` = N S / B_external, a pipelined
``binary-tree`` of whole chunks = 2 S/B + ceil(log2 N) 2 c/B, a ``chunk-chain`` = S/B + (N-1) c/B (N
workers, S model bytes, c chunk bytes, B link rate).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from paceline.errors import InvalidInput, InvalidPlan
from paceline.manifest import CHUNK_SECONDS, MIN_CHUNKS, choose_sizes
from paceline.plan.cost import DEPTH_LIMIT_SHARE, Network, Prediction
from paceline.plan.inputs import ModelLayout, PlanWorker
from paceline.plan.make import RELAYED, draft_plan, topology_of
from paceline.plan.trees import WorkerLine, build_line
from paceline.schemas import Labels, PlanRow, PlanTable, Topology


def predict(
    topology: Topology | str,
    *,
    total_bytes: int,
    workers: int,
    piece_bytes: int,
    link_mbit: float,
    external_mbit: float | None = None,
    racks: int = 1,
    chunk_bytes: int = 0,
    oversubscription: float = 1.0,
    disk_mbit: float | None = None,
) -> Prediction:
    """Return the predicted cost of ``topology`` for ``workers`` equal workers that hold nothing
    yet.

    ``external_mbit`` (the origin's link) defaults to ``link_mbit``; ``racks`` are as even as they
    can be; with ``chunk_bytes`` 0 chunks are so small that stripes are even.
    """
    topology = topology_of(topology)
    if workers < 1 or total_bytes < 0 or piece_bytes < 1 or link_mbit <= 0:
        raise InvalidPlan(
            "nothing to predict",
            got=f"{workers} workers, {total_bytes} bytes, {link_mbit} Mbit/s",
            wanted="at least one worker and a link",
        )
    line = even_line(workers, racks, link_mbit, disk_mbit)
    layout = ModelLayout.even(total_bytes, piece_bytes, chunk_bytes)
    network = Network(external_mbit, oversubscription)
    return draft_plan(topology, line, layout, network).cost.prediction


def even_line(
    workers: int, racks: int, link_mbit: float, disk_mbit: float | None = None
) -> WorkerLine:
    racks = max(1, min(racks, workers))
    labels = [Labels(rack=f"rack-{number}") for number in range(racks)]
    made = [
        PlanWorker(
            worker_id=f"node-{number}",
            labels=labels[number * racks // workers],
            address="",
            link_mbit=link_mbit,
            disk_mbit=disk_mbit,
        )
        for number in range(workers)
    ]
    return build_line(made, 0)


WORKERS_PER_RACK = 32  # workers a rack, where the number of racks is not given
MOST_WORKERS = 100_000
LEAST_MBIT, MOST_MBIT = 1e-3, 1e9  # of any link or disk


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetDescription:
    """A fleet of equal workers, and a model for it. Zero: derived from the rest."""

    size_bytes: int
    workers: int
    link_mbit: float
    external_mbit: float = 0.0
    racks: int = 0
    oversubscription: float = 1.0
    piece_bytes: int = 0
    chunk_bytes: int = 0
    disk_mbit: float = 0.0

    def checked(self) -> FleetDescription:
        """Return this fleet with every zero derived; raises InvalidInput for impossible values."""
        if self.size_bytes < 1:
            raise InvalidInput("nothing to move", got=f"{self.size_bytes} bytes", wanted="a size")
        if not 1 <= self.workers <= MOST_WORKERS:
            wanted = f"1 to {MOST_WORKERS}"
            raise InvalidInput("bad number of workers", got=self.workers, wanted=wanted)
        if self.racks < 0:
            raise InvalidInput("bad number of racks", got=self.racks, wanted="at least 1")
        if not 1 <= self.oversubscription <= 1000:
            raise InvalidInput(
                "bad oversubscription",
                got=self.oversubscription,
                wanted="a rack's links together / its uplink: 1 to 1000",
            )
        for what, mbit in (
            ("link", self.link_mbit),
            ("external link", self.external_mbit or self.link_mbit),
            ("disk", self.disk_mbit or LEAST_MBIT),
        ):
            if not LEAST_MBIT <= mbit <= MOST_MBIT:
                wanted = f"{LEAST_MBIT:g} to {MOST_MBIT:g} Mbit/s"
                raise InvalidInput(f"bad {what} speed", got=mbit, wanted=wanted)
        sizes = choose_sizes(
            self.size_bytes,
            self.link_mbit,
            piece_bytes=self.piece_bytes,
            chunk_bytes=self.chunk_bytes,
        )
        by_link = self.link_mbit * 1e6 / 8 * CHUNK_SECONDS
        chunk = max(sizes.piece_bytes, round(min(by_link, self.size_bytes / MIN_CHUNKS)))
        return replace(
            self,
            external_mbit=self.external_mbit or self.link_mbit,
            racks=min(self.racks or -(-self.workers // WORKERS_PER_RACK), self.workers),
            piece_bytes=sizes.piece_bytes,
            chunk_bytes=self.chunk_bytes or chunk,
        )

    @property
    def bound_seconds(self) -> float:
        """Return S/B: the lower bound of any topology."""
        return self.size_bytes * 8e-6 / min(self.link_mbit, self.external_mbit or self.link_mbit)

    def predict(self, topology: Topology) -> Prediction:
        """Return the predicted cost of ``topology`` for this fleet, where it is ``checked``."""
        options = asdict(self)
        disk_mbit, size_bytes = options.pop("disk_mbit") or None, options.pop("size_bytes")
        return predict(topology, total_bytes=size_bytes, disk_mbit=disk_mbit, **options)


def plan_table(fleet: FleetDescription, topology: Topology = Topology.AUTO) -> PlanTable:
    """Return the predictions of every topology for ``fleet``, and the choice: the cheapest, or
    ``topology``.

    Raises InvalidInput for impossible values in ``fleet``.
    """
    fleet = fleet.checked()
    asked = [] if topology in (Topology.AUTO, *RELAYED) else [topology]
    rows = [_row(fleet, each, fleet.predict(each)) for each in (*RELAYED, *asked)]
    chosen: str = topology
    if topology is Topology.AUTO:
        chosen = min(rows, key=lambda row: row.expected_seconds).topology
    described = asdict(fleet)
    del described["disk_mbit"]
    return PlanTable(
        **described,
        bound_seconds=fleet.bound_seconds,
        rows=(*rows, *_references(fleet)),
        chosen=chosen,
    )


def _row(
    fleet: FleetDescription, name: str, predicted: Prediction, *, reference: bool = False
) -> PlanRow:
    return PlanRow(
        topology=name,
        reference=reference,
        predicted_seconds=predicted.seconds,
        ratio=predicted.seconds / fleet.bound_seconds,
        expected_seconds=predicted.expected_seconds,
        cross_rack_bytes=predicted.cross_rack_bytes,
        origin_bytes=predicted.origin_bytes,
        depth=predicted.depth,
        limited_by=predicted.limited_by,
    )


def _references(fleet: FleetDescription) -> Iterator[PlanRow]:
    size, count, bound = fleet.size_bytes, fleet.workers, fleet.bound_seconds
    by_link = size * 8e-6 / fleet.link_mbit
    chunk_s = min(fleet.chunk_bytes, size) * 8e-6 / fleet.link_mbit
    # In an order that ignores racks, the next worker is in another rack with this probability.
    crossing = round(size * count * (1 - 1 / fleet.racks))
    from_origin = count * size * 8e-6 / fleet.external_mbit
    levels = (count - 1).bit_length()
    twice = 2 if count > 2 else 1
    schemes = (
        ("naive", max(bound, from_origin), 0.0, 0, count * size, 1),
        ("binary-tree", max(bound, twice * by_link), levels * twice * chunk_s, crossing, size,
         levels + 1),
        ("chunk-chain", bound, (count - 1) * chunk_s, crossing, size, count),
    )  # fmt: skip
    for name, flow_s, path_s, crossed, origin, depth in schemes:
        limit = "origin" if flow_s == from_origin > by_link else "link"
        if path_s > max(DEPTH_LIMIT_SHARE * bound, flow_s - bound):
            limit = "depth"
        predicted = Prediction(flow_s + path_s, bound, crossed, origin, depth, limit)
        yield _row(fleet, name, predicted, reference=True)
