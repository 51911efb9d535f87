"""REST routes for clients that have only a URL and a token: the installation, and its flows.

A flow is started through the installation's Prefect server, whose credentials stay here. Which
flows and which of their parameters is in ``schemas.clients``; URLs among them must be sources that
the profile allows, because the flow reads them with the installation's credentials.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated

from fastapi import APIRouter, Path as PathParameter, Query

from paceline import __version__
from paceline.api.flow_starter import PrefectStarter
from paceline.config import DEFAULT_S3, HubSettings, OciSettings, Runtime, StorageSettings
from paceline.coordinator import Coordinator, audit_event, current_call, current_caller
from paceline.errors import InvalidInput, NotFound
from paceline.relay import allowed_source
from paceline.schemas import (
    FLOW_PARAMETERS,
    EventName,
    FlowRunView,
    InstallationView,
    StartFlow,
    Success,
)

FlowRunId = Annotated[str, PathParameter(pattern=r"^[0-9a-f-]{36}$")]
# Sections of the profile that clients use; paths of files on this machine are left out.
CLIENT_SECTIONS: dict[str, set[str]] = {
    "storage": set(StorageSettings.model_fields),
    "objects": {"endpoint_url", "region", "addressing", "ca", "parameters"},
    "hub": set(HubSettings.model_fields),
    "oci": set(OciSettings.model_fields),
    "cluster": {"link_mbit", "external_mbit", "oversubscription"},
    "relay": {"topology", "max_failed", "piece_bytes", "chunk_bytes"},
    "security": {"trusted_publishers", "require_signature", "fips"},
}
SOURCES = ("data", "snapshot_url")  # parameters that name what the flow reads


def make_flow_router(runtime: Runtime, coordinator: Coordinator) -> APIRouter:
    """Return the routes of ``runtime``'s installation."""
    router = APIRouter()
    endpoints = runtime.endpoints
    starter = PrefectStarter.of(runtime) if endpoints.prefect_api_url else None

    def prefect() -> PrefectStarter:
        if starter is None:
            raise NotFound(
                "this installation has no Prefect server to start flows at",
                wanted="endpoints.prefect_api_url",
                do="Run the command on a machine with the state directory, or have an operator "
                "name the server: `paceline init --prefect URL`.",
            )
        return starter

    @router.get("/installation", tags=["installation"])
    def get_installation() -> InstallationView:
        """Return what a client needs to know of this installation and of its own token."""
        caller = current_caller()
        record = coordinator.tokens.find(caller.token_id)
        pages = {
            "prefect": endpoints.prefect_ui_url,
            "mlflow": endpoints.mlflow_url,
            "fleet": f"{endpoints.coordinator_url}/fleet",
        }
        return InstallationView(
            version=__version__,
            coordinator_urls=endpoints.coordinator_urls
            or tuple(filter(None, [endpoints.coordinator_url])),
            profile=_client_profile(runtime),
            pages={name: url for name, url in pages.items() if url},
            has_flows=starter is not None,
            token_name=caller.name,
            token_scopes=tuple(sorted(caller.scopes)),
            token_expires_at=None if record is None else record.expires_at,
        )

    @router.post("/flows", status_code=201, tags=["flows"])
    def start_flow(call: StartFlow) -> FlowRunView:
        """Start one of the installation's flows, or find the run that an earlier call started."""
        _require_allowed(call, lambda url: allowed_source(url, runtime))
        made = prefect().run(call.flow, call.run_id, call.parameters)
        if (request := current_call.get()) is not None:
            request.on.update(flow=call.flow, run_id=call.run_id, flow_run_id=made.flow_run_id)
            name = EventName.CHANGE_ACCEPTED
            coordinator.commit_audit_events([audit_event(request, name, "accepted", time.time())])
        return made

    @router.get("/flows/{flow_run_id}", tags=["flows"])
    def get_flow_run(
        flow_run_id: FlowRunId, after: Annotated[int, Query(ge=0, le=2**31)] = 0
    ) -> FlowRunView:
        """Return a flow run's state, and the lines of its log after the first ``after``."""
        return prefect().view(flow_run_id, after)

    @router.delete("/flows/{flow_run_id}", tags=["flows"])
    def cancel_flow_run(flow_run_id: FlowRunId) -> Success:
        """Request the cancellation of a flow run."""
        prefect().view(flow_run_id)  # raises NotFound for a flow run that is not Paceline's
        prefect().cancel(flow_run_id)
        return Success()

    return router


def _client_profile(runtime: Runtime) -> dict[str, object]:
    """Return the sections that clients use, with the endpoint of a server that runs here."""
    profile = runtime.profile
    if (s3_url := runtime.endpoints.s3_url) not in ("", DEFAULT_S3):
        objects = profile.objects.model_copy(update={"endpoint_url": s3_url})
        profile = profile.model_copy(update={"objects": objects})
    return {
        section: getattr(profile, section).model_dump(mode="json", include=keys)
        for section, keys in CLIENT_SECTIONS.items()
    }


def _require_allowed(call: StartFlow, allow: Callable[[str], object]) -> None:
    """Raise InvalidInput or AccessDenied for parameters that a remote caller may not give."""
    known = FLOW_PARAMETERS[call.flow]
    if unknown := sorted(call.parameters.keys() - known):
        raise InvalidInput(
            "this flow takes no such parameter from a client",
            got=", ".join(unknown)[:200],
            wanted=", ".join(sorted(known)),
            where=call.flow,
        )
    reading = call.parameters.get("reading") or {}
    if not isinstance(reading, Mapping):
        raise InvalidInput("reading is not an object", got=type(reading).__name__)
    features = reading.get("features") or []
    named = [call.parameters.get(each) for each in SOURCES]
    named += [reading.get("tokenizer"), *(features if isinstance(features, list) else [features])]
    for each in named:
        if each in (None, "stdlib", "bytes"):
            continue
        if not isinstance(each, str) or not each.startswith("s3://"):
            raise InvalidInput(
                "a client names its data by URL",
                got=repr(each)[:200],
                wanted="s3://bucket/prefix",
                where=call.flow,
                do="Upload the files first: a path would be one of the flow's machine.",
            )
        allow(each)
