"""`paceline up`, `down`, `where`, `agent`, `worker` and `coordinator`.

The first three start, stop and describe the embedded installation; the others are its long-running
processes.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from paceline.cli.commands import ExistingPath, Sections
from paceline.cli.options import (
    call_every,
    json_option,
    next_line,
    notice,
    parsed,
    profile_options,
    read_profile,
    show,
    state_directory,
    state_option,
    with_options,
)
from paceline.client import CoordinatorClient
from paceline.config import (
    DEFAULT_S3,
    Runtime,
    ThisNode,
    find_installation,
    load_runtime,
)
from paceline.errors import InvalidInput, PacelineError, SourceMissing
from paceline.extras import require_extras
from paceline.schemas import Links, Started, Stopped, one_of
from paceline.units import counted, link_mbit as speed


@click.command()
@state_option
@profile_options
@json_option
def up(state: Path | None, profile: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Start Prefect, S3, MLflow, Dask and the coordinator, and leave them running."""
    from paceline import cluster as fleet
    from paceline.cli.options import extra_services

    settings = read_profile(profile, overrides)
    directory = state_directory(state)
    began = time.monotonic()
    notice(
        f"starting S3, Prefect, MLflow, Dask with {counted(settings.cluster.nodes, 'node')} and "
        f"the coordinator in {directory} …",
        mark="",
    )
    with _naming_services(directory, began):
        runtime = fleet.start(
            settings, directory, detach=True, extra_services=extra_services(directory)
        )
    from paceline.cli.watching import service_lines

    links, ready_s = pages(runtime), time.monotonic() - began
    show(
        Started(state=str(directory), links=links),
        as_json,
        *service_lines(fleet.status(directory).services),
        f"ready in {ready_s:.1f} s; what the pages ask for is in the last of these files:",
        *_lines(links),
        next_line("lifecycle"),
        "          (`paceline down` stops it; the state stays)",
    )
    return 0


def _naming_services(directory: Path, began: float) -> AbstractContextManager[None]:
    """Within the ``with``, print each service of the installation once it is ready."""
    from paceline import cluster as fleet

    said = set[str]()

    def look() -> None:
        for each in fleet.status(directory).services:
            if each.state == "ready" and each.name not in said:
                said.add(each.name)
                notice(f"  {each.name} after {time.monotonic() - began:.0f} s", mark="")

    return call_every(1.0, look)


@click.command()
@state_option
@json_option
def down(state: Path | None, as_json: bool) -> int:
    """Stop every process that `up` started; the state stays on disk.

    Commands that run a flow on it end first, as by Ctrl-C: each prints how its run goes on.
    """
    from paceline import cluster as fleet

    directory = state_directory(state)
    report = fleet.stop(directory)
    what = "stopped" if report.was_running else "nothing was running"
    show(
        Stopped(was_running=report.was_running, runs=report.runs, state=str(directory)),
        as_json,
        *(f"run {each} was interrupted; its command says how it goes on" for each in report.runs),
        f"{what}; the state is in {directory} (delete it to start afresh)"
        if directory.exists()
        else f"{what}: there is no {directory}",
    )
    return 0


@click.command()
@click.argument("run_id", required=False)
@state_option
@json_option
def where(run_id: str | None, state: Path | None, as_json: bool) -> int:
    """Print every link of RUN_ID (default: of the installation): pages, logs, credentials.

    The beginning of a run's id is enough where no other run begins so.
    """
    if run_id:
        from paceline.registry import require_run_prefix

        require_run_prefix(run_id)
    runtime = find_installation(state)
    page = ""
    if run_id:
        known = _known_runs(runtime, run_id)
        run_id = one_of("run", run_id, known)
        page = known[run_id]
    if runtime.is_login:
        found = CoordinatorClient.of(runtime).installation().pages
    else:
        found = pages(runtime)
    if run_id:
        found |= {"run": run_id}
        if not runtime.is_login:
            found["state"] = str(runtime.state_dir)
        found |= run_pages(runtime, run_id, page)
    show(Links.model_validate(found), as_json, *_lines(found))
    return 0


def _known_runs(runtime: Runtime, run_id: str) -> dict[str, str]:
    """Return the runs that ``run_id`` begins, each with its page in MLflow: "" where the command
    does not reach MLflow, and the coordinator alone is asked."""
    if runtime.endpoints.mlflow_url and not runtime.is_login:
        from paceline.registry import Registry

        return Registry.from_runtime(runtime).pages_of_runs(run_id)
    client = CoordinatorClient.of(runtime)
    runs = {each.run_id for each in client.approvals()}
    runs |= {each.run_id for each in client.deployments() if each.run_id}
    runs |= {each.run_id for each in client.jobs(limit=500).jobs}
    return {each: "" for each in sorted(runs) if each.startswith(run_id)}


def run_pages(runtime: Runtime, run_id: str, mlflow: str = "") -> dict[str, str]:
    """Return the run's own pages: in Prefect, in MLflow (``mlflow`` where it is known), and in
    the fleet page: its promotion that waits, or its newest deployment or job. One of a server that
    does not answer is left out."""
    from paceline.registry import Registry

    def in_prefect() -> str | None:
        from paceline.api import PrefectStarter

        known = runtime.endpoints.prefect_api_url
        return PrefectStarter.of(runtime).page_of_run(run_id) if known else None

    def in_mlflow() -> str | None:
        if mlflow or runtime.is_login or not runtime.endpoints.mlflow_url:
            return mlflow
        return Registry.from_runtime(runtime).pages_of_runs(run_id)[run_id]

    def in_fleet() -> str | None:
        client = CoordinatorClient.of(runtime)
        if any(each.run_id == run_id for each in client.approvals()):
            return approval_page(client, run_id)
        brought = [each for each in client.deployments() if each.run_id == run_id]
        if brought:
            return deployment_page(client, brought[-1].deployment_id)
        job = next((each for each in client.jobs(limit=500).jobs if each.run_id == run_id), None)
        return None if job is None else f"{client.base_url}/fleet#job={job.job_id}"

    found = {}
    for name, look in {"prefect": in_prefect, "mlflow": in_mlflow, "fleet": in_fleet}.items():
        with contextlib.suppress(PacelineError, KeyError):
            if page := look():
                found[name] = page
    return found


def approval_page(client: CoordinatorClient, run_id: str) -> str:
    """Return where the fleet page shows a promotion, to be decided with a token."""
    return f"{client.base_url}/fleet#approval={run_id}"


def deployment_page(client: CoordinatorClient, deployment_id: str) -> str:
    """Return where the fleet page shows a deployment."""
    return f"{client.base_url}/fleet#deployment={deployment_id}"


def pages(runtime: Runtime) -> dict[str, str]:
    """Return the URLs of the installation's pages and the paths of its logs and credentials."""
    known = runtime.endpoints
    found = {
        "prefect": known.prefect_ui_url,
        "mlflow": known.mlflow_url,
        "fleet": f"{known.coordinator_url}/fleet",
        "s3": "" if known.s3_url == DEFAULT_S3 else known.s3_url,
        "logs": str(runtime.state_dir / "logs"),
        "credentials": str(runtime.state_dir / "runtime.json"),
    }
    return {name: target for name, target in found.items() if target}


def _lines(links: dict[str, str]) -> list[str]:
    return [f"{name:<14} {target}" for name, target in links.items()]


JOIN_CHECK_S = 15.0
DRIVER_S = 2.0  # an agent starts without its GPUs' names where their driver takes longer
STATE = click.option(
    "--state",
    type=click.Path(path_type=Path),
    required=True,
    help="State directory of the installation (its runtime.json says where servers listen).",
)


JOIN_OPTIONS = (
    click.option(
        "--join",
        "join_token",
        default="",
        metavar="TOKEN",
        help="Join with this join token (`paceline tokens join`), or @FILE that holds it; later"
        " starts need it no more, and spend nothing.",
    ),
    click.option(
        "--coordinator", "coordinator_url", default="", help="With --join: the coordinator's URL."
    ),
    click.option(
        "--ca",
        type=ExistingPath(path_type=Path, dir_okay=False),
        default=None,
        help="With --join: what the coordinator's certificate is checked against, if not the"
        " authority that the token names.",
    ),
)


@click.command(
    cls=Sections,
    sections={
        "Labels": "host rack zone labels",
        "Network": "listen advertise link_mbit limit_mbit",
        "Join, once": "join_token coordinator_url ca",
    },
)
@STATE
@click.option("--worker-id", required=True, help="This node's name in the fleet.")
@click.option("--host", default="", help="Label: the machine's name.")
@click.option("--rack", default="", help="Label: the rack it stands in.")
@click.option("--zone", default="", help="Label: the zone it stands in.")
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="Another label, e.g. pool=a100, by which `--to` selects this node (repeatable).",
)
@click.option(
    "--link-mbit",
    metavar="MBIT",
    callback=parsed(lambda text: speed(float(text) if text[-1:].isdigit() else text)),
    help="What plans count on, each direction, in Mbit/s (or 10Gbps); default: the profile's.",
)
@click.option(
    "--limit-mbit",
    type=click.FloatRange(min=0),
    default=None,
    help="Bandwidth limit, each direction, in Mbit/s; 0: none. Default: none, or the link's rate"
    " where the profile says [cluster] paced.",
)
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Peer port to listen on.")
@click.option(
    "--advertise",
    default="",
    metavar="HOST",
    help="Address that other nodes are told. Default: the one listened on; with 0.0.0.0 the one on "
    "the way to the coordinator.",
)
@click.option("--warm", is_flag=True, help="Load the S3 client at the start: 25 MB, 0.4 s sooner.")
@click.option("--die-with-parent", is_flag=True, help="Exit when the process that started it dies.")
@with_options(JOIN_OPTIONS)
def agent(
    state: Path, join_token: str, coordinator_url: str, ca: Path | None, **options: Any
) -> int:
    """Hold this node's models, and relay their pieces to its peers.

    Exit codes: 0 after SIGTERM or SIGINT, once what was verified is on the disk; 2 for options, a
    profile or a certificate that are wrong or unsafe; 1 for a port that is taken (PortInUse), a
    store that another agent holds (StateLocked), or a disk that refuses; 75 where there is nothing
    to join yet, 77 where the coordinator refuses; standard error says what, and what to do.
    """
    from paceline.relay import AgentConfig, read_inventory, run_agent

    # first: a configuration error must not use up the join token
    config = AgentConfig(state_dir=state.absolute(), **options)
    if join_token or coordinator_url or ca:
        _join(state.absolute(), config.worker_id, coordinator_url, join_token, ca)
    inventory = read_inventory(load_runtime(config.state_dir), DRIVER_S)
    return run_agent(replace(config, findings=_findings(config.state_dir), inventory=inventory))


def _join(state: Path, worker_id: str, url: str, token: str, ca: Path | None) -> None:
    from paceline.relay import has_joined, join

    if not token or not url:
        raise click.UsageError("--join and --coordinator belong together, and --ca to them.")
    if token.startswith("@"):
        try:
            token = Path(token[1:]).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            # The token was used long ago, and its file may be gone since.
            if not isinstance(error, FileNotFoundError):
                raise click.BadParameter(f"cannot be read: {error}", param_hint="--join") from error
            if not has_joined(state):
                what = "no such file with a join token"
                raise SourceMissing(what, got=token[1:], where="--join") from error
            token = ""
    if join(state, worker_id, url, token, ca=ca):
        _check_node(state)


def _check_node(state: Path) -> None:
    """Run `paceline doctor` on this node, in a process of its own: S3's client costs 25 MB."""
    argv = [sys.executable, "-m", "paceline.cli.main", "doctor", "--state", str(state)]
    try:
        subprocess.run(argv, stdout=sys.stderr, timeout=JOIN_CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        said = f"the check takes longer than {JOIN_CHECK_S:.0f} s; the agent starts without it"
        click.echo(f"{said}: see `paceline doctor --state {state}`", err=True)


def _findings(state_dir: Path) -> tuple[str, ...]:
    """Return what `paceline doctor` found on this node, at join or since."""
    if not (state_dir / "identity").is_dir():
        return ()
    from paceline.cli.doctor import findings_of

    return findings_of(state_dir)


@click.command(
    cls=Sections,
    sections={
        "Labels": "host rack zone",
        "Network": "scheduler listen",
        "Join, once": "join_token coordinator_url ca",
    },
)
@STATE
@click.option("--worker-id", default="", help="This node's name; default: the one it joined as.")
@click.option(
    "--scheduler",
    default="",
    metavar="tls://HOST:PORT",
    help="Dask's scheduler; default: the one of the profile that the node received as it joined.",
)
@click.option("--host", default="", help="Label: the machine's name. Default: its host name.")
@click.option("--rack", default="", help="Label: the rack it stands in.")
@click.option("--zone", default="", help="Label: the zone it stands in.")
@click.option(
    "--listen",
    default="",
    metavar="HOST",
    help="Address at which other nodes reach this one. Default: the one on the way to the"
    " scheduler.",
)
@click.option("--until-eof", is_flag=True, help="End when standard input does (over SSH).")
@with_options(JOIN_OPTIONS)
def worker(
    state: Path,
    worker_id: str,
    scheduler: str,
    listen: str,
    until_eof: bool,
    join_token: str,
    coordinator_url: str,
    ca: Path | None,
    **labels: str,
) -> int:
    """Run this node's Dask worker until SIGTERM or SIGINT: flows start agents and ranks through it.

    It reports the node's labels, cores, memory and accelerators, and is started again where it
    dies. `dask-tls` of the directory that `paceline init --scheduler` made lies in --state: these
    files allow to run code on every node that has them. Exit code 75: no scheduler answers.
    """
    from paceline.cluster import run, serve_nodes
    from paceline.relay import joined_worker_id

    require_extras("flows")
    if join_token or coordinator_url or ca:
        _join(state.absolute(), worker_id, coordinator_url, join_token, ca)
    runtime = load_runtime(state.absolute())
    if not (address := scheduler or runtime.profile.cluster.scheduler):
        raise InvalidInput(
            "this node's profile names no scheduler",
            wanted="--scheduler tls://HOST:PORT",
            do="Or name it to `paceline init --scheduler`, and let nodes join after that.",
        )
    endpoints = runtime.endpoints.model_copy(update={"scheduler_address": address})
    labels["host"] = labels["host"] or socket.gethostname()
    node = ThisNode(
        worker_id=joined_worker_id(runtime.state_dir, worker_id),
        state_dir=runtime.state_dir,
        labels={name: value for name, value in labels.items() if value},
    )
    moved = runtime.model_copy(update={"endpoints": endpoints})
    run(serve_nodes(moved, [node], listen, until_eof=until_eof))
    return 0


@click.command()
@state_option
@click.option(
    "--render",
    "parts",
    multiple=True,
    type=click.Choice(["all", "network", "coordinator", "agent", "dask", "prefect-worker"]),
    help='With [cluster] kind = "kubernetes": print these manifests for `kubectl apply -f -`'
    " (repeatable).",
)
def cluster(state: Path | None, parts: tuple[str, ...]) -> int:
    """Run Dask's scheduler and the workers of [cluster] kind = "ssh" or "slurm", until SIGTERM.

    ssh: a worker on each host, which needs Paceline and a login without a password. slurm: a worker
    on each node of one allocation, which is cancelled at the end, or with per_job on those of each
    allocation that the coordinator requests for a training job. The TLS files and a join token are
    copied to each node, and the worker starts its agent. A worker that ends is started again.

    kubernetes: nothing is started here; --render prints what Kubernetes and the Dask operator run.
    """
    from paceline.cluster import PARTS, render, run, serve

    require_extras("flows")
    runtime = load_runtime(state_directory(state))
    kind = runtime.profile.cluster.kind
    if kind == "local" or not runtime.endpoints.scheduler_address:
        raise InvalidInput(
            "this profile's nodes are started by `paceline up`",
            got=f'[cluster] kind = "{kind}"',
            wanted='"ssh", "slurm", "kubernetes" or "address", and a scheduler',
            do="Make the directory with `paceline init --scheduler tls://HOST:PORT`.",
        )
    if bool(parts) != (kind == "kubernetes"):
        raise InvalidInput(
            "manifests are rendered for Kubernetes, and only there",
            got=f'[cluster] kind = "{kind}", {"with" if parts else "without"} --render',
            wanted='--render PART with kind = "kubernetes", no --render with another',
            do="For example: paceline cluster --render all | kubectl apply -f -",
        )
    if parts:
        click.echo(render(runtime, PARTS if "all" in parts else parts), nl=False)
        return 0
    run(serve(runtime))
    return 0


@click.command()
@STATE
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), required=True, help="Port to listen on.")
@click.option(
    "--replica-id",
    default="coordinator",
    show_default=True,
    help="This replica's name among those that share a store; its log is named after it.",
)
@click.option(
    "--advertise",
    default="",
    help="URL at which clients and the other replicas reach this one; default: where it listens.",
)
def coordinator(state: Path, host: str, port: int, replica_id: str, advertise: str) -> int:
    """Keep the fleet's deployments and workers, and tell each agent its lanes.

    With [control] coordination = "etcd" several may run, each with a --replica-id of its own: one
    leads, the others answer reads, send writes on to the leader, and take over when it dies. A
    replica that is asked to stop makes way at once.
    """
    from paceline.api import serve

    return serve(load_runtime(state), host, port, replica_id=replica_id, advertise=advertise)
