"""Repairs for which the NICs gave up their share all along: on a clock, not in the network.

Where pieces are gathered, every NIC gives up what its corrupt pieces take (``Simulation``), and
what was refused passes beside it: at the link's rate, one run after the other. So a repair shares a
link with nobody and changes nobody's rate; as a flow it cost the whole fleet a new division of
every link, twice. What its source is still to get (it repairs the same pieces, or whoever is above
does) is sent all the same and is here when the source has it: two lumps overlap where single pieces
would not, and such waits must not add up along a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.relay.session.extents import Extent
from paceline.relay.session.limits import PieceMap
from paceline.simulate.clock import Clock
from paceline.simulate.gathering import Gathering
from paceline.simulate.hosts import Flow, Host
from paceline.simulate.network import Network

PAID = -2  # instead of a lane's number


class PaidRepairs:
    """Sends what PAID flows want. ``look`` brings the reader up to date about what is around a run,
    ``arrive`` takes pieces off the wire up to one of them, ``more`` has a flow looked at again.
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
        """Begin with the first run that the source has or was promised, if nothing is on its way
        yet.
        """
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
        """Yield what was not sent yet; what is owed comes by itself."""
        for wanted in list(flow.wanted):
            yield from list(flow.owed.gaps(wanted))

    def _sent(self, flow: Flow, run: Extent, took_s: float) -> None:
        flow.paid_run = None
        if not flow.open or not flow.source.serves or not flow.reader.serves:
            return  # its reader hears of that
        network, slot = self._network, flow.slot
        network.carried[slot] += self._pieces.bytes_of(run)
        network.busy_s[slot] += took_s
        network.moved_s[slot] = self._clock.now_s
        self._look(flow, run)
        for part in list(flow.wanted.common(run)):  # the rest has come another way
            flow.base, flow.stop = part
            flow.bad = self._gathering.draw(flow, part)
            self._arrive(flow, part.stop)
        self._more(flow)


def _is_coming(host: Host, run: Extent) -> bool:
    """Return whether ``host`` has asked somebody for pieces of ``run``."""
    return any(next(feed.wanted.common(run), None) is not None for feed in host.feeds.values())
