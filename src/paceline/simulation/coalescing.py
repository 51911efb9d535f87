"""Coalescing of pieces: how many are reported to a session at once, and which arrive corrupt.

Positions are exact, but up to ``coalesce`` pieces are reported to a session in one event. In an
extent of n pieces Binomial(n, q) arrive corrupt, as one run. With ``coalesce`` 1 each piece is
reported by itself. ``PaidRepairs`` sends the repairs of coalesced corrupt pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from paceline.relay.protocol.extents import Extent
from paceline.relay.protocol.limits import PieceMap
from paceline.simulation.hosts import Flow, Host
from paceline.simulation.network import Clock, Network

# On a spare source extents are this part of the longest, because failback is judged by pieces.
AWAY_EXTENTS = 128
LEAST_EXTENTS = 8  # extents shrink as a host nears completion, to this part of the longest
EARLIEST, LATEST = 0.1, 0.65  # corrupt runs lie in this part of their extent
MARKS = 8  # of an extent: corrupt runs end at them, at the same pieces on every host
MUCH_CORRUPT = 0.05  # beyond this share, rejections are not coalesced


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

    def is_usual(self, flow: Flow) -> bool:
        """Return whether corruption follows the share of all transfers, not a corrupting source."""
        return flow.source.corrupts <= self._corrupt

    def next_extent(self, flow: Flow) -> None:
        """Choose where the next report to the session ends, and which of its pieces are corrupt."""
        share = max(self._corrupt, flow.source.corrupts)
        drawn = flow.drawn
        if drawn.first <= flow.base < drawn.stop:  # a repair interrupted it
            flow.extent_stop = min(drawn.stop, flow.stop)
            flow.bad = flow.drawn_bad
            if flow.bad is not None and flow.bad.stop <= flow.base:
                flow.bad = None
        else:
            longest = self._extent_pieces(flow, share)
            stop = min((flow.base // longest + 1) * longest, flow.stop)
            flow.extent_stop = stop
            flow.bad = self._draw(flow.base, stop, share) if share > 0 else None
            if flow.base >= drawn.stop:
                flow.drawn, flow.drawn_bad = Extent(flow.base, stop), flow.bad
                flow.drawn_pieces = flow.bad.size if flow.bad is not None else 0

    def draw(self, flow: Flow, run: Extent) -> Extent | None:
        """Return the part of a repair that arrives corrupt again: its first pieces, or None."""
        share = max(self._corrupt, flow.source.corrupts)
        bad = int(self._random.binomial(run.size, share)) if share > 0 else 0
        return Extent(run.first, run.first + bad) if bad else None

    def mark(self, flow: Flow) -> int:
        """Return the number of pieces between two marks of the current extent, or 0."""
        return (flow.extent_stop - flow.drawn.first) // MARKS

    def after(self, flow: Flow, bad: Extent) -> int:
        """Return the mark up to which to process pieces once ``bad`` is repaired."""
        grain = _between_marks(flow.extent_stop - flow.drawn.first)
        return -(-bad.stop // grain) * grain

    def unspread(self, flow: Flow, reached: int) -> int:
        """Return how many more pieces would be corrupt so far, were they spread evenly."""
        drawn = flow.drawn
        if not flow.drawn_pieces or not drawn.first <= reached <= drawn.stop:
            return 0
        refused = flow.drawn_pieces - (flow.drawn_bad.size if flow.drawn_bad else 0)
        return round(flow.drawn_pieces * (reached - drawn.first) / drawn.size) - refused

    def _draw(self, first: int, stop: int, share: float) -> Extent | None:
        """Return which pieces of an extent will be corrupt."""
        bad = int(self._random.binomial(stop - first, share))
        if not bad:
            return None
        # After some good pieces, otherwise the source looks bad; and not too near the end, because
        # the run is repaired when others report the extent.
        room = stop - first - bad
        at = first + int((EARLIEST + self._random.random() * (LATEST - EARLIEST)) * (room + 1))
        # Flows upstream must be processed up to the run's end. Where runs end at common marks,
        # another flow has mostly caused that already.
        grain = _between_marks(stop - first)
        marked = -(-(at + bad) // grain) * grain
        at = marked - bad if marked < stop else at
        return Extent(at, at + bad)

    def _extent_pieces(self, flow: Flow, corrupt: float) -> int:
        if self.longest == 1:
            return 1
        if corrupt > MUCH_CORRUPT:
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


def _between_marks(pieces: int) -> int:
    """Return the distance of marks in an extent of ``pieces`` pieces: a power of two."""
    return 1 << max(0, (pieces // MARKS).bit_length() - 1)


# Paid repairs run on the clock, not in the network.
#
# Where pieces are coalesced, every NIC's capacity is reduced from the start by what its corrupt
# pieces take (``Simulation``), and rejected runs are sent outside the network: at the link's rate,
# one run after the other. So a repair shares no link and changes no other rate; as a flow, each
# repair caused all rates of the fleet to be computed again, twice. Pieces that the source itself is
# still receiving (it repairs the same pieces, or a host upstream does) are sent all the same and
# are counted once the source has them: two runs overlap where single pieces would not, and such
# waits must not add up along a chain of hosts.

PAID = -2  # in place of a lane number


class PaidRepairs:
    """Sends the pieces that PAID flows want.

    ``look`` processes what the reader has received around a run, ``arrive`` processes a flow's
    pieces up to a given one, ``more`` schedules a flow's next step.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        network: Network,
        pieces: PieceMap,
        gathering: Gathering,
        look: Callable[[Flow, Extent], None],
        arrive: Callable[[Flow, int], None],
        more: Callable[[Flow], None],
    ) -> None:
        self._clock = clock
        self._network = network
        self._pieces = pieces
        self._gathering = gathering
        self._look = look
        self._arrive = arrive
        self._more = more

    def send(self, flow: Flow) -> None:
        """Send the first run that the source has or has requested, unless one is under way."""
        source, reader = flow.source, flow.reader
        if flow.paid_run is not None or not source.serves or not reader.serves:
            return
        for run in self._unsent(flow):
            if next(source.have.common(run), None) is not None or _is_coming(source, run):
                break
        else:
            source.waiting[flow] = None
            return
        source.waiting.pop(flow, None)
        now_s = self._clock.now_s
        took_s = self._pieces.bytes_of(run) / reader.repairs_bytes_s
        reader.repaired_s = max(reader.repaired_s, now_s) + took_s
        flow.paid_run = run
        self._clock.at(reader.repaired_s, lambda: self._sent(flow, run, took_s))

    @staticmethod
    def _unsent(flow: Flow) -> Iterator[Extent]:
        """Yield wanted runs that were not sent yet, without those that are owed."""
        for wanted in list(flow.wanted):
            yield from list(flow.owed.gaps(wanted))

    def _sent(self, flow: Flow, run: Extent, took_s: float) -> None:
        flow.paid_run = None
        if not flow.open or not flow.source.serves or not flow.reader.serves:
            return  # its reader gets a failure event
        network, slot = self._network, flow.slot
        network.carried[slot] += self._pieces.bytes_of(run)
        network.busy_s[slot] += took_s
        network.moved_s[slot] = self._clock.now_s
        self._look(flow, run)
        for part in list(flow.wanted.common(run)):  # the rest arrived from another flow
            flow.base, flow.stop = part
            flow.bad = self._gathering.draw(flow, part)
            self._arrive(flow, part.stop)
        self._more(flow)


def _is_coming(host: Host, run: Extent) -> bool:
    """Return whether ``host`` has requested pieces of ``run`` from a source."""
    return any(next(feed.wanted.common(run), None) is not None for feed in host.feeds.values())
