"""Start, follow and cancel Prefect flow runs: those that drive a deployment, and a client's.

If the profile enables it, a deployment that was created without a flow run is driven by the
Prefect deployment ``distribute-model``. The request is part of the deployment's durable record
(``flow_wanted``), so the next leader continues after a leader dies. The deployment's id is the
idempotency key, so repeated starts create one flow run. While Prefect is unavailable only the start
is delayed. This module calls Prefect's REST API and does not import Prefect.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paceline.config import Runtime, prefect_headers, prefect_server
from paceline.coordinator import RepeatedTask
from paceline.coordinator.state import Cancel, FlowReported
from paceline.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    InvalidProfile,
    NotFound,
    PacelineError,
    ServiceUnavailable,
)
from paceline.schemas import (
    FLOW_PARAMETERS,
    INTERRUPTED,
    RUN_ID,
    Deployment,
    DeploymentStatus,
    EventName,
    FlowRunView,
    digest_of,
    new_run_id,
)

if TYPE_CHECKING:
    from paceline.coordinator import Coordinator

log = logging.getLogger(__name__)

FLOW = "distribute-model/distribute-model"  # as prefect.yaml registers it
TAG = "paceline"  # of every flow run that is started here
RUN_TAG = re.compile(f"run:{RUN_ID.strip('^$')}")  # of every flow run of our flows, as it begins
ATTEMPTS = 100  # of one client's run, each after one that ended badly
LINES = 200  # records of a log, in one answer
MESSAGE_CHARS = 4000
CALL_TIMEOUT_S = 5.0
CHECK_INTERVAL_S = 0.5
STATES_S = 2.0  # between two reads of the flow runs' states
RETRY_S = 15.0  # after a failed start
AT_ONCE = 200  # flow runs in one request for states
CANCEL_WINDOW_S = 600.0  # after a deployment's cancel, in which its flow run is cancelled too

ENDING = frozenset({"CANCELLING", "CANCELLED"})
ENDED_BADLY = frozenset({"CRASHED", "FAILED"})
ENDED = ENDED_BADLY | {"CANCELLED", "COMPLETED", INTERRUPTED.upper()}


class PrefectStarter:
    """Starts, reads and cancels flow runs of a Prefect server, over its REST API."""

    def __init__(self, api_url: str, authorization: str = "", ui_url: str = "") -> None:
        """``authorization`` is "user:password", or "": as the environment says; ``ui_url`` is
        where people open its page, by default beside the API."""
        try:
            self._server = prefect_server(api_url)
        except InvalidInput as error:
            raise InvalidProfile(
                "no Prefect server to start flows at",
                got=error.got,
                wanted="endpoints.prefect_api_url, e.g. http://prefect:4200/api",
                do='Set it, or set control.flow_starter = "off".',
            ) from error
        self._headers = {"Content-Type": "application/json", **prefect_headers(authorization)}
        self._flow_id = ""
        self._ui_url = (ui_url or api_url.rstrip("/").removesuffix("/api")).rstrip("/")

    @classmethod
    def of(cls, runtime: Runtime) -> PrefectStarter:
        """Return a starter at ``runtime``'s Prefect server."""
        known = runtime.endpoints
        return cls(known.prefect_api_url, runtime.secrets.prefect_auth, known.prefect_ui_url)

    def start(self, deployment: Deployment) -> str:
        """Return the id of the flow run that drives ``deployment``; idempotent."""
        if not self._flow_id:
            self._flow_id = str(self._call("GET", f"/deployments/name/{FLOW}")["id"])
        body = {
            "name": deployment.deployment_id,
            "idempotency_key": deployment.deployment_id,
            "tags": [TAG, deployment.deployment_id],
            "parameters": {
                "model_id": deployment.model_id,
                "version": deployment.version,
                "source_url": deployment.source_url,
                "target_workers": list(deployment.target_workers),
                "activate": False,  # a deployment is only staged; activation is a separate call
                "deployment_id": deployment.deployment_id,
                "run_id": deployment.run_id or new_run_id(),
            },
        }
        try:
            made = self._call("POST", f"/deployments/{self._flow_id}/create_flow_run", body)
        except NotFound:
            self._flow_id = ""  # it was registered again, under another id
            raise
        return str(made["id"])

    def run(
        self, flow: str, run_id: str, parameters: Mapping[str, object], attempt: int = 0
    ) -> FlowRunView:
        """Return the flow run of ``flow`` for a client's run; started where there is none, and
        again where the last one ended badly. Another ``attempt`` is another flow run.

        Raises InvalidInput for parameters that the flow refuses, NotFound where it is not
        registered.
        """
        given = dict(parameters) | {"run_id": run_id}
        deployment_id = self._call("GET", f"/deployments/name/{flow}/{flow}")["id"]
        named = {"flow": flow, "parameters": given}
        key = digest_of(named | ({"attempt": attempt} if attempt else {}))
        for _ in range(ATTEMPTS):
            body = {
                "name": run_id,
                "idempotency_key": key,
                "tags": [TAG, run_id, flow],
                "parameters": given,
            }
            made = self._call("POST", f"/deployments/{deployment_id}/create_flow_run", body)
            if made["state_type"] not in ENDED - {"COMPLETED"}:
                return self._view_of(made)
            key = digest_of({"after": made["id"], "key": key})
        raise Conflict("this run failed too often", got=f"{ATTEMPTS} flow runs", where=run_id)

    def view(self, flow_run_id: str, after: int = 0, tail: int = 0) -> FlowRunView:
        """Return a flow run's state and the lines of its and its sub-flows' logs: those after the
        first ``after``, or the last ``tail``, at most LINES of them.

        Raises NotFound for a flow run that was not started for Paceline.
        """
        found = self._found(flow_run_id, lambda tag: tag == TAG)
        below = {"flow_runs": {"parent_flow_run_id": {"any_": [flow_run_id]}}, "limit": AT_ONCE}
        runs = [
            flow_run_id,
            *(each["id"] for each in self._call("POST", "/flow_runs/filter", below)),
        ]
        order = "DESC" if tail else "ASC"
        wanted = {
            "sort": f"TIMESTAMP_{order}",
            "offset": 0 if tail else after,
            "limit": tail or LINES,
        }
        asked = {"logs": {"flow_run_id": {"any_": runs}}, **wanted}
        lines = [each["message"] for each in self._call("POST", "/logs/filter", asked)]
        return self._view_of(found, lines[::-1] if tail else lines)

    def _found(self, flow_run_id: str, is_ours: Callable[[str], bool]) -> Any:
        """Return Prefect's record of a flow run; raises NotFound where none of its tags is ours."""
        if _is_id(flow_run_id):
            found = self._call("GET", f"/flow_runs/{quote(flow_run_id, safe='')}")
            if any(map(is_ours, found["tags"])):
                return found
        raise NotFound("no such flow run of this installation", got=flow_run_id)

    def page_of_run(self, run_id: str) -> str | None:
        """Return the page of the newest flow run of a run of the lifecycle or of one flow."""
        body = {
            "flow_runs": {
                "tags": {"all_": [f"run:{run_id}"]},
                "parent_task_run_id": {"is_null_": True},  # no sub-flow
            },
            "sort": "START_TIME_DESC",
            "limit": 1,
        }
        found = self._call("POST", "/flow_runs/filter", body)
        return self.page_of(found[0]["id"]) if found else None

    def page_of(self, flow_run_id: object) -> str:
        """Return the page of a flow run."""
        return f"{self._ui_url}/runs/flow-run/{flow_run_id}"

    def _view_of(self, found: Mapping[str, Any], lines: Sequence[str] = ()) -> FlowRunView:
        state = found.get("state") or {}
        return FlowRunView(
            flow_run_id=str(found["id"]),
            flow=next((each for each in found["tags"] if each in FLOW_PARAMETERS), ""),
            run_id=str(found.get("parameters", {}).get("run_id", "")),
            team=str(found.get("parameters", {}).get("team") or ""),
            project=str(found.get("parameters", {}).get("project") or ""),
            state=str(found["state_type"]),
            message=str(state.get("message") or "")[:MESSAGE_CHARS],
            page=self.page_of(found["id"]),
            lines=tuple((each.splitlines() or [""])[0][:MESSAGE_CHARS] for each in lines),
        )

    def resume(self, flow_run_id: str, answer: Mapping[str, object]) -> FlowRunView:
        """Resume a flow run with the ``answer`` that it is suspended for; one that is not suspended
        is left as it is. Raises InvalidInput for an answer of another form."""
        if self.view(flow_run_id).state == "PAUSED":
            path = f"/flow_runs/{quote(flow_run_id, safe='')}/resume"
            done = self._call("POST", path, {"run_input": dict(answer)})
            if done["status"] == "REJECT":
                raise InvalidInput(
                    "Prefect refuses this answer",
                    got=(done.get("details") or {}).get("reason"),
                    where=f"flow run {flow_run_id}",
                )
        return self.view(flow_run_id)

    def states(self, flow_run_ids: Collection[str]) -> Mapping[str, str]:
        """Return the states of those flow runs that exist: Prefect's types, and INTERRUPTED for one
        that Ctrl-C ended."""
        found: dict[str, str] = {}
        # Callers supply flow run ids, and Prefect refuses a request that contains an invalid one.
        every = sorted(filter(_is_id, flow_run_ids))
        for begin in range(0, len(every), AT_ONCE):
            some = every[begin : begin + AT_ONCE]
            body = {"flow_runs": {"id": {"any_": some}}, "limit": AT_ONCE}
            for each in self._call("POST", "/flow_runs/filter", body):
                interrupted = each.get("state_name") == INTERRUPTED
                state = INTERRUPTED.upper() if interrupted else str(each["state_type"])
                found[str(each["id"])] = state
        return found

    def cancel(self, flow_run_id: str) -> None:
        """Request cancellation of the flow run; idempotent.

        Raises NotFound for one that is not Paceline's, because callers name flow runs.
        """
        # One that a command started has its run's tag alone.
        self._found(flow_run_id, lambda tag: tag == TAG or bool(RUN_TAG.fullmatch(tag)))
        # Through CANCELLING, as Prefect's own page does: the runner ends its process first.
        self._set_state(flow_run_id, {"type": "CANCELLING", "name": "Cancelling"})

    def crash(self, flow_run_id: str, message: str) -> None:
        """Record that the flow run has crashed, in whatever state it is: its runner is gone."""
        state = {"type": "CRASHED", "name": "Crashed", "message": message}
        self._set_state(flow_run_id, state, force=True)

    def _set_state(
        self, flow_run_id: str, state: Mapping[str, str], *, force: bool = False
    ) -> None:
        body = {"state": state, "force": force}
        self._call("POST", f"/flow_runs/{quote(flow_run_id, safe='')}/set_state", body)

    def emit(self, events: Sequence[Mapping[str, object]]) -> None:
        """Have Prefect take in events; one that it has already changes nothing."""
        self._call("POST", "/events", events)

    def _call(self, method: str, path: str, body: object = None) -> Any:
        payload = None if body is None else json.dumps(body).encode()
        answer = self._server.call(method, path, payload, self._headers, timeout_s=CALL_TIMEOUT_S)
        where = f"{method} {self._server.endpoint.url}{path}"
        if answer.status >= 300:
            raise _refused(answer.status, answer.body, where)
        try:
            return json.loads(answer.body) if answer.body else None
        except ValueError as error:
            raise ServiceUnavailable(
                "Prefect's answer cannot be read", got=answer.body[:200], where=where
            ) from error


class FlowRunSupervisor(RepeatedTask):
    """Starts, follows and cancels flow runs on its own thread, for one term of a leader."""

    def __init__(
        self,
        coordinator: Coordinator,
        starter: PrefectStarter,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("flow-keeper", CHECK_INTERVAL_S, 2 * CALL_TIMEOUT_S)
        self._coordinator, self._starter = coordinator, starter
        self._monotonic = monotonic
        self._retry_s: dict[str, float] = {}  # deployment whose start failed → when to try again
        self._reported: dict[str, str] = {}  # flow run → its failed state that was reported
        self._states_s = -STATES_S

    def run_once(self) -> None:
        """Start due flow runs, and reconcile states every STATES_S."""
        deployments = self._coordinator.read(
            lambda state: [e for e in state.deployments() if e.flow_wanted or e.flow_run_id]
        )
        wanting = [
            each
            for each in deployments
            if each.flow_wanted and each.flow_run_id is None and not each.status.is_final
        ]
        waiting = {each.deployment_id for each in wanting}
        self._retry_s = {key: at for key, at in self._retry_s.items() if key in waiting}
        for each in wanting:
            due_s = self._retry_s.get(each.deployment_id, 0.0)
            if not self._stop.is_set() and due_s <= self._monotonic():
                self._start(each)
        if self._monotonic() - self._states_s >= STATES_S:
            self._states_s = self._monotonic()
            self._reconcile([each for each in deployments if each.flow_run_id is not None])

    def _start(self, deployment: Deployment) -> None:
        try:
            flow_run_id = self._starter.start(deployment)
        except PacelineError as error:
            log.warning("no flow run for %s yet: %s", deployment.deployment_id, error)
            if deployment.deployment_id not in self._retry_s:  # one event for all attempts
                data = {"again_in_s": RETRY_S, "reason": error.one_line()[:500]}
                self._report(deployment, EventName.FLOW_DELAYED, data)
            self._retry_s[deployment.deployment_id] = self._monotonic() + RETRY_S
            return
        self._report(deployment, EventName.FLOW_STARTED, {"flow_run_id": flow_run_id}, flow_run_id)

    def _reconcile(self, driven: list[Deployment]) -> None:
        now = self._coordinator.now()
        open_ = [each for each in driven if not each.status.is_final]
        ending = [
            each
            for each in driven
            if each.status is DeploymentStatus.CANCELLED
            and now - (each.completed_at or now) < CANCEL_WINDOW_S
        ]
        followed = {each.flow_run_id for each in (*open_, *ending) if each.flow_run_id}
        self._reported = {key: value for key, value in self._reported.items() if key in followed}
        if not followed:
            return
        states = self._starter.states(followed)
        for each in open_:
            self._follow(each, states.get(each.flow_run_id or "", ""))
        for each in ending:
            if states.get(each.flow_run_id or "", "COMPLETED") not in ENDING | ENDED:
                with contextlib.suppress(NotFound):  # the flow run was deleted meanwhile
                    self._starter.cancel(each.flow_run_id or "")

    def _follow(self, deployment: Deployment, state: str) -> None:
        flow_run_id, identity = deployment.flow_run_id or "", deployment.deployment_id
        if state in ENDING:
            # It was cancelled in Prefect: the deployment is cancelled with it. (After Ctrl-C it
            # goes on, as the command says.)
            log.info("flow run %s was cancelled, and %s with it", flow_run_id, identity)
            self._coordinator.handle(Cancel(deployment_id=identity, at=self._coordinator.now()))
        elif state in ENDED_BADLY:
            if self._reported.get(flow_run_id) != state:
                self._reported[flow_run_id] = state
                data = {"flow_run_id": flow_run_id, "state": state.lower()}
                self._report(deployment, EventName.FLOW_ENDED, data)
        else:
            self._reported.pop(flow_run_id, None)  # it is running (again)

    def _report(
        self,
        deployment: Deployment,
        name: EventName,
        data: Mapping[str, object],
        flow_run_id: str | None = None,
    ) -> None:
        self._coordinator.handle(
            FlowReported(
                deployment_id=deployment.deployment_id,
                name=name,
                flow_run_id=flow_run_id,
                data=dict(data),
                at=self._coordinator.now(),
            )
        )


def _is_id(flow_run_id: str) -> bool:
    try:
        uuid.UUID(flow_run_id)
    except ValueError:
        return False
    return True


def _refused(status: int, answer: bytes, where: str) -> PacelineError:
    got = f"HTTP {status} {answer[:300].decode('utf-8', 'replace')}"
    if status in (401, 403):
        return AccessDenied("Prefect refuses our credentials", got=got, where=where)
    if status == 404:
        return NotFound(
            "Prefect does not have it",
            got=got,
            where=where,
            do="Register the deployments: `python -m paceline.flows.register`.",
        )
    if status in (409, 422) and where.endswith(("/create_flow_run", "/events")):
        return InvalidInput("Prefect refuses what it was sent", got=got, where=where)
    return ServiceUnavailable("Prefect cannot do it now", got=got, where=where)
