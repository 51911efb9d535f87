"""A connection that sends its request in time, or is closed.

uvicorn waits for ever for the first byte of a connection and for the end of a request's headers; a
thousand callers that send one byte a minute would hold a thousand descriptors. Bodies have their
own deadline (``limits``), idle connections uvicorn's.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 15.0  # from the connection, or from the first byte after an answer, to the headers' end


class PromptProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a deadline for headers."""

    headers_s = HEADERS_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Take bytes; once they make a request, its deadline is over."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._arm()
        else:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.headers_s, self._give_up)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.abort()
