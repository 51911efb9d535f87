"""The relay's bounds, and where the pieces of a manifest lie. Numbers only; no behaviour."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from paceline.manifest import Manifest
from paceline.relay.protocol.extents import Extent

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Bounds of one session; times in seconds."""

    window_bytes: int = 32 * MIB  # asked for and not yet here, per source
    window_pieces: int = 256
    away_pieces: int = 256  # of these at most in flight from a spare: the way back is probed beyond
    window_s: float = 1.0  # and no more than the expected rate brings in this time,
    origin_window_s: float = 4.0  # the origin is read in long ranges, one behind the other,
    least_window_pieces: int = 4  # but always several pieces: the pipe never runs empty
    piece_attempts: int = 3  # corrupt arrivals of one piece from each worker that has it,
    # and from the origin, which nobody can stand in for: with one transfer in a hundred corrupt,
    # three in a row come once in eight models of 500 GB, five once in 80,000
    origin_attempts: int = 5
    corrupt_before_lost: int = 4  # corrupt runs among a stream's last 16, and
    # this share of their pieces: it is not read further. With one transfer in a hundred corrupt,
    # 0.2 (four in sixteen) came by chance twice in a model of 2,000 pieces to 30 workers
    corrupt_share: float = 0.4
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    standstill_factor: float = 8.0  # of the piece deadline, for sources that live but only wait
    standstill_min_s: float = 4.0
    start_s: float = 20.0  # instead, while a lane of the first plan has brought nothing: ten
    # thousand agents hear of it one after the other, and the last may stand before everybody else
    spare_standstill_s: float = 0.3  # of a spare, while another one is left to try
    spares_first: int = 4  # workers that had nothing or failed, before the origin is asked
    return_s: float = 2.0  # a spare has stood in for so long: the planned source is asked again,
    return_max_s: float = 60.0  # later each time,
    return_pieces: int = 16  # while at least so many are wanted
    hedge_pieces: int = 16  # asked of two sources at once, at the end,
    hedge_share: float = 0.01  # and at most this share of all pieces in one plan,
    least_hedges: int = 16  # or so many of a small model
    origin_deadline_s: float = 60.0  # the origin reader retries inside; its silence means more
    give_up_s: float = 60.0  # no source gives a sign of life
    stall_s: float = 600.0  # sources live, yet nothing arrives


class PieceMap:
    """Offsets of pieces in the model's byte stream, and which pieces each chunk is made of.

    It depends on the manifest alone: a process with many sessions of one model makes it once.
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
        """Return how many bytes the pieces of ``extent`` have."""
        return self._starts[extent.stop] - self._starts[extent.first]

    def chunks_of(self, extent: Extent) -> range:
        """Return the numbers of the chunks that have pieces of ``extent``."""
        first = max(0, bisect_right(self._chunk_firsts, extent.first) - 1)
        return range(first, bisect_left(self._chunk_firsts, extent.stop))

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
