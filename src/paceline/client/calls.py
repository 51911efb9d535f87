"""The coordinator's REST from the caller's side: one method a call, records in and out.

Each thread keeps its own connection alive. Given one URL it calls that and retries nothing: how
long to wait and how often is the caller's choice. Given several replicas it finds the leader, and
with ``patience_s`` it waits for one where nobody leads; all that is safe because every call of this
API may be repeated.
"""

from __future__ import annotations

import http
import http.client
import random
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from paceline import errors
from paceline.client.connection import Answered, Connection, Endpoint, Sent
from paceline.client.replicas import Replicas
from paceline.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    NotFound,
    PacelineError,
    ServiceUnavailable,
    TemporaryError,
)
from paceline.profile import Runtime
from paceline.wire.calls import (
    CreatedDeployment,
    CreateDeployment,
    DeploymentList,
    DeploymentView,
    EventList,
    Heartbeat,
    HeartbeatAnswer,
    Problem,
    Registered,
    RegisterWorker,
    Success,
    SwitchView,
    WorkerList,
    WorkerProgressList,
)
from paceline.wire.leading import EPOCH_HEADER, LEADER_HEADER
from paceline.wire.plan import Plan, WorkerLanes
from paceline.wire.records import Deployment, StageRecord, Worker, WorkerProgress

FAILOVER_S = 15.0  # how long calls to several replicas wait for a leader, by default
ROUND_S = 0.25  # between two rounds of asking, jittered

Answer = TypeVar("Answer", bound=BaseModel)


class CoordinatorClient:
    """Calls one coordinator, of one replica or several; may be shared by threads."""

    def __init__(
        self,
        url: str | Sequence[str],
        token: str,
        timeout_s: float = 10.0,
        *,
        patience_s: float = 0.0,
        ca: str | Path = "",
    ) -> None:
        """``ca`` is a PEM file to trust in place of the system's authorities."""
        self._replicas = Replicas([url] if isinstance(url, str) else url)
        self.use_token(token)
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._tls = _trusting(ca) if ca else None
        self._local = threading.local()

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        timeout_s: float = 10.0,
        *,
        patience_s: float | None = None,
        worker: bool = False,
    ) -> Self:
        """Return a client of the installation's coordinator, whichever replica leads.

        Where there are several, a call waits for a leader up to ``patience_s``. As a ``worker`` it
        shows the agents' token, which opens a worker's calls and nothing else.
        """
        known, secrets = runtime.endpoints, runtime.secrets
        urls = known.coordinator_urls or (known.coordinator_url,)
        if patience_s is None:
            patience_s = FAILOVER_S if len(urls) > 1 else 0.0
        token = secrets.for_agents if worker else secrets.coordinator_token
        ca = runtime.coordinator_ca
        return cls(urls, token, timeout_s, patience_s=patience_s, ca=ca)

    def use_token(self, token: str) -> None:
        """Show ``token`` from the next call on."""
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}

    @property
    def base_url(self) -> str:
        """Return the URL that the next call asks first."""
        return self._replicas.first.url

    @property
    def epoch(self) -> int:
        """Return the highest epoch that an answer carried, 0 before the first."""
        return self._replicas.epoch

    def register(self, call: RegisterWorker) -> Registered:
        """Make the worker known, or known again as a new incarnation.

        Raises StaleEpoch where a higher incarnation of the same worker is registered.
        """
        return self._call(Registered, "POST", "/workers/register", call)

    def heartbeat(self, beat: Heartbeat, wait_s: float = 0.0) -> HeartbeatAnswer:
        """Report, and return what the coordinator wants done, waiting up to ``wait_s`` for it."""
        query = f"?{urlencode({'wait_s': round(wait_s, 3)})}" if wait_s > 0 else ""
        path = f"/workers/heartbeat{query}"
        return self._call(HeartbeatAnswer, "POST", path, beat, wait_s=wait_s)

    def lanes(self, deployment_id: str, worker_id: str) -> WorkerLanes:
        """Return the worker's part of the newest plan."""
        query = urlencode({"worker_id": worker_id})
        return self._call(WorkerLanes, "GET", f"{_path(deployment_id)}/lanes?{query}")

    def manifest_bytes(self, deployment_id: str) -> bytes:
        """Return the manifest exactly as it was published."""
        return self._request("GET", f"{_path(deployment_id)}/manifest")

    def create(self, call: CreateDeployment, idempotency_key: str) -> CreatedDeployment:
        """Start a deployment; the same key and body again return the same deployment."""
        return self._call(
            CreatedDeployment,
            "POST",
            "/deployments",
            call,
            headers={"Idempotency-Key": idempotency_key},
            # Creating reads the manifest from the origin, which may be slow.
            timeout_s=max(self._timeout_s, 60.0),
        )

    def deployment(self, deployment_id: str) -> DeploymentView:
        """Return the deployment and how far it is."""
        return self._call(DeploymentView, "GET", _path(deployment_id))

    def deployments(self) -> list[Deployment]:
        """Return every deployment the coordinator keeps, oldest first."""
        return list(self._call(DeploymentList, "GET", "/deployments").deployments)

    def workers_of(self, deployment_id: str) -> list[WorkerProgress]:
        """Return each target's progress."""
        answer = self._call(WorkerProgressList, "GET", f"{_path(deployment_id)}/workers")
        return list(answer.workers)

    def plan(self, deployment_id: str) -> Plan:
        """Return the newest plan; raises NotFound before there is one."""
        return self._call(Plan, "GET", f"{_path(deployment_id)}/plan")

    def workers(self) -> list[Worker]:
        """Return the fleet: every worker that ever registered, living or not."""
        return list(self._call(WorkerList, "GET", "/workers").workers)

    def cancel(self, deployment_id: str) -> None:
        """Stop the deployment for good; once this returns, no worker publishes it any more."""
        self._call(Success, "DELETE", _path(deployment_id))

    def activate(self, deployment_id: str, *, allow_older: bool = False) -> None:
        """Have the fleet switch to this version, once a quorum is ready; see ``switch``.

        Raises Conflict unless it is complete, and for an older version than the active one unless
        that is allowed.
        """
        query = "?allow_older=true" if allow_older else ""
        self._call(Success, "POST", f"{_path(deployment_id)}/activate{query}")

    def rollback(self, deployment_id: str) -> None:
        """Have the fleet return from this version to what was active before; see ``switch``."""
        self._call(Success, "POST", f"{_path(deployment_id)}/rollback")

    def switch(self, deployment_id: str) -> SwitchView:
        """Return the deployment's newest switch; raises NotFound where there was none."""
        return self._call(SwitchView, "GET", f"{_path(deployment_id)}/switch")

    def ledger_get(self, stage: str, input_digest: str) -> StageRecord | None:
        """Return what the stage gave for these inputs, or None where it never finished."""
        try:
            return self._call(StageRecord, "GET", _ledger_path(stage, input_digest))
        except NotFound:
            return None

    def ledger_put(self, record: StageRecord) -> StageRecord:
        """Record that a stage finished; a newer record for the same inputs replaces the older."""
        path = _ledger_path(record.stage, record.input_digest)
        return self._call(StageRecord, "PUT", path, record)

    def events(self, after: int = 0, wait_s: float = 0.0) -> EventList:
        """Return the events after number ``after``, waiting up to ``wait_s`` for the first.

        They come in pages: go on from ``last``. An ``after`` beyond the newest (``2**62``) returns
        no events and the newest one's number: where to begin if the past is of no interest.
        """
        query = urlencode({"after": after, "wait_s": wait_s})
        return self._call(EventList, "GET", f"/events?{query}", wait_s=wait_s)

    def close(self) -> None:
        """Close this thread's connection; the next call opens another."""
        held = getattr(self._local, "held", None)
        if held is not None:
            held.close()
            self._local.held = None

    def _call(
        self,
        kind: type[Answer],
        method: str,
        path: str,
        body: BaseModel | None = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
    ) -> Answer:
        raw = self._request(method, path, body, headers=headers, timeout_s=timeout_s, wait_s=wait_s)
        try:
            return kind.model_validate_json(raw)
        except ValidationError as error:
            raise ServiceUnavailable(
                "the coordinator's answer cannot be read",
                got=str(error).splitlines()[0],
                wanted=kind.__name__,
                where=f"{method} {self.base_url}{path}",
                do="Check that this URL is a Paceline coordinator of the same version.",
            ) from error

    def _request(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
    ) -> bytes:
        payload = None if body is None else body.model_dump_json(by_alias=True).encode()
        given = self._headers | (headers or {})
        if payload is not None:
            given["Content-Type"] = "application/json"
        limit_s = (self._timeout_s if timeout_s is None else timeout_s) + wait_s
        sent = Sent(method, path, payload, given, limit_s, wait_s)
        until_s = time.monotonic() + self._patience_s
        while True:
            try:
                return self._ask_around(sent)
            except ServiceUnavailable:
                pause_s = ROUND_S * random.uniform(0.5, 1.5)
                if time.monotonic() + pause_s >= until_s:
                    raise
            time.sleep(pause_s)

    def _ask_around(self, sent: Sent) -> bytes:
        """Ask each endpoint once at most, following who points at the leader."""
        waiting = self._replicas.order()
        problem: ServiceUnavailable | None = None
        asked: set[Endpoint] = set()
        while waiting:
            endpoint = waiting.pop(0)
            asked.add(endpoint)
            where = f"{sent.method} {endpoint.url}{sent.path}"
            try:
                answer = self._connection(endpoint).exchange(sent)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                self._replicas.silent(endpoint)
                problem = problem or ServiceUnavailable(
                    "the coordinator does not answer",
                    got=f"{type(error).__name__}: {error}",
                    where=where,
                    do="Check that it runs (`paceline status`); the call may be repeated.",
                )
                problem.__cause__ = problem.__cause__ or error
                continue
            if not self._replicas.believe(_epoch_of(answer)):
                problem = _outdated(answer, self._replicas.epoch, where)
                continue
            if answer.status == http.HTTPStatus.TEMPORARY_REDIRECT:
                leader = self._leader_at(answer, where)
                if leader not in asked or problem is None:
                    problem = _not_leading(endpoint, leader, where)
                if leader not in asked and not self._replicas.suspect(leader):
                    waiting = [leader, *(each for each in waiting if each != leader)]
                continue
            if 200 <= answer.status < 300:
                self._replicas.answered(endpoint, answer.headers.get(LEADER_HEADER))
                return answer.body
            refusal = _error_of(answer.status, answer.body, where)
            if not isinstance(refusal, ServiceUnavailable):
                raise refusal
            problem = refusal
        assert problem is not None
        raise problem

    def _leader_at(self, answer: Answered, where: str) -> Endpoint:
        named = answer.headers.get("Location")
        leader = self._replicas.find(named)
        if leader is None:
            raise ServiceUnavailable(
                "the leader is none of the known replicas, and the token goes to those only",
                got=named,
                wanted=", ".join(each.url for each in self._replicas.endpoints),
                where=where,
                do="Add it to this installation's coordinator_urls.",
            )
        return leader

    def _connection(self, endpoint: Endpoint) -> Connection:
        held: Connection | None = getattr(self._local, "held", None)
        if held is None or held.endpoint != endpoint:
            if held is not None:
                held.close()
            held = Connection(endpoint, self._tls, probing=self._replicas.several)
            self._local.held = held
        return held


def _trusting(ca: str | Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:  # ssl.SSLError is one
        raise InvalidInput(
            "the coordinator's certificate authority cannot be read", got=error, where=ca
        ) from error


def _path(deployment_id: str) -> str:
    return f"/deployments/{quote(deployment_id, safe='')}"


def _ledger_path(stage: str, input_digest: str) -> str:
    return f"/ledger/{quote(stage, safe='')}/{quote(input_digest, safe='')}"


def _epoch_of(answer: Answered) -> int | None:
    said = answer.headers.get(EPOCH_HEADER, "")
    return int(said) if said.isdigit() and len(said) < 19 else None


def _outdated(answer: Answered, epoch: int, where: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        "an answer from before the newest leader's time was refused",
        got=f"epoch {answer.headers.get(EPOCH_HEADER)}",
        wanted=f"epoch {epoch} or later",
        where=where,
        do="Call again; that replica has yet to notice the newer leader.",
    )


def _not_leading(endpoint: Endpoint, leader: Endpoint, where: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        "the coordinator's leader does not answer",
        got=f"{endpoint.url} points at {leader.url}",
        where=where,
        do="Call again; another replica takes over within seconds.",
    )


def _error_of(status: int, answer: bytes, where: str) -> PacelineError:
    """Return the error that the coordinator named, or the nearest one for a foreign answer."""
    try:
        problem = Problem.model_validate_json(answer)
    except ValidationError:
        text = answer[:200].decode("utf-8", "replace").strip()
        return _kind_of(status)(
            "the coordinator refused the call", got=f"HTTP {status} {text}".strip(), where=where
        )
    kind = getattr(errors, problem.code, None)
    if not (isinstance(kind, type) and issubclass(kind, PacelineError)):
        kind = _kind_of(status)
    what = problem.detail or problem.title
    return kind(
        what,
        got=problem.got,
        wanted=problem.wanted,
        where=problem.where or where,
        do=problem.do,
    )


def _kind_of(status: int) -> type[PacelineError]:
    by_status: dict[int, type[PacelineError]] = {
        401: AccessDenied,
        403: AccessDenied,
        404: NotFound,
        409: Conflict,
        429: TemporaryError,
    }
    if status >= 500:
        return ServiceUnavailable
    return by_status.get(status, InvalidInput)
