"""REST routes for clients that have only a URL and a token: the installation, and its flows.

A flow is started through the installation's Prefect server, whose credentials stay here. Which
flows and which of their parameters is in ``schemas.clients``; URLs among them must be sources that
the profile allows, because the flow reads them with the installation's credentials.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Path as PathParameter, Query

from paceline import __version__
from paceline.api.flow_starter import PrefectStarter
from paceline.api.job_views import own_training, require_job_owner
from paceline.api.problems import PROBLEM
from paceline.config import (
    DEFAULT_S3,
    HubSettings,
    OciSettings,
    Profile,
    Runtime,
    StorageSettings,
    with_job_settings,
)
from paceline.coordinator import (
    Coordinator,
    audit_event,
    current_call,
    current_caller,
    is_anothers_run,
    is_own_run,
    is_submitter,
    owner_of,
    refuse_own,
    require_owner,
    submitters,
    submitting,
)
from paceline.errors import (
    AccessDenied,
    Conflict,
    CorruptData,
    GateRefused,
    InvalidInput,
    NotFound,
    PacelineError,
    SourceMissing,
    short_repr,
)
from paceline.jobs import JobTable, Sweep, flow_runs, require_prices
from paceline.relay import allowed_source
from paceline.schemas import (
    APPROVAL,
    APPROVAL_REQUEST,
    FLOW_PARAMETERS,
    MODEL_ID,
    AdoptJob,
    Approval,
    ApprovalList,
    ApprovalRequest,
    ApprovalShown,
    DecidePromotion,
    EventName,
    Evidence,
    FlowRunView,
    InstallationView,
    Name,
    Scope,
    StageRecord,
    StartFlow,
    Success,
    digest_of,
    require_no_secrets,
)
from paceline.storage import ObjectStore, is_remote

FlowRunId = Annotated[str, PathParameter(pattern=r"^[0-9a-f-]{36}$")]
# Sections of the profile that clients use; paths of files on this machine are left out.
CLIENT_SECTIONS: dict[str, set[str]] = {
    "storage": set(StorageSettings.model_fields),
    "objects": {"endpoint_url", "region", "addressing", "ca", "parameters", "customer_key_env"},
    "hub": set(HubSettings.model_fields),
    "oci": set(OciSettings.model_fields),
    "cluster": {"link_mbit", "external_mbit", "oversubscription"},
    "relay": {"topology", "max_failed", "piece_bytes", "chunk_bytes"},
    "security": {"trusted_publishers", "require_signature", "fips"},
}
MAX_EVIDENCE_BYTES = 16 * 1024 * 1024
SOURCES = ("data", "snapshot_url")  # parameters that name what the flow reads


def make_flow_router(
    runtime: Runtime, coordinator: Coordinator, table: JobTable, starter: PrefectStarter | None
) -> APIRouter:
    """Return the routes of ``runtime``'s installation; ``starter`` is None without Prefect."""
    router = APIRouter(responses=PROBLEM)
    endpoints = runtime.endpoints

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
            token_team=caller.team,
            token_project=caller.project,
            token_expires_at=None if record is None else record.expires_at,
        )

    @router.post("/flows", status_code=201, tags=["flows"])
    def start_flow(call: StartFlow) -> FlowRunView:
        """Start one of the installation's flows, or find the run that an earlier call started."""
        _require_allowed(call, runtime.profile, lambda url: allowed_source(url, runtime))
        call = _of_caller(call, table)
        prefect = _require_prefect(starter)
        with submitting(
            coordinator, table.jobs, call.run_id, lambda: not prefect.page_of_run(call.run_id)
        ):
            made = prefect.run(call.flow, call.run_id, call.parameters)
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
        found = _require_prefect(starter).view(flow_run_id, after)
        _require_own(found, table, coordinator)
        return found

    @router.delete("/flows/{flow_run_id}", tags=["flows"])
    def cancel_flow_run(flow_run_id: FlowRunId) -> Success:
        """Request the cancellation of a flow run."""
        found = _require_prefect(starter).view(flow_run_id)  # of another flow: NotFound
        _require_scope(found.flow)
        _require_own(found, table, coordinator)
        _require_prefect(starter).cancel(flow_run_id)
        return Success()

    _add_approvals(router, runtime, coordinator, table, starter)
    return router


def _add_approvals(
    router: APIRouter,
    runtime: Runtime,
    coordinator: Coordinator,
    table: JobTable,
    starter: PrefectStarter | None,
) -> None:
    records = ObjectStore.from_runtime(runtime)  # its clients are made at the first read

    def is_anothers(run_id: str) -> bool:
        return is_anothers_run(coordinator, table.jobs, run_id)

    def require_not_anothers(run_id: str) -> None:
        if is_anothers(run_id):
            raise AccessDenied(
                "this promotion is of another team or project",
                got=run_id,
                wanted="one that a token of the same team and project submitted",
            )

    @router.get("/approvals", tags=["flows"])
    def list_approvals() -> ApprovalList:
        """List the promotions that wait for a person, the first to expire first; to a token that is
        bound to a team or project, none that another one submitted."""
        requests = [
            ApprovalRequest.model_validate(each.output)
            for each in coordinator.stages(APPROVAL_REQUEST)
        ]
        waiting = [
            each
            for each in requests
            if each.expires_at > time.time()
            and coordinator.stage(APPROVAL, each.key) is None
            and not is_anothers(each.run_id)
        ]
        return ApprovalList(
            approvals=tuple(sorted(waiting, key=lambda each: each.expires_at)),
            submitters={each.run_id: _names(coordinator, each.run_id) for each in waiting},
        )

    @router.get("/approvals/{run_id}", tags=["flows"])
    def get_approval(run_id: Annotated[Name, PathParameter()]) -> ApprovalShown:
        """Return a run's promotion, the evidence to judge it by, and the decision if any."""
        require_not_anothers(run_id)
        return _shown(records, runtime, coordinator, run_id)

    @router.post("/approvals/{run_id}", tags=["flows"])
    def decide_promotion(
        run_id: Annotated[Name, PathParameter()], call: DecidePromotion
    ) -> ApprovalShown:
        """Approve or reject a promotion that waits, as the owner of the caller's token; then the
        flow goes on. The same decision may be sent again."""
        require_not_anothers(run_id)
        request, approval = _decided(runtime, coordinator, run_id, call)
        word = "approve" if approval.approved else "reject"
        answer = {"decision": word, "reason": approval.reason}
        view = _require_prefect(starter).resume(request.flow_run_id, answer)
        return ApprovalShown(
            status="approved" if approval.approved else "rejected",
            request=request,
            approval=approval,
            flow_run=view.state,
            submitters=approval.submitters,
        )


def _require_prefect(starter: PrefectStarter | None) -> PrefectStarter:
    if starter is None:
        raise NotFound(
            "this installation has no Prefect server to start flows at",
            wanted="endpoints.prefect_api_url",
            do="Run the command on a machine with the state directory, or have an operator "
            "name the server: `paceline init --prefect URL`.",
        )
    return starter


def _require_own(
    found: FlowRunView, table: JobTable, coordinator: Coordinator, unknown: bool = False
) -> None:
    """Raise AccessDenied for the run of a job or a flow of another team or project; where it names
    neither, of a run that is not the caller's. ``unknown``: pass where nothing says whose it is."""
    jobs = (each for each in table.jobs() if found.flow_run_id in flow_runs(each).values())
    if (job := next(jobs, None)) is not None:  # its parameters name no team
        require_job_owner(job)
    elif found.team or found.project:
        require_owner(found.team or "default", found.project)
    elif (own := is_own_run(coordinator, table.jobs, found.run_id)) is False or (
        own is None and not unknown
    ):
        raise AccessDenied(
            "the flow run is not this token's",
            got=found.flow_run_id,
            wanted="one that a token of its team and project submitted, or an unbound token",
        )


def require_own_flow_run(
    flow_run_id: str, table: JobTable, coordinator: Coordinator, starter: PrefectStarter | None
) -> None:
    """Raise AccessDenied where the caller's token is bound, and the flow run another's; NotFound
    where it is none of this installation."""
    if current_caller().is_bound:
        _require_own(_require_prefect(starter).view(flow_run_id), table, coordinator)


def require_free(
    call: AdoptJob, table: JobTable, coordinator: Coordinator, starter: PrefectStarter | None
) -> None:
    """Raise AccessDenied where the caller's token is bound, and the flow run or its run another's:
    who has the job of a flow run has that, too."""
    if is_own_run(coordinator, table.jobs, call.run_id) is False:
        raise AccessDenied("the run is another's", got=call.run_id, wanted="a run of one's own")
    if current_caller().is_bound and starter is not None:
        with suppress(NotFound):
            _require_own(starter.view(call.flow_run_id), table, coordinator, unknown=True)


def _names(coordinator: Coordinator, run_id: str) -> tuple[str, ...]:
    return tuple(sorted(submitters(coordinator, run_id).values()))


def _request_of(coordinator: Coordinator, run_id: str) -> ApprovalRequest:
    record = coordinator.stage(APPROVAL_REQUEST, digest_of(run_id))
    if record is None:
        raise NotFound("no promotion of this run waits for an approval", got=run_id)
    return ApprovalRequest.model_validate(record.output)


def _shown(
    records: ObjectStore, runtime: Runtime, coordinator: Coordinator, run_id: str
) -> ApprovalShown:
    """Return what GET /approvals answers; raises NotFound, and as ``_evidence`` does."""
    request = _request_of(coordinator, run_id)
    found = coordinator.stage(APPROVAL, request.key)
    approval = None if found is None else Approval.model_validate(found.output)
    status = "expired" if time.time() > request.expires_at else "waiting"
    if approval is not None:
        status = "approved" if approval.approved else "rejected"
    shown = {"status": status, "request": request, "approval": approval}
    url = f"{runtime.records_url}/evidence/{request.evidence_digest}.json"
    try:
        shown["evidence"] = _evidence(records, url, request.evidence_digest)
    except SourceMissing:
        shown["no_evidence"] = "not recorded: an older version made the request"
    except CorruptData:
        raise
    except PacelineError as error:  # it can be decided without
        shown["no_evidence"] = error.one_line()[:2000]
    return ApprovalShown.model_validate(shown | {"submitters": _names(coordinator, run_id)})


def _evidence(records: ObjectStore, url: str, wanted: str) -> Evidence:
    """Return the evidence at ``url`` in the installation's records, whose digest is ``wanted``.

    Raises CorruptData for another one, and as the store does.
    """
    raw = records.get_bytes(url, max_bytes=MAX_EVIDENCE_BYTES)
    try:
        fields = json.loads(raw)["record"]
        if (got := digest_of(fields)) != wanted:
            raise ValueError(f"digest {got}")
        return Evidence.model_validate(fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptData(
            "the evidence of this promotion cannot be trusted",
            got=str(error).splitlines()[0][:200],
            wanted=wanted,
            where=url,
            do="Submit the promotion again, as a new run.",
        ) from error


def _decided(
    runtime: Runtime, coordinator: Coordinator, run_id: str, call: DecidePromotion
) -> tuple[ApprovalRequest, Approval]:
    """Return the request of ``run_id`` and the decision on it, which is ``call``'s or the same.

    Raises NotFound without a request, Conflict where it is about other evidence or was decided
    otherwise, GateRefused where it has expired, AccessDenied where the caller submitted the run and
    the policy wants another person.
    """
    request = _request_of(coordinator, run_id)
    if request.evidence_digest != call.evidence_digest:
        raise Conflict(
            "the promotion is about other evidence by now",
            got=call.evidence_digest,
            wanted=request.evidence_digest,
            where=run_id,
            do=f"Look at it again: paceline approve {run_id} --show",
        )
    caller, now = current_caller(), time.time()
    if (decided := coordinator.stage(APPROVAL, request.key)) is not None:
        approval = Approval.model_validate(decided.output)
        if (approval.token_id, approval.approved) != (caller.token_id, call.approved):
            raise Conflict(
                "this promotion was decided already",
                got=f"{'approved' if approval.approved else 'rejected'} by {approval.approver}",
                where=run_id,
            )
        return request, approval
    if now > request.expires_at:
        raise GateRefused(
            "the time to approve this promotion is over",
            where=run_id,
            do="Submit it again, as a new run.",
        )
    policy = runtime.profile.gate.policy(request.model_id)
    own = is_submitter(coordinator, run_id)
    if call.approved and own and policy.approval == "four-eyes":
        refuse_own("who submitted a promotion cannot approve it", run_id)
    approval = Approval(
        run_id=run_id,
        model_id=request.model_id,
        evidence_digest=request.evidence_digest,
        approved=call.approved,
        reason=call.reason,
        approver=caller.name,
        token_id=caller.token_id,
        at=now,
        submitters=_names(coordinator, run_id),
    )
    if (made := current_call.get()) is not None:
        made.on.update(run_id=run_id, evidence=request.evidence_digest, approved=str(call.approved))
    output = approval.model_dump(mode="json")
    coordinator.save_stage(StageRecord.of(APPROVAL, request.key, output, run_id))
    return request, approval


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


def _require_allowed(call: StartFlow, profile: Profile, allow: Callable[[str], object]) -> None:
    """Raise InvalidInput or AccessDenied for parameters that a remote caller may not give."""
    require_no_secrets(call)
    known = FLOW_PARAMETERS[call.flow]
    if unknown := sorted(call.parameters.keys() - known):
        raise InvalidInput(
            "this flow takes no such parameter from a client",
            got=", ".join(unknown)[:200],
            wanted=", ".join(sorted(known)),
            where=call.flow,
        )
    reading, settings = _object(call, "reading"), _object(call, "settings")
    own = with_job_settings(profile, settings)
    refs = [str(call.parameters.get(name) or "") for name in ("code_ref", "optimizer_ref")]
    if any(refs):
        from paceline.training.user_code import with_code

        with_code(own, *refs)
    if call.flow == "sweep":
        asked = Sweep.of({**_object(call, "search"), **call.parameters, "search": None})
        asked.check(profile)
        require_prices(asked.budget, profile.prices)
    features = reading.get("features") or []
    named = [call.parameters.get(each) for each in SOURCES]
    named.append(call.parameters.get("evaluate_on") or None)  # "": the result is not judged
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
    if (model := call.parameters.get("model")) is None:
        return
    if not isinstance(model, str) or not (is_remote(model) or re.fullmatch(MODEL_ID, model)):
        raise InvalidInput(
            "a client names a model by its id or URL",
            got=repr(model)[:200],
            wanted="MODEL_ID/VERSION, hf://… or oci://…",
            where=call.flow,
            do="Publish the directory first: a path would be one of the flow's machine.",
        )
    if is_remote(model):
        allow(model)


def _of_caller(call: StartFlow, table: JobTable) -> StartFlow:
    """Return ``call`` with the team and project of its jobs, and the training that it goes on from;
    raises AccessDenied for what the token may not."""
    _require_scope(call.flow)
    if continued := call.parameters.get("continue_from"):
        training = {"continue_from": own_training(str(continued), table)}
        call = call.model_copy(update={"parameters": call.parameters | training})
    if "team" not in FLOW_PARAMETERS[call.flow]:
        return call
    named = (str(call.parameters.get(each) or "") for each in ("team", "project"))
    team, project = owner_of(*named)
    owner = {"team": team} | ({"project": project} if project else {})
    return call.model_copy(update={"parameters": call.parameters | owner})


def _require_scope(flow: str) -> None:
    """Raise AccessDenied unless the caller may start and cancel ``flow``."""
    if flow != "sweep" and Scope.DEPLOY not in current_caller().scopes:
        raise AccessDenied(
            "the token does not open this flow",
            got="scope train",
            wanted="scope deploy",
            where=flow,
        )


def _object(call: StartFlow, name: str) -> Mapping[str, object]:
    """Return the JSON object that is this parameter; empty where it is not given."""
    given = call.parameters.get(name)
    if not isinstance(given, Mapping | None):
        raise InvalidInput(f"{name} is not a JSON object", got=short_repr(given), where=call.flow)
    return given or {}
