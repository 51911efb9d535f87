"""The coordinator's REST from the caller's side: one method a call, records in and out.

How a call finds whoever leads, and what it waits for, is in ``asking``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self
from urllib.parse import quote, urlencode

from paceline.client.failover import Asking
from paceline.config import Runtime
from paceline.errors import NotFound
from paceline.schemas.access import (
    CreatedToken,
    CreateJoinToken,
    CreateToken,
    JoinWorker,
    TokenList,
    TokenView,
    WorkerIdentity,
)
from paceline.schemas.calls import (
    CreatedDeployment,
    CreateDeployment,
    DeploymentList,
    DeploymentView,
    EventList,
    Heartbeat,
    HeartbeatAnswer,
    Registered,
    RegisterWorker,
    Success,
    SwitchView,
    WorkerList,
    WorkerProgressList,
)
from paceline.schemas.events import Event
from paceline.schemas.plan import Plan, WorkerLanes
from paceline.schemas.records import Deployment, StageRecord, Worker, WorkerProgress

FAILOVER_S = 15.0  # how long calls to several replicas wait for a leader, by default


class CoordinatorClient(Asking):
    """Calls one coordinator, of one replica or several; may be shared by threads."""

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
        """Return the fleet: every worker that registered, the lost ones for a month."""
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


def _path(deployment_id: str) -> str:
    return f"/deployments/{quote(deployment_id, safe='')}"


def _ledger_path(stage: str, input_digest: str) -> str:
    return f"/ledger/{quote(stage, safe='')}/{quote(input_digest, safe='')}"


# The calls about access: tokens, joining, renewing, the audit history, from the caller's side.


class AccessClient(CoordinatorClient):
    """A client that may also say who may call."""

    def create_token(self, call: CreateToken) -> CreatedToken:
        """Make a bearer token; its text comes this once."""
        return self._call(CreatedToken, "POST", "/tokens", call)

    def create_join_token(self, call: CreateJoinToken) -> CreatedToken:
        """Make a join token for one worker; its text comes this once."""
        return self._call(CreatedToken, "POST", "/tokens/join", call)

    def tokens(self) -> list[TokenView]:
        """Return every token that is remembered, oldest first."""
        return list(self._call(TokenList, "GET", "/tokens").tokens)

    def revoke_token(self, token_id: str) -> None:
        """Have a token open nothing any more, and with a worker's all of that worker's.

        Raises NotFound.
        """
        self._call(Success, "DELETE", f"/tokens/{quote(token_id, safe='')}")

    def revoke_worker(self, worker_id: str) -> list[str]:
        """Take a worker out, and have no join token for it open anything any more.

        Return the ids of what was ended; raises NotFound where there was nothing to end.
        """
        ended: list[str] = []
        for each in self.tokens():
            if each.worker_id == worker_id and each.revoked_at is None:
                self.revoke_token(each.token_id)  # a worker's token ends with all of that worker
                ended.append(each.token_id)
        if not ended:
            raise NotFound(
                "this worker has no token", got=worker_id, do="See `paceline tokens list`."
            )
        return ended

    def join(self, call: JoinWorker) -> WorkerIdentity:
        """Spend this client's join token for an identity, or get another for the same key.

        Raises AccessDenied where it was spent for another key.
        """
        return self._call(WorkerIdentity, "POST", "/workers/join", call)

    def renew(self, call: JoinWorker) -> WorkerIdentity:
        """Return the worker's next identity."""
        return self._call(WorkerIdentity, "POST", "/workers/renew", call)

    def ca_pem(self) -> bytes:
        """Return the authority's certificate."""
        return self._request("GET", "/ca.pem")

    def audit(
        self,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 100,
        newest_first: bool = False,
        names: Sequence[str] = (),
        deployment_id: str | None = None,
        worker_id: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[Event]:
        """Return what the audit history has of that."""
        asked: list[tuple[str, object]] = [("after", after), ("limit", limit)]
        asked += [("name", name) for name in names]
        asked += [("newest_first", "true")] if newest_first else []
        optional = {
            "before": before,
            "deployment_id": deployment_id,
            "worker_id": worker_id,
            "since": since,
            "until": until,
        }
        asked += [(key, value) for key, value in optional.items() if value is not None]
        return list(self._call(EventList, "GET", f"/audit?{urlencode(asked)}").events)
