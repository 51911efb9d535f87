"""The service's own routes: metrics for monitors, pages for people."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Response
from fastapi.responses import HTMLResponse

from paceline.coordinator import Coordinator, CoordinatorState
from paceline.observe import FleetMetrics, Snapshot, docs_page, fleet_page
from paceline.observe.metrics import CONTENT_TYPE
from paceline.observe.page import PAGE_HEADERS
from paceline.service.stream import EventStream, StreamHub
from paceline.wire.stream import LeaderView

STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Items of wire.stream."}
}


def add_observation(
    app: FastAPI, coordinator: Coordinator, *, url: str = "", replica_id: str = ""
) -> StreamHub:
    """Add /metrics, /events/stream, /fleet and /docs to ``app``; return the stream's hub, which its
    owner closes."""
    metrics = FleetMetrics(lambda: coordinator.read(_snapshot))

    @app.get("/metrics", tags=["observation"], response_class=Response)
    def get_metrics() -> Response:
        """Everything for Prometheus, in its text format."""
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
        """What happens, as it happens, and how everything stands, as server-sent events.

        ``deployment`` shows one alone. Events come from ``Last-Event-ID`` (or ``after``) on,
        without either from now on. ``for_s`` ends the answer after so many seconds.
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
