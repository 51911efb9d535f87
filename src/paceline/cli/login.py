"""`paceline login` and `logout`, and how other commands use an installation that runs elsewhere.

The login is kept in the user's configuration directory; ``config.find_installation`` decides when
a command uses it.
"""

from __future__ import annotations

import os
import re
import ssl
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import again, json_option, next_line, notice, remember, show
from paceline.client import (
    TOKEN_VARIABLE,
    Client,
    CoordinatorClient,
    deploy,
    finish,
    require_encrypted,
)
from paceline.config import (
    Login,
    Runtime,
    config_directory,
    delete_login,
    read_certificate,
    read_login,
    save_login,
)
from paceline.errors import (
    AccessDenied,
    InvalidInput,
    NotFound,
    ServiceUnavailable,
    SourceMissing,
)
from paceline.relay import fetch_authority
from paceline.schemas import SHA256_HEX, InstallationView, LoggedIn, LoggedOut, new_run_id
from paceline.system import Endpoint

TRUST = (
    "Name the installation's authority: --authority SHA256 (`paceline init` and `tokens create` "
    "print it), --ca FILE, or log in with the client.json that `paceline init` wrote."
)

NAMES = (
    "Use the URL that `paceline init --coordinator` was given, or have this name added to "
    "[security] rest_hosts."
)


@click.command()
@click.argument("target", metavar="URL | client.json")
@click.option(
    "--ca",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="PEM file that the coordinator's certificate is checked against.",
)
@click.option(
    "--authority",
    metavar="SHA256",
    default=None,
    help="Fingerprint of the installation's authority, which is then fetched from there.",
)
@json_option
def login(target: str, ca: Path | None, authority: str | None, as_json: bool) -> int:
    """Use the installation whose coordinator is at URL from this machine, with a token.

    The token comes from $PACELINE_TOKEN, from standard input where that is no terminal, or from a
    prompt. Afterwards the commands of a client need no state directory and no profile.
    """
    asked = _target(target)
    endpoints = require_encrypted(asked.coordinators)
    if ca is not None and authority is not None:
        raise InvalidInput("two authorities", got="--ca and --authority", wanted="one of them")
    pem = asked.ca
    if ca is not None:
        pem = read_certificate(ca).decode()
    elif authority is not None:
        pem = fetch_authority(endpoints[0], _fingerprint(authority)).decode()
    made = asked.model_copy(update={"ca": pem, "token": _token()})
    found = _checked(made)
    # A replica may name itself by its loopback address, which is another machine here.
    others = [u for u in found.coordinator_urls if not Endpoint.of(u).on_loopback]
    urls = asked.coordinators
    if not any(each.on_loopback for each in endpoints):
        urls = tuple(dict.fromkeys((*urls, *others)))
    path = save_login(made.model_copy(update={"coordinators": urls}))
    done = LoggedIn(
        coordinators=urls,
        token_name=found.token_name,
        scopes=found.token_scopes,
        expires_at=found.token_expires_at,
        path=str(path),
    )
    ends = found.token_expires_at
    until = time.strftime("until %Y-%m-%d %H:%M UTC", time.gmtime(ends)) if ends else "without end"
    show(
        done,
        as_json,
        f"logged in to {urls[0]} (Paceline {found.version}) as {found.token_name}: "
        f"{', '.join(found.token_scopes)}, {until}",
        f"kept in {path} (mode 0600); `paceline logout` deletes it",
    )
    return 0


@click.command()
@json_option
def logout(as_json: bool) -> int:
    """Delete this user's login; the token itself goes on until it is revoked or expires."""
    was = delete_login()
    said = "logged out" if was else f"there was no login in {config_directory()}"
    show(LoggedOut(was_logged_in=was), as_json, said)
    return 0


def _target(target: str) -> Login:
    if "://" in target:
        return Login(coordinators=(target.rstrip("/"),))
    try:
        return read_login(Path(target))
    except FileNotFoundError as error:
        raise SourceMissing(
            "neither a URL nor a file",
            got=target,
            wanted="https://HOST:PORT of a coordinator, or its client.json",
        ) from error


def _fingerprint(given: str) -> str:
    found = given.lower().replace(":", "").removeprefix("sha256")
    if not re.fullmatch(SHA256_HEX, found):
        raise InvalidInput(
            "not a fingerprint",
            got=given[:100],
            wanted="64 hexadecimal digits",
            where="--authority",
        )
    return found


def _token() -> str:
    given = os.environ.get(TOKEN_VARIABLE, "")
    if not given:
        terminal = sys.stdin.isatty()
        given = click.prompt("Token", hide_input=True) if terminal else sys.stdin.readline()
    if not (token := given.strip()):
        raise InvalidInput(
            "no token",
            got="nothing",
            wanted=f"one in ${TOKEN_VARIABLE}, on standard input or at the prompt",
            do="An admin makes one: `paceline tokens create --name YOU --scope deploy`.",
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidInput("not a token", got=f"{len(token)} characters", wanted="pl_…, one word")
    return token


def _checked(made: Login) -> InstallationView:
    """Return what the coordinator says to this token; raises the error that names what is wrong."""
    client = CoordinatorClient.of(made.runtime())
    try:
        return client.installation()
    except NotFound as error:
        raise NotFound(
            "this coordinator answers no logins",
            got=error.what,
            where=error.where,
            do="Check the URL; a coordinator of an older version must be upgraded first.",
        ) from error
    except ServiceUnavailable as error:
        reasons = getattr(error.__cause__, "args", ())
        refused = next((e for e in reasons if isinstance(e, ssl.SSLCertVerificationError)), None)
        if refused is None:
            raise
        other_name = "mismatch" in refused.verify_message
        raise AccessDenied(
            "the coordinator's certificate is not trusted here",
            got=refused.verify_message,
            wanted="one that the installation's authority signed, for this host",
            where=made.coordinators[0],
            do=NAMES if other_name else TRUST,
        ) from error
    finally:
        client.close()


# Commands on an installation that runs no flows here. A deployment is created over REST and
# followed; a flow runs where the installation has its Prefect worker. Either ends with the exit
# code that it would have had there.


def distribute(
    runtime: Runtime,
    model: str,
    version: str | None,
    selector: str,
    *,
    activate: bool,
    allow_older: bool,
    digest: str,
    cancels: bool,
    run_id: str | None,
    as_json: bool,
) -> int:
    """Bring a published version to the selected workers, follow it to its end, and switch to it.

    ``model`` is its id, or without ``version`` a source's URL, which the coordinator resolves.
    """
    from paceline.cli.installation import deployment_page
    from paceline.cli.watching import follow

    client, run_id = Client.of(runtime), run_id or new_run_id()
    older = allow_older or not activate
    deployment_id = deploy(
        client, model, version, selector, run_id, allow_older=older, digest=digest
    )
    try:
        follow(runtime, deployment_id, quiet=as_json, activates=activate)
    except BaseException as error:
        if not isinstance(error, Exception):
            from paceline.cli.flows import left_behind

            said = left_behind(client.coordinator, deployment_id, cancels=cancels)
            sys.stderr.write(f"{said}\n")
        raise
    answer = finish(client, client.wait(deployment_id, notice), run_id, activate=activate)
    failed = answer.relay.workers_failed
    without = f", without {', '.join(failed)}" if failed else ""
    then = "not activated" if answer.activated is None else f"active on {answer.activated}"
    show(
        answer,
        as_json,
        f"{answer.model_id} {answer.version} on {answer.relay.workers} of "
        f"{len(answer.targets)} workers{without}, {then}",
        f"fleet:    {deployment_page(client.coordinator, deployment_id)}",
        f"done: run {run_id}, deployment {deployment_id}",
        next_line("status" if activate else f"activate {deployment_id}"),
    )
    return 0


def run_flow(
    runtime: Runtime, name: str, run_id: str | None, parameters: Mapping[str, Any], *, as_json: bool
) -> int:
    """Start the flow ``module.function`` on the installation, follow it, and print its result."""
    from paceline.cli.flows import flow_name, made_and_next
    from paceline.cli.installation import run_pages

    flow = flow_name(name)
    begun = Client.of(runtime).start(flow, parameters, run_id=run_id, on_notice=notice)
    sys.stderr.write(f"{flow}: flow run {begun.page}\n")
    try:
        answer = begun.wait(lambda line: click.echo(f"  {line}", err=True), notice)
    except KeyboardInterrupt:
        sys.stderr.write(f"run {begun.run_id} goes on there; this follows it:\n")
        sys.stderr.write(f"  {again(begun.run_id)}\n")
        raise
    remember(runtime, name, answer.model_dump(mode="json"))
    lines = [*(f"! {note}" for note in answer.notes), f"done: run {begun.run_id}"]
    lines += made_and_next(name, parameters, answer)
    if not as_json:
        pages = {"prefect": begun.page} | run_pages(runtime, begun.run_id)
        lines += [f"{page:<10}{url}" for page, url in pages.items()]
    show(answer, as_json, *lines)
    return 0
