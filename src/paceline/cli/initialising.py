"""`paceline init`: a state directory for a fleet whose servers somebody else starts."""

from __future__ import annotations

import secrets
from pathlib import Path

import click

from paceline.cli.options import (
    json_option,
    profile_options,
    read_profile,
    state_directory,
    state_option,
)
from paceline.client import Endpoint
from paceline.errors import Conflict, InvalidInput
from paceline.fleet.credentials import SECRETS_FILE
from paceline.profile import RUNTIME_FILE, Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.relay.wires.identity import ensure_authority, fingerprint
from paceline.system.files import own_directory
from paceline.wire.access import FleetInitialised

# What `init` or a join writes, and what `up` writes: secrets that are nowhere else.
MADE = (RUNTIME_FILE, SECRETS_FILE)


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
@click.option("--scheduler", default="", metavar="URL", help="Dask's scheduler, for the same.")
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
    settings = _with_names(settings, [Endpoint.of(url) for url in urls])
    own_directory(directory)
    kept = (directory / settings.security.authority / "ca-key.pem").exists()
    authority = ensure_authority(directory / settings.security.authority)
    runtime = Runtime(
        profile=settings,
        state_dir=directory,
        endpoints=Endpoints(
            coordinator_url=urls[0],
            coordinator_urls=urls,
            coordinator_ca=_trusted(settings),
            s3_url=settings.objects.endpoint_url,
            prefect_api_url=prefect,
            prefect_ui_url=prefect.removesuffix("/api"),
            mlflow_url=mlflow,
            scheduler_address=scheduler,
        ),
        secrets=Secrets(coordinator_token=secrets.token_urlsafe(32)),
    )
    save_runtime(runtime)  # last: it makes the directory an installation
    made = FleetInitialised(
        state=str(directory),
        coordinators=urls,
        authority=fingerprint(authority.cert.read_bytes()),
    )
    click.echo(made.model_dump_json() if as_json else _next_steps(made, kept=kept))
    return 0


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
    ]
    return "\n".join(lines)
