"""Client of the coordinator's event stream, with reconnects, failover and retries.

``Follower`` tries one replica after the other, sends the number of the last event that it received,
and fails once no replica has answered for ``patience_s``. Any replica will do: standbys stream,
too. It reads the items of ``schemas.events`` and does not depend on how they are shown.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from pydantic import ValidationError

from paceline.client.failover import error_of, servers_of, tls_context_of
from paceline.config import Runtime
from paceline.errors import NotFound, ServiceUnavailable
from paceline.schemas import Dropped, EventItem, Missed, Moment, StreamItem
from paceline.system import Endpoint, HttpServer

SILENCE_S = 10.0  # a stream sends something every few seconds: a longer silence means it is lost
PAUSE_S = 0.25  # after all replicas failed; doubled up to PAUSE_MAX_S, jittered
PAUSE_MAX_S = 3.0
READ_BYTES = 64 * 1024
LONGEST_LINE = 64 * 1024 * 1024


@dataclass(frozen=True)
class Lost:
    """The stream broke; the follower reconnects."""

    reason: str
    since_s: float  # monotonic


Item = Moment | EventItem | Missed | Dropped | Lost


class Follower:
    """Reads one deployment's stream, or the whole fleet's."""

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        *,
        deployment_id: str | None = None,
        after: int | None = None,
        patience_s: float = 60.0,
        ca: str | bytes = "",
    ) -> None:
        endpoints = [Endpoint.of(each) for each in urls]
        self._servers = list(servers_of(endpoints, tls_context_of(ca) if ca else None).values())
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "text/event-stream"}
        self._deployment_id = deployment_id
        self._last = after
        self._patience_s = patience_s
        self._met = False  # a replica answered before: NotFound now means a replica that is behind

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        *,
        deployment_id: str | None = None,
        after: int | None = None,
        patience_s: float = 60.0,
    ) -> Follower:
        """Return a follower of ``runtime``'s coordinator, whichever replica answers."""
        known = runtime.endpoints
        return cls(
            known.coordinator_urls or (known.coordinator_url,),
            runtime.secrets.coordinator_token,
            deployment_id=deployment_id,
            after=after,
            patience_s=patience_s,
            ca=runtime.coordinator_ca,
        )

    def items(self) -> Iterator[Item]:
        """Yield items without end, with a Lost at each break.

        Raises AccessDenied, NotFound, and ServiceUnavailable once no replica has answered for
        ``patience_s``.
        """
        turn, pause_s = 0, PAUSE_S
        lost_since_s: float | None = None
        while True:
            server = self._servers[turn % len(self._servers)]
            try:
                for item in self._read(server):
                    self._met, lost_since_s, pause_s = True, None, PAUSE_S
                    yield item
                reason = "the stream ended"
            except ServiceUnavailable as error:
                reason = error.one_line()
            except NotFound as error:
                if not self._met:
                    raise
                reason = error.one_line()
            now_s = time.monotonic()
            lost_since_s = now_s if lost_since_s is None else lost_since_s
            if now_s - lost_since_s > self._patience_s:
                raise ServiceUnavailable(
                    "no coordinator answers",
                    got=reason,
                    wanted=f"an answer within {self._patience_s:g} s",
                    where=", ".join(each.endpoint.url for each in self._servers),
                    do="The transfer goes on without it; watch again once it runs.",
                )
            yield Lost(f"{server.endpoint.url}: {reason}", lost_since_s)
            turn += 1
            if turn % len(self._servers) == 0:
                time.sleep(pause_s * random.uniform(0.7, 1.3))
                pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _read(self, server: HttpServer) -> Iterator[Item]:
        path = "/events/stream"
        if self._deployment_id:
            path += f"?deployment={quote(self._deployment_id, safe='')}"
        headers = dict(self._headers)
        if self._last is not None:
            headers["Last-Event-ID"] = str(self._last)
        with server.opened("GET", path, headers=headers, timeout_s=SILENCE_S) as response:
            if response.status != 200:
                where = f"GET {server.endpoint.url}{path}"
                raise error_of(response.status, response.read(100_000), where)
            chunks = iter(lambda: response.read1(READ_BYTES), b"")
            yield from self._items_of(_lines(chunks))

    def _items_of(self, lines: Iterator[bytes]) -> Iterator[Item]:
        number: int | None = None
        data: list[bytes] = []
        for line in lines:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                data.append(value)
            elif name == b"id" and value.isdigit() and len(value) < 19:
                number = int(value)
            elif line == b"" and data:
                item = _parsed(b"\n".join(data))
                fresh = number is None or self._last is None or number > self._last
                if number is not None and fresh:
                    self._last = number
                number, data = None, []
                if fresh:  # a replica that was behind may repeat events
                    yield item
                if isinstance(item, Dropped):
                    return


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of ``chunks`` as they arrive, without their ends."""
    left = b""
    for chunk in chunks:
        *lines, left = (left + chunk).split(b"\n")
        if len(left) > LONGEST_LINE:
            raise ServiceUnavailable("the stream cannot be read", got="a line without end")
        yield from (line.rstrip(b"\r") for line in lines)


def _parsed(data: bytes) -> Moment | EventItem | Missed | Dropped:
    try:
        return StreamItem.model_validate_json(data, extra="ignore").root  # of a newer coordinator
    except ValidationError as error:
        raise ServiceUnavailable(
            "the stream cannot be read",
            got=str(error).splitlines()[0],
            wanted="items of this version of Paceline",
            do="Use the same version as the coordinator.",
        ) from error
