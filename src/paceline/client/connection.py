"""One HTTP exchange with one endpoint over a kept-alive connection, with hang detection.

A server may take long for an answer (it reads a manifest, or holds a long poll), and a frozen
process looks the same: its kernel accepts connections, and no answer comes. A caller that waits
longer than usual therefore requests ``/healthz`` on a second connection, and gives up if that is
not answered either. Standard library only.
"""

from __future__ import annotations

import http.client
import select
import ssl
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from paceline.errors import InvalidInput
from paceline.system.addresses import is_loopback

MAX_ANSWER_BYTES = 64 * 1024 * 1024  # a manifest of 100,000 pieces is some 15 MB
CONNECT_S = 1.0  # connect timeout if there are other endpoints
PROBE_AFTER_S = 1.0  # without an answer, beyond the wait that the call requested
PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Endpoint:
    """The parsed URL of one coordinator replica."""

    url: str
    secure: bool
    host: str
    port: int
    prefix: str

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """Return the endpoint of ``url``; raises InvalidInput unless http(s)://host[:port]."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidInput(
                "not a coordinator's URL", got=url or "nothing", wanted="http://host:port"
            )
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/")
        return cls(url.rstrip("/"), secure, host, port or (443 if secure else 80), prefix)

    @property
    def on_loopback(self) -> bool:
        """Return whether only this machine can reach it."""
        return is_loopback(self.host)

    def serves(self, url: str) -> bool:
        """Return whether ``url`` has this endpoint's scheme, host, port and path prefix."""
        try:
            other = Endpoint.of(url)
        except InvalidInput:
            return False
        mine = (self.secure, self.host, self.port)
        return (other.secure, other.host, other.port) == mine and (
            other.prefix == self.prefix or other.prefix.startswith(f"{self.prefix}/")
        )

    def connect(self, timeout_s: float, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
        """Return a connection that is not open yet."""
        if self.secure:
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=tls)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)


@dataclass(frozen=True)
class Request:
    """One request and its timeouts."""

    method: str
    path: str
    body: bytes | None
    headers: dict[str, str]
    timeout_s: float
    quiet_s: float = 0.0  # how long the request asks the server to wait (long poll)


@dataclass(frozen=True)
class Response:
    """One HTTP response."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Connection:
    """One thread's kept-alive connection; its socket closes when this object is deleted."""

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, *, probing: bool) -> None:
        self.endpoint = endpoint
        self._tls = tls
        self._probing = probing  # there are other endpoints if this one hangs
        self._connection: http.client.HTTPConnection | None = None

    def exchange(self, sent: Request) -> Response:
        """Send ``sent`` and return the response; raises OSError or HTTPException if none comes.

        A connection that closed since the last call is replaced once.
        """
        if self._connection is not None:
            try:
                return self._exchange(self._connection, sent)
            except (ConnectionError, http.client.BadStatusLine):
                # The server closed the idle connection or restarted: retry on a new one.
                self.close()
        patience_s = min(CONNECT_S, sent.timeout_s) if self._probing else sent.timeout_s
        self._connection = self.endpoint.connect(patience_s, self._tls)
        self._connection.connect()
        return self._exchange(self._connection, sent)

    def _exchange(self, connection: http.client.HTTPConnection, sent: Request) -> Response:
        until_s = time.monotonic() + sent.timeout_s
        if connection.sock is None:  # closed on the server's request after the last answer
            connection.connect()
        connection.sock.settimeout(sent.timeout_s)
        path = self.endpoint.prefix + sent.path
        connection.request(sent.method, path, body=sent.body, headers=sent.headers)
        if self._probing:
            self._await_answer(connection, until_s, sent.quiet_s)
        response = connection.getresponse()
        answer = response.read(MAX_ANSWER_BYTES + 1)
        if len(answer) > MAX_ANSWER_BYTES:
            self.close()
            raise http.client.HTTPException(f"answer longer than {MAX_ANSWER_BYTES} bytes")
        return Response(response.status, response.headers, answer)

    def _await_answer(
        self, connection: http.client.HTTPConnection, until_s: float, quiet_s: float
    ) -> None:
        """Return once bytes arrive; raises TimeoutError if the server seems to hang."""
        poller = select.poll()
        poller.register(connection.sock, select.POLLIN)
        patience_s = quiet_s + PROBE_AFTER_S
        while True:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no answer in time")
            if poller.poll(min(left_s, patience_s) * 1000):
                return
            if not self._alive():
                raise TimeoutError("no answer, and its health check gives none either")
            patience_s = PROBE_AFTER_S

    def _alive(self) -> bool:
        probe = self.endpoint.connect(PROBE_TIMEOUT_S, self._tls)
        try:
            probe.request("GET", f"{self.endpoint.prefix}/healthz")
            probe.getresponse()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            probe.close()
        return True

    def close(self) -> None:
        """Close the socket; the next exchange opens another."""
        held, self._connection = self._connection, None
        if held is not None:
            held.close()

    def __del__(self) -> None:
        self.close()
