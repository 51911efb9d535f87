"""`paceline doctor`: what works here and what does not, with what mends it.

On a client (a login) it checks the coordinator, the token, the clock and S3; on a node also network
and disk; on a control host also stores, Prefect, MLflow, Dask and certificates.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import click

from paceline.cli.commands import Sections
from paceline.cli.doctor import checks
from paceline.cli.doctor.bundle import write_bundle
from paceline.cli.options import json_option, refuse_typed, state_option
from paceline.client import Client, runtime_of
from paceline.config import Runtime, find_installation
from paceline.errors import InvalidInput, PacelineError
from paceline.schemas import Check, Diagnosis
from paceline.system import write_private

Place = Literal["client", "node", "control"]
MARKS = {"ok": "ok     ", "warning": "WARNING", "failed": "FAILED "}
FINDINGS_FILE = "findings.json"  # in a node's identity/: what its agent reports
MOST_FINDINGS = 10
FINDING_CHARS = 300


@click.command(cls=Sections, sections={"Without --servers": "bundle source state"})
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    metavar="FILE",
    help="Also write a support bundle (tar.gz): findings, settings, ends of logs; no secrets.",
)
@click.option(
    "--source", default="", metavar="URL", help="Read S3 here: s3://bucket/prefix of a model."
)
@click.option(
    "--servers",
    is_flag=True,
    help="Check what Prefect's and MLflow's servers here are given (their variables), no more.",
)
@state_option
@json_option
def doctor(
    bundle: Path | None, source: str, servers: bool, state: Path | None, as_json: bool
) -> int:
    """Check this machine and what it reaches: each finding with what mends it.

    Exit code 1 where something failed; a warning alone is 0.
    """
    if servers:
        refuse_typed("Without --servers", got="--servers")
        return _servers(as_json)
    if source and not source.startswith("s3://"):
        raise InvalidInput("not a source", got=source, wanted="s3://bucket/prefix")
    runtime: Runtime | None = None
    found = list(checks.versions())
    try:
        runtime = find_installation(state)
    except PacelineError as error:
        found.append(checks.failed("installation", error.what, error.do or ""))
    if not as_json:
        _print(found)
    place: Place = "client"
    if runtime is not None and not runtime.is_login:
        place = "control" if runtime.secrets.coordinator_token else "node"
    if runtime is not None:
        for each in _checks(runtime, place, source):
            found.append(each)
            if place == "node":
                keep_findings(runtime.state_dir, found)  # at once: a join waits only so long
            if not as_json:
                _print([each])
    worst = [status for status in ("failed", "warning") if status in {e.status for e in found}]
    diagnosis = Diagnosis.model_validate(
        {
            "status": worst[0] if worst else "ok",
            "place": place,
            "checks": tuple(found),
            "bundle": str(bundle or ""),
        }
    )
    if bundle is not None:
        write_bundle(bundle, diagnosis, runtime)
    if as_json:
        click.echo(diagnosis.model_dump_json())
    elif bundle is not None:
        click.echo(f"{bundle} holds these findings, settings and ends of logs, without secrets")
    return 1 if diagnosis.status == "failed" else 0


def _servers(as_json: bool) -> int:
    from paceline.cli.doctor.servers import server_checks

    found: list[Check] = []
    for each in server_checks(os.environ):
        found.append(each)
        if not as_json:
            _print([each])
    bad = any(each.status == "failed" for each in found)
    if as_json:
        status: Literal["failed", "ok"] = "failed" if bad else "ok"
        made = Diagnosis(status=status, place="control", checks=tuple(found), bundle="")
        click.echo(made.model_dump_json())
    return int(bad)


def _checks(runtime: Runtime, place: Place, source: str) -> Iterator[Check]:
    if place == "client":
        yield from _client(runtime, source)
        return
    yield from _node(runtime)
    yield from checks.s3(runtime, source)
    if place == "control":
        security = runtime.profile.security
        paths = {"authority": f"{security.authority}/ca.pem", "rest": security.rest_cert}
        named = {name: runtime.state_dir / path for name, path in paths.items() if path}
        yield from checks.certificates(named)
        yield from checks.stores(runtime)
        yield from checks.flows_and_cluster(runtime)
        yield from checks.gate(runtime)


def _client(runtime: Runtime, source: str) -> Iterator[Check]:
    urls = runtime.endpoints.coordinator_urls
    for url in urls:
        yield from checks.coordinator(runtime, url, token=url == urls[0])
    try:
        runtime = runtime_of(Client.of(runtime))
    except PacelineError:
        return  # what the coordinator's check has found
    yield from checks.s3(runtime, source)


def _node(runtime: Runtime) -> Iterator[Check]:
    known = runtime.endpoints
    urls = known.coordinator_urls or tuple(filter(None, [known.coordinator_url]))
    for url in urls:
        yield from checks.coordinator(
            runtime, url, token=bool(runtime.secrets.coordinator_token) and url == urls[0]
        )
    if urls:
        yield from checks.network(runtime, urls[0])
    yield from checks.peer_ports(runtime.state_dir)
    yield from checks.disk(runtime.state_dir, runtime.profile.cluster.link_mbit)
    yield from checks.accelerators()
    yield from checks.certificates({"identity": runtime.state_dir / "identity" / "node.pem"})


def keep_findings(state_dir: Path, found: Iterable[Check]) -> None:
    """Keep what needs something for the node's agent, which reports it when it registers."""
    lines = [_finding(each) for each in found if each.status != "ok"]
    path = state_dir / "identity" / FINDINGS_FILE
    write_private(path, json.dumps(lines[:MOST_FINDINGS]).encode())


def _finding(check: Check) -> str:
    """Return what was found and what mends it, which stays where the line is too long."""
    then = f" → {check.do}"[: FINDING_CHARS // 2] if check.do else ""
    return f"{check.name}: {check.found}"[: FINDING_CHARS - len(then)] + then


def findings_of(state_dir: Path) -> tuple[str, ...]:
    """Return what the last check of this node found; nothing where there was none."""
    try:
        lines = json.loads((state_dir / "identity" / FINDINGS_FILE).read_bytes())
    except (OSError, ValueError):
        return ()
    return tuple(map(str, lines)) if isinstance(lines, list) else ()


def _print(found: Iterable[Check]) -> None:
    for each in found:
        click.echo(_line(each))


def _line(check: Check) -> str:
    then = f"\n        → {check.do}" if check.status != "ok" and check.do else ""
    return f"{MARKS[check.status]} {check.name:<16} {check.found}{then}"
