"""REST routes of deployments, workers, the ledger and events.

Each route reads the coordinator's state or sends it one event; the records are in
``schemas.calls``. Routes store and decide nothing. Authentication and rate limits are in
``api.middleware``.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Header, HTTPException, Path as PathParameter, Query, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.api.event_stream import is_shown
from paceline.api.flow_runs import require_own_flow_run
from paceline.api.flow_starter import PrefectStarter
from paceline.api.limits import BufferedBody
from paceline.api.problems import PROBLEM, problem_response
from paceline.config import Runtime
from paceline.coordinator import (
    Coordinator,
    current_caller,
    is_own_run,
    note_submitter,
    require_worker,
)
from paceline.coordinator.state import (
    Activate,
    AwaitCommands,
    CoordinatorState,
    Event,
    FetchLanes,
    HeartbeatReceived,
    RaiseBudget,
    Register,
    Rollback,
)
from paceline.errors import (
    AccessDenied,
    InvalidInput,
    NotFound,
    PacelineError,
    ServiceUnavailable,
)
from paceline.jobs import JobTable
from paceline.schemas import (
    APPROVAL,
    APPROVAL_REQUEST,
    SUBMITTERS,
    TRAINING_JOBS,
    CreatedDeployment,
    CreateDeployment,
    DeploymentList,
    DeploymentView,
    EventList,
    Heartbeat,
    HeartbeatAnswer,
    Name,
    Plan,
    RaiseOriginBudget,
    Registered,
    RegisterWorker,
    Scope as Access,
    Sha256,
    SignedRead,
    SignRead,
    StageRecord,
    Success,
    SwitchView,
    Worker,
    WorkerLanes,
    WorkerList,
    WorkerProgressList,
    digest_of,
)
from paceline.storage import ObjectStore

POLL_S = 0.05
LONGEST_POLL_S = 30.0
CANCEL_WAIT_S = 8.0  # one beat to deliver, one to confirm; a silent worker is lost by then

DeploymentId = Annotated[str, PathParameter(max_length=128)]
Key = Annotated[
    str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200, pattern=r"^[!-~]+$")
]
Stage = Annotated[Name, PathParameter()]
Digest = Annotated[Sha256, PathParameter()]
Known = TypeVar("Known", bound=BaseModel)


def make_router(
    runtime: Runtime,
    coordinator: Coordinator,
    table: JobTable,
    starter: PrefectStarter | None,
    is_outdated: Callable[[], bool],
) -> APIRouter:
    """Return the routes of ``coordinator``; ``starter`` is None without Prefect."""
    router = APIRouter(responses=PROBLEM)
    _add_deployments(router, coordinator, table, starter)
    _add_workers(router, coordinator, is_outdated)
    _add_signing(router, runtime, coordinator)
    _add_ledger(router, coordinator, table)
    _add_observation(router, coordinator)
    return router


def _add_deployments(
    router: APIRouter, coordinator: Coordinator, table: JobTable, starter: PrefectStarter | None
) -> None:
    @router.post("/deployments", status_code=201, tags=["deployments"])
    def create_deployment(call: CreateDeployment, idempotency_key: Key = None) -> CreatedDeployment:
        """Distribute a model version to every target worker."""
        if call.flow_run_id:  # it is cancelled with the deployment
            require_own_flow_run(call.flow_run_id, table, coordinator, starter)
        return coordinator.create(call, idempotency_key)

    @router.get("/deployments", tags=["deployments"])
    def list_deployments(
        newest: Annotated[int | None, Query(ge=1, le=100_000)] = None,
    ) -> DeploymentList:
        """List every stored deployment, or only the newest; oldest first."""
        every = coordinator.read(lambda state: state.deployments())
        return DeploymentList(deployments=tuple(every if newest is None else every[-newest:]))

    @router.get("/deployments/{deployment_id}", tags=["deployments"])
    def get_deployment(deployment_id: DeploymentId) -> DeploymentView:
        """Return one deployment and its progress."""
        return coordinator.read(lambda state: state.view(deployment_id))

    @router.delete("/deployments/{deployment_id}", tags=["deployments"])
    async def cancel_deployment(deployment_id: DeploymentId) -> Success:
        """Cancel a deployment; returns once no living worker can publish it any more."""
        await run_in_threadpool(coordinator.cancel, deployment_id)
        await _wait_until_stopped(coordinator, deployment_id)
        return Success()

    @router.get("/deployments/{deployment_id}/workers", tags=["deployments"])
    def get_workers(deployment_id: DeploymentId) -> WorkerProgressList:
        """Return the progress of each target worker."""
        progress = coordinator.read(lambda state: state.progress(deployment_id))
        return WorkerProgressList(workers=tuple(progress))

    @router.get("/deployments/{deployment_id}/manifest", tags=["deployments"])
    def get_manifest(deployment_id: DeploymentId) -> Response:
        """Return the manifest's bytes, exactly as published."""
        raw = coordinator.read(lambda state: state.deployment_state(deployment_id).manifest_bytes)
        return Response(raw, media_type="application/json")

    @router.get("/deployments/{deployment_id}/lanes", tags=["deployments"])
    def get_lanes(deployment_id: DeploymentId, worker_id: Annotated[Name, Query()]) -> WorkerLanes:
        """Return one worker's lanes of the newest plan; the call acknowledges the manifest."""
        require_worker(worker_id)
        event = FetchLanes(deployment_id=deployment_id, worker_id=worker_id)
        return _handle_as(coordinator, event, WorkerLanes)

    @router.get("/deployments/{deployment_id}/plan", tags=["deployments"])
    def get_plan(deployment_id: DeploymentId) -> Plan:
        """Return the newest plan."""
        return coordinator.read(lambda state: state.plan(deployment_id))

    _add_switching(router, coordinator)


def _add_switching(router: APIRouter, coordinator: Coordinator) -> None:
    @router.post("/deployments/{deployment_id}/activate", tags=["deployments"])
    def activate_deployment(deployment_id: DeploymentId, allow_older: bool = False) -> Success:
        """Switch the fleet to this version, once a quorum of workers is ready."""
        event = Activate(deployment_id=deployment_id, allow_older=allow_older, at=coordinator.now())
        return _handle_as(coordinator, event, Success)

    @router.post("/deployments/{deployment_id}/rollback", tags=["deployments"])
    def roll_back_deployment(deployment_id: DeploymentId) -> Success:
        """Switch the fleet from this version back to the previous one; nothing is transferred."""
        event = Rollback(deployment_id=deployment_id, at=coordinator.now())
        return _handle_as(coordinator, event, Success)

    @router.get("/deployments/{deployment_id}/switch", tags=["deployments"])
    def get_switch(deployment_id: DeploymentId) -> SwitchView:
        """Return the newest switch of this deployment, worker by worker."""
        return coordinator.read(lambda state: state.switch_of(deployment_id))

    @router.post("/deployments/{deployment_id}/budget", tags=["deployments"])
    def raise_budget(
        deployment_id: DeploymentId, call: RaiseOriginBudget, idempotency_key: Key = None
    ) -> Success:
        """Raise a deployment's origin budget, so that it continues if it stalled.

        A repeated call with the same Idempotency-Key adds nothing.
        """
        event = RaiseBudget(
            deployment_id=deployment_id,
            extra_bytes=call.extra_bytes,
            key=idempotency_key,
            body_digest=digest_of({"budget_of": deployment_id, "extra_bytes": call.extra_bytes}),
            at=coordinator.now(),
        )
        return _handle_as(coordinator, event, Success)


def _add_workers(
    router: APIRouter, coordinator: Coordinator, is_outdated: Callable[[], bool]
) -> None:
    @router.post("/workers/register", tags=["workers"])
    def register_worker(call: RegisterWorker) -> Registered:
        """Register a worker, or its next incarnation."""
        require_worker(call.worker_id)
        return _handle_as(coordinator, Register(call=call, at=coordinator.now()), Registered)

    @router.post("/workers/heartbeat", tags=["workers"])
    async def heartbeat(
        beat: Heartbeat,
        wait_s: Annotated[float, Query(ge=0, le=LONGEST_POLL_S, allow_inf_nan=False)] = 0.0,
    ) -> HeartbeatAnswer:
        """Receive a worker's heartbeat and return its commands, waiting for the first one."""
        require_worker(beat.worker_id)
        return await answer_beat(coordinator, beat, wait_s, is_outdated)

    @router.get("/workers", tags=["workers"])
    def list_workers() -> WorkerList:
        """List every registered worker; lost workers are kept for a month."""
        return WorkerList(workers=tuple(coordinator.read(lambda state: state.fleet.workers())))

    @router.get("/workers/{worker_id}", tags=["workers"])
    def get_worker(worker_id: Annotated[Name, PathParameter()]) -> Worker:
        """Return one registered worker."""
        found = coordinator.read(lambda state: state.fleet.find(worker_id))
        if found is None:
            raise NotFound("no such worker", got=worker_id, do="See `paceline workers`.")
        return found


def _add_signing(router: APIRouter, runtime: Runtime, coordinator: Coordinator) -> None:
    valid_s = runtime.profile.objects.presigned_s
    store = ObjectStore.from_runtime(runtime)  # makes no client before it signs

    def is_read(state: CoordinatorState, call: SignRead) -> bool:
        """Return whether a deployment of the worker is read from this object."""
        for each in state.deployments():
            prefix = f"{each.source_url.rstrip('/')}/"
            if (
                call.url.startswith(prefix)
                and not each.status.is_final
                and call.worker_id in each.target_workers
            ):
                files = state.deployment_state(each.deployment_id).manifest.files
                return any(call.url[len(prefix) :] == file.path for file in files)
        return False

    @router.post("/workers/signed-reads", tags=["workers"])
    def sign_read(call: SignRead) -> SignedRead:
        """Return a signed URL of an object that a deployment of the worker is read from."""
        require_worker(call.worker_id)
        if not valid_s:
            raise AccessDenied(
                "this installation signs no reads",
                got="objects.presigned_s = 0",
                wanted="a number of seconds",
                do="Give the node credentials, or set it in the coordinator's profile.",
            )
        if not coordinator.read(lambda state: is_read(state, call)):
            raise AccessDenied(
                "no deployment of this worker is read from there",
                got=call.url,
                wanted="a file of a deployment that is under way",
                where=call.worker_id,
            )
        made = store.signed(call.method, call.url, call.version_id, valid_s)
        return SignedRead(url=made, valid_s=valid_s)


def _add_ledger(router: APIRouter, coordinator: Coordinator, table: JobTable) -> None:
    def is_readable(record: StageRecord) -> bool:
        is_flow = Access.LEDGER in current_caller().scopes  # which goes on with what others made
        return is_flow or bool(is_own_run(coordinator, table.jobs, record.run_id))

    @router.get("/ledger/{stage}/{input_digest}", tags=["ledger"])
    def get_stage(stage: Stage, input_digest: Digest) -> StageRecord:
        """Return the recorded result of a stage for these inputs. To a token that is bound to a
        team or project, without scope ledger, of its own runs alone."""
        record = coordinator.stage(stage, input_digest)
        if record is None:
            raise NotFound("the stage has not finished for these inputs", got=input_digest)
        if not is_readable(record):
            raise AccessDenied(
                "a run of others recorded it",
                got=f"run {record.run_id}",
                wanted="a run of the token's team and project",
            )
        return record

    @router.put("/ledger/{stage}/{input_digest}", tags=["ledger"])
    def put_stage(
        stage: Stage,
        input_digest: Digest,
        record: StageRecord,
    ) -> StageRecord:
        """Record that a stage finished; a newer record replaces the older."""
        if (record.stage, record.input_digest) != (stage, input_digest):
            raise InvalidInput(
                "the record is of another stage or input",
                got=f"{record.stage}/{record.input_digest}",
                wanted=f"{stage}/{input_digest}",
            )
        if stage in (APPROVAL, SUBMITTERS, TRAINING_JOBS):
            raise AccessDenied("the coordinator alone records these", got=stage)
        _require_plain(record.output)
        if stage == APPROVAL_REQUEST:  # a run that was not started over REST is its flow's
            note_submitter(coordinator, record.run_id, unless_known=True)
        return coordinator.save_stage(record)


def _add_observation(router: APIRouter, coordinator: Coordinator) -> None:
    @router.get("/events", tags=["observation"])
    async def get_events(
        after: Annotated[int, Query(ge=0, le=2**62)] = 0,
        wait_s: Annotated[float, Query(ge=0, le=LONGEST_POLL_S, allow_inf_nan=False)] = 0.0,
    ) -> EventList:
        """Return the events after a sequence number, waiting for the first one."""
        clock, caller = asyncio.get_running_loop().time, current_caller()
        until_s = clock() + wait_s
        while True:
            found = coordinator.events(after)
            seen = tuple(each for each in found.events if is_shown(each, caller))
            if found.events and not seen:  # all of this page are of other teams
                after = found.last
                continue
            found = found.model_copy(update={"events": seen})
            if found.events or coordinator.stopping or clock() >= until_s:
                return found
            await asyncio.sleep(POLL_S)

    @router.get("/healthz", tags=["observation"])
    async def healthz() -> Success:
        """Liveness probe: the process answers."""
        return Success()

    @router.get("/readyz", tags=["observation"])
    def readyz() -> Success:
        """Readiness probe: this replica can decide and commit."""
        coordinator.check_ready()
        return Success()


async def _wait_until_stopped(coordinator: Coordinator, deployment_id: str) -> None:
    """Return once no living target can publish a cancelled deployment (invariant I11)."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + CANCEL_WAIT_S
    while True:
        waiting = await run_in_threadpool(
            coordinator.read, lambda state: state.unstopped(deployment_id)
        )
        if not waiting:
            return
        if clock() >= until_s:
            break
        await asyncio.sleep(POLL_S)
    raise ServiceUnavailable(
        "the cancel is decided, but not every worker has confirmed it",
        got=f"waiting for {', '.join(waiting[:20])}",
        where=deployment_id,
        do="Call again; it returns once they stopped or are lost.",
    )


def _handle_as(coordinator: Coordinator, event: Event, kind: type[Known]) -> Known:
    answer = coordinator.handle(event)
    assert isinstance(answer, kind)
    return answer


def _require_plain(output: dict[str, object]) -> None:
    """Refuse what JSON cannot store and return unchanged: NaN, infinity, lone surrogates."""
    try:
        json.dumps(output, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            "the output is not plain JSON", got=type(error).__name__, wanted="finite JSON"
        ) from error


# The fast path of a heartbeat, which is most of a coordinator's calls.
#
# ``HeartbeatMiddleware`` runs after ``AccessMiddleware`` and before the routes. A heartbeat that
# only reports progress is parsed once, decided on the event loop and answered without a thread, in
# about a quarter of the time that its route takes (docs/measurements). A malformed one goes to the
# route; one that must be committed, or that finds the state locked, goes to a worker thread. All
# are answered as the route documents.

BEAT = "/workers/heartbeat"
QUERY = re.compile(rb"(?:wait_s=(\d{1,2}(?:\.\d{1,6})?))?")  # the route answers anything else
JSON = (b"content-type", b"application/json")


class HeartbeatMiddleware:
    """ASGI middleware that answers ``POST /workers/heartbeat`` and passes on everything else."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        coordinator: Coordinator,
        is_outdated: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app, self._coordinator, self._is_outdated = app, coordinator, is_outdated

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = (
            QUERY.fullmatch(scope["query_string"])
            if scope["type"] == "http" and scope["path"] == BEAT and scope["method"] == "POST"
            else None
        )
        wait_s = float(asked.group(1) or 0.0) if asked else 0.0
        if asked is None or wait_s > LONGEST_POLL_S or JSON not in scope["headers"]:
            await self._app(scope, receive, send)
            return
        arrived = BufferedBody(receive)
        try:
            beat = Heartbeat.model_validate_json(await arrived.body())
        except (ValueError, HTTPException):  # the route reports the error
            await self._app(scope, arrived.again, send)
            return
        try:
            require_worker(beat.worker_id)
            answer = await answer_beat(self._coordinator, beat, wait_s, self._is_outdated)
        except PacelineError as error:
            await problem_response(error)(scope, receive, send)
            return
        body = answer.model_dump_json(by_alias=True).encode()
        headers = [JSON, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def answer_beat(
    coordinator: Coordinator,
    beat: Heartbeat,
    wait_s: float,
    is_outdated: Callable[[], bool] = lambda: False,
) -> HeartbeatAnswer:
    """Process a heartbeat and return its answer, waiting up to ``wait_s`` seconds for a command.

    Where the caller's identity ``is_outdated``, the answer has it renewed. Raises the coordinator's
    errors.
    """
    answer = await _await_commands(coordinator, beat, wait_s)
    return answer.model_copy(update={"renew": True}) if is_outdated() else answer


async def _await_commands(
    coordinator: Coordinator, beat: Heartbeat, wait_s: float
) -> HeartbeatAnswer:
    answer = await _decide(coordinator, HeartbeatReceived(beat=beat, at=coordinator.now()))
    if wait_s <= 0 or not answer.go_on or answer.commands:
        return answer
    listen = AwaitCommands(worker_id=beat.worker_id, incarnation=beat.incarnation)
    clock = asyncio.get_running_loop().time
    until_s = clock() + wait_s
    news: asyncio.Future[None] | None = None
    try:
        while answer.go_on and not answer.commands and not coordinator.stopping:
            left_s = until_s - clock()
            if left_s <= 0:
                break
            if news is None or news.done():
                news = coordinator.notifier.listen()  # before the read: no command is missed
            else:
                await asyncio.wait([news], timeout=left_s)
                if not news.done():
                    break
            answer = await _decide(coordinator, listen)
    finally:
        if news is not None:
            coordinator.notifier.leave(news)
    return answer


async def _decide(
    coordinator: Coordinator, event: HeartbeatReceived | AwaitCommands
) -> HeartbeatAnswer:
    answer = coordinator.try_decide(event)
    if answer is None:
        slow = await run_in_threadpool(coordinator.handle, event)
        assert isinstance(slow, HeartbeatAnswer)
        return slow
    return answer
