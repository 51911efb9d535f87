"""Commands on an installation that runs no flows here: deployments and flow runs over REST.

A deployment is created over REST and followed; a flow runs where the installation has its Prefect
worker. Either ends with the exit code that it would have had there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from paceline.cli.options import notice, show
from paceline.cli.watching import follow
from paceline.client import Client
from paceline.config import Runtime
from paceline.schemas import new_run_id


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
    client, run_id = Client.of(runtime), run_id or new_run_id()
    deployment_id = client.deploy(model, version, selector, run_id, allow_older=not activate)
    try:
        follow(runtime, deployment_id, quiet=as_json)
    except BaseException as error:
        if not isinstance(error, Exception):
            from paceline.cli.flows import left_behind

            said = left_behind(client.coordinator, deployment_id, cancels=cancels)
            sys.stderr.write(f"{said}\n")
        raise
    answer = client.finish(client.wait(deployment_id, notice), run_id, activate=activate)
    relay, switched = answer["relay"], answer["activated"]
    failed = relay["workers_failed"]
    without = f", without {', '.join(failed)}" if failed else ""
    then = "not activated" if switched is None else f"active on {switched}"
    show(
        {"status": "complete"} | answer,
        as_json,
        f"{answer['model_id']} {answer['version']} on {relay['workers']} of "
        f"{len(answer['targets'])} workers{without}, {then}",
        f"done: run {run_id}, deployment {deployment_id}",
    )
    return 0


def run_flow(
    runtime: Runtime, name: str, run_id: str | None, parameters: Mapping[str, Any], *, as_json: bool
) -> int:
    """Start the flow ``module.function`` on the installation, follow it, and print its result."""
    function = name.rpartition(".")[2]
    flow = "lifecycle" if function == "run_lifecycle" else function.replace("_", "-")
    begun = Client.of(runtime).start(flow, parameters, run_id=run_id, on_notice=notice)
    sys.stderr.write(f"{flow}: flow run {begun.page}\n")
    try:
        answer = begun.wait(lambda line: click.echo(f"  {line}", err=True), notice)
    except KeyboardInterrupt:
        again = f"the same command with --run-id {begun.run_id} follows it"
        sys.stderr.write(f"the flow goes on; {again}\n")
        raise
    lines = [f"! {note}" for note in answer["notes"]]
    show({"status": "complete"} | answer, as_json, *lines, f"done: run {begun.run_id}")
    return 0
