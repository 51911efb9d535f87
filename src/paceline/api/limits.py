"""Limits on requests before they are parsed: host names, sizes, durations and rates.

Refused here: unknown names in the Host header (DNS rebinding by a web page), oversized URLs and
headers, and bodies that are too long or too slow.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from paceline.api.problems import problem_response
from paceline.errors import InvalidInput, PacelineError

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_KEYS = 32 * 1024  # of a body's JSON objects: each unknown one makes an error of its own
MAX_TARGET_BYTES = 8 * 1024  # path and query
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
BODY_S = 30.0  # to receive the body; a long poll begins after it
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class HostGuard:
    """ASGI middleware that accepts a Host of loopback or ``names``; the port is ignored."""

    def __init__(self, app: ASGIApp, *, names: Iterable[str] = ()) -> None:
        self._app = app
        self._names = frozenset(name.lower().strip("[]") for name in (*LOOPBACK_NAMES, *names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"host"]
        host = host_of(given[0].decode("latin-1")) if len(given) == 1 else None
        if host is not None and (host in self._names or _is_loopback(host)):
            await self._app(scope, receive, send)
            return
        error = InvalidInput(
            "this server is not called by that name",
            got=b", ".join(given).decode("latin-1") or "no Host",
            wanted="one of its names in the Host header",
            do="Call it by its own name, or add that name to [security] rest_hosts.",
        )
        await refuse(error, 421, scope, receive, send)


class SizeGuard:
    """ASGI middleware that refuses URLs, headers and bodies over the limits."""

    def __init__(self, app: ASGIApp, *, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refuse(*refusal, scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        until_s, arrived, keys, ended = clock() + BODY_S, 0, 0, False

        async def counted() -> Message:
            nonlocal arrived, keys, ended
            if ended:
                return await receive()  # only a disconnect can follow
            try:
                async with asyncio.timeout_at(until_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body took longer than {BODY_S:.0f} s") from None
            arrived += len(body := message.get("body", b""))
            keys += body.count(b":")  # counts colons in strings too
            ended = not message.get("more_body", False)
            if arrived > self._max_bytes:
                raise HTTPException(413, f"the body is longer than {self._max_bytes} bytes")
            if keys > MAX_KEYS:
                raise HTTPException(413, f"the body has more than {MAX_KEYS} keys (or colons)")
            return message

        await self._app(scope, counted, send)

    def _refusal(self, scope: Scope) -> tuple[PacelineError, int] | None:
        target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if target > MAX_TARGET_BYTES:
            what, wanted = "the address is too long", f"at most {MAX_TARGET_BYTES} bytes"
            return InvalidInput(what, got=target, wanted=wanted), 414
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            what = "the headers are too long"
            wanted = f"at most {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes"
            return InvalidInput(what, got=f"{len(headers)}, {size} bytes", wanted=wanted), 431
        for name, value in headers:
            if name == b"content-length" and self._too_long(value):
                wanted = f"at most {self._max_bytes} bytes"
                return InvalidInput("the body is too long", wanted=wanted), 413
        return None

    def _too_long(self, value: bytes) -> bool:
        # Digits only: servers refuse anything else; int() of 10,000 digits is too expensive.
        return not value.isdigit() or len(value) > 18 or int(value) > self._max_bytes


async def refuse(
    error: PacelineError,
    status: int,
    scope: Scope,
    receive: Receive,
    send: Send,
    headers: dict[str, str] | None = None,
) -> None:
    """Send a problem document, or close a websocket."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await problem_response(error, status, headers)(scope, receive, send)


def host_of(header: str) -> str | None:
    """Return the name in a Host header without its port; None if it is not a host."""
    text = header.strip().lower()
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        return name if bracket and (not rest or _is_port(rest)) else None
    name, colon, port = text.partition(":")
    return name if name and (not colon or _is_port(":" + port)) else None


def _is_port(text: str) -> bool:
    return text.startswith(":") and text[1:].isdecimal() and len(text) <= 6


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


MOST = 20_000  # keys that Buckets stores; a dropped key starts again with a full bucket


class TokenBuckets:
    """Token buckets, one per key, in bounded memory: ``rate`` calls a second, ``burst`` at once.

    Not thread-safe; used by the event loop's thread only.
    """

    def __init__(self, rate: float, burst: float) -> None:
        assert rate > 0
        self.rate, self.burst = rate, max(1.0, burst)
        self._held: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def take(self, key: Hashable, now_s: float, cost: float = 1.0) -> float:
        """Take ``cost`` calls from ``key``'s bucket; return 0, or the seconds to wait for them."""
        left, at_s = self._held.get(key, (self.burst, now_s))
        left = min(self.burst, left + max(0.0, now_s - at_s) * self.rate)
        wait_s = 0.0 if left >= cost else (cost - left) / self.rate
        self._held[key] = (left if wait_s else left - cost, now_s)
        self._held.move_to_end(key)
        while len(self._held) > MOST:
            self._held.popitem(last=False)
        return wait_s


# Limits per connection. uvicorn has no deadline for the first byte of a connection or for the end
# of a request's headers, and buffers what arrives: a thousand slow callers would hold a thousand
# descriptors, and endless headers all memory. It has none either for a caller that stops reading,
# with the rest of a manifest in memory. SizeGuard limits bodies, uvicorn idle connections.

HEADERS_S = 15.0  # from connect, or from the first byte after an answer, to the headers' end
HEADERS_BYTES = 64 * 1024
TAKEN_S = 30.0  # in which a caller must read some of a response that waits

_Base: Any = object if TYPE_CHECKING else AutoHTTPProtocol  # httptools' where it is installed


class HttpProtocol(_Base):  # type: ignore[misc]  # one of two classes, chosen at run time
    """uvicorn's HTTP/1.1 protocol with deadlines for request headers and response reads."""

    headers_s = HEADERS_S
    taken_s = TAKEN_S
    _stalled: asyncio.TimerHandle | None = None
    _deadline: asyncio.TimerHandle | None = None
    _unparsed = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the deadline for the request headers."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Parse bytes; stop the header deadline once a request is complete."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()
            return
        self._arm()
        self._unparsed += len(data)
        if self._unparsed > HEADERS_BYTES:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines."""
        self._disarm()
        self._taken()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the read deadline; nothing is added to the write buffer meanwhile."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """Cancel the read deadline."""
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
