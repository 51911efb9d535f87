"""The coordinator's REST from the caller's side: one method a call, records in and out.

Lean on purpose (http.client and pydantic only), because every agent imports it. Each thread keeps
its own connection alive; a connection that went stale between two calls is replaced once, which is
safe because every call of this API may be repeated. It knows no deadlines beyond its timeout and
never retries a server that does not answer: how long to wait and how often is the caller's choice.
"""

from __future__ import annotations

import http.client
import threading
from typing import TypeVar
from urllib.parse import quote, urlencode, urlsplit

from pydantic import BaseModel, ValidationError

from paceline import errors
from paceline.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    NotFound,
    PacelineError,
    ServiceUnavailable,
    TemporaryError,
)
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
    WorkerList,
    WorkerProgressList,
)
from paceline.wire.plan import Plan, WorkerLanes
from paceline.wire.records import Deployment, StageRecord, Worker, WorkerProgress

MAX_ANSWER_BYTES = 64 * 1024 * 1024  # a manifest of 100,000 pieces is some 15 MB

Answer = TypeVar("Answer", bound=BaseModel)


class CoordinatorClient:
    """Calls one coordinator; may be shared by threads."""

    def __init__(self, base_url: str, token: str, timeout_s: float = 10.0) -> None:
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidInput(
                "not a coordinator's URL", got=base_url or "nothing", wanted="http://host:port"
            )
        self.base_url = base_url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._host = host
        self._port = port
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        self._timeout_s = timeout_s
        self._local = threading.local()

    def register(self, call: RegisterWorker) -> Registered:
        """Make the worker known, or known again as a new incarnation.

        Raises StaleEpoch where a higher incarnation of the same worker is registered.
        """
        return self._call(Registered, "POST", "/workers/register", call)

    def heartbeat(self, beat: Heartbeat, wait_s: float = 0.0) -> HeartbeatAnswer:
        """Report, and return what the coordinator wants done, waiting up to ``wait_s`` for it."""
        query = f"?{urlencode({'wait_s': round(wait_s, 3)})}" if wait_s > 0 else ""
        path = f"/workers/heartbeat{query}"
        return self._call(HeartbeatAnswer, "POST", path, beat, timeout_s=self._timeout_s + wait_s)

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

    def activate(self, deployment_id: str) -> None:
        """Have every worker switch to this version; raises Conflict unless it is complete."""
        self._call(Success, "POST", f"{_path(deployment_id)}/activate")

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
        timeout_s = self._timeout_s + wait_s
        return self._call(EventList, "GET", f"/events?{query}", timeout_s=timeout_s)

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
    ) -> Answer:
        raw = self._request(method, path, body, headers=headers, timeout_s=timeout_s)
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
    ) -> bytes:
        payload = None if body is None else body.model_dump_json(by_alias=True).encode()
        sent = self._headers | (headers or {})
        if payload is not None:
            sent["Content-Type"] = "application/json"
        where = f"{method} {self.base_url}{path}"
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            status, answer = self._exchange(method, self._prefix + path, payload, sent, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ServiceUnavailable(
                "the coordinator does not answer",
                got=f"{type(error).__name__}: {error}",
                where=where,
                do="Check that it runs (`paceline status`); the call may be repeated.",
            ) from error
        if 200 <= status < 300:
            return answer
        raise _error_of(status, answer, where)

    def _exchange(
        self,
        method: str,
        path: str,
        payload: bytes | None,
        headers: dict[str, str],
        timeout_s: float,
    ) -> tuple[int, bytes]:
        held: _Held | None = getattr(self._local, "held", None)
        if held is not None:
            try:
                return held.exchange(method, path, payload, headers, timeout_s)
            except (ConnectionError, http.client.BadStatusLine):
                # The server closed the idle connection (or restarted): once more on a fresh one.
                held.close()
                self._local.held = None
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        held = _Held(kind(self._host, self._port, timeout=timeout_s))
        self._local.held = held
        return held.exchange(method, path, payload, headers, timeout_s)


class _Held:
    """A thread's connection; closes its socket when the thread, and with it this object, goes."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def exchange(
        self,
        method: str,
        path: str,
        payload: bytes | None,
        headers: dict[str, str],
        timeout_s: float,
    ) -> tuple[int, bytes]:
        connection = self._connection
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        connection.request(method, path, body=payload, headers=headers)
        response = connection.getresponse()
        answer = response.read(MAX_ANSWER_BYTES + 1)
        if len(answer) > MAX_ANSWER_BYTES:
            connection.close()
            raise http.client.HTTPException(f"answer longer than {MAX_ANSWER_BYTES} bytes")
        return response.status, answer

    def close(self) -> None:
        self._connection.close()

    def __del__(self) -> None:
        self._connection.close()


def _path(deployment_id: str) -> str:
    return f"/deployments/{quote(deployment_id, safe='')}"


def _ledger_path(stage: str, input_digest: str) -> str:
    return f"/ledger/{quote(stage, safe='')}/{quote(input_digest, safe='')}"


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
