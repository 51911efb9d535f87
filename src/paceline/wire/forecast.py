"""Forecasts, before a byte moves: what `plan` and `simulate` print with --json."""

from __future__ import annotations

from pydantic import Field

from paceline.wire.base import Record


class PlanRow(Record):
    """What one topology would take. Reference rows are schemes that Paceline does not use."""

    topology: str
    reference: bool = False
    predicted_seconds: float = Field(ge=0)
    ratio: float = Field(ge=0)  # predicted / bound
    expected_seconds: float = Field(default=0.0, ge=0)  # with the deaths that `auto` counts on
    cross_rack_bytes: int = Field(ge=0)
    origin_bytes: int = Field(ge=0)
    depth: int = Field(ge=1)  # longest path from the origin, in hops
    limited_by: str = "link"  # "link", "origin", "uplink", "disk", "depth"


class PlanTable(Record):
    """Every topology for one fleet and model; ``chosen`` is what `auto` takes."""

    size_bytes: int = Field(ge=0)
    workers: int = Field(ge=1)
    racks: int = Field(ge=1)
    link_mbit: float = Field(gt=0)
    external_mbit: float = Field(gt=0)
    oversubscription: float = Field(ge=1)
    piece_bytes: int = Field(ge=1)
    chunk_bytes: int = Field(ge=1)
    bound_seconds: float = Field(ge=0)
    rows: tuple[PlanRow, ...]
    chosen: str


class SimulationReport(Record):
    """What one simulated deployment took; the same seed gives the same report to the byte."""

    seconds: float = Field(ge=0)  # accepted plan to the last survivor's verified rename
    bound_seconds: float = Field(ge=0)
    predicted_seconds: float = Field(ge=0)  # the plan's own estimate, with nothing failing
    ratio: float = Field(ge=0)  # seconds / bound_seconds
    survivors_complete: bool
    workers: int = Field(ge=1)
    survivors: int = Field(ge=0)
    topology: str
    seed: int
    origin_bytes: int = Field(ge=0)
    origin_ratio: float = Field(ge=0)  # origin_bytes / size
    cross_rack_bytes: int = Field(ge=0)
    corrupt_pieces: int = Field(ge=0)
    killed: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()  # invariants that did not hold; empty when all is well
    events: int = Field(ge=0)  # how many events the sessions were told
