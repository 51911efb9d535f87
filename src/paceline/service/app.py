"""The coordinator's process: routers, guards, metrics and pages in one app, on one port.

``serve`` is the body of ``paceline coordinator``: it prints nothing, logs to a file in the state
directory, and returns the exit status. It makes no decisions; those are in ``coordinator``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI

from paceline import __version__
from paceline.coordinator import Coordinator, Patience
from paceline.coordinator.problems import BodyLimit, TokenGuard, add_problem_handlers
from paceline.coordinator.rest import make_router
from paceline.errors import InvalidInput
from paceline.manifest import Manifest, fetch_manifest
from paceline.manifest.signing import TrustPolicy, verify_signature
from paceline.profile import Runtime
from paceline.relay.origin import below_roots
from paceline.service.observation import add_observation
from paceline.service.serving import serve_app

LOG_FILE = "coordinator.log"
DATABASE = "coordinator.sqlite"
# Served without a token: the probes, and pages that hold no data and ask for the token themselves.
OPEN_PATHS = ("/healthz", "/readyz", "/fleet", "/docs")


def create_app(runtime: Runtime, *, patience: Patience | None = None) -> FastAPI:
    """Return the app of ``runtime``; its coordinator runs from start-up to shutdown."""
    coordinator = Coordinator(
        runtime.state_dir / DATABASE,
        fetch_manifest=lambda url: _fetch(url, runtime),
        patience=patience or Patience.of(runtime.profile),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        coordinator.start()
        try:
            yield
        finally:
            coordinator.stop()

    app = FastAPI(
        title="Paceline coordinator",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # the stock pages load scripts from elsewhere; /docs here is our own
        redoc_url=None,
    )
    app.state.coordinator = coordinator
    app.include_router(make_router(coordinator))
    add_observation(app, coordinator)
    add_problem_handlers(app)
    app.add_middleware(BodyLimit)
    app.add_middleware(TokenGuard, token=runtime.secrets.coordinator_token, open_paths=OPEN_PATHS)
    return app


def serve(runtime: Runtime, host: str, port: int, ready_fd: int | None = None) -> int:
    """Serve the coordinator of ``runtime`` until SIGTERM or SIGINT; return the exit status.

    Once it accepts connections it writes ``{"url": …}`` and a newline to ``ready_fd`` and closes
    it. Port 0 takes a free one. Raises PortInUse, and InvalidInput for a host that others can
    reach: the bearer token would cross the network in the clear.
    """
    return serve_app(
        lambda: create_app(runtime),
        log_file=runtime.state_dir / LOG_FILE,
        host=host,
        port=port,
        ready_fd=ready_fd,
        end_waits=lambda app: app.state.coordinator.end_waits(),
    )


def _fetch(url: str, runtime: Runtime) -> Manifest:
    """Return the manifest at ``url``: an S3 URL, or a directory that may be a source.

    Raises UntrustedManifest where the profile wants a signature that it has not.
    """
    if "\0" in url:
        raise InvalidInput("not a source URL", got="a NUL in it", wanted="s3://bucket/prefix")
    security = runtime.profile.security
    trust = TrustPolicy.of(security.trusted_publishers, required=security.require_signature)
    if url.startswith("s3://"):
        from paceline.objects import ObjectStore

        manifest = fetch_manifest(url, ObjectStore.from_runtime(runtime))
    else:
        if "://" in url or not Path(url).is_absolute():
            raise InvalidInput("not a source URL", got=url, wanted="s3://bucket/prefix")
        directory = below_roots(Path(url), (runtime.state_dir, *security.source_roots))
        manifest = fetch_manifest(str(directory), None)
    verify_signature(manifest, trust, where=url)
    return manifest
