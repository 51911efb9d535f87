"""`Client`: an installation, for programs: its workers, deployments and flow runs, over REST.

Deployments are created and followed by the coordinator; flows run where the installation has its
Prefect worker, and end here with the error that they ended with there. Nothing of it needs Prefect,
Dask or MLflow on this machine.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast

from pydantic import ValidationError

from paceline import errors
from paceline.client.calls import CoordinatorClient
from paceline.client.failover import OUTAGE_S, POLL_S, OnLine, drop, retry
from paceline.client.jobs import JobMethods
from paceline.client.movement import movement
from paceline.config import Login, Profile, Runtime, find_installation, read_certificate
from paceline.errors import (
    Cancelled,
    DeploymentFailed,
    InvalidInput,
    PacelineError,
    kind_named,
)
from paceline.schemas import (
    FLOW_RESULT,
    Activated,
    CreateDeployment,
    Deployment,
    DeploymentStatus,
    DeploymentView,
    DistributeAnswer,
    EvaluateAnswer,
    FlowAnswer,
    FlowRunView,
    InstallationView,
    Moved,
    PromoteAnswer,
    RunSummary,
    SnapshotAnswer,
    StartFlow,
    TrainAnswer,
    Verified,
    VerifyAnswer,
    Worker,
    digest_of,
    flow_answer,
    flow_result_key,
    new_run_id,
)
from paceline.system import Endpoint

TOKEN_VARIABLE = "PACELINE_TOKEN"  # noqa: S105 (a variable's name)
START_S = 15.0  # how long a flow is tried to be started: Prefect refuses while its database is busy
SWITCH_S = 60.0
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
# Prefect's message of a failed flow run: "Flow run encountered an exception: KIND: message"
# or, of one that waits: "KIND: message"
RAISED = re.compile(r"(?:exception:? |\A)(?:[\w.]*\.)?(\w+): (.+)", re.DOTALL)


Answer = TypeVar("Answer", bound=FlowAnswer)


class FlowRun(Generic[Answer]):
    """A flow run of the installation, which ends with an ``Answer``."""

    def __init__(self, coordinator: CoordinatorClient, view: FlowRunView) -> None:
        self._coordinator = coordinator
        self.id = view.flow_run_id  # Prefect's
        self.flow = view.flow
        self.run_id = view.run_id  # Paceline's; the same one again goes on with this run
        self.page = view.page  # in Prefect

    def __repr__(self) -> str:
        return f"FlowRun({self.flow!r}, {self.run_id!r}, page={self.page!r})"

    @property
    def state(self) -> str:
        """Return Prefect's type of state now: SCHEDULED, PENDING, RUNNING, COMPLETED, FAILED, …"""
        return self._coordinator.flow_run(self.id, 2**31).state

    def wait(self, on_line: OnLine = drop, on_notice: OnLine = drop) -> Answer:
        """Return the flow's result, with ``run_id`` and ``notes``, once it has ended: the record of
        that flow (SnapshotAnswer, TrainAnswer, …), or of an installation of another version, whose
        result has not all of its fields, a plain FlowAnswer with those that it has.

        ``on_line`` receives each line of its log, ``on_notice`` what is said while no coordinator
        answers. Raises the error that the flow ended with, Cancelled for one that was cancelled,
        and TemporaryError where no coordinator answers for AWAY_S.
        """
        after = 0
        while True:
            view = retry(partial(self._coordinator.flow_run, self.id, after), OUTAGE_S, on_notice)
            for line in view.lines:
                on_line(line)
            after += len(view.lines)
            if view.state in FINAL and not view.lines:
                break
            if not view.lines:
                time.sleep(POLL_S)
        if view.state != "COMPLETED":
            raise _failure(view)
        record = self._coordinator.ledger_get(FLOW_RESULT, flow_result_key(self.id))
        output = record.output if record is not None else {}
        result, notes = output.get("result"), output.get("notes")
        answer = flow_answer(
            self.flow, self.run_id, notes, result if isinstance(result, dict) else {}
        )
        return cast(Answer, answer)

    def cancel(self) -> None:
        """Ask for the flow run's cancellation; ``wait`` then raises Cancelled."""
        self._coordinator.cancel_flow(self.id)


class Client(JobMethods):
    """An installation, over REST.

    ``Client()`` is the one that a command typed here would mean: in ``state``, $PACELINE_STATE or
    ./.paceline, else this user's login. ``Client(URL, token)`` needs neither; ``ca`` is the PEM
    file of the installation's authority (default: the system's), and the token is $PACELINE_TOKEN
    unless given. Threads may share a client. Its calls raise PacelineError's kinds: AccessDenied
    for a token that does not open the call, ServiceUnavailable where no coordinator answers.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        ca: Path | str | None = None,
        state: Path | str | None = None,
    ) -> None:
        if url is None:
            if token is not None or ca is not None:
                raise InvalidInput("a token or CA without a URL", wanted="Client(URL, token)")
            runtime = find_installation(None if state is None else Path(state))
        else:
            runtime = _runtime_at((url,) if isinstance(url, str) else tuple(url), token, ca, state)
        self._open(runtime)

    @classmethod
    def of(cls, runtime: Runtime) -> Self:
        made = cls.__new__(cls)
        made._open(runtime)
        return made

    def _open(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.coordinator = CoordinatorClient.of(runtime)  # one method per REST call

    def __repr__(self) -> str:
        return f"Client({self.coordinator.base_url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the coordinator; the end of a ``with`` does so."""
        self.coordinator.close()

    # -- what there is

    def installation(self) -> InstallationView:
        """Return the installation's version, settings and pages, and what this token opens."""
        return self.coordinator.installation()

    def workers(self) -> list[Worker]:
        """Return every registered worker; lost ones are kept for a month."""
        return self.coordinator.workers()

    def deployments(self) -> list[Deployment]:
        """Return every deployment that the coordinator holds, those that ended included."""
        return self.coordinator.deployments()

    def deployment(self, deployment_id: str) -> DeploymentView:
        """Return a deployment with its progress and workers; raises NotFound for another id."""
        return self.coordinator.deployment(deployment_id)

    # -- deployments

    def distribute(
        self,
        model: str,
        version: str | None = None,
        *,
        to: str | Sequence[str] = "",
        activate: bool = True,
        allow_older: bool = False,
        digest: str = "",
        run_id: str | None = None,
    ) -> DistributeAnswer:
        """Bring a published version to workers, wait until they have it, and switch to it.

        ``model`` is its id, or without ``version`` a source's URL (s3://, models:/, hf://, oci://).
        ``to`` selects workers by label or name (default: all that are alive). ``digest`` is what
        the manifest must be (CorruptData else); ``allow_older`` goes back to a version before the
        active one. Raises DeploymentFailed and Cancelled.
        """
        selector = to if isinstance(to, str) else ";".join(to)
        run_id = run_id or new_run_id()
        older = allow_older or not activate
        deployment_id = deploy(
            self, model, version, selector, run_id, allow_older=older, digest=digest
        )
        return finish(self, self.wait(deployment_id), run_id, activate=activate)

    def wait(self, deployment_id: str, on_notice: OnLine = drop) -> DeploymentView:
        """Return the deployment once it has ended; TemporaryError as ``FlowRun.wait`` says."""
        while True:
            call = partial(self.coordinator.deployment, deployment_id)
            view = retry(call, OUTAGE_S, on_notice)
            if view.deployment.status.is_final:
                return view
            time.sleep(POLL_S)

    def activate(self, deployment_id: str, workers: Collection[str] = ()) -> int:
        """Switch the fleet to a deployment's version; return how many workers have switched.

        ``workers`` are waited for. Raises Conflict and WorkerLost as ``await_switch`` does.
        """
        self.coordinator.activate(deployment_id)
        return self.coordinator.await_switch(deployment_id, SWITCH_S, workers).switched

    def rollback(self, deployment_id: str) -> int:
        """Switch the fleet back to what was active before this deployment's version."""
        self.coordinator.rollback(deployment_id)
        return self.coordinator.await_switch(deployment_id, SWITCH_S).switched

    def cancel(self, deployment_id: str) -> None:
        """Cancel a deployment; what arrived is kept."""
        self.coordinator.cancel(deployment_id)

    # -- flows

    def start(
        self,
        flow: str,
        parameters: Mapping[str, Any],
        *,
        run_id: str | None = None,
        on_notice: OnLine = drop,
    ) -> FlowRun[Any]:
        """Start a flow by its name in Prefect ("train-model"); parameters that are None are left
        out. With the ``run_id`` of an earlier call it is the same flow run, unless that ended
        badly. Raises InvalidInput for what cannot be started over REST.
        """
        given = {name: value for name, value in parameters.items() if value is not None}
        try:
            call = StartFlow.model_validate(
                {"flow": flow, "run_id": run_id or new_run_id(), "parameters": given}
            )
        except ValidationError as error:
            raise InvalidInput(
                "this cannot be started from here", got=error.errors()[0]["msg"], where=flow
            ) from error
        view = retry(lambda: self.coordinator.start_flow(call), START_S, on_notice)
        return FlowRun(self.coordinator, view)

    def lifecycle(
        self,
        *,
        data: str | None = None,
        model: str | None = None,
        settings: dict[str, Any] | None = None,
        approver: str | None = None,
        run_id: str | None = None,
    ) -> FlowRun[RunSummary]:
        """Start the whole lifecycle: relay, train, judge, promote, roll out.

        ``data`` is s3://bucket/prefix, ``model`` MODEL_ID/VERSION or hf://… (both by default the
        profile's), ``settings`` those of the training by their keys in a profile.
        """
        given = {"data": data, "model": model, "settings": settings, "approver": approver}
        return self.start("lifecycle", given, run_id=run_id)

    def snapshot(
        self, data: str, *, run_id: str | None = None, **reading: Any
    ) -> FlowRun[SnapshotAnswer]:
        """Start a snapshot of the samples at ``data`` (s3://bucket/prefix); ``reading`` changes the
        profile's [data]: format, text_field, tokenizer, purpose…
        """
        given = {"data": data, "reading": reading or None}
        return self.start("build-snapshot", given, run_id=run_id)

    def train(
        self,
        model_id: str,
        version: str,
        snapshot: str,
        *,
        settings: dict[str, Any] | None = None,
        run_id: str | None = None,
        **more: Any,
    ) -> FlowRun[TrainAnswer]:
        """Start a training of a version that the nodes hold, on a snapshot (its URL).

        ``settings`` are this training's own by their keys in a profile; ``more``: steps, ranks,
        learning_rate, continue_from, labels, name, seed, priority, budget, resources,
        checkpoint_policy.
        """
        given = {"model_id": model_id, "version": version, "snapshot_url": snapshot}
        more["settings"] = settings
        return self.start("train-model", given | more, run_id=run_id)

    def evaluate(
        self, model_id: str, base: str, trained: str, snapshot: str, *, run_id: str | None = None
    ) -> FlowRun[EvaluateAnswer]:
        """Start the judging of a training (its training_digest) against version ``base``."""
        given = {"model_id": model_id, "base_version": base, "trained": trained}
        return self.start("evaluate-model", given | {"snapshot_url": snapshot}, run_id=run_id)

    def promote(
        self,
        model_id: str,
        report: str,
        *,
        approver: str | None = None,
        run_id: str | None = None,
    ) -> FlowRun[PromoteAnswer]:
        """Start the promotion of what an evaluation (its report_digest) judged."""
        given = {"model_id": model_id, "report": report, "approver": approver}
        return self.start("promote-model", given, run_id=run_id)

    def verify(
        self, model_id: str, version: str, *, full: bool = False, run_id: str | None = None
    ) -> FlowRun[VerifyAnswer]:
        """Start a check of every byte of each node's copy."""
        given = {"model_id": model_id, "version": version, "full": full}
        return self.start("verify-model", given, run_id=run_id)


def runtime_of(client: Client) -> Runtime:
    """Return where the installation's servers and buckets are; a login asks it for them."""
    if not client._runtime.is_login:
        return client._runtime
    found = client.installation()
    try:
        profile = Profile.model_validate(found.profile)
    except ValidationError as error:
        raise InvalidInput(
            "the installation's settings cannot be read here",
            got=str(error).splitlines()[2].strip(),
            wanted="settings of this version",
            where=client.coordinator.base_url,
            do=f"Install the version that runs there: Paceline {found.version}.",
        ) from error
    return client._runtime.model_copy(update={"profile": profile})


def deploy(
    client: Client,
    model: str,
    version: str | None,
    selector: str,
    run_id: str,
    *,
    allow_older: bool = False,
    digest: str = "",
) -> str:
    """Start a deployment and return its id; the same ``run_id`` again returns the same."""
    source = f"{runtime_of(client).models_url}/{model}/{version}" if version else model
    call = CreateDeployment(
        model_id=model if version else "",
        version=version or "",
        source_url=source,
        selector=selector,
        allow_older=allow_older,
        manifest_digest=digest or None,
        run_id=run_id,
    )
    return client.coordinator.create(call, digest_of([run_id, source])).deployment_id


def finish(
    client: Client, view: DeploymentView, run_id: str, *, activate: bool
) -> DistributeAnswer:
    """Switch the fleet to a deployment that is complete, and return what came of it.

    Raises DeploymentFailed, or Cancelled, where it is not complete; and as ``await_switch``.
    """
    made, nodes = view.deployment, view.workers_complete
    require_complete(made)
    began, switched = time.monotonic(), None
    if activate:
        client.coordinator.activate(made.deployment_id)
        switch = client.coordinator.await_switch(made.deployment_id, SWITCH_S, nodes)
        switched = Activated(
            activated=tuple(x.worker_id for x in switch.workers if x.state == "switched"),
            seconds=time.monotonic() - began,
            deployment_id=made.deployment_id,
        )
    relay = movement(
        view,
        client.coordinator.workers_of(made.deployment_id),
        client.coordinator.plan(made.deployment_id),
    )
    return DistributeAnswer(
        run_id=run_id,
        model_id=made.model_id,
        version=made.version,
        manifest_digest=made.manifest_digest,
        url=made.source_url,
        targets=made.target_workers,
        plan=relay["plan"],
        relay=Moved(**relay, reused_result=False, holders=nodes),
        verify=Verified(
            verified=0, vouched=len(nodes), nodes=nodes, seconds=0.0,
            manifest_digest=made.manifest_digest,
        ),
        activate=switched,
    )  # fmt: skip


def require_complete(deployment: Deployment) -> None:
    """Raise DeploymentFailed, or Cancelled, where ``deployment`` did not end as complete."""
    if deployment.status is DeploymentStatus.COMPLETE:
        return
    kind = Cancelled if deployment.status is DeploymentStatus.CANCELLED else DeploymentFailed
    why = deployment.failure
    raise kind(
        f"the deployment is {deployment.status.value}",
        got=f"{why.code}: {why.message}" if why else None,
        where=f"deployment {deployment.deployment_id}",
    )


def require_encrypted(urls: Sequence[str]) -> list[Endpoint]:
    """Return the endpoints of ``urls``; raises InvalidInput for plaintext beyond loopback."""
    endpoints = [Endpoint.of(url) for url in urls]
    clear = [each.url for each in endpoints if not each.secure and not each.on_loopback]
    if clear:
        raise InvalidInput(
            "a token does not cross a network in the clear",
            got=clear[0],
            wanted="an https:// URL",
            do='Set [security] rest_tls = "installation" where the coordinator runs.',
        )
    return endpoints


def _runtime_at(
    urls: tuple[str, ...], token: str | None, ca: Path | str | None, state: Path | str | None
) -> Runtime:
    if state is not None:
        raise InvalidInput("two installations", got="url and state", wanted="one of them")
    token = token or os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise InvalidInput("no token", wanted=f"Client(URL, token), or ${TOKEN_VARIABLE}")
    endpoints = require_encrypted(urls)
    pem = "" if ca is None else read_certificate(Path(ca)).decode()
    return Login(coordinators=tuple(each.url for each in endpoints), ca=pem, token=token).runtime()


def raised(message: str) -> tuple[type[PacelineError] | None, str]:
    """Return the kind of our error that a flow run's message names (None: it names none), and what
    that error says."""
    found = RAISED.search(message)
    if found and (kind := kind_named(found[1])) is not None:
        return kind, found[2].strip()
    return None, message


def _failure(view: FlowRunView) -> PacelineError:
    """Return the error that the flow ended with, of its own kind where the message names one."""
    where = f"flow run {view.page}"
    kind, said = raised(view.message)
    if view.state == "CANCELLED" and kind is not errors.AwaitingApproval:
        return Cancelled("the flow run was cancelled", where=where)
    if kind is not None:
        return kind(said, where=where)
    return PacelineError(
        f"the flow run ended as {view.state}", got=view.message or None, where=where
    )
