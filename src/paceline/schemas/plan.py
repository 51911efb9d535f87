"""Distribution plans: each worker has lanes; a lane reads a range of chunks from one source.

The relay executes lanes and does not depend on topologies; planners in ``paceline.plan`` differ
only in the lanes they create. A failed, slow, new or leaving worker causes a new plan with a higher
epoch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from paceline.schemas.base import Name, Record, Sha256, Text


class Topology(StrEnum):
    """Topologies of a plan; ``auto`` requests the cheapest and does not occur in a plan."""

    DIRECT = "direct"
    CHAIN = "chain"
    TREE = "tree"
    TREE_OF_CHAINS = "tree-of-chains"
    MESH = "mesh"
    AUTO = "auto"


LABEL_KEY = r"^[A-Za-z][A-Za-z0-9._/-]{0,62}$"
LABEL_VALUE = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"
MOST_LABELS = 32
PLACES = ("host", "rack", "zone")


NodeLabels = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=LABEL_KEY)],
        Annotated[str, StringConstraints(pattern=LABEL_VALUE)],
    ],
    Field(max_length=MOST_LABELS),
]


class Labels(Record):
    """Labels of a worker: its place, by which planners avoid traffic between racks, and others
    (``pool=a100``), by which selectors choose.
    """

    # ranks on the same one are close; "": the worker itself
    host: Text = Field(default="", max_length=255)
    rack: Text = Field(default="", max_length=255)
    zone: Text = Field(default="", max_length=255)
    # of your own, for selectors: { pool = "a100" }
    others: NodeLabels = {}

    @property
    def named(self) -> dict[str, str]:
        """Return every label that is set, by key."""
        places = {key: getattr(self, key) for key in PLACES}
        return {key: value for key, value in (self.others | places).items() if value}


class Source(Record):
    """A source of pieces: another worker, or the origin (S3 or a path)."""

    kind: Literal["worker", "origin"]  # which of the two
    worker_id: Name | None = None  # kind == "worker"
    address: Text = Field(default="", max_length=300)  # "host:port" of the worker's peer port
    url: str = Field(default="", max_length=2048)  # kind == "origin": s3://bucket/prefix or a path

    @property
    def key(self) -> str:
        """Return the identifier of this source within one plan."""
        return self.worker_id or f"origin:{self.url}"


class Lane(Record):
    """Read chunks ``[first_chunk, last_chunk]`` from ``source``; if it fails, from ``spares``."""

    source: Source  # where to read first
    spares: tuple[Source, ...] = ()  # in order of preference; the origin, if any, is last
    first_chunk: int = Field(ge=0)  # inclusive
    last_chunk: int = Field(ge=0)  # inclusive
    expected_bytes_s: float = Field(default=0.0, ge=0)  # the plan's estimate; 0: unknown


class WorkerLanes(Record):
    """One worker's part of a plan; agents fetch it when a heartbeat answer has a new epoch."""

    deployment_id: str
    epoch: int = Field(ge=1)
    manifest_digest: Sha256
    worker_id: Name
    lanes: tuple[Lane, ...]  # what it reads, and from where
    origin_budget_bytes: int = Field(ge=0)  # this worker's share of the origin budget, beyond
    # the bytes its process had reported when it was granted; None: beyond those it has read when
    # it receives these lanes
    origin_counted_bytes: int | None = Field(default=None, ge=0)
    origin_tell_bytes: int = Field(default=0, ge=0)  # so many are reported at once; 0: with beats
    piece_deadline_s: float = Field(gt=0)  # a source without a piece for longer is lost

    @property
    def origin_lanes(self) -> tuple[Lane, ...]:
        """Return the lanes whose source is the origin; a worker with any is a seed."""
        return tuple(lane for lane in self.lanes if lane.source.kind == "origin")


class Plan(Record):
    """The whole fleet's lanes for one deployment and epoch, in the order of the line."""

    plan_version: Literal[1] = 1  # of this format
    deployment_id: str
    epoch: int = Field(ge=1)
    topology: Topology
    manifest_digest: Sha256
    seed: int = 0
    workers: tuple[WorkerLanes, ...]  # in the order of the line
    predicted_seconds: float = Field(ge=0)  # by the cost model
    bound_seconds: float = Field(ge=0)  # lower bound: size / link
    cross_rack_bytes: int = Field(ge=0)  # that cross a rack's uplink
    origin_bytes: int = Field(ge=0)  # that are read from the origin
    depth: int = Field(ge=1)  # longest path from the origin, in hops

    def lanes_of(self, worker_id: str) -> WorkerLanes | None:
        """Return the lanes of ``worker_id``, or None if it has no part in the plan."""
        return next((each for each in self.workers if each.worker_id == worker_id), None)
