"""`paceline authority`: replace the certificate authority of a fleet that works meanwhile.

Each step changes the authority's directory on this machine (``relay.rotation``), after checking
with the coordinator that every living worker is ready for it.
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from paceline.cli.commands import Group
from paceline.cli.options import json_option, show, state_directory, state_option
from paceline.client import AccessClient, CoordinatorClient
from paceline.config import Runtime, load_runtime, read_certificate
from paceline.errors import Conflict, InvalidInput, ServiceUnavailable
from paceline.relay import add_authority, retire_authority, switch_authority, trusted_set
from paceline.relay.transport import authorities, fingerprint
from paceline.schemas import AuthorityShown, TokenView


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
        lines.append(f"! have yet to renew: {_listed(found.behind)}")
    if found.away and found.beside:
        lines.append(f"! away, must join again if they miss it: {_listed(found.away)}")
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
            got=f"{len(found.behind)} behind: {_listed(found.behind)}",
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


def _listed(names: tuple[str, ...], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
