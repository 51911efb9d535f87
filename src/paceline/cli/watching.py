"""`paceline watch`, `status`, `workers`, `activate`, `cancel`: observe and control the fleet.

Each command calls the coordinator only, whichever replica leads; none needs Prefect or Dask.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from paceline.cli.board import (
    Board,
    figures,
    lines_of_json,
    lines_of_text,
    live,
    outcome_of,
    said_of,
    shown_end,
    until_ended,
)
from paceline.cli.options import (
    deadline_option,
    json_option,
    next_line,
    print_table,
    resolve_deployment_id,
    show,
    show_table,
    state_directory,
    state_option,
    there,
    to_option,
)
from paceline.client import CoordinatorClient, Follower, Lost
from paceline.config import Runtime, find_installation
from paceline.errors import (
    AccessDenied,
    InvalidInput,
    NotFound,
    NotReady,
    PacelineError,
    ServiceUnavailable,
)
from paceline.plan import select_workers
from paceline.schemas import (
    ApprovalRequest,
    Changed,
    CreateDeployment,
    DeploymentMoment,
    DeploymentsShown,
    DeploymentStatus,
    Inventory,
    Moment,
    ReplicaStatus,
    ServiceStatus,
    StatusReport,
    WorkersShown,
)
from paceline.text import shortened
from paceline.units import duration, size

POLL_S = 0.2

deployment_argument = click.argument("deployment_id", metavar="ID")


@click.command()
@click.argument("deployment_id", metavar="[ID]", required=False)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds without any coordinator before it gives up.",
)
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def watch(deployment_id: str | None, patience: float, state: Path | None, as_json: bool) -> int:
    """Show deployment ID (default: the newest) until it ends: rate, ETA, who has which chunk.

    Exit codes: 0 complete, 1 failed, 130 cancelled (or interrupted), 75 when no coordinator answers
    for so long. The coordinator may fail over meanwhile. Watching changes nothing: to end the
    deployment use `paceline cancel ID`.
    """
    runtime = find_installation(state)
    if deployment_id:
        chosen = resolve_deployment_id(CoordinatorClient.of(runtime), deployment_id)
    else:
        chosen = _newest(runtime)
    follower = Follower.of(runtime, deployment_id=chosen, after=0, patience_s=patience)
    if not as_json:
        return outcome_of(_shown_until_ended(follower)).exit_code
    outcome = outcome_of(lines_of_json(follower, Board()))
    click.echo(outcome.model_dump_json())
    return outcome.exit_code


def follow(
    runtime: Runtime, deployment_id: str, *, quiet: bool = False, activates: bool = False
) -> DeploymentMoment:
    """Show a deployment until it has ended, as `watch` does (``quiet``: not); return its end.

    With ``activates`` the caller switches to it, and no line says how.
    """
    follower = Follower.of(runtime, deployment_id=deployment_id, after=0)
    if not quiet:
        return _shown_until_ended(follower, activates=activates)
    board = Board()
    for _ in until_ended(follower, board):
        pass
    return shown_end(board)


def _shown_until_ended(follower: Follower, *, activates: bool = False) -> DeploymentMoment:
    board, console = Board(), Console()
    is_live = console.is_terminal
    ended = live(follower, board, console) if is_live else lines_of_text(follower, board)
    said = said_of(ended)
    if not activates and ended.status is DeploymentStatus.COMPLETE and ended.activation == "none":
        said += f"\nSwitch to it with `paceline activate {ended.deployment_id}`."
    console.print(said, highlight=False, markup=False) if is_live else click.echo(said)
    return ended


@click.command()
@state_option
@json_option
def status(state: Path | None, as_json: bool) -> int:
    """Show what runs here, who leads, the fleet and its deployments, and what waits for approval.

    With a login: of the installation elsewhere. Exit code 75 if nothing runs here and no
    coordinator answers.
    """
    from paceline import cluster as fleet

    try:
        runtime = find_installation(state)
    except NotReady:
        runtime = None
    report = StatusReport(running=False)
    if runtime is None or not runtime.is_login:
        report = StatusReport(**fleet.status(state_directory(state)).model_dump())
    if runtime is not None:
        report = _report(report, runtime)
    answers = report.running or any(each.answers for each in report.replicas)
    report = report.model_copy(update={"status": "running" if answers else "stopped"})
    if as_json:
        show(report, as_json)
    else:
        directory = state_directory(state)
        idle = f"nothing runs in {directory}; `{there('up')}` starts an installation there"
        if runtime is not None and runtime.is_login:
            idle = "no coordinator answers"
        elif runtime is not None and not runtime.secrets.coordinator_token:
            idle = f"{directory} is a node's, and no coordinator answers"
        elif runtime is not None and runtime.endpoints.coordinator_urls:
            idle = f"{directory} is a fleet's, and none of its coordinators answers"
        _show(report, idle)
    return 0 if answers else 75


@click.command()
@to_option
@state_option
@json_option
def workers(targets: tuple[str, ...], state: Path | None, as_json: bool) -> int:
    """List the registered workers with their labels; with --to, those that it selects."""
    found = CoordinatorClient.of(find_installation(state)).workers()
    if targets:
        chosen = set(select_workers(";".join(targets), found))
        found = [each for each in found if each.worker_id in chosen]
    rows = [
        (
            each.worker_id,
            "alive" if each.alive else "lost",
            " ".join(f"{key}={value}" for key, value in each.labels.named.items()),
            _machine(each.inventory),
            f"{each.link_mbit:g} Mbit/s",
            size(each.available_storage),
            each.address,
        )
        for each in found
    ]
    names = ("worker", "state", "labels", "machine", "link", "free", "address")
    return show_table(WorkersShown(workers=tuple(found)), as_json, names, rows)


def _machine(found: Inventory | None) -> str:
    """Return a node's machine in a line: GPUs, cores, memory, network, disk; "" if not reported."""
    if found is None:
        return ""
    gpus = [f"{each.count} × {each.kind} {size(each.memory_bytes)}" for each in found.accelerators]
    parts = [*gpus, f"{found.cores} cores", size(found.memory_bytes)]
    if found.interface_mbit is not None:
        parts.append(f"{found.interface} {found.interface_mbit:g} Mbit/s")
    if found.disk_bytes_s is not None:
        parts.append(f"disk {size(round(found.disk_bytes_s))}/s")
    return ", ".join(parts)


@click.command()
@deployment_argument
@to_option
@click.option("--allow-older", is_flag=True, help="Also where a newer version is active.")
@deadline_option
@state_option
@json_option
def activate(
    deployment_id: str,
    targets: tuple[str, ...],
    allow_older: bool,
    deadline: float,
    state: Path | None,
    as_json: bool,
) -> int:
    """Have the fleet switch to deployment ID's version: all together, once a quorum is ready.

    With --to only the selected ones of its workers, as a deployment of their own that moves nothing
    and that `rollback` takes back. Exit code 75 if not every node has switched in time; one that is
    away switches when it returns.
    """
    client = CoordinatorClient.of(find_installation(state))
    deployment_id = resolve_deployment_id(client, deployment_id)
    began = time.monotonic()
    if targets:
        deployment_id = _part_of(client, deployment_id, ";".join(targets), deadline)
    client.activate(deployment_id, allow_older=allow_older)
    back = next_line(f"rollback {deployment_id}")
    _switched(client, deployment_id, began, deadline, as_json, back)
    return 0


def _part_of(
    client: CoordinatorClient, deployment_id: str, selector: str, deadline_s: float
) -> str:
    """Return a complete deployment of the same version to the selected ones of its workers.

    Raises InvalidInput for a selected worker that is none of them.
    """
    whole = client.deployment(deployment_id).deployment
    chosen = select_workers(selector, client.workers())
    if strangers := [each for each in chosen if each not in whole.target_workers]:
        raise InvalidInput(
            "not every selected worker is part of this deployment",
            got=shortened(strangers),
            wanted=f"some of {shortened(whole.target_workers)}",
            where=deployment_id,
            do="Bring it the version first: `paceline distribute`.",
        )
    if set(chosen) == set(whole.target_workers):
        return deployment_id
    call = CreateDeployment(
        model_id=whole.model_id,
        version=whole.version,
        source_url=whole.source_url,
        target_workers=chosen,
        max_failed=whole.max_failed,
        allow_older=True,  # activation is what may be refused
    )
    part = client.create(call, secrets.token_hex(16)).deployment_id
    until_s = time.monotonic() + deadline_s
    while not (found := client.deployment(part).deployment).status.is_final:
        if time.monotonic() > until_s:
            break
        time.sleep(POLL_S)
    if found.status is not DeploymentStatus.COMPLETE:
        raise NotReady(
            "the selected workers have not confirmed the version",
            got=f"{found.status.value}{f': {found.failure.message}' if found.failure else ''}",
            wanted=DeploymentStatus.COMPLETE.value,
            where=f"deployment {part}",
            do=f"See `paceline watch {part}`; then activate that one.",
        )
    return part


@click.command("rollback")
@deployment_argument
@deadline_option
@state_option
@json_option
def rollback(deployment_id: str, deadline: float, state: Path | None, as_json: bool) -> int:
    """Switch the workers of deployment ID back to the version that was active there before it.

    On the fleet alone, without a transfer: the registry's champion stays (`paceline model rollback
    MODEL_ID` puts the one before back).
    """
    if not re.fullmatch(r"[0-9a-f-]{1,36}", deployment_id):
        raise InvalidInput(
            "not a deployment's id",
            got=repr(deployment_id[:100]),
            wanted="an id, or the beginning of one",
            do="`paceline deployment list` lists them; a model: `paceline model rollback`.",
        )
    client = CoordinatorClient.of(find_installation(state))
    deployment_id = resolve_deployment_id(client, deployment_id)
    began = time.monotonic()
    client.rollback(deployment_id)
    _switched(client, deployment_id, began, deadline, as_json)
    return 0


@click.command("list")
@state_option
@json_option
def deployments(state: Path | None, as_json: bool) -> int:
    """List the deployments that the coordinator keeps, the newest last."""
    found = CoordinatorClient.of(find_installation(state)).deployments()
    if as_json:
        show(DeploymentsShown(deployments=tuple(found)), as_json)
        return 0
    rows = [
        (
            each.deployment_id,
            each.status.value,
            f"{each.model_id} {each.version}",
            str(len(each.target_workers)),
        )
        for each in found
    ]
    print_table(("deployment", "status", "model", "workers"), rows)
    return 0


@click.command()
@deployment_argument
@state_option
@json_option
def cancel(deployment_id: str, state: Path | None, as_json: bool) -> int:
    """Stop deployment ID for good; once this returns no worker publishes it any more.

    What was verified stays on the disks: a later deployment of the same version goes on from there.
    """
    client = CoordinatorClient.of(find_installation(state))
    deployment_id = resolve_deployment_id(client, deployment_id)
    began = time.monotonic()
    client.cancel(deployment_id)
    done = Changed(
        status="cancelled", deployment_id=deployment_id, seconds=time.monotonic() - began
    )
    show(done, as_json, f"cancelled {deployment_id}")
    return 0


# --- watching ------------------------------------------------------------------------------------


def _newest(runtime: Runtime) -> str:
    known = CoordinatorClient.of(runtime).deployments()
    if not known:
        raise NotFound("there is no deployment to watch", do="Begin one: `paceline distribute`.")
    flying = [each for each in known if not each.status.is_final]
    return (flying or known)[-1].deployment_id


# --- switching -----------------------------------------------------------------------------------


def _switched(
    client: CoordinatorClient,
    deployment_id: str,
    began: float,
    deadline_s: float,
    as_json: bool,
    *more: str,
) -> None:
    """Wait for the requested switch and print its outcome; raises where it did not happen."""
    view = client.await_switch(deployment_id, deadline_s)
    done = Changed(
        status="switched",
        deployment_id=deployment_id,
        workers=view.switched,
        waiting=view.waiting,
        seconds=time.monotonic() - began,
    )
    versions = sorted({each.version for each in view.workers if each.version})
    show(
        done,
        as_json,
        f"{view.switched} workers run {', '.join(versions) or 'it'}, in {duration(done.seconds)}"
        + (f"; {shortened(view.waiting)} will when they return" if view.waiting else ""),
        *more,
    )


# --- the fleet -----------------------------------------------------------------------------------


def _report(found: StatusReport, runtime: Runtime) -> StatusReport:
    """Return ``found`` with each replica's status; the fleet's state comes from the leader."""
    known = runtime.endpoints
    replicas, moments = [], []
    for url in known.coordinator_urls or (known.coordinator_url,):
        if not url:
            continue
        try:
            moment = _moment(runtime, url)
        except PacelineError as error:
            replicas.append(ReplicaStatus(url=url, answers=False, problem=error.one_line()))
            continue
        leader = moment.leader
        replicas.append(
            ReplicaStatus(
                url=url,
                answers=True,
                leads=leader.leads,
                leader_url=leader.leader_url or (url if leader.leads else None),
                epoch=leader.epoch,
            )
        )
        moments.append(moment)
    best = max(moments, key=lambda each: (each.leader.leads, each.leader.epoch), default=None)
    return found.model_copy(
        update={
            "replicas": tuple(replicas),
            "leader_url": next((each.url for each in replicas if each.leads), None),
            "workers": best.workers if best else (),
            "approvals": _approvals(runtime) if best else (),
            "deployments": tuple(each.model_copy(update={"parts": ()}) for each in best.deployments)
            if best
            else (),
        }
    )


def _approvals(runtime: Runtime) -> tuple[ApprovalRequest, ...]:
    try:
        return tuple(CoordinatorClient.of(runtime).approvals())
    except (AccessDenied, NotFound):  # a node's token, or a coordinator of an older release
        return ()


def _moment(runtime: Runtime, url: str) -> Moment:
    """Return the fleet's present state as the replica at ``url`` reports it."""
    token, ca = runtime.secrets.coordinator_token, runtime.coordinator_ca
    follower = Follower([url], token, patience_s=0.0, ca=ca)
    for item in follower.items():
        if isinstance(item, Moment):
            return item
        if isinstance(item, Lost):
            raise ServiceUnavailable("no answer", got=item.reason, where=url)
    raise ServiceUnavailable("no answer", where=url)


def service_lines(services: Sequence[ServiceStatus]) -> list[str]:
    """Return a line for each of this machine's servers."""
    lines = []
    for each in services:
        memory = f"{each.rss_bytes / 1e6:.0f} MB" if each.rss_bytes else ""
        lines.append(f"{each.name:<20} {each.state:<11} {memory:>8}  {each.problem}".rstrip())
    return lines


def _show(report: StatusReport, nothing: str) -> None:
    for line in service_lines(report.services):
        click.echo(line)
    if not report.running and not any(each.answers for each in report.replicas):
        click.echo(nothing)
    for replica in report.replicas:
        role = "leads" if replica.leads else "stands by" if replica.answers else "does not answer"
        epoch = f"epoch {replica.epoch}" if replica.answers else ""
        click.echo(f"coordinator          {role:<11} {epoch:>8}  {replica.url}".rstrip())
        if replica.problem:
            click.echo(f"  {replica.problem}")
    if not any(each.answers for each in report.replicas):
        return
    lost = tuple(each.worker_id for each in report.workers if not each.alive)
    alive = len(report.workers) - len(lost)
    gone = f"; lost: {shortened(lost)}" if lost else ""
    click.echo(f"workers              {alive} alive of {len(report.workers)}{gone}")
    for shown in report.deployments:
        active = f", {shown.activation}" if shown.activation != "none" else ""
        click.echo(
            f"{shown.deployment_id}  {shown.model_id} {shown.version}  {figures(shown)}{active}"
        )
    for asked in report.approvals:
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(asked.expires_at))
        click.echo(
            f"waits for approval   {asked.model_id} {asked.version}, until {until}\n"
            f"  look at it         paceline approve {asked.run_id} --show\n"
            f"  decide             paceline approve {asked.run_id} [--reject]"
        )
