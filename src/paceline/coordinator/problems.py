"""Errors as RFC 9457 problem documents, and the two guards before every route.

The only place that knows which error is which HTTP status.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Collection
from http import HTTPStatus

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline import errors
from paceline.errors import AccessDenied, InvalidInput, NotFound, PacelineError
from paceline.wire.calls import Problem

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024 * 1024
RETRY_AFTER_S = 1
LONGEST_FIELD = 500
STATUS: dict[type[PacelineError], int] = {
    errors.TemporaryError: 503,
    errors.InvalidInput: 422,
    errors.AccessDenied: 403,
    errors.NotFound: 404,
    errors.StorageFull: 507,
    # What is asked for does not fit what is there; nothing is wrong with the server.
    errors.PermanentError: 409,
}


def status_of(error: PacelineError) -> int:
    """Return the HTTP status that stands for ``error``."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def problem_response(
    error: PacelineError, status: int | None = None, headers: dict[str, str] | None = None
) -> Response:
    """Return ``error`` as a problem document."""
    status = status_of(error) if status is None else status
    sent = dict(headers or {})
    if status == HTTPStatus.UNAUTHORIZED:
        sent["WWW-Authenticate"] = "Bearer"
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        sent["Retry-After"] = str(RETRY_AFTER_S)
    problem = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=_clean(error.what) or "",
        code=error.code,
        got=_clean(error.got),
        wanted=_clean(error.wanted),
        where=_clean(error.where),
        do=_clean(error.do),
    )
    body = problem.model_dump_json(exclude_none=True)
    return Response(body, status, sent, media_type="application/problem+json")


def add_problem_handlers(app: FastAPI) -> None:
    """Have ``app`` answer every error with a problem document."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, PacelineError)
        if status_of(error) >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.warning("%s %s: %s", request.method, request.url.path, error)
        return problem_response(error)

    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        problem = InvalidInput(
            "the request is not acceptable",
            got=f"{place} = {first.get('input')!r}",
            wanted=first["msg"],
            where=f"{request.method} {request.url.path}",
        )
        return problem_response(problem, 400 if first["type"] == "json_invalid" else 422)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        kind = NotFound if error.status_code == HTTPStatus.NOT_FOUND else InvalidInput
        where = f"{request.method} {request.url.path}"
        problem = kind(str(error.detail), where=where)
        return problem_response(problem, error.status_code, dict(error.headers or {}))

    async def broken(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem_response(PacelineError("the coordinator failed; its log says why"), 500)

    app.add_exception_handler(PacelineError, refused)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(StarletteHTTPException, http)
    app.add_exception_handler(Exception, broken)


class TokenGuard:
    """Lets nothing pass without the bearer token, except to ``open_paths``."""

    def __init__(self, app: ASGIApp, *, token: str, open_paths: Collection[str]) -> None:
        if not token:
            raise InvalidInput(
                "the coordinator has no token",
                got="an empty one",
                wanted="Secrets.coordinator_token",
                do="Start it with `paceline up`, which makes one.",
            )
        self._app = app
        self._wanted = f"Bearer {token}".encode()
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) == 1 and hmac.compare_digest(given[0], self._wanted):
            await self._app(scope, receive, send)
            return
        denied = AccessDenied(
            "the token is not accepted" if given else "no token was given",
            wanted="Authorization: Bearer TOKEN",
            do="Use the coordinator token of this installation.",
        )
        await problem_response(denied, 401)(scope, receive, send)


class BodyLimit:
    """Refuses bodies over the limit, by their announced length or as they arrive."""

    def __init__(self, app: ASGIApp, *, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and self._too_long(value):
                error = InvalidInput(
                    "the body is too long", wanted=f"at most {self._max_bytes} bytes"
                )
                await problem_response(error, 413)(scope, receive, send)
                return
        arrived = 0

        async def counted() -> Message:
            nonlocal arrived
            message = await receive()
            arrived += len(message.get("body", b""))
            if arrived > self._max_bytes:
                raise HTTPException(413, f"the body is longer than {self._max_bytes} bytes")
            return message

        await self._app(scope, counted, send)

    def _too_long(self, value: bytes) -> bool:
        # Digits only: servers refuse anything else, and 10,000 of them are no number to compute.
        return not value.isdigit() or len(value) > 18 or int(value) > self._max_bytes


def _clean(value: object) -> str | None:
    if value is None:
        return None
    text = str(value)
    text = text if len(text) <= LONGEST_FIELD else text[:LONGEST_FIELD] + "…"
    # A lone surrogate out of somebody's JSON must not break the answer that complains about it.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
