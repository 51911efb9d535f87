"""`paceline init`, `authority` and `keys`: what a fleet's trust rests on.

`init` creates a state directory for a fleet whose servers run elsewhere, `authority` replaces the
certificate authority of a fleet that works meanwhile, `keys` handles manifest signing keys. Each
step of `authority` changes its directory on this machine (``relay.rotation``), after checking with
the coordinator that every living worker is ready for it.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from urllib.parse import urlsplit

import click

from paceline.cli.commands import Group
from paceline.cli.options import (
    json_option,
    profile_options,
    read_profile,
    show,
    state_directory,
    state_option,
)
from paceline.client import AccessClient, CoordinatorClient
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
    StorageSettings,
    load_runtime,
    read_certificate,
    save_runtime,
)
from paceline.errors import Conflict, InvalidInput, ServiceUnavailable
from paceline.relay import add_authority, retire_authority, switch_authority, trusted_set
from paceline.relay.transport import authorities, ensure_authority, fingerprint
from paceline.schemas import AuthorityShown, FleetInitialised, KeyShown, TokenView
from paceline.system import Endpoint, ensure_own_directory, write_private
from paceline.text import shortened


@click.group(cls=Group)
def authority() -> None:
    """Replace the fleet's certificate authority: add, switch, retire."""


@authority.command("show")
@state_option
@json_option
def show_authority(state: Path | None, as_json: bool) -> int:
    """Show who signs, who is trusted beside it, and which workers have yet to renew."""
    _show(_found(_runtime(state)), as_json)
    return 0


@authority.command()
@state_option
@json_option
def add(state: Path | None, as_json: bool) -> int:
    """Make the next authority. Every node trusts it from its next heartbeats on."""
    runtime = _runtime(state)
    _found(runtime)  # first: without a coordinator no node receives it
    add_authority(_directory(runtime))
    _show(_found(runtime), as_json)
    return 0


@authority.command()
@state_option
@json_option
def switch(state: Path | None, as_json: bool) -> int:
    """Have the next authority sign; refused while a living worker does not trust it yet."""
    runtime = _runtime(state)
    _require_current(_found(runtime))
    switch_authority(_directory(runtime))
    _show(_found(runtime), as_json)
    return 0


@authority.command()
@state_option
@json_option
def retire(state: Path | None, as_json: bool) -> int:
    """End the trust in the old authority and destroy its key.

    Refused while a living worker or a coordinator still shows a certificate of it.
    """
    runtime = _runtime(state)
    _require_current(_found(runtime))
    _require_replicas(runtime)
    retire_authority(_directory(runtime))
    _show(_found(runtime), as_json)
    return 0


def _runtime(state: Path | None) -> Runtime:
    runtime = load_runtime(state_directory(state))
    if not (_directory(runtime) / "ca.pem").is_file():
        raise InvalidInput(
            "there is no authority here",
            where=_directory(runtime),
            do="Name the state directory that `paceline init` made: --state DIR.",
        )
    return runtime


def _directory(runtime: Runtime) -> Path:
    return runtime.state_dir / runtime.profile.security.authority


def _found(runtime: Runtime) -> AuthorityShown:
    """Return the authorities and which workers have them; raises ServiceUnavailable."""
    directory = _directory(runtime)
    signing, other = authorities(directory)
    wanted, now = trusted_set(directory), time.time()
    used: dict[str, list[TokenView]] = {}
    for each in AccessClient.of(runtime).tokens():
        usable = each.revoked_at is None and (each.expires_at or now + 1) > now
        if each.worker_id and each.kind == "access" and usable and each.last_used_at is not None:
            used.setdefault(each.worker_id, []).append(each)
    workers = CoordinatorClient.of(runtime).workers()
    alive = [each.worker_id for each in workers if each.alive]
    current = [e for e in alive if e in used and all(t.authority == wanted for t in used[e])]
    return AuthorityShown(
        signing=fingerprint(signing.cert.read_bytes()),
        beside=fingerprint(other.cert.read_bytes()) if other else None,
        next_step="add"
        if other is None
        else "switch"
        if signing.cert.name == "ca.pem"
        else "retire",
        current=tuple(current),
        behind=tuple(each for each in alive if each not in current),
        away=tuple(each.worker_id for each in workers if not each.alive),
    )


def _show(found: AuthorityShown, as_json: bool) -> None:
    lines = [f"signs    sha256 {found.signing}"]
    if found.beside:
        lines.append(f"trusted  sha256 {found.beside}, too")
    lines.append(
        f"{len(found.current)} of {len(found.current) + len(found.behind)} workers are up to date"
    )
    if found.behind:
        lines.append(f"! have yet to renew: {shortened(found.behind)}")
    if found.away and found.beside:
        lines.append(f"! away, must join again if they miss it: {shortened(found.away)}")
    if found.beside:
        lines.append(
            "Next: copy the authority's directory to the other coordinators, if there are any;"
            f" then `paceline authority {found.next_step}`."
        )
    show(found, as_json, *lines)


def _require_current(found: AuthorityShown) -> None:
    if found.behind:
        raise Conflict(
            "not every worker has renewed its identity",
            got=f"{len(found.behind)} behind: {shortened(found.behind)}",
            wanted="none",
            do="Wait some seconds; see `paceline authority show` and the log of that agent. On "
            "several coordinators, copy the authority's directory first.",
        )


def _require_replicas(runtime: Runtime) -> None:
    """Raise Conflict while a coordinator's port shows a certificate of the old authority."""
    if runtime.profile.security.rest_tls != "installation":
        return
    signing = read_certificate(authorities(_directory(runtime))[0].cert)
    known = runtime.endpoints
    for url in known.coordinator_urls or (known.coordinator_url,):
        client = CoordinatorClient(url, runtime.secrets.coordinator_token, ca=signing)
        try:
            client.workers()
        except ServiceUnavailable as error:
            raise Conflict(
                "a coordinator shows no certificate of the new authority",
                got=error.got,
                where=url,
                do="Restart it; with several, one after another.",
            ) from error
        finally:
            client.close()


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
    wanted += [
        f"[[cluster.hosts]] ssh = {each.ssh}: your own host in its place, in the profile"
        for each in runtime.profile.cluster.hosts
        if each.ssh.rpartition("@")[2].endswith(".example")
    ]
    cluster, objects = runtime.profile.cluster, runtime.profile.objects
    if cluster.kind in ("ssh", "slurm") and not cluster.scheduler:
        wanted.append("--scheduler tls://HOST:PORT: Dask's, for [cluster] kind = " + cluster.kind)
    bucket = runtime.profile.storage.bucket
    if not objects.endpoint_url and bucket == StorageSettings().bucket:
        wanted.append(f"storage.bucket: s3://{bucket} where AWS's settings say, else one of yours")
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
        "# Prefect's API wants them, set PREFECT_API_AUTH_STRING=user:password or PREFECT_API_KEY.",
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


@click.group(cls=Group)
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
