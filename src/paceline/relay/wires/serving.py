"""What one peer asked for, and which verified pieces it gets next; the transports carry them.

While none of the requested pieces is verified here the stream is *parked*: it stays open, the peer
hears four times a deadline that we wait too, and it goes on the moment a piece is verified. That is
all of cut-through. Nothing unverified is ever sent (I3). One thread runs it. It knows no lanes and
no plans.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from paceline.errors import InvalidFrame, NotFound, PeerLost
from paceline.relay.disk.requests import RequestQueue
from paceline.relay.disk.staging import Staging
from paceline.relay.session.extents import Extent, Extents
from paceline.relay.wires.barred import Barred

log = logging.getLogger(__name__)

UNKNOWN_DIGEST_S = 30.0  # a peer may hear of a deployment before this agent does
IDLE_S = 120.0  # without any request
RUN_PIECES = 16  # sent between two looks at what the peer asks
HEAR_S = 0.02  # how long what a peer says may wait while it is being sent something
# A session has at most 256 pieces in flight and asks in runs. These bounds keep a peer of tiny
# requests below a tenth of a core, and its queue below a megabyte.
MOST_FRAMES = 256  # of a peer that are read every HEAR_S
MOST_RUNS = 4096  # separate runs of pieces that a peer may wait for at once
TALLY_S = 0.2  # how old an edge's count may be while a piece is being sent


@dataclass(frozen=True, slots=True)
class Complaint:
    """A peer says that what it was sent of ``piece`` does not match its digest."""

    piece: int


Asked = Extent | Complaint


class Serving:
    """One welcomed peer, ``reader``, of the model in ``staging``."""

    def __init__(
        self,
        *,
        worker_id: str,
        reader: str,
        staging: Staging,
        keepalive_s: float,
        on_rotten: Callable[[str, int], None],
        barred: Barred,
        admission: str = "",
    ) -> None:
        self._worker_id = worker_id
        self._reader = reader
        self._staging = staging
        self._keepalive_s = keepalive_s
        self._on_rotten = on_rotten
        self._barred, self._admission = barred, admission
        self._sent = Extents()  # a peer may complain once of each piece it was sent
        self._since_s = time.monotonic()
        self._counted = 0

    def runs(self, asked: Callable[[float], Iterable[Asked]]) -> Generator[Extent | None]:
        """Yield what to send next, or None where the peer should hear that nothing is there yet.

        ``asked(wait_s)`` returns what the peer said meanwhile, and waits for it as long as that.
        Ends by PeerLost (closed, idle), NotFound (given up), AccessDenied (barred meanwhile) or
        InvalidFrame. To be closed by whoever leaves it early.
        """
        try:
            with self._staging.requests() as requests:
                yield from self._runs(asked, requests)
        finally:
            self._staging.edges.rests(self)  # what was under way has gone with the stream

    def _runs(
        self, asked: Callable[[float], Iterable[Asked]], requests: RequestQueue
    ) -> Iterator[Extent | None]:
        heard_s, frames = float("-inf"), 0
        while True:
            self._barred.require(self._reader, self._admission)
            if frames == MOST_FRAMES and not requests:
                time.sleep(HEAR_S)
            frames = 0
            if not requests or time.monotonic() - heard_s >= HEAR_S:
                for each in islice(asked(0.0 if requests else IDLE_S), MOST_FRAMES):
                    frames += 1
                    self._hear(each, requests)
                heard_s = time.monotonic()
            if not requests:
                if not frames:
                    raise PeerLost("the peer asks for nothing")
                continue
            more = frames == MOST_FRAMES  # to read, which may ask for what is verified
            run = requests.next(
                RUN_PIECES, min(HEAR_S, self._keepalive_s) if more else self._keepalive_s
            )
            if self._staging.closed:
                raise PeerLost("the model is no longer open here")
            if run is not None:
                self._sent.add(run)
                self._since_s = time.monotonic()
                self._staging.edges.sends(self, self._worker_id, self._reader)
                yield run
            elif self._staging.gave_up:
                digest = self._staging.manifest.digest
                raise NotFound("this worker gave the model up", got=digest[:12])
            else:
                yield None

    def carried(self, count: int, last: bool) -> None:
        """Count bytes of a run that left; time spent waiting for pieces is not part of it."""
        self._counted += count
        now = time.monotonic()
        if last or now - self._since_s >= TALLY_S:
            self._staging.edges.sent(self, self._counted, goes_on=not last)
            self._since_s, self._counted = now, 0

    def _hear(self, asked: Asked, requests: RequestQueue) -> None:
        pieces = self._staging.manifest.piece_count
        if isinstance(asked, Complaint):
            self._look_at(asked.piece)
        elif asked.stop > pieces:
            raise InvalidFrame("request beyond the model", got=asked, wanted=pieces)
        elif requests.runs >= MOST_RUNS:
            raise InvalidFrame(
                "too many separate runs of pieces are requested",
                got=requests.runs + 1,
                wanted=f"at most {MOST_RUNS} that are not sent yet",
                where=self._reader,
                do="Request neighbouring pieces together, and fewer ahead of what arrives.",
            )
        else:
            requests.add(asked)

    def _look_at(self, index: int) -> None:
        """A peer says that a piece of ours is corrupt: was it the wire, or is it this disk?"""
        if self._sent.remove(Extent(index, index + 1)) and self._staging.distrust(index):
            digest = self._staging.manifest.digest
            log.error("piece %d of %s rotted on this disk", index, digest[:12])
            self._on_rotten(digest, index)
