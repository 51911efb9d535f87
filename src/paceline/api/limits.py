"""Limits on requests before they are parsed: host names, sizes, durations and rates.

Refused here: unknown names in the Host header (DNS rebinding by a web page), oversized URLs and
headers, and bodies that are too long or too slow.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterable

from fastapi import HTTPException
from starlette.types import Message, Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.errors import InvalidInput, PacelineError
from paceline.system import is_loopback

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_KEYS = 32 * 1024  # of a body's JSON objects: each unknown one makes an error of its own
MAX_TARGET_BYTES = 8 * 1024  # path and query
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
BODY_S = 30.0  # to receive the body; a long poll begins after it
_HOST = re.compile(r"(?:\[(?P<address>[^\]]+)\]|(?P<name>[^\[:][^:]*))(?::[0-9]{1,5})?")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class HostNames:
    """The names that the Host header may carry: loopback's and ``names``; the port is ignored."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(name.lower().strip("[]") for name in (*LOOPBACK_NAMES, *names))

    def refusal(self, scope: Scope) -> PacelineError | None:
        """Return why the request's Host is refused, None if it is not."""
        given = [value for name, value in scope["headers"] if name == b"host"]
        host = host_of(given[0].decode("latin-1")) if len(given) == 1 else None
        if host is not None and (host in self._names or is_loopback(host)):
            return None
        return InvalidInput(
            "this server is not called by that name",
            got=b", ".join(given).decode("latin-1") or "no Host",
            wanted="one of its names in the Host header",
            do="Call it by its own name, or add that name to [security] rest_hosts.",
        )


def size_refusal(scope: Scope) -> tuple[PacelineError, int] | None:
    """Return why URL, headers or the announced body are too large, and the status; else None."""
    target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if target > MAX_TARGET_BYTES:
        what, wanted = "the address is too long", f"at most {MAX_TARGET_BYTES} bytes"
        return InvalidInput(what, got=target, wanted=wanted), 414
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        wanted = f"at most {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes"
        got = f"{len(headers)}, {size} bytes"
        return InvalidInput("the headers are too long", got=got, wanted=wanted), 431
    for name, value in headers:
        # Digits only: servers refuse anything else; int() of 10,000 digits is too expensive.
        if name == b"content-length" and (
            not value.isdigit() or len(value) > 18 or int(value) > MAX_BODY_BYTES
        ):
            wanted = f"at most {MAX_BODY_BYTES} bytes"
            return InvalidInput("the body is too long", wanted=wanted), 413
    return None


def bounded_body(receive: Receive) -> Receive:
    """Return ``receive`` that raises HTTPException for a body that is too long or too slow."""
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
        if arrived > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
        if keys > MAX_KEYS:
            raise HTTPException(413, f"the body has more than {MAX_KEYS} keys (or colons)")
        return message

    return counted


def host_of(header: str) -> str | None:
    """Return the name in a Host header without its port; None if it is not a host."""
    found = _HOST.fullmatch(header.strip().lower())
    return found and (found["name"] or found["address"])


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
# with the rest of a manifest in memory. ``bounded_body`` limits bodies, uvicorn idle connections.

HEADERS_S = 15.0  # from connect, or from the first byte after an answer, to the headers' end
HEADERS_BYTES = 64 * 1024
RESPONSE_READ_DEADLINE_S = 30.0  # in which a caller must read some of a response that waits


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with deadlines for request headers and response reads."""

    headers_s = HEADERS_S
    read_s = RESPONSE_READ_DEADLINE_S
    _headers_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _unparsed = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline for the request headers."""
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Parse bytes; stop the header deadline once a request is complete."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_headers()
            return
        self._await_headers()
        self._unparsed += len(data)
        if self._unparsed > HEADERS_BYTES:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines."""
        self._cancel_headers()
        self._cancel_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the read deadline; nothing is added to the write buffer meanwhile."""
        super().pause_writing()
        self._await_read()

    def resume_writing(self) -> None:
        """Cancel the read deadline."""
        self._cancel_read()
        super().resume_writing()

    def _await_read(self) -> None:
        self._cancel_read()
        left = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self.read_s, self._check_read, left)

    def _check_read(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._await_read()
        else:
            self.transport.abort()

    def _cancel_read(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _await_headers(self) -> None:
        if self._headers_timer is None:
            self._headers_timer = self.loop.call_later(self.headers_s, self.transport.abort)

    def _cancel_headers(self) -> None:
        self._unparsed = 0
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None


class BufferedBody:
    """Buffers a request's body, so that the route can read it again."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self._error: HTTPException | None = None

    async def body(self) -> bytes:
        """Return the whole body; raises AccessMiddleware's HTTPException if it is too long."""
        try:
            while not self._messages or self._messages[-1].get("more_body", False):
                self._messages.append(await self._receive())
        except HTTPException as error:
            self._error = error
            raise
        return b"".join(each.get("body", b"") for each in self._messages)

    async def again(self) -> Message:
        """Return the next message, as if none had been read."""
        if self._messages:
            return self._messages.pop(0)
        if self._error is not None:
            raise self._error
        return await self._receive()
