"""The HTTP client of every process: kept-alive connections, TLS, timeouts and a size limit.

urllib3 holds the connections; it costs an agent 25 ms and 0.9 MB, httpx 130 ms and 7 MB. Redirects
are not followed, proxies are not used, and a call is repeated once only, where its kept connection
turns out to be closed. Several servers and retries over time are ``client.failover``.
"""

from __future__ import annotations

import base64
import ipaddress
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import urllib3
from urllib3.connection import HTTPSConnection
from urllib3.exceptions import HTTPError, ProtocolError

from paceline.errors import InvalidInput, ServiceUnavailable

MAX_ANSWER_BYTES = 64 * 1024 * 1024  # a manifest of 100,000 pieces is some 15 MB
KEPT_CONNECTIONS = 16  # idle ones of one server


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is loopback; of names, only ``localhost`` is accepted."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Endpoint:
    """The parsed URL of one server."""

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
                "not a server's URL", got=url or "nothing", wanted="http://host:port"
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


@dataclass(frozen=True)
class Response:
    """One HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: bytes


_CERTIFICATE = "Check the address, this machine's clock, and the authority that is trusted here."


class HttpServer:
    """Calls to one server; threads share it and its connections."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        name: str,
        do: str | None = None,
        tls: ssl.SSLContext | None = None,
        connect_s: float | None = None,
    ) -> None:
        """``name`` and ``do`` are for errors; ``connect_s`` defaults to a call's timeout."""
        self.endpoint = endpoint
        self._name, self._do, self._tls, self._connect_s = name, do, tls, connect_s
        self._pool = self._new_pool()

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        host, port = self.endpoint.host, self.endpoint.port
        if not self.endpoint.secure:
            return urllib3.HTTPConnectionPool(host, port, maxsize=KEPT_CONNECTIONS)
        pool = urllib3.HTTPSConnectionPool(
            host, port, maxsize=KEPT_CONNECTIONS, ssl_context=self._tls
        )
        if self._tls is not None and self._tls.verify_mode is ssl.CERT_NONE:
            pool.ConnectionCls = _Unverified
        return pool

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> Response:
        """Return the response, whatever its status.

        Raises ServiceUnavailable where none arrives in time, or one longer than ``max_bytes``.
        """
        for is_last in (False, True):
            opened = self._pool.num_connections
            try:
                with self.opened(method, path, body, headers, timeout_s=timeout_s) as response:
                    answer = response.read(max_bytes + 1)
                    if len(answer) > max_bytes:
                        raise HTTPError(f"an answer longer than {max_bytes} bytes")
                    return Response(response.status, response.headers, answer)
            except ServiceUnavailable as error:
                # The server closed a kept connection: a new one is tried, once.
                is_kept = self._pool.num_connections == opened
                if is_last or not is_kept or not isinstance(error.__cause__, ProtocolError):
                    raise
        raise AssertionError("unreachable")

    @contextmanager
    def opened(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Open a response to read within the ``with``; ``timeout_s`` bounds each read.

        Raises ServiceUnavailable, also for errors while it is read.
        """
        connect_s = timeout_s if self._connect_s is None else min(self._connect_s, timeout_s)
        try:
            with self._pool.urlopen(
                method,
                (self.endpoint.prefix + path) or "/",
                body,
                dict(headers or {}),
                retries=False,
                timeout=urllib3.Timeout(connect=connect_s, read=timeout_s),
                preload_content=False,
                decode_content=False,
            ) as response:
                yield response
        except (HTTPError, OSError) as error:
            refused = "CERTIFICATE_VERIFY_FAILED" in str(error)
            what = "shows a certificate that fails" if refused else "does not answer"
            raise ServiceUnavailable(
                f"{self._name} {what}",
                got=f"{type(error).__name__}: {error}",
                where=f"{method} {self.endpoint.url}{path}",
                do=_CERTIFICATE if refused else self._do,
            ) from error

    def close(self) -> None:
        """Close the idle connections; the next call opens another."""
        old, self._pool = self._pool, self._new_pool()
        old.close()


class _Unverified(HTTPSConnection):
    """A connection whose certificate is not checked, on purpose: no warning about it."""

    def connect(self) -> None:
        super().connect()
        self.is_verified = True


def fetch(
    url: str,
    *,
    name: str,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    max_bytes: int = MAX_ANSWER_BYTES,
    verify: bool = True,
) -> Response:
    """Return the response of one GET of ``url``, as ``HttpServer.call`` does."""
    parts = urlsplit(url)
    endpoint = Endpoint.of(f"{parts.scheme}://{parts.netloc}")
    server = HttpServer(endpoint, name=name, tls=None if verify else unverified_context())
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return server.call("GET", path, headers=headers, timeout_s=timeout_s, max_bytes=max_bytes)
    finally:
        server.close()


def unverified_context() -> ssl.SSLContext:
    """Return a TLS context that checks no certificate; send no secret over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def basic_authorization(credentials: str) -> dict[str, str]:
    """Return the header for "user:password"; none for ""."""
    if not credentials:
        return {}
    return {"Authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}"}
