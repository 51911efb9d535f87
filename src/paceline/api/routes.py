"""Table of all REST routes: required scopes, rate limit and audit.

The access middleware enforces it and the OpenAPI document is generated from it. An app with a route
that is missing here does not start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from paceline.errors import InvalidInput
from paceline.schemas import Scope

Bucket = Literal["open", "calls", "beats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Access rules of one method of one path."""

    scopes: tuple[Scope, ...]  # any one of them is enough; empty: no token needed
    bucket: Bucket = "calls"  # the rate limit that applies
    is_change: bool = False  # gets an audit row, whether accepted or refused

    @property
    def is_open(self) -> bool:
        """Return whether no token is needed."""
        return not self.scopes


OPEN = Route(scopes=(), bucket="open")
READ = Route(scopes=(Scope.READ,))
ADMIN = Route(scopes=(Scope.ADMIN,))
DEPLOY = Route(scopes=(Scope.DEPLOY,), is_change=True)
TRAIN = Route(scopes=(Scope.TRAIN, Scope.DEPLOY), is_change=True)
ADMIN_CHANGE = Route(scopes=(Scope.ADMIN,), is_change=True)
WORKER = Route(scopes=(Scope.WORKER,), bucket="beats")
ONE = "/deployments/{deployment_id}"
STAGE = "/ledger/{stage}/{input_digest}"
JOBS = "/v1/training-jobs"
PURPOSES = "/v1/data-purposes"
JOB = f"{JOBS}/{{job_id}}"
COSTS = "/v1/training-costs"
ROUTES: dict[tuple[str, str], Route] = {
    ("POST", "/deployments"): DEPLOY,
    ("GET", "/deployments"): READ,
    ("GET", ONE): READ,
    ("DELETE", ONE): DEPLOY,
    ("GET", f"{ONE}/workers"): READ,
    ("GET", f"{ONE}/manifest"): Route(scopes=(Scope.READ, Scope.WORKER), bucket="beats"),
    ("GET", f"{ONE}/lanes"): WORKER,
    ("GET", f"{ONE}/plan"): READ,
    ("GET", f"{ONE}/switch"): READ,
    ("POST", f"{ONE}/activate"): DEPLOY,
    ("POST", f"{ONE}/rollback"): DEPLOY,
    ("POST", f"{ONE}/budget"): ADMIN_CHANGE,
    ("POST", "/workers/register"): Route(scopes=(Scope.WORKER,), bucket="beats", is_change=True),
    ("POST", "/workers/heartbeat"): WORKER,
    ("POST", "/workers/signed-reads"): WORKER,
    ("GET", "/workers"): READ,
    ("GET", "/workers/{worker_id}"): READ,
    ("POST", "/workers/join"): Route(scopes=(Scope.JOIN,), is_change=True),
    ("POST", "/workers/renew"): Route(scopes=(Scope.WORKER,), is_change=True),
    ("GET", STAGE): READ,
    ("PUT", STAGE): Route(scopes=(Scope.LEDGER,), is_change=True),
    ("GET", "/events"): READ,
    ("GET", "/events/stream"): READ,
    ("GET", "/audit"): ADMIN,
    ("GET", "/tokens"): ADMIN,
    ("POST", "/tokens"): ADMIN_CHANGE,
    ("POST", "/tokens/join"): ADMIN_CHANGE,
    ("DELETE", "/tokens/{token_id}"): ADMIN_CHANGE,
    ("GET", "/installation"): READ,
    # with ``train`` the flow sweep only: flow_runs.py checks it
    ("POST", "/flows"): TRAIN,
    ("GET", "/flows/{flow_run_id}"): READ,
    ("DELETE", "/flows/{flow_run_id}"): TRAIN,
    ("GET", "/approvals"): Route(scopes=(Scope.READ, Scope.APPROVE)),
    ("GET", "/approvals/{run_id}"): Route(scopes=(Scope.READ, Scope.APPROVE)),
    ("POST", "/approvals/{run_id}"): Route(scopes=(Scope.APPROVE,), is_change=True),
    ("POST", JOBS): TRAIN,
    ("GET", JOBS): READ,
    ("POST", f"{JOBS}/adopt"): Route(scopes=(Scope.LEDGER,), is_change=True),
    ("GET", JOB): READ,
    ("POST", f"{JOB}/pause"): TRAIN,
    ("POST", f"{JOB}/resume"): TRAIN,
    ("POST", f"{JOB}/cancel"): TRAIN,
    ("POST", f"{JOB}/review"): Route(scopes=(Scope.APPROVE,), is_change=True),
    ("POST", f"{JOB}/report"): Route(scopes=(Scope.LEDGER,), bucket="beats"),
    ("GET", f"{JOB}/events"): READ,
    ("GET", f"{JOB}/logs"): READ,
    ("GET", PURPOSES): READ,
    ("POST", PURPOSES): ADMIN_CHANGE,
    ("DELETE", f"{PURPOSES}/{{rule_id}}"): ADMIN_CHANGE,
    ("GET", COSTS): READ,
    ("GET", "/metrics"): READ,
    ("GET", "/openapi.json"): READ,
    # Open: the probes, pages without data that ask for the token, and public files.
    ("GET", "/healthz"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/ca.pem"): OPEN,
    ("GET", "/"): OPEN,  # leads to /fleet
    ("GET", "/fleet"): OPEN,
    ("GET", "/docs"): OPEN,
    ("GET", "/pages/{name}"): OPEN,  # their scripts and styles
}


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """The matched route of a call; ``route`` is None if the method or path is unknown."""

    path: str  # the path template
    parameters: dict[str, str]
    route: Route | None


_EXACT = frozenset(path for _, path in ROUTES if "{" not in path)
_PATTERNS = {
    path: re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))
    for _, path in ROUTES
    if "{" in path
}


def find_route(method: str, path: str) -> RouteMatch:
    """Return the route of ``method path``; HEAD does not match GET, as in the app."""
    if path in _EXACT:
        return RouteMatch(path, {}, ROUTES.get((method, path)))
    for template, pattern in _PATTERNS.items():
        match = pattern.fullmatch(path)
        if match is not None:
            return RouteMatch(template, match.groupdict(), ROUTES.get((method, template)))
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
