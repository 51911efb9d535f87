"""What every call passes before its route: host name, sizes, token, scope, rate limits, leader.

``AccessMiddleware`` is plain ASGI middleware, because every heartbeat passes through it: one
SHA-256, one dictionary lookup, one token bucket. FastAPI's security dependencies would run after it
has read the body, so a caller without a token could send one. A call to a route that is not in
``api.routes`` is refused here and does not reach the app.
"""

from __future__ import annotations

import hmac
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.api.limits import (
    MAX_BODY_BYTES,
    HostNames,
    TokenBuckets,
    bounded_body,
    size_refusal,
)
from paceline.api.problems import problem_response
from paceline.api.routes import RouteMatch, find_route
from paceline.config import Secrets, SecuritySettings
from paceline.coordinator import (
    INCLUDES,
    Call,
    Caller,
    Coordinator,
    TokenRegistry,
    audit_event,
    current_call,
    scopes_of,
    sha256_of,
)
from paceline.coordinator.state import EmitEvent, TokensUsed
from paceline.coordinator.stores import Term
from paceline.errors import (
    AccessDenied,
    InvalidInput,
    NotFound,
    NotLeading,
    PacelineError,
    TooManyCalls,
)
from paceline.schemas import EPOCH_HEADER, LEADER_HEADER, EventName, Scope as TokenScope

log = logging.getLogger(__name__)

ROWS_PER_S, ROWS_AT_ONCE = 2.0, 200.0
BATCH = 50
WRITE_S = 0.25
USES_S = 30.0  # between two checks for used tokens
TOKEN_USE_INTERVAL_S = 3600.0  # between two stored times of last use of one token
BURST = 4.0  # a bucket holds the calls of so many seconds
UNBOUND_WORKERS = 400.0  # a token that is bound to no worker has the limit of so many workers
# Changes are stored, and etcd keeps replaced values for an hour: with this limit one token writes
# less than 1 GiB an hour, half of etcd's own quota.
CHANGE_BYTES_PER_S = 256 * 1024.0
CHANGE_BYTES_AT_ONCE = 64 * 1024 * 1024.0
OPEN_PER_S = 50.0  # calls to open paths, per client address
FIRST_ADMIN = "installation"  # name in audit rows of the installation's first admin token
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH")


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """One refused attempt at a change; refused by the middleware or by the app behind it."""

    call: Call
    status: int
    code: str


class Authenticator:
    """Authenticates bearer tokens: the installation's own and those of the TokenRegistry."""

    def __init__(self, secrets: Secrets, registry: Callable[[], TokenRegistry]) -> None:
        if not secrets.coordinator_token:
            raise InvalidInput(
                "the coordinator has no token",
                got="an empty one",
                wanted="Secrets.coordinator_token",
                do="Start it with `paceline up`, which makes one.",
            )
        self._registry = registry
        self._builtin_tokens = (
            (sha256_of(secrets.agents_token), _builtin_caller("agents", TokenScope.WORKER)),
            (sha256_of(secrets.coordinator_token), _builtin_caller(FIRST_ADMIN, TokenScope.ADMIN)),
        )
        self.seen: dict[str, float] = {}  # when each TokenRegistry token was last used

    def authenticate(self, authorization: list[bytes], now: float) -> Caller:
        """Return the caller whose token the header carries; raises AccessDenied."""
        scheme, _, given = authorization[0].partition(b" ") if authorization else (b"", b"", b"")
        if len(authorization) != 1 or scheme.lower() != b"bearer" or not given:
            raise AccessDenied(
                "no token was given" if not authorization else "the token is not accepted",
                wanted="Authorization: Bearer TOKEN",
                do="Use a token of this installation: `paceline tokens create`.",
            )
        token = given.decode("latin-1")
        digest = sha256_of(token)
        for known, caller in self._builtin_tokens:
            if hmac.compare_digest(known, digest):
                return caller
        record = self._registry().authenticate(token, now)
        self.seen[record.token_id] = now
        return Caller(
            name=record.name,
            token_id=record.token_id,
            scopes=scopes_of(record),
            worker_id=record.worker_id,
            team=record.team,
            project=record.project,
            admission=record.admission or record.token_id,
            begins=record.admission is not None and record.begun_at is None,
            authority=record.authority,
        )


class AccessMiddleware:
    """ASGI middleware that checks a call before its route; see the module."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        security: SecuritySettings,
        names: Iterable[str],
        refused: Callable[[RefusedCall], None],
        begin: Callable[[str], object],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``begin`` is called with a worker token's id when the token is first used."""
        self._app, self._authenticator = app, authenticator
        self._refused, self._begin = refused, begin
        self._names = HostNames((*names, *security.rest_hosts))
        self._monotonic, self._wall = monotonic, wall
        calls, beats = security.calls_per_s, security.beats_per_s
        fails = security.failures_per_minute
        self._open = TokenBuckets(OPEN_PER_S, OPEN_PER_S * BURST)
        self._calls = TokenBuckets(calls, calls * BURST)
        self._beats = TokenBuckets(beats, beats * BURST)
        self._many_beats = TokenBuckets(beats * UNBOUND_WORKERS, beats * UNBOUND_WORKERS * BURST)
        self._bodies = TokenBuckets(CHANGE_BYTES_PER_S, CHANGE_BYTES_AT_ONCE)
        self._failures = TokenBuckets(fails / 60.0, fails)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # lifespan; uvicorn serves no websockets
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if (error := self._names.refusal(scope)) is not None:
            await problem_response(error, 421)(scope, receive, send)
            return
        if (too_large := size_refusal(scope)) is not None:
            await problem_response(*too_large)(scope, receive, send)
            return
        found = find_route(method, scope["path"])
        address = scope["client"][0] if scope.get("client") else ""
        caller, refusal = self._authorize(scope, found, address)
        route = found.route
        call = Call(
            caller=caller,
            what=f"{method if method in METHODS else '?'} {found.path or '?'}",
            address=address,
            on=found.parameters,
            is_change=route is not None and route.is_change,
        )
        if refusal is not None:
            if call.is_change:
                self._refused(RefusedCall(call, refusal.status, refusal.error.code))
            response = problem_response(refusal.error, refusal.status, refusal.headers)
            await response(scope, receive, send)
            return

        async def send_and_audit(message: Message) -> None:
            status = message.get("status", 0)
            if message["type"] == "http.response.start" and 400 <= status != 503:  # 503: "again"
                self._refused(RefusedCall(call, status, scope.get("paceline.code", "")))
            await send(message)

        if caller is not None and caller.begins:
            try:
                await run_in_threadpool(self._begin, caller.token_id)
            except PacelineError as error:  # cannot commit now; the next call tries again
                log.info("first use of %s is not kept now: %s", caller.token_id, error)
        mark = current_call.set(call)
        try:
            await self._app(
                scope, bounded_body(receive), send_and_audit if call.is_change else send
            )
        finally:
            current_call.reset(mark)

    def _authorize(
        self, scope: Scope, found: RouteMatch, address: str
    ) -> tuple[Caller | None, _Refusal | None]:
        now_s, route = self._monotonic(), found.route
        if route is not None and route.is_open:
            return None, _rate_limited(self._open.take(address, now_s))
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        try:
            caller = self._authenticator.authenticate(given, self._wall())
        except AccessDenied as error:
            # An address with many failures receives 429; a valid token passes even from there.
            rate_limit = _rate_limited(self._failures.take(address, now_s))
            return None, rate_limit or _Refusal(error, 401)
        if route is None:
            return caller, _unknown(scope)
        if caller.scopes.isdisjoint(route.scopes):
            wanted = " or ".join(route.scopes)
            denied = AccessDenied(
                "the token lacks the scope of this route",
                got=f"scope {', '.join(sorted(caller.scopes))}",
                wanted=f"scope {wanted}",
                where=f"{scope['method']} {found.path}",
                do="Ask an admin for a token with that scope: `paceline tokens create"
                f" --scope {route.scopes[0]}`.",
            )
            return caller, _rate_limited(self._take(caller, "calls", now_s)) or _Refusal(
                denied, 403
            )
        rate_limit = _rate_limited(self._take(caller, route.bucket, now_s))
        if rate_limit is None and route.is_change:
            rate_limit = _rate_limited(
                self._bodies.take(caller.token_id, now_s, _body_bytes(scope))
            )
        return caller, rate_limit

    def _take(self, caller: Caller, bucket: str, now_s: float) -> float:
        if bucket != "beats":
            return self._calls.take(caller.token_id, now_s)
        bound = self._beats if caller.worker_id else self._many_beats
        return bound.take(caller.token_id, now_s)


def _body_bytes(scope: Scope) -> int:
    """Return the body's length from Content-Length, or the maximum if there is none."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)  # digits only: size_refusal checked it
    return MAX_BODY_BYTES


def _builtin_caller(name: str, scope: TokenScope) -> Caller:
    return Caller(name=name, token_id=name, scopes=INCLUDES[scope])


@dataclass(frozen=True, slots=True)
class _Refusal:
    error: PacelineError
    status: int
    headers: dict[str, str] | None = None


def _rate_limited(wait_s: float) -> _Refusal | None:
    if not wait_s:
        return None
    error = TooManyCalls(
        "too many calls",
        wanted=f"the next one in {wait_s:.2f} s",
        do="Wait as long as Retry-After says.",
    )
    return _Refusal(error, 429, {"Retry-After": str(math.ceil(wait_s))})


def _unknown(scope: Scope) -> _Refusal:
    where = f"{scope['method']} {scope['path'][:200]}"
    allowed = [method for method in METHODS if find_route(method, scope["path"]).route]
    if not allowed:
        return _Refusal(NotFound("no such route", where=where, do="See /docs."), 404)
    error = InvalidInput("no such method here", wanted=", ".join(allowed), where=where)
    return _Refusal(error, 405, {"Allow": ", ".join(allowed)})


# Leader redirects: a standby answers reads, redirects other calls to the leader (307), or refuses
# them with 503 while there is no leader. Every response carries the epoch and the leader's URL. A
# leader whose term ended during a call (frozen or disconnected) withholds the response, because it
# may be outdated. Tokens are checked before this middleware.

READS = ("GET", "HEAD", "OPTIONS")
DECIDING_READS = ("/lanes",)  # a GET that acknowledges the manifest


class LeaderGate:
    """ASGI middleware that lets only the leader answer calls that decide something."""

    def __init__(self, app: ASGIApp, *, coordinator: Coordinator) -> None:
        self._app = app
        self._coordinator = coordinator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        coordinator = self._coordinator
        term = coordinator.term
        leader = coordinator.leader
        deciding = scope["method"] not in READS or scope["path"].endswith(DECIDING_READS)
        withheld = False

        async def send_with_leader(message: Message) -> None:
            nonlocal withheld
            if message["type"] == "http.response.start":
                if deciding and term is not None and coordinator.term != term:
                    withheld = True
                    await self._refuse(scope, receive, send)
                    return
                headers = MutableHeaders(scope=message)
                headers[EPOCH_HEADER] = str(term.epoch if term else coordinator.leader_epoch)
                if leader is not None:
                    headers[LEADER_HEADER] = leader.url
            if not withheld:
                await send(message)

        if not deciding or term is not None:
            await self._app(scope, receive, send_with_leader)
        elif leader is not None:
            redirect = Response(
                status_code=307, headers={"Location": _leader_location(leader, scope)}
            )
            await redirect(scope, receive, send_with_leader)
        else:
            await problem_response(_no_leader())(scope, receive, send_with_leader)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {EPOCH_HEADER: str(self._coordinator.leader_epoch)}
        await problem_response(_no_leader(), headers=headers)(scope, receive, send)


def _leader_location(leader: Term, scope: Scope) -> str:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    return leader.url + (path + (b"?" + query if query else b"")).decode("latin-1")


def _no_leader() -> NotLeading:
    return NotLeading(
        "this replica does not lead",
        got="no replica is known to lead now",
        do="Call again in a second, or another replica.",
    )


class AuditWriter:
    """Commits audit rows of refused changes, and the time each token was last used, on its own
    thread; only ``refused`` is called from the event loop.

    Refusals are recorded at a bounded rate (the next row counts those left out), token uses at most
    once an hour. Refusals that cannot be committed (on a standby, or while the store is
    unavailable) are logged instead.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        seen: MutableMapping[str, float],
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._coordinator, self._seen, self._wall = coordinator, seen, wall
        self._rows: deque[EmitEvent] = deque(maxlen=int(ROWS_AT_ONCE))
        self._allowance = TokenBuckets(ROWS_PER_S, ROWS_AT_ONCE)
        self._left_out = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="audit-writer", daemon=True)

    def start(self) -> None:
        """Start the writer thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write what is queued and end the thread."""
        self._stopping.set()
        self._thread.join(timeout=10)

    def refused(self, attempt: RefusedCall) -> None:
        """Queue a refused attempt; never blocks, and the queue is bounded."""
        full = len(self._rows) == self._rows.maxlen
        if full or self._allowance.take("refused", time.monotonic()):
            self._left_out += 1
            return
        outcome = f"{attempt.status} {attempt.code}".strip()
        row = audit_event(attempt.call, EventName.CHANGE_REFUSED, outcome, self._wall())
        if self._left_out:
            row.data["left_out_before"], self._left_out = self._left_out, 0
        self._rows.append(row)

    def _work(self) -> None:
        next_uses_s = time.monotonic() + USES_S
        while not self._stopping.wait(WRITE_S):
            self._write()
            if time.monotonic() >= next_uses_s:
                self._keep_uses()
                next_uses_s = time.monotonic() + USES_S
        self._keep_uses()
        self._write()

    def _write(self) -> None:
        while self._rows:
            batch = [self._rows.popleft() for _ in range(min(BATCH, len(self._rows)))]
            try:
                self._coordinator.commit_audit_events(batch)
            except PacelineError as error:
                for row in batch:
                    log.warning("refused, not in the audit history (%s): %s", error.what, row.data)

    def _keep_uses(self) -> None:
        uses = []
        for token_id, at in list(self._seen.items()):
            record = self._coordinator.tokens.find(token_id)
            if record is None:
                self._seen.pop(token_id, None)  # the coordinator no longer stores this token
            if record is not None and (record.last_used_at or 0.0) + TOKEN_USE_INTERVAL_S <= at:
                uses.append((token_id, at))
        for start in range(0, len(uses), BATCH):
            try:
                self._coordinator.handle(TokensUsed(uses=tuple(uses[start : start + BATCH])))
            except PacelineError as error:
                log.info("when tokens were last used is not kept now: %s", error)
                return
