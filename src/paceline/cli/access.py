"""`paceline tokens`, `audit`, `init` and `keys`: access to the coordinator, and its audit log.

`tokens` manages who may call the coordinator, `audit` shows who changed what, `init` creates a
state directory for a fleet whose servers run elsewhere, `keys` handles manifest signing keys.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

import click
from pydantic import BaseModel, ValidationError

from paceline.cli.options import (
    json_option,
    parsed,
    print_table,
    profile_options,
    read_profile,
    show,
    state_directory,
    state_option,
    whole_deployment_id,
)
from paceline.client import AccessClient
from paceline.cluster import SECRETS_FILE, make_dask_tls
from paceline.config import (
    CLIENT_FILE,
    DEFAULT_S3,
    RUNTIME_FILE,
    Endpoints,
    Login,
    Profile,
    Runtime,
    Secrets,
    find_installation,
    read_certificate,
    save_runtime,
)
from paceline.errors import Conflict, InvalidInput
from paceline.relay.transport import ensure_authority, fingerprint
from paceline.schemas import (
    AuditShown,
    CreatedToken,
    CreateJoinToken,
    CreateToken,
    Event,
    FleetInitialised,
    GrantedScope,
    KeyShown,
    TokenMade,
    TokenRevoked,
    TokensShown,
    TokenView,
    one_of,
)
from paceline.system import Endpoint, ensure_own_directory, write_private
from paceline.units import seconds

SCOPES = tuple(str(each) for each in get_args(GrantedScope))
Call = TypeVar("Call", bound=BaseModel)
DURATION: dict[str, Any] = {"metavar": "DURATION", "callback": parsed(seconds)}


@click.group()
def tokens() -> None:
    """Make, list and revoke the tokens that open the coordinator."""


@tokens.command()
@click.option("--name", required=True, help="Whom it is for, as audit rows will say.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    required=True,
    help="What it allows (repeatable); deploy, train and approve include read, admin all.",
)
@click.option("--ttl", **DURATION, default=None, help="When it expires, e.g. 30d; default: never.")
@click.option("--worker-id", default=None, help="The worker that it identifies (scope worker).")
@click.option(
    "--team", default=None, help="Its jobs are this team's, and no other's (scope train)."
)
@click.option("--project", default=None, help="Its jobs are this project's; as --team.")
@state_option
@json_option
def create(
    name: str,
    scopes: tuple[str, ...],
    ttl: float | None,
    worker_id: str | None,
    team: str | None,
    project: str | None,
    state: Path | None,
    as_json: bool,
) -> int:
    """Make a bearer token and print it, this once; only its hash is kept."""
    given = {
        "name": name,
        "scopes": scopes,
        "ttl_seconds": ttl,
        "worker_id": worker_id,
        "team": team,
        "project": project,
    }
    client = _client(state)
    made = client.create_token(_checked(CreateToken, given))
    _say_made(made, as_json)
    if not as_json and "worker" not in scopes:
        pin = f" --authority {made.ca_sha256}" if made.ca_sha256 else ""
        click.echo(f"use it with: paceline login {client.base_url}{pin}", err=True)
    return 0


@tokens.command()
@click.option("--worker-id", default=None, help="The one worker that the node will be.")
@click.option(
    "--nodes", type=int, default=None, help="For so many nodes with new names, at most 10,000."
)
@click.option("--ttl", **DURATION, default="1h", show_default=True, help="At most 7d.")
@click.option(
    "--from",
    "networks",
    multiple=True,
    metavar="CIDR",
    help="Nodes of this network alone may use it (repeatable); default: of any.",
)
@state_option
@json_option
def join(
    worker_id: str | None,
    nodes: int | None,
    ttl: float,
    networks: tuple[str, ...],
    state: Path | None,
    as_json: bool,
) -> int:
    """Make a token with which one node may join, once, or --nodes of them, and print it.

    On a node: paceline agent --state DIR --worker-id ID --coordinator URL --join TOKEN
    """
    if (worker_id is None) == (nodes is None):
        raise click.UsageError("Name --worker-id for one node, or --nodes for many.")
    given = {
        "worker_id": worker_id,
        "nodes": nodes,
        "ttl_seconds": ttl,
        "networks": networks,
    }
    made = _client(state).create_join_token(_checked(CreateJoinToken, given))
    _say_made(made, as_json)
    return 0


@tokens.command("list")
@state_option
@json_option
def list_tokens(state: Path | None, as_json: bool) -> int:
    """Show every token: what it opens, until when, and when it was last used."""
    found = _client(state).tokens()
    if as_json:
        click.echo(TokensShown(tokens=tuple(found)).model_dump_json())
        return 0
    rows = [
        (
            each.token_id,
            each.name,
            ", ".join(each.scopes),
            each.worker_id or ", ".join(filter(None, (each.team, each.project))),
            _state(each),
            _at(each.last_used_at),
        )
        for each in found
    ]
    print_table(("id", "name", "scopes", "bound to", "state", "last used"), rows)
    return 0


@tokens.command()
@click.argument("token_id", required=False)
@click.option("--worker-id", default=None, help="Take this worker out: every token of it ends.")
@state_option
@json_option
def revoke(token_id: str | None, worker_id: str | None, state: Path | None, as_json: bool) -> int:
    """Have the token with this id open nothing any more.

    A worker's token ends with everything that worker has; so does --worker-id. Other workers
    refuse its certificate from their next beat on.
    """
    if (token_id is None) == (worker_id is None):
        raise click.UsageError("Name a token's id, or --worker-id.")
    client = _client(state)
    if worker_id is not None:
        ended = client.revoke_worker(worker_id)
    else:
        assert token_id is not None
        whole = one_of("token", token_id, [each.token_id for each in client.tokens()])
        client.revoke_token(whole)
        ended = [whole]
    done = TokenRevoked(token_id=ended[0], token_ids=tuple(ended))
    show(done, as_json, *(f"{each} opens nothing any more" for each in ended))
    return 0


@click.command()
@click.option("--deployment", default=None, help="Of this deployment only.")
@click.option("--worker-id", default=None, help="Of this worker only.")
@click.option("--name", "names", multiple=True, help="Of this kind, e.g. change.refused.")
@click.option("--since", **DURATION, default=None, help="Of the last so long, e.g. 12h.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
@state_option
@json_option
def audit(
    deployment: str | None,
    worker_id: str | None,
    names: tuple[str, ...],
    since: float | None,
    limit: int,
    state: Path | None,
    as_json: bool,
) -> int:
    """Show the newest of what happened: who changed what, from where, and what was refused."""
    client = _client(state)
    rows = client.audit(
        deployment_id=deployment and whole_deployment_id(client, deployment),
        worker_id=worker_id,
        names=names,
        since=None if since is None else max(0.0, time.time() - since),
        limit=limit,
        newest_first=True,
    )
    rows.reverse()
    if rows or as_json:
        show(AuditShown(events=tuple(rows)), as_json, *map(_line, rows))
    return 0


def _client(state: Path | None) -> AccessClient:
    return AccessClient.of(find_installation(state))


def _checked(kind: type[Call], given: Mapping[str, object]) -> Call:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0] if first["loc"] else "").replace("_", "-")
        option = option.removesuffix("-seconds").replace("--networks", "--from")
        raise InvalidInput(
            "not a token that can be made",
            got=f"{option} {first.get('input')!r}",
            wanted=first["msg"],
        ) from error


def _say_made(made: CreatedToken, as_json: bool) -> None:
    show(TokenMade.model_validate(made.model_dump()), as_json, made.token)
    if as_json:
        return
    until = f"until {_at(made.record.expires_at)}" if made.record.expires_at else "without end"
    click.echo(f"id {made.record.token_id}, {until}; it is shown this once", err=True)


def _state(token: TokenView) -> str:
    if token.revoked_at is not None:
        return f"revoked {_at(token.revoked_at)}"
    if token.used_at is not None:
        return f"spent {_at(token.used_at)}"
    if token.expires_at is None:
        return "good"
    ended = token.expires_at <= time.time()
    state = f"{'expired' if ended else 'good until'} {_at(token.expires_at)}"
    if token.nodes is not None:
        state += f", {token.nodes - (token.joined or 0)} of {token.nodes} uses left"
    return f"{state}, from {', '.join(token.networks)}" if token.networks else state


def _at(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else ""


def _line(event: Event) -> str:
    on = {"deployment": event.deployment_id, "worker": event.worker_id} | event.data
    details = " ".join(f"{key}={value}" for key, value in on.items() if value not in (None, ""))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.at))
    return f"{event.seq:>7} {when} {event.name.value} {details}"


# Written by `init` or a join, and by `up`: each holds secrets that have no other copy.
MADE = (RUNTIME_FILE, SECRETS_FILE)
PREFECT_WORKER_FILE = "prefect-worker.env"


@click.command()
@state_option
@profile_options
@click.option(
    "--coordinator",
    "urls",
    multiple=True,
    required=True,
    metavar="URL",
    help="Where callers reach a replica of the coordinator; once for each replica.",
)
@click.option(
    "--prefect", default="", metavar="URL", help="Prefect's API, for [control] flow_starter."
)
@click.option("--mlflow", default="", metavar="URL", help="MLflow, where flows run from here.")
@click.option(
    "--scheduler",
    default="",
    metavar="tls://HOST:PORT",
    help="Dask's scheduler, for flows that use nodes; makes the TLS files for it and for workers.",
)
@json_option
def init(
    state: Path | None,
    profile: str,
    overrides: tuple[str, ...],
    urls: tuple[str, ...],
    prefect: str,
    mlflow: str,
    scheduler: str,
    as_json: bool,
) -> int:
    """Prepare the state directory of a fleet's coordinator: profile, tokens, authority.

    Run it once, and copy the directory to each machine that runs a replica; nodes get what they
    need when they join. Where `paceline up` starts everything on one machine, it is not needed.
    """
    if scheduler:
        overrides = (*overrides, f"cluster.scheduler={scheduler}")
        if read_profile(profile, overrides).cluster.kind == "local":
            overrides = (*overrides, "cluster.kind=address")
    settings = read_profile(profile, overrides)
    directory = state_directory(state)
    taken = next((each for each in MADE if (directory / each).exists()), None)
    if taken is not None:
        raise Conflict(
            "this directory is an installation's already",
            got=taken,
            where=directory,
            do="Name another with --state, or edit its profile in place.",
        )
    for url in (*urls, prefect, mlflow):
        if "@" in urlsplit(url).netloc:  # it would be printed, and copied to clients
            raise InvalidInput(
                "a server's URL has no user and password",
                where=url,
                do="Tokens are made here; Prefect's and MLflow's accounts are secrets of the "
                'control plane ("Run the control plane" in the documentation).',
            )
    settings = _with_names(settings, [Endpoint.of(url) for url in urls])
    ensure_own_directory(directory)
    kept = (directory / settings.security.authority / "ca-key.pem").exists()
    authority = ensure_authority(directory / settings.security.authority)
    runtime = Runtime(
        profile=settings,
        state_dir=directory,
        endpoints=Endpoints(
            coordinator_url=urls[0],
            coordinator_urls=urls,
            coordinator_ca=_trusted(settings),
            s3_url=settings.objects.endpoint_url or DEFAULT_S3,
            prefect_api_url=prefect,
            prefect_ui_url=prefect.removesuffix("/api"),
            mlflow_url=mlflow,
            scheduler_address=settings.cluster.scheduler,
        ),
        secrets=Secrets(coordinator_token=secrets.token_urlsafe(32)),
    )
    if settings.cluster.scheduler:
        make_dask_tls(directory)
    made = FleetInitialised(
        state=str(directory),
        coordinators=urls,
        authority=fingerprint(authority.cert.read_bytes()),
        client=str(_write_client_file(runtime)),
        prefect_worker=str(_write_worker_file(runtime)) if prefect else "",
        missing=_missing(runtime),
    )
    save_runtime(runtime)  # last: this file makes the directory an installation
    show(made, as_json, _next_steps(made, kept=kept))
    return 0


def _missing(runtime: Runtime) -> tuple[str, ...]:
    """Return what the profile names and is not there yet: files, passwords, servers."""
    control, security = runtime.profile.control, runtime.profile.security
    files = {
        f"[{section}] {key}": value
        for section, values in (("control", control), ("security", security))
        for key, value in values.model_dump().items()
        if key.endswith(("_ca", "_cert", "_key")) and isinstance(value, str) and value
        if "{" not in value  # a name of each node's own
    }
    wanted = [
        f"{runtime.state_dir / value}: the file of {key}"
        for key, value in files.items()
        if not (runtime.state_dir / value).exists()
    ]
    passwords = {
        control.etcd_password_env: control.coordination == "etcd" and control.etcd_user,
        control.redis_password_env: control.progress == "redis" and control.redis_user,
        control.postgres_password_env: control.audit == "postgres",
    }
    wanted += [
        f"${name}: in the environment of each coordinator"
        for name, used in passwords.items()
        if used and name not in os.environ
    ]
    if control.flow_starter == "prefect" and not runtime.endpoints.prefect_api_url:
        wanted.append('--prefect URL: [control] flow_starter = "prefect" needs Prefect\'s API')
    return tuple(wanted)


def _write_client_file(runtime: Runtime) -> Path:
    """Write what a laptop and a CI runner need, beside a token; it holds no secret."""
    ca = runtime.state_dir / (runtime.endpoints.coordinator_ca or ".")
    pem = read_certificate(ca).decode() if ca.is_file() else ""
    made = Login(coordinators=runtime.endpoints.coordinator_urls, ca=pem)
    path = runtime.state_dir / CLIENT_FILE
    write_private(path, made.model_dump_json(indent=2, exclude={"token"}).encode() + b"\n")
    return path


def _write_worker_file(runtime: Runtime) -> Path:
    """Write the variables of a Prefect worker, for `EnvironmentFile=` and `set -a; . FILE`."""
    path = runtime.state_dir / PREFECT_WORKER_FILE
    lines = [
        "# A Prefect worker of this installation: prefect worker start --pool paceline",
        "# It needs a copy of this directory (mode 0700); PACELINE_STATE says where it lies. Where",
        "# Prefect's API wants a password, set PREFECT_API_AUTH_STRING=user:password beside these.",
        f"PACELINE_STATE={runtime.state_dir}",
        f"PREFECT_API_URL={runtime.endpoints.prefect_api_url}",
        "PREFECT_LOGGING_EXTRA_LOGGERS=paceline",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER=json",
        "PREFECT_SERVER_ANALYTICS_ENABLED=false",
        "DO_NOT_TRACK=1",
    ]
    write_private(path, "\n".join([*lines, ""]).encode())
    return path


def _with_names(profile: Profile, endpoints: list[Endpoint]) -> Profile:
    """Return ``profile`` with the replicas' names among those that callers may use."""
    security, control = profile.security, profile.control
    clear = [each.url for each in endpoints if not each.secure and not each.on_loopback]
    if clear and security.rest_tls != "plaintext-anywhere":
        raise InvalidInput(
            "tokens would cross a network in the clear",
            got=clear[0],
            wanted="an https:// URL",
            do='Set [security] rest_tls = "installation" (or "files") and name https:// URLs.',
        )
    encrypted = security.rest_tls in ("installation", "files")
    plain = next((each.url for each in endpoints if each.secure != encrypted), None)
    if plain is not None:
        raise InvalidInput(
            "a replica's URL is not as the profile protects its port",
            got=f'{plain} with [security] rest_tls = "{security.rest_tls}"',
            wanted="https:// with TLS, http:// without",
        )
    if len(endpoints) > 1 and control.coordination != "etcd":
        raise InvalidInput(
            "several replicas need a store that they share",
            got=f'{len(endpoints)} replicas, [control] coordination = "{control.coordination}"',
            wanted='coordination = "etcd" with etcd_endpoints',
        )
    names = dict.fromkeys((*security.rest_hosts, *(each.host for each in endpoints)))
    return profile.model_copy(
        update={"security": security.model_copy(update={"rest_hosts": tuple(names)})}
    )


def _trusted(profile: Profile) -> str:
    security = profile.security
    if security.rest_tls == "installation":
        return f"{security.authority}/ca.pem"
    return security.rest_ca if security.rest_tls == "files" else ""


def _next_steps(made: FleetInitialised, *, kept: bool) -> str:
    replicas = [Endpoint.of(url) for url in made.coordinators]
    lines = [
        f"{made.state} holds the profile, the first admin's token and the authority (mode 0600).",
        f"authority  sha256 {made.authority}"
        + (" (it was there already and is kept; the first admin's token is new)" if kept else ""),
        *(["The profile still needs:"] if made.missing else []),
        *(f"  {each}" for each in made.missing),
        "Next, on each replica's machine, with a copy of that directory:",
        *(
            f"  paceline coordinator --state {made.state} --host ADDRESS --port {each.port}"
            f" --replica-id {each.host} --advertise {each.url}"
            for each in replicas
        ),
        "and for each node, its token first and then there:",
        f"  paceline tokens join --worker-id NODE --state {made.state}",
        "  paceline agent --state DIR --worker-id NODE --listen 0.0.0.0:7700"
        f" --coordinator {replicas[0].url} --join TOKEN",
        f"for a laptop or a CI runner a token, and there, with a copy of {made.client} (no secret)",
        f"  paceline tokens create --name WHO --scope deploy --state {made.state}",
        "  paceline login client.json      # the token comes from $PACELINE_TOKEN or a prompt",
    ]
    if made.prefect_worker:
        lines += [
            "and for a Prefect worker, with a copy of that directory and these variables:",
            f"  {made.prefect_worker}",
        ]
    return "\n".join(lines)


path_argument = click.argument("path", type=click.Path(path_type=Path, dir_okay=False))


@click.group()
def keys() -> None:
    """Make the keys that sign manifests (Ed25519)."""


@keys.command()
@path_argument
@json_option
def new(path: Path, as_json: bool) -> int:
    """Write a new private key to PATH (mode 0600) and print its public key.

    The public key goes into security.trusted_publishers of the profiles that shall trust it.
    """
    from paceline.manifest import new_key

    _say(path, new_key(path), as_json)
    return 0


@keys.command("show")
@path_argument
@json_option
def show_key(path: Path, as_json: bool) -> int:
    """Print the public key of the private key in PATH."""
    from paceline.manifest import load_key, public_key

    _say(path, public_key(load_key(path)), as_json)
    return 0


def _say(path: Path, public: str, as_json: bool) -> None:
    show(KeyShown(path=str(path), public_key=public), as_json, public)
