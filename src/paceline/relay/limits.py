"""The relay's bounds, and where the pieces of a manifest lie. Numbers only; no behaviour."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from paceline.manifest import Manifest
from paceline.relay.extents import Extent

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Bounds of one session; times in seconds."""

    window_bytes: int = 32 * MIB  # asked for and not yet here, per source
    window_pieces: int = 256
    piece_attempts: int = 3  # corrupt arrivals of one piece before the worker gives up
    corrupt_before_lost: int = 3  # corrupt pieces after which a stream is not read further
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    standstill_factor: float = 8.0  # of the piece deadline, for sources that live but only wait
    standstill_min_s: float = 4.0
    origin_deadline_s: float = 60.0  # the origin reader retries inside; its silence means more
    give_up_s: float = 60.0  # no source gives a sign of life
    stall_s: float = 600.0  # sources live, yet nothing arrives


class PieceMap:
    """Offsets of pieces in the model's byte stream, and which pieces each chunk is made of."""

    def __init__(self, manifest: Manifest) -> None:
        lengths = (
            min(manifest.piece_bytes, file.size - at)
            for file in manifest.files
            for at in range(0, file.size, manifest.piece_bytes)
        )
        self._starts = list(accumulate(lengths, initial=0))
        self.count = manifest.piece_count
        runs = (manifest.chunk_pieces(chunk.chunk_id) for chunk in manifest.chunks)
        self.chunks = tuple(Extent(run.start, run.stop) for run in runs)

    def bytes_of(self, extent: Extent) -> int:
        """Return how many bytes the pieces of ``extent`` have."""
        return self._starts[extent.stop] - self._starts[extent.first]

    def chunk_range(self, first_chunk: int, last_chunk: int) -> Extent:
        """Return the pieces of chunks ``first_chunk`` to ``last_chunk``, both included."""
        last_chunk = min(last_chunk, len(self.chunks) - 1)
        if first_chunk > last_chunk:
            return Extent(0, 0)
        return Extent(self.chunks[first_chunk].first, self.chunks[last_chunk].stop)

    def fitting(self, extent: Extent, budget_bytes: int, budget_pieces: int) -> Extent:
        """Return the longest beginning of ``extent`` within both budgets."""
        stop = bisect_right(self._starts, self._starts[extent.first] + budget_bytes) - 1
        return Extent(
            extent.first, max(extent.first, min(stop, extent.stop, extent.first + budget_pieces))
        )
