"""How a piece is asked for: the books know it, the origin's budget pays, a driver fetches.

Who is asked for what is decided by those who call this: ``pulling`` and ``aside``.
"""

from __future__ import annotations

from paceline.relay.session.choosing import Choice
from paceline.relay.session.events import Fetch, SessionAction
from paceline.relay.session.extents import Extent
from paceline.relay.session.feeds import Feed
from paceline.relay.session.flights import Flights
from paceline.relay.session.limits import PieceMap


class Asking:
    """Asks for pieces under the present lanes."""

    def __init__(self, pieces: PieceMap, flights: Flights, choice: Choice) -> None:
        self._pieces = pieces
        self._flights = flights
        self._choice = choice

    def ask(
        self,
        feed: Feed,
        extent: Extent,
        now_s: float,
        actions: list[SessionAction],
        *,
        aside: bool = False,
    ) -> None:
        """Ask ``feed`` for ``extent``; ``aside`` for a repair, a hedge or a probe."""
        self._flights.ask(feed, extent, now_s, aside=aside)
        if feed.source.kind == "origin":
            self._choice.budget.spent_bytes += self._pieces.bytes_of(extent)
        actions.append(Fetch(feed.source, feed.stream, extent))
