"""`paceline up`, `down` and `where`: the embedded installation from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import (
    json_option,
    point_prefect_at,
    profile_options,
    read_profile,
    state_directory,
    state_option,
)
from paceline.profile import Runtime, load_runtime


@click.command()
@state_option
@profile_options
@json_option
def up(state: Path | None, profile: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Start Prefect, S3, MLflow, Dask and the coordinator, and leave them running."""
    from paceline import fleet
    from paceline.cli.extras import extra_services

    settings = read_profile(profile, overrides)
    directory = state_directory(state)
    runtime = fleet.start(
        settings, directory, detach=True, extra_services=extra_services(directory)
    )
    _show(runtime, as_json, "running")
    return 0


@click.command()
@state_option
@json_option
def down(state: Path | None, as_json: bool) -> int:
    """Stop every process that `up` started; the state stays on disk."""
    from paceline import fleet

    directory = state_directory(state)
    stopped = fleet.stop(directory).was_running
    if as_json:
        click.echo(
            json.dumps({"status": "stopped", "was_running": stopped, "state": str(directory)})
        )
    else:
        what = "stopped" if stopped else "nothing was running"
        click.echo(f"{what}; the state is in {directory} (delete it to start afresh)")
    return 0


@click.command()
@click.argument("run_id", required=False)
@state_option
@json_option
def where(run_id: str | None, state: Path | None, as_json: bool) -> int:
    """Print every link of RUN_ID (default: of the installation): pages, logs, credentials."""
    runtime = load_runtime(state_directory(state))
    found = pages(runtime)
    if run_id:
        point_prefect_at(runtime)
        from tasks.lineage import links
        from tasks.run import Run

        run = Run.open(runtime.state_dir, run_id)
        run.registry.find_run(run_id)  # or NotFound: asking for links must not make a run
        found |= links(run)
    if as_json:
        click.echo(json.dumps(found))
    else:
        for name, target in found.items():
            click.echo(f"{name:<14} {target}")
    return 0


def pages(runtime: Runtime) -> dict[str, str]:
    """Return the installation's pages and where its credentials are kept."""
    return {
        "prefect": runtime.endpoints.prefect_ui_url,
        "mlflow": runtime.endpoints.mlflow_url,
        "fleet": f"{runtime.endpoints.coordinator_url}/fleet",
        "s3": runtime.endpoints.s3_url,
        "logs": str(runtime.state_dir / "logs"),
        "credentials": str(runtime.state_dir / "runtime.json"),
    }


def _show(runtime: Runtime, as_json: bool, state: str) -> None:
    found: dict[str, Any] = pages(runtime)
    if as_json:
        click.echo(json.dumps({"status": state, "state": str(runtime.state_dir), "links": found}))
        return
    for name, target in found.items():
        click.echo(f"{name:<14} {target}")
    click.echo("Stop it with `paceline down`.")
