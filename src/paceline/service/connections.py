"""A connection that sends its request, and takes its answer, in time and in bounds, or is closed.

uvicorn waits for ever for the first byte of a connection and for the end of a request's headers,
and keeps whatever comes until then: a thousand callers that send one byte a minute would hold a
thousand descriptors, one that sends headers without end all memory. Likewise it waits for ever for
a caller that stops reading, with the rest of a manifest in memory. Bodies have limits of their own
(``limits``), idle connections uvicorn's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 15.0  # from the connection, or from the first byte after an answer, to the headers' end
HEADERS_BYTES = 64 * 1024
TAKEN_S = 30.0  # in which a caller that is sent something must take some of it

_Base: Any = object if TYPE_CHECKING else AutoHTTPProtocol  # httptools' where it is installed


class Prompt(_Base):  # type: ignore[misc]  # one of two classes, known at run time
    """uvicorn's HTTP/1.1, with limits for what comes before a request is known."""

    headers_s = HEADERS_S
    taken_s = TAKEN_S
    _stalled: asyncio.TimerHandle | None = None
    _deadline: asyncio.TimerHandle | None = None
    _unparsed = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Take bytes; once they make a request, its limits are over."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()
            return
        self._arm()
        self._unparsed += len(data)
        if self._unparsed > HEADERS_BYTES:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        self._disarm()
        self._taken()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begin to watch whether the caller takes what waits for it; nothing is added meanwhile."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """Take note that it did."""
        self._taken()
        super().resume_writing()

    def _watch(self) -> None:
        self._taken()
        left = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self.taken_s, self._look, left)

    def _look(self, left: int) -> None:
        self._stalled = None
        if self.transport.get_write_buffer_size() < left:
            self._watch()
        else:
            self.transport.abort()

    def _taken(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _arm(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.headers_s, self._give_up)

    def _disarm(self) -> None:
        self._unparsed = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.abort()
