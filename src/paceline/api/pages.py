"""Routes of /metrics, /events/stream, /fleet and /docs, and the OpenAPI document."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from paceline.api.event_stream import EventStream, StreamHub
from paceline.api.routes import ROUTES, Route
from paceline.coordinator import Coordinator, CoordinatorState
from paceline.schemas.calls import Problem
from paceline.schemas.events import LeaderView
from paceline.telemetry import FleetMetrics, Snapshot, docs_page, fleet_page
from paceline.telemetry.metrics import CONTENT_TYPE
from paceline.telemetry.page import PAGE_HEADERS

STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Items of paceline.schemas.events."}
}


def add_observation(
    app: FastAPI, coordinator: Coordinator, *, url: str = "", replica_id: str = ""
) -> StreamHub:
    """Add /metrics, /events/stream, /fleet and /docs to ``app``; return the stream's hub.

    The caller closes the hub.
    """
    metrics = FleetMetrics(lambda: coordinator.read(_snapshot))

    @app.get("/metrics", tags=["observation"], response_class=Response)
    def get_metrics() -> Response:
        """Return the metrics in Prometheus text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    hub = StreamHub(coordinator, lambda: _leader(coordinator, url, replica_id))

    @app.get(
        "/events/stream",
        status_code=200,
        tags=["observation"],
        response_class=EventStream,
        responses=STREAM,
    )
    async def stream_events(
        deployment: Annotated[str | None, Query(max_length=128)] = None,
        after: Annotated[int | None, Query(ge=0, le=2**62)] = None,
        for_s: Annotated[float | None, Query(gt=0, le=86_400, allow_inf_nan=False)] = None,
        last_event_id: Annotated[int | None, Header(alias="Last-Event-ID", ge=0, le=2**62)] = None,
    ) -> Response:
        """Stream events and the fleet's state as server-sent events.

        ``deployment`` limits the stream to one deployment. Events start after ``Last-Event-ID`` (or
        ``after``), without either from now on. ``for_s`` ends the response after so many seconds.
        """
        begin = after if last_event_id is None else last_event_id
        return EventStream(hub, await hub.join(deployment, begin), for_s)

    @app.get("/fleet", include_in_schema=False)
    async def get_fleet_page() -> HTMLResponse:
        return HTMLResponse(fleet_page(), headers=PAGE_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def get_docs_page() -> HTMLResponse:
        return HTMLResponse(docs_page(), headers=PAGE_HEADERS)

    return hub


def _leader(coordinator: Coordinator, url: str, replica_id: str) -> LeaderView:
    leader = coordinator.leader
    return LeaderView(
        replica_id=replica_id,
        url=url,
        leads=coordinator.term is not None,
        leader_url=None if leader is None else leader.url,
        epoch=0 if leader is None else leader.epoch,
    )


def _snapshot(state: CoordinatorState) -> Snapshot:
    deployments = state.deployments()
    return Snapshot(
        deployments=deployments,
        progress={
            each.deployment_id: state.view(each.deployment_id).progress
            for each in deployments
            if not each.status.is_final
        },
        workers=state.fleet.workers(),
        beats=state.beats,
        beats_refused=state.beats_refused,
        leader_epoch=state.leader_epoch,
    )


# The OpenAPI document: schemas from FastAPI, scopes and statuses from ``api.routes``. Every error
# is a problem document, so each possible status is listed with that schema; FastAPI's default 422,
# which never occurs, is removed.

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
    """Make ``app`` serve its OpenAPI document, built at the first call."""

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
