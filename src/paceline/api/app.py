"""The coordinator's web app: routes, access checks, metrics and pages on one port.

``serve`` runs ``paceline coordinator``: it prints nothing, logs to a file in the state directory
and returns the exit status. Decisions are made in the package ``coordinator``, not here.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from paceline import __version__
from paceline.api.access import IdentityIssuer, make_access_router, make_purpose_router
from paceline.api.deployments import HeartbeatMiddleware, make_router
from paceline.api.flow_runs import make_flow_router
from paceline.api.flow_starter import FlowRunSupervisor, PrefectStarter
from paceline.api.jobs import make_job_router
from paceline.api.middleware import AccessMiddleware, AuditWriter, Authenticator, LeaderGate
from paceline.api.pages import add_observation, describe
from paceline.api.problems import PROBLEM, add_problem_handlers
from paceline.api.routes import require_declared
from paceline.api.serving import port_protection, serve_app
from paceline.config import Runtime
from paceline.coordinator import Coordinator, CoordinatorSettings, Replica, TermTask
from paceline.coordinator.state import TokenFirstUsed
from paceline.coordinator.stores import (
    Candidate,
    OutboxShipper,
    Term,
    open_audit,
    open_coordination,
    open_progress,
)
from paceline.jobs import JobScheduler, JobTable, engine_of
from paceline.registry import resolve_source
from paceline.telemetry import JobEvents

REPLICA_ID = "coordinator"  # id of the only (or first) replica, and name of its log file


def create_app(
    runtime: Runtime,
    *,
    url: str = "",
    replica_id: str = REPLICA_ID,
    settings: CoordinatorSettings | None = None,
    names: tuple[str, ...] = (),
) -> FastAPI:
    """Return the app of ``runtime``; its coordinator runs from the app's start-up to its shutdown.

    ``url`` is where clients and other replicas reach it. ``names`` are additional host names that
    the Host header may carry, besides those of loopback and of the profile.
    """
    coordination = open_coordination(runtime)
    settings = settings or CoordinatorSettings.of(runtime.profile)
    keep_events = settings.kept_audit_events
    progress, audit = open_progress(runtime), open_audit(runtime)
    coordinator = Coordinator(
        coordination,
        progress=progress,
        audit=audit,
        resolve_source=lambda url: resolve_source(url, runtime),
        settings=settings,
    )
    flows = PrefectStarter.of(runtime) if runtime.endpoints.prefect_api_url else None
    events = JobEvents(flows.emit) if flows is not None else None
    jobs = JobTable(coordinator, on_change=events.take) if events else JobTable(coordinator)
    replica = Replica(
        coordinator,
        coordination,
        progress,
        Candidate(replica_id, url),
        duties=[
            lambda term: OutboxShipper(coordination, audit, term, keep_events=keep_events),
            *_flow_duties(runtime, coordinator),
            lambda _term: JobScheduler(
                coordinator, jobs, flows, runtime.profile, engine_of(runtime)
            ),
        ],
    )
    authenticator = Authenticator(runtime.secrets, lambda: coordinator.tokens)
    writer = AuditWriter(coordinator, authenticator.seen)
    admission = IdentityIssuer(runtime, coordinator)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(replica.start)
        writer.start()
        if events is not None:
            events.start()
        try:
            yield
        finally:
            await run_in_threadpool(writer.stop)
            await run_in_threadpool(replica.stop)
            if events is not None:
                await run_in_threadpool(events.stop)
            for store in (audit, progress, coordination):
                store.close()

    app = FastAPI(
        title="Paceline coordinator",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads scripts from other hosts; /docs here is our own
        redoc_url=None,
        responses=PROBLEM,
    )
    app.state.coordinator, app.state.replica, app.state.jobs = coordinator, replica, jobs
    add_observation(app, coordinator, jobs, runtime.profile, url=url, replica_id=replica_id)
    for router in (
        make_router(runtime, coordinator, jobs, flows, admission.is_outdated),
        make_access_router(coordinator, admission, authenticator),
        make_purpose_router(coordinator),
        make_flow_router(runtime, coordinator, jobs, flows),
        make_job_router(runtime, coordinator, jobs, flows),
    ):
        app.router.routes.extend(router.routes)  # include_router would build each a second time
    add_problem_handlers(app)
    describe(app)
    require_declared(app)
    # The middleware added last runs first.
    app.add_middleware(
        HeartbeatMiddleware, coordinator=coordinator, is_outdated=admission.is_outdated
    )
    app.add_middleware(LeaderGate, coordinator=coordinator)
    app.add_middleware(
        AccessMiddleware,
        authenticator=authenticator,
        security=runtime.profile.security,
        names=(urlsplit(url).hostname or "localhost", *names),
        refused=writer.refused,
        begin=lambda token_id: coordinator.handle(
            TokenFirstUsed(token_id=token_id, at=coordinator.now())
        ),
    )
    return app


def _flow_duties(runtime: Runtime, coordinator: Coordinator) -> list[Callable[[Term], TermTask]]:
    """Return the leader duty that starts flow runs, if the profile enables it."""
    if runtime.profile.control.flow_starter == "off":
        return []
    starter = PrefectStarter.of(runtime)
    return [lambda _term: FlowRunSupervisor(coordinator, starter)]


def serve(
    runtime: Runtime,
    host: str,
    port: int,
    ready_fd: int | None = None,
    *,
    replica_id: str = REPLICA_ID,
    advertise: str = "",
) -> int:
    """Serve the coordinator of ``runtime`` until SIGTERM or SIGINT; return the exit status.

    Once it accepts connections it writes ``{"url": …}`` and a newline to ``ready_fd`` and closes
    it. Port 0 selects a free port. ``advertise`` is the URL under which others reach it, if that is
    not the address it listens on. Raises PortInUse, and InvalidProfile with the missing settings if
    other machines can reach ``host`` and tokens would cross the network unencrypted.
    """
    protection = port_protection(runtime, host)
    return serve_app(
        lambda url: create_app(
            runtime, url=advertise or url, replica_id=replica_id, names=protection.names
        ),
        tls=protection.tls,
        log_file=runtime.state_dir / f"{replica_id}.log",
        host=host,
        port=port,
        ready_fd=ready_fd,
        end_long_polls=lambda app: app.state.replica.resign(),
    )
