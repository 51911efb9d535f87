"""The API as a document: what FastAPI knows of the records, and what the table knows of the rest.

Every error is a problem document, so each status that can come is listed with that schema; the
stock 422 of FastAPI, which never comes, is taken out.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from paceline.service.routes import ROUTES, Route
from paceline.wire.calls import Problem

SCHEME = "token"
EVERYWHERE = (414, 421, 429, 431)
GUARDED = (401, 403, 503)
WITH_BODY = (400, 408, 413, 422)
HEADERS = {401: "WWW-Authenticate", 429: "Retry-After", 503: "Retry-After"}
ABOUT = """Paceline's coordinator. Every error is a problem document (RFC 9457) with what was got
and wanted, where, and what to do. Replicas that do not lead answer reads and send changes to the
leader.
"""


def describe(app: FastAPI) -> None:
    """Have ``app`` serve its document, made at the first call."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(
        title=app.title, version=app.version, description=ABOUT, routes=list(app.routes)
    )
    components = made.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for stock in ("HTTPValidationError", "ValidationError"):
        schemas.pop(stock, None)
    schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    components["securitySchemes"] = {
        SCHEME: {
            "type": "http",
            "scheme": "bearer",
            "description": "`paceline tokens create`; each route names the scopes that open it.",
        }
    }
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            _complete(operation, ROUTES[method.upper(), path])
    return made


def _complete(operation: dict[str, Any], route: Route) -> None:
    operation["security"] = [] if route.is_open else [{SCHEME: []}]
    if not route.is_open:
        scopes = " or ".join(f"`{scope}`" for scope in route.scopes)
        operation["description"] = f"{operation.get('description', '')}\n\nScope: {scopes}.".strip()
    responses = operation.setdefault("responses", {})
    responses.pop("422", None)
    for content in responses.get("200", {}).get("content", {}).items():
        if content[0] == "text/event-stream":
            content[1].pop("schema", None)  # its items are in docs/schemas/event-stream.json
    statuses = {*EVERYWHERE, *route.errors}
    if not route.is_open:
        statuses.update(GUARDED)
    if "requestBody" in operation:
        statuses.update(WITH_BODY)
    if route.is_change or route.bucket == "beats":
        responses["307"] = {
            "description": "Another replica leads: call it.",
            "headers": {"Location": {"schema": {"type": "string"}}},
        }
    for status in sorted(statuses):
        responses[str(status)] = _problem(status)


def _problem(status: int) -> dict[str, Any]:
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    made: dict[str, Any] = {"description": HTTPStatus(status).phrase, "content": content}
    if status in HEADERS:
        made["headers"] = {HEADERS[status]: {"required": True, "schema": {"type": "string"}}}
    return made
