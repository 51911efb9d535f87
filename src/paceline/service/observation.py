"""The service's own routes: metrics for monitors, pages for people."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse

from paceline.coordinator import Coordinator, CoordinatorState
from paceline.observe import FleetMetrics, Snapshot, docs_page, fleet_page
from paceline.observe.metrics import CONTENT_TYPE
from paceline.observe.page import PAGE_HEADERS


def add_observation(app: FastAPI, coordinator: Coordinator) -> None:
    """Add /metrics, /fleet and /docs to ``app``."""
    metrics = FleetMetrics(lambda: coordinator.read(_snapshot))

    @app.get("/metrics", tags=["observation"], response_class=Response)
    def get_metrics() -> Response:
        """Everything for Prometheus, in its text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/fleet", include_in_schema=False)
    async def get_fleet_page() -> HTMLResponse:
        return HTMLResponse(fleet_page(), headers=PAGE_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def get_docs_page() -> HTMLResponse:
        return HTMLResponse(docs_page(), headers=PAGE_HEADERS)


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
