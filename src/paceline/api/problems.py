"""Errors as RFC 9457 problem documents.

The only module that maps error classes to HTTP statuses.
"""

from __future__ import annotations

import errno
import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from paceline import errors
from paceline.errors import InvalidInput, NotFound, PacelineError, ServiceUnavailable
from paceline.schemas import Problem

log = logging.getLogger(__name__)

PROBLEM: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A problem document (RFC 9457).",
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
        },
    }
}

RETRY_AFTER_S = 1
LONGEST_FIELD = 500
STATUS: dict[type[PacelineError], int] = {
    errors.TooManyCalls: 429,
    errors.TemporaryError: 503,
    errors.InvalidInput: 422,
    errors.AccessDenied: 403,
    errors.NotFound: 404,
    errors.StorageFull: 507,
    # The request conflicts with the current state; the server works correctly.
    errors.PermanentError: 409,
}


class ProblemResponse(Response):
    """A problem document; puts its code into the ASGI scope for the audit of refused calls."""

    media_type = "application/problem+json"

    def __init__(self, problem: Problem, headers: dict[str, str]) -> None:
        super().__init__(problem.model_dump_json(exclude_none=True), problem.status, headers)
        self._code = problem.code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["paceline.code"] = self._code
        await super().__call__(scope, receive, send)


def status_of(error: PacelineError) -> int:
    """Return the HTTP status of ``error``."""
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
    return ProblemResponse(problem, sent)


def add_problem_handlers(app: FastAPI) -> None:
    """Make ``app`` answer every error with a problem document."""

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
            got=f"{place} = {_short(first.get('input'))}",
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

    async def storage(request: Request, error: Exception) -> Response:
        assert isinstance(error, OSError)
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        problem = ServiceUnavailable(
            "a file or a connection of the coordinator failed",
            got=errno.errorcode.get(error.errno or 0, type(error).__name__),
            do="Call again; if it stays so, the coordinator's log says which.",
        )
        return problem_response(problem)

    async def broken(request: Request, error: Exception) -> Response:
        if isinstance(error, OSError):
            return await storage(request, error)
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem_response(PacelineError("the coordinator failed; its log says why"), 500)

    app.add_exception_handler(PacelineError, refused)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(StarletteHTTPException, http)
    app.add_exception_handler(OSError, storage)
    app.add_exception_handler(Exception, broken)


def _short(value: object) -> str:
    """Return ``value``'s repr, or its type and length if it is long (repr could take a second)."""
    if isinstance(value, list | dict | str) and len(value) > LONGEST_FIELD:
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)


def _clean(value: object) -> str | None:
    if value is None:
        return None
    text = str(value)
    text = text if len(text) <= LONGEST_FIELD else text[:LONGEST_FIELD] + "…"
    # A lone surrogate from a caller's JSON must not break the error response about it.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
