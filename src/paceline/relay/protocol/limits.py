"""Limits of a relay session, and the byte offsets of a manifest's pieces. No behaviour."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from paceline.manifest import Manifest
from paceline.relay.protocol.extents import Extent

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Limits of one session; times in seconds."""

    window_bytes: int = 32 * MIB  # in flight per source, at most
    window_pieces: int = 256
    on_spare_pieces: int = 256  # in flight from a spare, at most; failback probes start beyond them
    window_s: float = 1.0  # a window holds at most what arrives in this time at the planned rate
    origin_window_s: float = 4.0  # the same for the origin, which is read in long ranges
    least_window_pieces: int = 4  # the smallest window, so that the pipe never runs empty
    piece_attempts: int = 3  # corrupt arrivals of one piece from each worker that holds it
    # The same from the origin, which has no substitute: with one transfer in a hundred corrupt,
    # three in a row occur once in eight models of 500 GB, five once in 80,000.
    origin_attempts: int = 5
    corrupt_before_lost: int = 4  # corrupt runs among a stream's last 16 before it is abandoned,
    # together with this share of their pieces. With one transfer in a hundred corrupt, 0.2 (four
    # in sixteen) occurred by chance twice in a model of 2,000 pieces sent to 30 workers.
    corrupt_share: float = 0.4
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    standstill_factor: float = 8.0  # times the piece deadline, for live sources without progress
    standstill_min_s: float = 4.0
    # At least this while a lane of the first plan has received nothing: ten thousand agents receive
    # the plan one after the other, and the last one may be upstream of all others.
    start_s: float = 20.0
    spare_standstill_s: float = 0.3  # for a spare, while another one is left to try
    spares_first: int = 4  # workers that had nothing or failed before the origin is a candidate
    return_s: float = 2.0  # time on a spare before the first failback probe of the planned source,
    return_max_s: float = 60.0  # longer after each attempt, up to this,
    return_pieces: int = 16  # while at least this many pieces are unrequested
    hedge_pieces: int = 16  # requested from a second source at once, at the end,
    hedge_share: float = 0.01  # and at most this share of all pieces in one plan,
    least_hedges: int = 16  # or this many of a small model
    origin_deadline_s: float = 60.0  # the origin reader retries inside, so its silence is serious
    give_up_s: float = 60.0  # without a sign of life from any source
    stall_s: float = 600.0  # sources are alive, but nothing arrives


class PieceMap:
    """Offsets of pieces in the model's byte stream, and the pieces of each chunk.

    It depends on the manifest alone, so that many sessions of one model can share it.
    """

    def __init__(self, manifest: Manifest) -> None:
        lengths = (
            min(manifest.piece_bytes, file.size - at)
            for file in manifest.files
            for at in range(0, file.size, manifest.piece_bytes)
        )
        self._starts = list(accumulate(lengths, initial=0))
        self.count = manifest.piece_count
        self.piece_bytes = min(manifest.piece_bytes, manifest.total_size)  # of the largest
        runs = (manifest.chunk_pieces(chunk.chunk_id) for chunk in manifest.chunks)
        self.chunks = tuple(Extent(run.start, run.stop) for run in runs)
        self._chunk_firsts = [chunk.first for chunk in self.chunks]

    def bytes_of(self, extent: Extent) -> int:
        """Return the size of the pieces of ``extent`` in bytes."""
        return self._starts[extent.stop] - self._starts[extent.first]

    def chunks_of(self, extent: Extent) -> range:
        """Return the numbers of the chunks that contain pieces of ``extent``."""
        first = max(0, bisect_right(self._chunk_firsts, extent.first) - 1)
        return range(first, bisect_left(self._chunk_firsts, extent.stop))

    def chunk_range(self, first_chunk: int, last_chunk: int) -> Extent:
        """Return the pieces of chunks ``first_chunk`` to ``last_chunk``, both included."""
        last_chunk = min(last_chunk, len(self.chunks) - 1)
        if first_chunk > last_chunk:
            return Extent(0, 0)
        return Extent(self.chunks[first_chunk].first, self.chunks[last_chunk].stop)

    def fitting(self, extent: Extent, budget_bytes: int, budget_pieces: int) -> Extent:
        """Return the longest prefix of ``extent`` within both budgets."""
        stop = bisect_right(self._starts, self._starts[extent.first] + budget_bytes) - 1
        return Extent(
            extent.first, max(extent.first, min(stop, extent.stop, extent.first + budget_pieces))
        )
