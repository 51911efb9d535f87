"""Which token opens which route, and what else holds for it: the one table.

The guard refuses by it, the OpenAPI document is written from it, and an app with a route that has
no line here does not start.
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
    """What holds for one method of one path."""

    scopes: tuple[Scope, ...]  # any one of them opens it; none at all: it is open to everybody
    bucket: Bucket = "calls"  # which of the caller's allowances it draws on
    is_change: bool = False  # gets an audit row, refused or not
    errors: tuple[int, ...] = ()  # beyond those of every guarded route

    @property
    def is_open(self) -> bool:
        """Return whether no token is asked for."""
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
    # Open: the probes, pages that hold no data and ask for the token, and what is public anyway.
    ("GET", "/healthz"): _open(),
    ("GET", "/readyz"): _open((503,)),
    ("GET", "/ca.pem"): _open((503,)),
    ("GET", "/fleet"): _open(),
    ("GET", "/docs"): _open(),
}


def paths_open() -> tuple[str, ...]:
    """Return the paths that ask for no token."""
    return tuple(path for (_, path), route in ROUTES.items() if route.is_open)


@dataclass(frozen=True, slots=True)
class Found:
    """Which route a call is for; ``route`` is None where the method or the path is unknown."""

    path: str  # the table's, with its parameters' names
    parameters: dict[str, str]
    route: Route | None


class RouteTable:
    """Finds a call's route by method and path: a dictionary first, patterns after."""

    def __init__(self, routes: dict[tuple[str, str], Route] | None = None) -> None:
        self._routes = ROUTES if routes is None else routes
        paths = dict.fromkeys(path for _, path in self._routes)
        self._exact = frozenset(path for path in paths if "{" not in path)
        self._patterns = [
            (re.compile(PARAMETER.sub(r"(?P<\1>[^/]+)", path)), path)
            for path in paths
            if "{" in path
        ]

    def find(self, method: str, path: str) -> Found:
        """Return what ``method path`` is; HEAD is no GET here, as in the app."""
        if path in self._exact:
            return Found(path, {}, self._routes.get((method, path)))
        for pattern, template in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                return Found(template, match.groupdict(), self._routes.get((method, template)))
        return Found("", {}, None)


def require_declared(app: FastAPI) -> None:
    """Raise InvalidInput where ``app`` has a route that the table does not know."""
    unknown = sorted(set(routes_of(app)) - set(ROUTES))
    if unknown:
        raise InvalidInput(
            "routes without a declared scope",
            got=", ".join(f"{method} {path}" for method, path in unknown),
            wanted="a line for each in service/routes.py",
        )


def routes_of(app: FastAPI) -> Iterable[tuple[str, str]]:
    """Yield each method and path that ``app`` answers; HEAD goes with its GET.

    What answers all methods, or is no plain route (a mount, a socket), shows as method ``*``.
    """
    for context in iter_route_contexts(app.routes):
        methods = sorted(context.methods or ["*"])
        for method in methods:
            if method != "HEAD":
                yield method, str(context.path)
