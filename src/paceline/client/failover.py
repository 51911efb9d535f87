"""Failover of REST calls between coordinator replicas: redirects, retries and stale answers.

With one URL a call is sent there and not retried. With several replicas the client finds the
leader, and with ``patience_s`` it waits for one while there is none. A replica whose answer is late
must answer its health check, else it counts as frozen: its kernel accepts connections, and no
answer comes. Repeating is safe because every call of this API may be repeated. The calls themselves
are in ``calls``; ``retry`` repeats one of them while no coordinator answers.
"""

from __future__ import annotations

import http
import random
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urljoin

from pydantic import BaseModel, ValidationError
from urllib3.exceptions import ReadTimeoutError

from paceline.config import one_certificate, read_certificate, read_other
from paceline.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    NotFound,
    PacelineError,
    ServiceUnavailable,
    TemporaryError,
    kind_named,
)
from paceline.schemas import EPOCH_HEADER, LEADER_HEADER, Problem
from paceline.system import Endpoint, HttpServer, Response

SUSPECT_S = 2.0  # how long an endpoint that did not answer is tried last
POLL_S = 1.0
OUTAGE_S = 60.0  # how long no coordinator may answer while a flow or a deployment is followed

OnLine = Callable[[str], None]
Result = TypeVar("Result")


class Replicas:
    """Order of the replicas to call, and the epoch check; shared by the threads of a client.

    The first choice is the replica that answered last, or the leader that it named. A replica that
    did not answer is tried last for SUSPECT_S, even if a standby still names it as the leader. An
    answer from an older epoch than one seen before is refused, because its sender no longer leads.
    This class makes no calls and never sleeps.
    """

    def __init__(
        self, urls: Sequence[str], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        endpoints = [Endpoint.of(url) for url in urls]
        self.endpoints = tuple(dict.fromkeys(endpoints))
        if not self.endpoints:
            raise InvalidInput("not a coordinator's URL", got="nothing", wanted="http://host:port")
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self.first = self.endpoints[0]  # the endpoint to call first
        self._suspect_until_s: dict[Endpoint, float] = {}
        self.epoch = 0  # the highest seen

    def order(self) -> list[Endpoint]:
        """Return the endpoints in calling order; those that did not answer lately come last."""
        with self._lock:
            now_s = self._monotonic()
            first = self.endpoints.index(self.first)
            turned = self.endpoints[first:] + self.endpoints[:first]
            return sorted(turned, key=lambda each: self._suspect_until_s.get(each, 0.0) > now_s)

    def suspect(self, endpoint: Endpoint) -> bool:
        with self._lock:
            return self._suspect_until_s.get(endpoint, 0.0) > self._monotonic()

    def silent(self, endpoint: Endpoint) -> None:
        with self._lock:
            self._suspect_until_s[endpoint] = self._monotonic() + SUSPECT_S
            if endpoint == self.first:
                where = self.endpoints.index(endpoint)
                self.first = self.endpoints[(where + 1) % len(self.endpoints)]

    def answered(self, endpoint: Endpoint, leader_url: str | None) -> None:
        """Record that ``endpoint`` answered and which leader it named."""
        with self._lock:
            self._suspect_until_s.pop(endpoint, None)
            leader = self.find(leader_url)
            named = endpoint if leader is None else leader
            is_silent = self._suspect_until_s.get(named, 0.0) > self._monotonic()
            self.first = endpoint if is_silent else named

    def find(self, url: str | None) -> Endpoint | None:
        """Return the endpoint of ``url``, or None; the token is sent only to known endpoints."""
        return next((each for each in self.endpoints if url and each.serves(url)), None)

    def add(self, endpoint: Endpoint) -> None:
        with self._lock:
            self.endpoints = tuple(dict.fromkeys((*self.endpoints, endpoint)))

    def accept_epoch(self, epoch: int | None) -> bool:
        """Return whether ``epoch`` is not older than the highest seen, and store it if so."""
        if epoch is None:
            return True  # no epoch header: a refusal by a guard before the leader check
        with self._lock:
            if epoch < self.epoch:
                return False
            self.epoch = epoch
            return True


ROUND_S = 0.25  # between two rounds over the endpoints, jittered
CONNECT_S = 1.0  # connect timeout if there are other endpoints
LATE_S = 2.0  # without an answer, beyond the wait that the call requested
HEALTH_S = 1.0

Answer = TypeVar("Answer", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class _Request:
    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    timeout_s: float  # with the long poll's wait
    wait_s: float  # how long the request asks the server to wait (long poll)


class FailoverClient:
    """Sends calls to one coordinator with one or several replicas; threads may share it."""

    def __init__(
        self,
        url: str | Sequence[str],
        token: str,
        timeout_s: float = 10.0,
        *,
        patience_s: float = 0.0,
        ca: str | Path | bytes = "",
        follows: bool = False,
    ) -> None:
        """``ca`` is one certificate (PEM, or its file) to trust instead of the system's CAs.

        With ``follows`` the leader that an https:// replica names gets the token, too, although it
        is not listed, where its certificate is one that is trusted.
        """
        self._replicas = Replicas([url] if isinstance(url, str) else url)
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._follows = follows
        self._servers: dict[Endpoint, HttpServer] = {}
        self.use(token, ca)

    def use(self, token: str, ca: str | Path | bytes = "") -> None:
        """Use ``token``, and trust ``ca``, from the next call on."""
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        earlier, self._tls = self._servers, tls_context_of(ca) if ca else None
        self._servers = servers_of(self._replicas.endpoints, self._tls)
        for each in earlier.values():
            each.close()

    @property
    def base_url(self) -> str:
        """Return the URL that the next call tries first."""
        return self._replicas.first.url

    @property
    def epoch(self) -> int:
        """Return the highest epoch seen in an answer, 0 before the first."""
        return self._replicas.epoch

    def date(self) -> str:
        """Return the Date header of the first replica; needs no token."""
        server = self._servers[self._replicas.first]
        answer = server.call("GET", "/healthz", timeout_s=self._timeout_s)
        return answer.headers.get("Date", "")

    def close(self) -> None:
        """Close idle connections; the next call opens another."""
        for each in self._servers.values():
            each.close()

    def _call(
        self,
        kind: type[Answer],
        method: str,
        path: str,
        body: BaseModel | None = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
    ) -> Answer:
        raw = self._request(method, path, body, headers=headers, timeout_s=timeout_s, wait_s=wait_s)
        try:
            return kind.model_validate_json(raw, extra="ignore")  # of a newer coordinator
        except ValidationError as error:
            raise ServiceUnavailable(
                "the coordinator's answer cannot be read",
                got=str(error).splitlines()[0],
                wanted=kind.__name__,
                where=f"{method} {self.base_url}{path}",
                do="Check that this URL is a Paceline coordinator of the same version.",
            ) from error

    def _request(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
    ) -> bytes:
        payload = None if body is None else body.model_dump_json(by_alias=True).encode()
        given = self._headers | (headers or {})
        if payload is not None:
            given["Content-Type"] = "application/json"
        limit_s = (self._timeout_s if timeout_s is None else timeout_s) + wait_s
        sent = _Request(
            method=method, path=path, body=payload, headers=given, timeout_s=limit_s, wait_s=wait_s
        )
        until_s = time.monotonic() + self._patience_s
        while True:
            try:
                return self._try_replicas(sent)
            except ServiceUnavailable:
                pause_s = ROUND_S * random.uniform(0.5, 1.5)
                if time.monotonic() + pause_s >= until_s:
                    raise
            time.sleep(pause_s)

    def _try_replicas(self, sent: _Request) -> bytes:
        """Try each endpoint, following redirects to the leader; return the response body."""
        waiting = self._replicas.order()
        problem: ServiceUnavailable | None = None
        asked: set[Endpoint] = set()
        while waiting:
            endpoint = waiting.pop(0)
            asked.add(endpoint)
            where = f"{sent.method} {endpoint.url}{sent.path}"
            try:
                answer = self._exchange(self._servers[endpoint], sent)
            except ServiceUnavailable as error:
                self._replicas.silent(endpoint)
                problem = problem or error
                continue
            if not self._replicas.accept_epoch(_epoch_of(answer)):
                problem = ServiceUnavailable(
                    "an answer from before the newest leader's time was refused",
                    got=f"epoch {answer.headers.get(EPOCH_HEADER)}",
                    wanted=f"epoch {self._replicas.epoch} or later",
                    where=where,
                    do="Call again; that replica has yet to notice the newer leader.",
                )
                continue
            if answer.status == http.HTTPStatus.TEMPORARY_REDIRECT:
                leader = self._leader_at(answer, endpoint, where)
                if leader not in asked or problem is None:
                    problem = ServiceUnavailable(
                        "the coordinator's leader does not answer",
                        got=f"{endpoint.url} points at {leader.url}",
                        where=where,
                        do="Call again; another replica takes over within seconds.",
                    )
                if leader not in asked and not self._replicas.suspect(leader):
                    waiting = [leader, *(each for each in waiting if each != leader)]
                continue
            if 200 <= answer.status < 300:
                self._replicas.answered(endpoint, answer.headers.get(LEADER_HEADER))
                return answer.body
            refusal = error_of(answer.status, answer.body, where)
            if not isinstance(refusal, ServiceUnavailable):
                raise refusal
            problem = refusal
        assert problem is not None
        raise problem

    def _exchange(self, server: HttpServer, sent: _Request) -> Response:
        """Return the response; a late one is awaited once more if the server is alive."""
        limits_s = [sent.timeout_s]
        if len(self._replicas.endpoints) > 1 and sent.wait_s + LATE_S < sent.timeout_s:
            limits_s.insert(0, sent.wait_s + LATE_S)
        while True:
            limit_s = limits_s.pop(0)
            try:
                return server.call(
                    sent.method, sent.path, sent.body, sent.headers, timeout_s=limit_s
                )
            except ServiceUnavailable as error:
                if not limits_s or not isinstance(error.__cause__, ReadTimeoutError):
                    raise
                server.call("GET", "/healthz", timeout_s=HEALTH_S)

    def _leader_at(self, answer: Response, by: Endpoint, where: str) -> Endpoint:
        named = answer.headers.get("Location")
        leader = self._replicas.find(named)
        if leader is None and named and self._follows and by.secure:
            leader = Endpoint.of(urljoin(named, "/"))
            if leader.secure:
                self._replicas.add(leader)
                self._servers = self._servers | servers_of([leader], self._tls)
                return leader
            leader = None
        if leader is None:
            raise ServiceUnavailable(
                "the leader is none of the known replicas, and the token goes to those only",
                got=named,
                wanted=", ".join(each.url for each in self._replicas.endpoints),
                where=where,
                do="Add it to this installation's coordinator_urls.",
            )
        return leader


def servers_of(
    endpoints: Sequence[Endpoint], tls: ssl.SSLContext | None
) -> dict[Endpoint, HttpServer]:
    return {
        each: HttpServer(
            each,
            name="the coordinator",
            do="Check that it runs (`paceline status`); the call may be repeated.",
            tls=tls,
            connect_s=CONNECT_S if len(endpoints) > 1 else None,
        )
        for each in endpoints
    }


def tls_context_of(ca: str | Path | bytes) -> ssl.SSLContext:
    """Return a TLS context that trusts only the certificate ``ca`` (PEM, or its file).

    While an authority is replaced, the one in the file beside it is trusted too. Raises
    InvalidInput if a file holds not exactly one certificate.
    """
    pem = one_certificate(ca) if isinstance(ca, bytes) else read_certificate(ca) + read_other(ca)
    try:
        return ssl.create_default_context(cadata=pem.decode())
    except ssl.SSLError as error:
        raise InvalidInput(
            "the coordinator's certificate authority is not usable", got=error, where=ca
        ) from error


def _epoch_of(answer: Response) -> int | None:
    said = answer.headers.get(EPOCH_HEADER, "")
    return int(said) if said.isdecimal() and len(said) < 19 else None


def error_of(status: int, answer: bytes, where: str) -> PacelineError:
    """Return the error of a problem document, or the nearest one for another response."""
    try:
        problem = Problem.model_validate_json(answer, extra="ignore")
    except ValidationError:
        text = answer[:200].decode("utf-8", "replace").strip()
        return _kind_of(status)(
            "the coordinator refused the call", got=f"HTTP {status} {text}".strip(), where=where
        )
    kind = kind_named(problem.code) or _kind_of(status)
    more = {"got": problem.got, "wanted": problem.wanted, "do": problem.do}
    return kind(problem.detail or problem.title, where=problem.where or where, **more)


def _kind_of(status: int) -> type[PacelineError]:
    by_status: dict[int, type[PacelineError]] = {
        401: AccessDenied,
        403: AccessDenied,
        404: NotFound,
        409: Conflict,
        429: TemporaryError,
    }
    if status >= 500:
        return ServiceUnavailable
    return by_status.get(status, InvalidInput)


def drop(_line: str) -> None:
    """Drop a line."""


def retry(call: Callable[[], Result], away_s: float, on_notice: OnLine = drop) -> Result:
    """Return what ``call`` returns, repeated while a server is away for at most ``away_s``.

    ``on_notice`` receives why it is repeated, each reason once.
    """
    until_s, said = time.monotonic() + away_s, ""
    while True:
        try:
            return call()
        except TemporaryError as error:
            if time.monotonic() > until_s:
                raise
            if said != error.one_line():  # once, not every second
                said = error.one_line()
                on_notice(f"trying again: {said}")
            time.sleep(POLL_S)
