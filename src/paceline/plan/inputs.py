"""The inputs of a planner: workers with their standing, the model's chunk sizes, and stripes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise

from paceline.manifest import Manifest
from paceline.schemas import Labels, Source


class Standing(StrEnum):
    """The role that a plan gives to a worker."""

    LINE = "line"  # feeds others according to its place
    TAIL = "tail"  # slow, or back with missing pieces: it is fed, and no place depends on it
    QUARANTINED = "quarantined"  # sends corrupt bytes: it is fed, and is never a source
    GONE = "gone"  # dead: its place stays, so that the others keep theirs


@dataclass(frozen=True, slots=True)
class PlanWorker:
    """One target: its location, its link rate, and what it holds already."""

    worker_id: str
    labels: Labels
    address: str  # "host:port" of its peer port
    link_mbit: float
    complete: bool = False  # holds and has published the whole version
    held_pieces: int = 0
    held_chunks: frozenset[int] = frozenset()
    standing: Standing = Standing.LINE
    disk_mbit: float | None = None  # write rate of its disk; None: never the bound

    @property
    def source(self) -> Source:
        """Return this worker as a source of pieces."""
        return Source(kind="worker", worker_id=self.worker_id, address=self.address)


def rack_of(worker: PlanWorker) -> tuple[str, str]:
    """Return the key of the worker's rack; racks of different zones differ."""
    return (worker.labels.zone, worker.labels.rack)


# The model as planners see it: sizes of chunks, stripes of them, and the bytes a worker lacks.
#
# A stripe is a run of chunks that travels along a tree of its own. No digests and no files.

# Four stripes: a worker has at most four sources and four readers, and trees of 10,000 workers are
# seven deep; more stripes make the trees hardly shallower, and each stream slower.
STRIPES = 4
# The excess of the longest stripe over the mean is what a link sends too much. 501 chunks in four
# stripes are 0.6 % uneven, in three even; below this limit, more stripes are better than evener
# ones.
EVEN_ENOUGH = 0.002


@dataclass(frozen=True, slots=True)
class Stripe:
    """Chunks ``first`` to ``last``, both inclusive, and their bytes."""

    first: int
    last: int
    size: int


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """One model version: ``sizes`` are the bytes of its chunks, in order."""

    sizes: tuple[int, ...]
    piece_bytes: int
    pieces: int
    total: int = field(init=False)
    ends: tuple[int, ...] = field(init=False)  # ends[n]: the bytes before chunk n

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", (0, *accumulate(self.sizes)))
        object.__setattr__(self, "total", self.ends[-1])

    @classmethod
    def of(cls, manifest: Manifest) -> ModelLayout:
        """Return the chunk sizes of ``manifest``."""
        sizes = tuple(chunk.size for chunk in manifest.chunks)
        return cls(sizes, manifest.piece_bytes, manifest.piece_count)

    @classmethod
    def even(cls, total_bytes: int, piece_bytes: int, chunk_bytes: int) -> ModelLayout:
        """Return a model that is not published yet: chunks of one size, the last one shorter.

        With ``chunk_bytes`` 0 the chunks are so small that stripes are even.
        """
        chunk = chunk_bytes or max(1, total_bytes // (64 * STRIPES))
        sizes = [chunk] * (total_bytes // chunk)
        if rest := total_bytes - sum(sizes):
            sizes.append(rest)
        return cls(tuple(sizes or [0]), piece_bytes, -(-total_bytes // piece_bytes))

    def size_of(self, first: int, last: int) -> int:
        """Return the bytes of chunks ``first`` to ``last``, both inclusive."""
        return self.ends[last + 1] - self.ends[first]

    def stripes(self, count: int) -> list[Stripe]:
        """Return the model as ``count`` runs of chunks, as even in bytes as chunks allow."""
        edges = [0]
        for number in range(1, count):
            wanted = self.total * number / count
            least, most = edges[-1] + 1, len(self.sizes) - (count - number)
            edge = least
            while edge < most and abs(self.ends[edge + 1] - wanted) <= abs(
                self.ends[edge] - wanted
            ):
                edge += 1
            edges.append(edge)
        edges.append(len(self.sizes))
        return [
            Stripe(first, stop - 1, self.size_of(first, stop - 1))
            for first, stop in pairwise(edges)
        ]

    def stripe_count(self, workers: int) -> int:
        """Return how many stripes to use for so many workers: four, or fewer where chunks or
        workers are few or where fewer stripes are more even.
        """
        most = min(STRIPES, workers, len(self.sizes))
        if most < 2 or not self.total:
            return 1
        uneven = {
            count: max(stripe.size for stripe in self.stripes(count)) * count / self.total
            for count in range(2, most + 1)
        }
        least = min(uneven.values())
        return max(count for count in uneven if uneven[count] <= least + EVEN_ENOUGH)

    def missing(self, worker: PlanWorker, stripes: Sequence[Stripe]) -> list[int]:
        """Return how many bytes of each stripe ``worker`` lacks.

        Pieces held beyond whole chunks are spread evenly over what is missing.
        """
        if worker.complete:
            return [0] * len(stripes)
        lacking = [stripe.size for stripe in stripes]
        if worker.held_chunks:
            lasts = [stripe.last for stripe in stripes]
            at = 0
            for chunk in sorted(worker.held_chunks):
                while at < len(lasts) and lasts[at] < chunk:
                    at += 1
                if at < len(lasts) and chunk >= 0:
                    lacking[at] -= self.sizes[chunk]
        held = min(worker.held_pieces, self.pieces)
        if held and (left := sum(lacking)):
            by_pieces = self.total - self.total * held // self.pieces
            if by_pieces < left:
                if len(lacking) == 1:
                    return [by_pieces]
                return [size * by_pieces // left for size in lacking]
        return lacking
