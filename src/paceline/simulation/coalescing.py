"""Coalescing of pieces: how many are reported to a session at once, and which arrive corrupt.

Positions are exact, but up to ``coalesce`` pieces are reported to a session in one event. With
``coalesce`` 1 each piece is reported by itself, and is corrupt by itself. Where pieces are
coalesced, the corrupt ones of a healthy fleet are spread over all transfers and repaired within
milliseconds, one by one: as runs of an extent they would cost several times as much. There they
only take their share of every link (``Simulation``) and are counted; a source that corrupts more
than the others still sends corrupt runs, which its readers' sessions repair.
"""

from __future__ import annotations

import numpy as np

from paceline.relay.protocol import Extent
from paceline.simulation.hosts import Flow

# On a spare source extents are this part of the longest, because failback is judged by pieces.
AWAY_EXTENTS = 128
LEAST_EXTENTS = 8  # extents shrink as a host nears completion, to this part of the longest


class Gathering:
    """Chooses the extents of flows; ``corrupt`` is the share of all transfers that are corrupt."""

    def __init__(
        self, *, pieces: int, piece_bytes: int, coalesce: int, corrupt: float, seed: int
    ) -> None:
        self.piece_bytes = float(piece_bytes)
        self.longest = coalesce
        self._count = pieces
        self._corrupt = corrupt
        self._random = np.random.default_rng([seed, 0x70616365])

    @property
    def exact(self) -> bool:
        """Return whether every piece is reported by itself."""
        return self.longest == 1

    def next_extent(self, flow: Flow) -> None:
        """Choose where the next report to the session ends, and which of its pieces are corrupt."""
        share = flow.source.corrupts
        share = max(self._corrupt, share) if self.exact or share > self._corrupt else 0.0
        longest = self._extent_pieces(flow, share)
        stop = min((flow.base // longest + 1) * longest, flow.stop)
        flow.extent = Extent(flow.base, stop)
        bad = int(self._random.binomial(stop - flow.base, share)) if share > 0 else 0
        first = flow.base + int(self._random.random() * (stop - flow.base - bad + 1)) if bad else 0
        flow.bad = Extent(first, first + bad) if bad else None

    def spread(self, pieces: int) -> int:
        """Return how many corrupt transfers were repaired beside ``pieces`` that were coalesced."""
        if self.exact or not self._corrupt:
            return 0
        return int(self._random.negative_binomial(pieces, 1 - self._corrupt))

    def _extent_pieces(self, flow: Flow, corrupt: float) -> int:
        if self.exact:
            return 1
        if corrupt > 0:
            return max(1, min(self.longest, int(1 / corrupt)))
        if flow.source.is_origin:  # its window is some seconds long, and is requested in halves
            return max(1, self.longest // AWAY_EXTENTS)
        planned = flow.reader.lane_sources
        if 0 < flow.lane <= len(planned) and planned[flow.lane - 1] != flow.key:
            return max(1, self.longest // AWAY_EXTENTS)
        left = (self._count - flow.reader.have.count) // max(1, len(flow.reader.feeds))
        least = max(1, self.longest // LEAST_EXTENTS)
        longest = least
        while longest * 2 <= min(self.longest, left // 3):
            longest *= 2  # powers of two: an extent's edges are the same pieces on every host
        return longest
