"""Commands on an installation that runs no flows here: deployments and flow runs over REST.

A deployment is created over REST and followed; a flow runs where the installation has its Prefect
worker. Either ends with the exit code that it would have had there.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import click
from pydantic import ValidationError

from paceline import errors
from paceline.cli.options import show
from paceline.cli.watching import follow
from paceline.client import CoordinatorClient
from paceline.config import Profile, Runtime
from paceline.errors import (
    Cancelled,
    DeploymentFailed,
    InvalidInput,
    PacelineError,
    TemporaryError,
)
from paceline.schemas import (
    FLOW_RESULT,
    CreateDeployment,
    DeploymentStatus,
    FlowRunView,
    StartFlow,
    digest_of,
    flow_result_key,
    new_run_id,
)

Answer = TypeVar("Answer")
POLL_S = 1.0
START_S = 15.0  # how long a flow is tried to be started: Prefect refuses while its database is busy
AWAY_S = 60.0  # how long no coordinator may answer while a flow is followed
SWITCH_S = 60.0
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
# Prefect's message of a failed flow run: "Flow run encountered an exception: KIND: message"
# or, of one that waits: "KIND: message"
RAISED = re.compile(r"(?:exception:? |\A)(?:[\w.]*\.)?(\w+): (.+)", re.DOTALL)


def with_settings(runtime: Runtime) -> Runtime:
    """Return a login's ``runtime`` with the installation's own settings, which it asks for."""
    client = CoordinatorClient.of(runtime)
    told = client.installation()
    try:
        profile = Profile.model_validate(told.profile)
    except ValidationError as error:
        raise InvalidInput(
            "the installation's settings cannot be read here",
            got=str(error).splitlines()[2].strip(),
            wanted="settings of this version",
            where=client.base_url,
            do=f"Install the version that runs there: Paceline {told.version}.",
        ) from error
    return runtime.model_copy(update={"profile": profile})


def distribute(
    runtime: Runtime,
    model: str,
    version: str | None,
    selector: str,
    *,
    activate: bool,
    cancels: bool,
    run_id: str | None,
    as_json: bool,
) -> int:
    """Bring a published version to the selected workers, follow it to its end, and switch to it.

    ``model`` is its id, or without ``version`` a source's URL, which the coordinator resolves.
    """
    runtime, run_id = with_settings(runtime), run_id or new_run_id()
    client = CoordinatorClient.of(runtime)
    call = CreateDeployment(
        model_id=model if version else "",
        version=version or "",
        source_url=f"{runtime.models_url}/{model}/{version}" if version else model,
        selector=selector,
        allow_older=not activate,
        run_id=run_id,
    )
    key = digest_of([run_id, call.source_url])
    deployment_id = client.create(call, key).deployment_id
    try:
        ended = follow(runtime, deployment_id, quiet=as_json)
    except BaseException as error:
        if not isinstance(error, Exception):
            from paceline.cli.flows import left_behind

            sys.stderr.write(f"{left_behind(client, deployment_id, cancels=cancels)}\n")
        raise
    if ended.status is not DeploymentStatus.COMPLETE:
        kind = Cancelled if ended.status is DeploymentStatus.CANCELLED else DeploymentFailed
        why = ended.failure
        raise kind(
            f"the deployment is {ended.status.value}",
            got=f"{why.code}: {why.message}" if why else None,
            where=f"deployment {deployment_id}",
        )
    view = client.deployment(deployment_id)
    targets = list(view.deployment.target_workers)
    switched = None
    if activate:
        client.activate(deployment_id)
        switched = client.await_switch(deployment_id, SWITCH_S, view.workers_complete).switched
    answer = {
        "status": "complete",
        "run_id": run_id,
        "notes": [],
        "model_id": view.deployment.model_id,
        "version": view.deployment.version,
        "url": view.deployment.source_url,
        "targets": targets,
        "relay": {
            "deployment_id": deployment_id,
            "workers": len(view.workers_complete),
            "workers_failed": list(view.workers_failed),
            "seconds": view.deployment.seconds,
            "origin_bytes": view.deployment.origin_bytes,
        },
        "activated": switched,
    }
    without = f", without {', '.join(view.workers_failed)}" if view.workers_failed else ""
    then = "not activated" if switched is None else f"active on {switched}"
    show(
        answer,
        as_json,
        f"{view.deployment.model_id} {view.deployment.version} on {len(view.workers_complete)} of "
        f"{len(targets)} workers{without}, {then}",
        f"done: run {run_id}, deployment {deployment_id}",
    )
    return 0


def run_flow(
    runtime: Runtime, name: str, run_id: str | None, parameters: Mapping[str, Any], *, as_json: bool
) -> int:
    """Start the flow ``module.function`` on the installation, follow it, and print its result."""
    function = name.rpartition(".")[2]
    flow = "lifecycle" if function == "run_lifecycle" else function.replace("_", "-")
    given = {key: value for key, value in parameters.items() if value is not None}
    client, run_id = CoordinatorClient.of(runtime), run_id or new_run_id()
    try:
        call = StartFlow.model_validate({"flow": flow, "run_id": run_id, "parameters": given})
    except ValidationError as error:
        raise InvalidInput(
            "this cannot be started from here", got=error.errors()[0]["msg"], where=flow
        ) from error
    view = patiently(lambda: client.start_flow(call), START_S)  # it may be repeated
    sys.stderr.write(f"{flow}: flow run {view.page}\n")
    try:
        view = _followed(client, view)
    except KeyboardInterrupt:
        sys.stderr.write(f"the flow goes on; the same command with --run-id {run_id} follows it\n")
        raise
    if view.state != "COMPLETED":
        raise _failure(view)
    record = client.ledger_get(FLOW_RESULT, flow_result_key(view.flow_run_id))
    output = record.output if record is not None else {}
    result, notes = output.get("result"), output.get("notes")
    notes = notes if isinstance(notes, list) else []
    answer = {"status": "complete", "run_id": run_id, "notes": notes}
    answer |= result if isinstance(result, dict) else {}
    lines = [f"! {note}" for note in notes]
    show(answer, as_json, *lines, f"done: run {run_id}")
    return 0


def _followed(client: CoordinatorClient, view: FlowRunView) -> FlowRunView:
    """Return the flow run once it has ended; its log goes to standard error meanwhile."""
    after, flow_run_id = 0, view.flow_run_id
    while True:
        view = patiently(partial(client.flow_run, flow_run_id, after), AWAY_S)
        for line in view.lines:
            click.echo(f"  {line}", err=True)
        after += len(view.lines)
        if view.state in FINAL and not view.lines:
            return view
        if not view.lines:
            time.sleep(POLL_S)


def patiently(call: Callable[[], Answer], away_s: float) -> Answer:
    """Return what ``call`` returns, repeated while a server is away for at most ``away_s``."""
    until_s, shown = time.monotonic() + away_s, ""
    while True:
        try:
            return call()
        except TemporaryError as error:
            if time.monotonic() > until_s:
                raise
            if shown != error.one_line():  # once, not every second
                shown = error.one_line()
                click.echo(f"! trying again: {shown}", err=True)
            time.sleep(POLL_S)


def _failure(view: FlowRunView) -> PacelineError:
    """Return the error that the flow ended with, of its own kind where the message names one."""
    where = f"flow run {view.page}"
    found = RAISED.search(view.message)
    kind = getattr(errors, found[1], None) if found else None
    if view.state == "CANCELLED" and kind is not errors.AwaitingApproval:
        return Cancelled("the flow run was cancelled", where=where)
    if found and isinstance(kind, type) and issubclass(kind, PacelineError):
        return kind(found[2].strip(), where=where)
    return PacelineError(
        f"the flow run ended as {view.state}", got=view.message or None, where=where
    )
