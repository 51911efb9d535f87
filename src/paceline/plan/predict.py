"""What a topology would take for a fleet that is only described: the same cost, no plan."""

from __future__ import annotations

from paceline.errors import InvalidPlan
from paceline.plan.cargo import Cargo
from paceline.plan.cost import Network, Prediction
from paceline.plan.line import Line, line_up
from paceline.plan.make import draft_plan, topology_of
from paceline.plan.worker import PlanWorker
from paceline.wire.plan import Labels, Topology


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
    fanout: int = 2,
) -> Prediction:
    """Return what ``topology`` takes for ``workers`` equal workers that hold nothing yet.

    ``external_mbit`` (the origin's link) defaults to ``link_mbit``; ``racks`` are as even as they
    can be; ``chunk_bytes`` 0 is so fine that stripes come out even.
    """
    topology = topology_of(topology)
    if workers < 1 or total_bytes < 0 or piece_bytes < 1 or link_mbit <= 0:
        raise InvalidPlan(
            "nothing to predict",
            got=f"{workers} workers, {total_bytes} bytes, {link_mbit} Mbit/s",
            wanted="at least one worker and a link",
        )
    line = even_line(workers, racks, link_mbit, disk_mbit)
    cargo = Cargo.even(total_bytes, piece_bytes, chunk_bytes)
    network = Network(external_mbit, oversubscription)
    return draft_plan(topology, line, cargo, network, fanout=fanout).price.prediction


def even_line(workers: int, racks: int, link_mbit: float, disk_mbit: float | None = None) -> Line:
    """Return a line of equal workers in even racks."""
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
    return line_up(made, 0)
