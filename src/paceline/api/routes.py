"""Table of all REST routes: required scopes, rate limit, audit and error statuses.

The guard enforces it and the OpenAPI document is generated from it. An app with a route that is
missing here does not start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from paceline.errors import InvalidInput
from paceline.schemas.access import Scope

Bucket = Literal["open", "calls", "beats"]
PARAMETER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Access rules of one method of one path."""

    scopes: tuple[Scope, ...]  # any one of them is enough; empty: no token needed
    bucket: Bucket = "calls"  # the rate limit that applies
    is_change: bool = False  # gets an audit row, whether accepted or refused
    errors: tuple[int, ...] = ()  # HTTP statuses besides those of every guarded route

    @property
    def is_open(self) -> bool:
        """Return whether no token is needed."""
        return not self.scopes


def _open(errors: tuple[int, ...] = ()) -> Route:
    return Route(scopes=(), bucket="open", errors=errors)


def _read(*errors: int) -> Route:
    return Route(scopes=(Scope.READ,), errors=errors)


def _change(*errors: int, scope: Scope = Scope.DEPLOY) -> Route:
    return Route(scopes=(scope,), is_change=True, errors=(400, 413, *errors))


def _worker(*errors: int, is_change: bool = False) -> Route:
    return Route(scopes=(Scope.WORKER,), bucket="beats", is_change=is_change, errors=errors)


ONE = "/deployments/{deployment_id}"
STAGE = "/ledger/{stage}/{input_digest}"
ROUTES: dict[tuple[str, str], Route] = {
    ("POST", "/deployments"): _change(404, 409, 422, 507),
    ("GET", "/deployments"): _read(422),
    ("GET", ONE): _read(404, 422),
    ("DELETE", ONE): _change(404, 409, 422),
    ("GET", f"{ONE}/workers"): _read(404, 422),
    ("GET", f"{ONE}/manifest"): Route(
        scopes=(Scope.READ, Scope.WORKER), bucket="beats", errors=(404, 422)
    ),
    ("GET", f"{ONE}/lanes"): _worker(404, 409, 422),
    ("GET", f"{ONE}/plan"): _read(404, 422),
    ("GET", f"{ONE}/switch"): _read(404, 422),
    ("POST", f"{ONE}/activate"): _change(404, 409, 422),
    ("POST", f"{ONE}/rollback"): _change(404, 409, 422),
    ("POST", f"{ONE}/budget"): _change(404, 409, 422, scope=Scope.ADMIN),
    ("POST", "/workers/register"): _worker(400, 409, 413, 422, is_change=True),
    ("POST", "/workers/heartbeat"): _worker(400, 409, 413, 422),
    ("GET", "/workers"): _read(),
    ("POST", "/workers/join"): _change(409, 422, scope=Scope.JOIN),
    ("POST", "/workers/renew"): _change(409, 422, scope=Scope.WORKER),
    ("GET", STAGE): _read(404, 422),
    ("PUT", STAGE): _change(409, 422, scope=Scope.LEDGER),
    ("GET", "/events"): _read(422),
    ("GET", "/events/stream"): _read(404, 422),
    ("GET", "/audit"): Route(scopes=(Scope.ADMIN,), errors=(422,)),
    ("GET", "/tokens"): Route(scopes=(Scope.ADMIN,)),
    ("POST", "/tokens"): _change(409, 422, scope=Scope.ADMIN),
    ("POST", "/tokens/join"): _change(409, 422, scope=Scope.ADMIN),
    ("DELETE", "/tokens/{token_id}"): _change(404, 422, scope=Scope.ADMIN),
    ("GET", "/metrics"): _read(),
    ("GET", "/openapi.json"): _read(),
    # Open: the probes, pages without data that ask for the token, and public files.
    ("GET", "/healthz"): _open(),
    ("GET", "/readyz"): _open((503,)),
    ("GET", "/ca.pem"): _open((503,)),
    ("GET", "/fleet"): _open(),
    ("GET", "/docs"): _open(),
}


def paths_open() -> tuple[str, ...]:
    """Return the paths that need no token."""
    return tuple(path for (_, path), route in ROUTES.items() if route.is_open)


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """The matched route of a call; ``route`` is None if the method or path is unknown."""

    path: str  # the path template
    parameters: dict[str, str]
    route: Route | None


class RouteTable:
    """Finds a call's route by method and path: exact paths first, then patterns."""

    def __init__(self, routes: dict[tuple[str, str], Route] | None = None) -> None:
        self._routes = ROUTES if routes is None else routes
        paths = dict.fromkeys(path for _, path in self._routes)
        self._exact = frozenset(path for path in paths if "{" not in path)
        self._patterns = [
            (re.compile(PARAMETER.sub(r"(?P<\1>[^/]+)", path)), path)
            for path in paths
            if "{" in path
        ]

    def find(self, method: str, path: str) -> RouteMatch:
        """Return the route of ``method path``; HEAD does not match GET, as in the app."""
        if path in self._exact:
            return RouteMatch(path, {}, self._routes.get((method, path)))
        for pattern, template in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                return RouteMatch(template, match.groupdict(), self._routes.get((method, template)))
        return RouteMatch("", {}, None)


def require_declared(app: FastAPI) -> None:
    """Raise InvalidInput if ``app`` has a route that is missing in the table."""
    unknown = sorted(set(routes_of(app)) - set(ROUTES))
    if unknown:
        raise InvalidInput(
            "routes without a declared scope",
            got=", ".join(f"{method} {path}" for method, path in unknown),
            wanted="a line for each in api/routes.py",
        )


def routes_of(app: FastAPI) -> Iterable[tuple[str, str]]:
    """Yield each method and path that ``app`` answers, without HEAD.

    A route for all methods, a mount or a websocket has the method ``*``.
    """
    for context in iter_route_contexts(app.routes):
        methods = sorted(context.methods or ["*"])
        for method in methods:
            if method != "HEAD":
                yield method, str(context.path)
