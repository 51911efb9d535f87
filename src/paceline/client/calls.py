"""Client methods of the coordinator's REST: one per call, records in and out.

Finding the leader, retries and timeouts are in ``failover``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Literal, Self
from urllib.parse import quote, urlencode

from paceline.client.failover import FailoverClient
from paceline.config import Runtime
from paceline.errors import Conflict, NotFound, TemporaryError, WorkerLost
from paceline.schemas import (
    AdoptJob,
    AllowPurpose,
    ApprovalList,
    ApprovalRequest,
    ApprovalShown,
    CreatedDeployment,
    CreateDeployment,
    CreatedToken,
    CreateJoinToken,
    CreateToken,
    DecidePromotion,
    Deployment,
    DeploymentList,
    DeploymentView,
    Event,
    EventList,
    FlowRunView,
    Heartbeat,
    HeartbeatAnswer,
    InstallationView,
    JobList,
    JobLog,
    JobReport,
    JobView,
    JoinWorker,
    Plan,
    PurposeList,
    PurposeRule,
    Registered,
    RegisterWorker,
    ResumeJob,
    ReviewJob,
    SignedRead,
    SignRead,
    StageRecord,
    StartFlow,
    SubmitJob,
    Success,
    SwitchPhase,
    SwitchView,
    TokenList,
    TokenView,
    TrainingCosts,
    TrainingJob,
    Worker,
    WorkerIdentity,
    WorkerLanes,
    WorkerList,
    WorkerProgress,
    WorkerProgressList,
)
from paceline.text import shortened

JOBS = "/v1/training-jobs"
PURPOSES = "/v1/data-purposes"
COSTS = "/v1/training-costs"
POLL_S = 0.2
FLOW_START_S = 30.0  # Prefect answers in its own time
FAILOVER_S = 15.0  # default wait for a leader, if there are several replicas


class CoordinatorClient(FailoverClient):
    """Client of one coordinator with one or several replicas; threads may share it."""

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        timeout_s: float = 10.0,
        *,
        patience_s: float | None = None,
        worker: bool = False,
    ) -> Self:
        """Return a client of the installation's coordinator; it finds the leading replica.

        With several replicas a call waits up to ``patience_s`` for a leader. With ``worker`` it
        uses the agents' token, which allows a worker's calls only.
        """
        known, secrets = runtime.endpoints, runtime.secrets
        urls = known.coordinator_urls or (known.coordinator_url,)
        if patience_s is None:
            patience_s = FAILOVER_S if len(urls) > 1 else 0.0
        token = secrets.agents_token if worker else secrets.coordinator_token
        ca = runtime.coordinator_ca
        return cls(urls, token, timeout_s, patience_s=patience_s, ca=ca)

    def register(self, call: RegisterWorker) -> Registered:
        """Register the worker, or a new incarnation of it.

        Raises StaleEpoch if a higher incarnation of the same worker is registered.
        """
        return self._call(Registered, "POST", "/workers/register", call)

    def heartbeat(self, beat: Heartbeat, wait_s: float = 0.0) -> HeartbeatAnswer:
        """Send a heartbeat and return the answer, waiting up to ``wait_s`` for a command."""
        query = f"?{urlencode({'wait_s': round(wait_s, 3)})}" if wait_s > 0 else ""
        path = f"/workers/heartbeat{query}"
        return self._call(HeartbeatAnswer, "POST", path, beat, wait_s=wait_s)

    def sign_read(self, call: SignRead) -> SignedRead:
        """Return a signed URL of one object of a deployment that the worker is part of."""
        return self._call(SignedRead, "POST", "/workers/signed-reads", call)

    def lanes(self, deployment_id: str, worker_id: str) -> WorkerLanes:
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
        return self._call(DeploymentView, "GET", _path(deployment_id))

    def deployments(self) -> list[Deployment]:
        """Return every deployment that the coordinator stores, oldest first."""
        return list(self._call(DeploymentList, "GET", "/deployments").deployments)

    def workers_of(self, deployment_id: str) -> list[WorkerProgress]:
        answer = self._call(WorkerProgressList, "GET", f"{_path(deployment_id)}/workers")
        return list(answer.workers)

    def plan(self, deployment_id: str) -> Plan:
        """Return the newest plan; raises NotFound before there is one."""
        return self._call(Plan, "GET", f"{_path(deployment_id)}/plan")

    def workers(self) -> list[Worker]:
        """Return every registered worker; lost workers are kept for a month."""
        return list(self._call(WorkerList, "GET", "/workers").workers)

    def cancel(self, deployment_id: str) -> None:
        """Cancel the deployment; once this returns, no worker publishes it any more."""
        self._call(Success, "DELETE", _path(deployment_id))

    def activate(self, deployment_id: str, *, allow_older: bool = False) -> None:
        """Switch the fleet to this version, once a quorum is ready; see ``switch``.

        Raises Conflict unless the deployment is complete, and for a version older than the active
        one unless ``allow_older``.
        """
        query = "?allow_older=true" if allow_older else ""
        self._call(Success, "POST", f"{_path(deployment_id)}/activate{query}")

    def rollback(self, deployment_id: str) -> None:
        """Switch the fleet from this version back to the previous one; see ``switch``."""
        self._call(Success, "POST", f"{_path(deployment_id)}/rollback")

    def switch(self, deployment_id: str) -> SwitchView:
        """Return the deployment's newest switch; raises NotFound if there was none."""
        return self._call(SwitchView, "GET", f"{_path(deployment_id)}/switch")

    def await_switch(
        self, deployment_id: str, deadline_s: float, workers: Collection[str] = ()
    ) -> SwitchView:
        """Return the newest switch once the fleet has switched, each of ``workers`` included.

        Raises Conflict if it was refused or superseded, WorkerLost if workers have not switched in
        time; they switch when they return.
        """
        until_s = time.monotonic() + deadline_s
        view: SwitchView | None = None
        while True:
            is_late = time.monotonic() >= until_s
            try:
                view = self.switch(deployment_id)
            except TemporaryError:
                if is_late:
                    raise
            is_done = view is not None and view.phase is SwitchPhase.SWITCHED
            if view is not None and is_done and not set(view.waiting) & set(workers):
                return view
            if view is not None and view.phase in (SwitchPhase.REFUSED, SwitchPhase.SUPERSEDED):
                raise Conflict(
                    f"the fleet was not switched: {view.phase}",
                    got=view.failure.message if view.failure else f"{view.ready} workers ready",
                    wanted=f"{view.quorum} workers ready",
                    where=f"deployment {deployment_id}",
                    do="No worker switches without a quorum. Mend what is named, and ask again.",
                )
            if view is not None and is_late:
                raise WorkerLost(
                    "not every worker has switched in time",
                    got=f"{view.switched} have; waiting for {shortened(view.waiting)}",
                    wanted=f"within {deadline_s:g} s",
                    where=f"deployment {deployment_id}",
                    do="The switch is decided: a worker that is away switches when it returns.",
                )
            time.sleep(POLL_S)

    def ledger_get(self, stage: str, input_digest: str) -> StageRecord | None:
        """Return the stage's recorded result for these inputs, or None if it never finished."""
        try:
            return self._call(StageRecord, "GET", _ledger_path(stage, input_digest))
        except NotFound:
            return None

    def ledger_put(self, record: StageRecord) -> StageRecord:
        """Record that a stage finished; a newer record for the same inputs replaces the older."""
        path = _ledger_path(record.stage, record.input_digest)
        return self._call(StageRecord, "PUT", path, record)

    def installation(self) -> InstallationView:
        """Return what a client needs to know of the installation, and what this token opens."""
        return self._call(InstallationView, "GET", "/installation")

    def start_flow(self, call: StartFlow) -> FlowRunView:
        """Start one of the installation's flows; raises NotFound where it has no Prefect."""
        return self._call(FlowRunView, "POST", "/flows", call, timeout_s=FLOW_START_S)

    def flow_run(self, flow_run_id: str, after: int = 0) -> FlowRunView:
        """Return a flow run, with the lines of its log after the first ``after``."""
        path = f"/flows/{quote(flow_run_id, safe='')}?after={after}"
        return self._call(FlowRunView, "GET", path)

    def approvals(self) -> list[ApprovalRequest]:
        """Return the promotions that wait for a person, the first to expire first."""
        return list(self._call(ApprovalList, "GET", "/approvals").approvals)

    def approval(self, run_id: str) -> ApprovalShown:
        """Return the promotion of ``run_id`` with its evidence; raises NotFound."""
        return self._call(ApprovalShown, "GET", f"/approvals/{quote(run_id, safe='')}")

    def decide_promotion(self, run_id: str, call: DecidePromotion) -> ApprovalShown:
        """Approve or reject the promotion of ``run_id``; the same decision may be sent again."""
        path = f"/approvals/{quote(run_id, safe='')}"
        return self._call(ApprovalShown, "POST", path, call, timeout_s=FLOW_START_S)

    def submit_job(self, call: SubmitJob, idempotency_key: str | None = None) -> JobView:
        """Queue a training job; the same key and job again return the same job."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else None
        return self._call(JobView, "POST", JOBS, call, headers=headers, timeout_s=FLOW_START_S)

    def jobs(
        self,
        states: Sequence[str] = (),
        team: str = "",
        project: str = "",
        *,
        name: str = "",
        submitter: str = "",
        model: str = "",
        training: str = "",
        offset: int = 0,
        limit: int = 100,
    ) -> JobList:
        """Return the jobs of these states, team, project, submitter, model id and training (the
        beginning of its id), the newest first; ``name`` is a part of a name, or the beginning of
        an id."""
        asked: list[tuple[str, object]] = [("offset", offset), ("limit", limit)]
        asked += [("state", each) for each in states]
        given = {"team": team, "project": project, "name": name}
        given |= {"submitter": submitter, "model": model, "training": training}
        asked += [(key, value) for key, value in given.items() if value]
        return self._call(JobList, "GET", f"{JOBS}?{urlencode(asked)}")

    def job(self, job_id: str) -> JobView:
        """Return a job: its state, metrics, checkpoints, ranks and history."""
        return self._call(JobView, "GET", _job_path(job_id))

    def change_job(
        self,
        job_id: str,
        what: Literal["pause", "resume", "cancel"],
        *,
        budget: float | None = None,
    ) -> JobView:
        """Pause, resume (with a new ``budget``) or cancel a job. Raises Conflict where its state or
        its budget does not allow it."""
        body = None if budget is None else ResumeJob(budget=budget)
        return self._call(JobView, "POST", f"{_job_path(job_id)}/{what}", body)

    def training_costs(self) -> TrainingCosts:
        """Return what trainings and attempts of jobs used, and the installation's prices."""
        return self._call(TrainingCosts, "GET", COSTS, timeout_s=FLOW_START_S)

    def review_job(self, job_id: str, call: ReviewJob) -> JobView:
        """Accept or reject a job that passed bad data over."""
        return self._call(JobView, "POST", f"{_job_path(job_id)}/review", call)

    def data_purposes(self) -> list[PurposeRule]:
        """Return the table of what data may be used for, oldest first."""
        return list(self._call(PurposeList, "GET", PURPOSES).rules)

    def job_log(self, job_id: str, after: int = 0, *, attempt: int = 0, tail: int = 0) -> JobLog:
        """Return lines of the log of an attempt's flow run, after the first ``after``, or its last
        ``tail`` lines; of the newest attempt that has one, where ``attempt`` is 0."""
        asked = urlencode({"after": after, "attempt": attempt, "tail": tail})
        return self._call(JobLog, "GET", f"{_job_path(job_id)}/logs?{asked}")

    def adopt_job(self, call: AdoptJob) -> TrainingJob:
        """Ask for the admission of a training whose flow runs already."""
        return self._call(JobView, "POST", f"{JOBS}/adopt", call).job

    def report_job(self, job_id: str, report: JobReport) -> TrainingJob:
        """Report how a job's flow goes; returns the job, with what is wanted of it."""
        return self._call(JobView, "POST", f"{_job_path(job_id)}/report", report).job

    def cancel_flow(self, flow_run_id: str) -> None:
        self._call(Success, "DELETE", f"/flows/{quote(flow_run_id, safe='')}")

    def events(self, after: int = 0, wait_s: float = 0.0) -> EventList:
        """Return the events after number ``after``, waiting up to ``wait_s`` for the first.

        They come in pages: continue from ``last``. An ``after`` beyond the newest (``2**62``)
        returns no events and the newest one's number, from which to follow new events only.
        """
        query = urlencode({"after": after, "wait_s": wait_s})
        return self._call(EventList, "GET", f"/events?{query}", wait_s=wait_s)


def _path(deployment_id: str) -> str:
    return f"/deployments/{quote(deployment_id, safe='')}"


def _job_path(job_id: str) -> str:
    return f"{JOBS}/{quote(job_id, safe='')}"


def _ledger_path(stage: str, input_digest: str) -> str:
    return f"/ledger/{quote(stage, safe='')}/{quote(input_digest, safe='')}"


class AccessClient(CoordinatorClient):
    """A CoordinatorClient with the calls for tokens, joining, renewing and the audit history."""

    def create_token(self, call: CreateToken) -> CreatedToken:
        """Create a bearer token; only this result contains its text."""
        return self._call(CreatedToken, "POST", "/tokens", call)

    def create_join_token(self, call: CreateJoinToken) -> CreatedToken:
        """Create a join token, for one worker or many; only this result contains its text."""
        return self._call(CreatedToken, "POST", "/tokens/join", call)

    def tokens(self) -> list[TokenView]:
        return list(self._call(TokenList, "GET", "/tokens").tokens)

    def revoke_token(self, token_id: str) -> None:
        """Revoke a token; for a worker's token, revoke all tokens of that worker.

        Raises NotFound.
        """
        self._call(Success, "DELETE", f"/tokens/{quote(token_id, safe='')}")

    def revoke_worker(self, worker_id: str) -> list[str]:
        """Revoke a worker and its join tokens; return the ids of the revoked tokens.

        Raises NotFound if the worker has no valid token.
        """
        ended: list[str] = []
        for each in self.tokens():
            if each.worker_id == worker_id and each.revoked_at is None:
                self.revoke_token(each.token_id)  # revokes all tokens of that worker
                ended.append(each.token_id)
        if not ended:
            raise NotFound(
                "this worker has no token", got=worker_id, do="See `paceline tokens list`."
            )
        return ended

    def allow_purpose(self, call: AllowPurpose) -> PurposeRule:
        return self._call(PurposeRule, "POST", PURPOSES, call)

    def revoke_purpose(self, rule_id: str) -> PurposeRule:
        """End a rule of the table of purposes. Raises NotFound."""
        return self._call(PurposeRule, "DELETE", f"{PURPOSES}/{quote(rule_id, safe='')}")

    def join(self, call: JoinWorker) -> WorkerIdentity:
        """Spend this client's join token and return an identity; repeatable with the same key.

        Raises AccessDenied if the token was spent for another key.
        """
        return self._call(WorkerIdentity, "POST", "/workers/join", call)

    def renew(self, call: JoinWorker) -> WorkerIdentity:
        return self._call(WorkerIdentity, "POST", "/workers/renew", call)

    def ca_pem(self) -> bytes:
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
        """Return the events of the audit history that match."""
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
