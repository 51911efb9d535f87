"""Routes of /metrics, /events/stream, /fleet and /docs, and the OpenAPI document."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, RedirectResponse

from paceline.api.event_stream import EventStream, StreamHub
from paceline.api.routes import ROUTES
from paceline.config import Profile
from paceline.coordinator import Coordinator, CoordinatorState, current_caller
from paceline.errors import NotFound
from paceline.jobs import JobTable, hosts_of
from paceline.schemas import LeaderView, Problem
from paceline.telemetry import (
    CONTENT_TYPE,
    PAGE_FILES,
    PAGE_HEADERS,
    FleetMetrics,
    Snapshot,
    page_text,
)

STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Items of paceline.schemas.events."}
}


def add_observation(
    app: FastAPI,
    coordinator: Coordinator,
    jobs: JobTable,
    profile: Profile,
    *,
    url: str = "",
    replica_id: str = "",
) -> None:
    """Add /metrics, /events/stream, /fleet and /docs to ``app``."""

    def snapshot() -> Snapshot:
        shot = coordinator.read(_snapshot)
        if coordinator.term is None:
            return shot
        return replace(shot, jobs=jobs.metrics(hosts_of(shot.workers, profile.training)))

    metrics = FleetMetrics(snapshot)

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
        return EventStream(hub, await hub.join(deployment, begin, current_caller()), for_s)

    @app.get("/", include_in_schema=False)
    async def get_start() -> RedirectResponse:
        return RedirectResponse("/fleet")

    @app.get("/pages/{name}", include_in_schema=False)
    async def get_page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise NotFound("no such file of a page", got=name[:100], do="See /fleet and /docs.")
        kind = PAGE_FILES[name]
        return Response(page_text(name), media_type=kind, headers=PAGE_HEADERS)

    @app.get("/fleet", include_in_schema=False)
    async def get_fleet_page() -> HTMLResponse:
        return HTMLResponse(page_text("fleet.html"), headers=PAGE_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def get_docs_page() -> HTMLResponse:
        return HTMLResponse(page_text("docs.html"), headers=PAGE_HEADERS)


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
        beats=state.agents.beats,
        beats_refused=state.agents.beats_refused,
        leader_epoch=state.leader_epoch,
    )


# The OpenAPI document: schemas from FastAPI, scopes from ``api.routes``. Every error is a problem
# document, which is the default response of each operation.

SCHEME = "token"
LEADER = {
    "description": "Another replica leads: call it.",
    "headers": {"Location": {"schema": {"type": "string"}}},
}
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
    made["components"]["schemas"]["Problem"] = Problem.model_json_schema()
    made["components"]["securitySchemes"] = {
        SCHEME: {
            "type": "http",
            "scheme": "bearer",
            "description": "`paceline tokens create`; each route names the scopes that open it.",
        }
    }
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            route = ROUTES[method.upper(), path]
            operation["security"] = [] if route.is_open else [{SCHEME: []}]
            if not route.is_open:
                scopes = " or ".join(f"`{scope}`" for scope in route.scopes)
                about = operation.get("description", "")
                operation["description"] = f"{about}\n\nScope: {scopes}.".strip()
            if route.is_change or route.bucket == "beats":
                operation["responses"]["307"] = LEADER
    return made
