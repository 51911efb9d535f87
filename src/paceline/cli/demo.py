"""`paceline demo`: start everything, run the lifecycle, show one screen, stop everything.

The supervisor holds the other end of a pipe of this process: however the demo process ends, the
servers stop and the state stays. The next `paceline demo` continues from there.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from paceline.cli.options import (
    json_option,
    point_prefect_at,
    profile_options,
    read_profile,
    state_directory,
    state_option,
)
from paceline.config import Runtime
from paceline.errors import InvalidInput, NotReady
from paceline.relay.process import SignalEvent
from paceline.schemas import new_run_id
from paceline.system.files import write_private

MARKER = "demo.json"


@click.command()
@state_option
@profile_options
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=None,
    help="Directory of your own text files (default: Python's standard library).",
)
@click.option("--keep", is_flag=True, help="Leave the pages open until Ctrl-C.")
@json_option
def demo(
    state: Path | None,
    profile: str,
    overrides: tuple[str, ...],
    data: Path | None,
    keep: bool,
    as_json: bool,
) -> int:
    """Run the whole lifecycle on this machine, from a bucket to a promoted model on every node."""
    settings = read_profile(profile, overrides)
    if data is not None and not data.is_dir():
        raise InvalidInput("no such data", got=data, wanted="a directory of text files")
    directory = state_directory(state)
    began = time.monotonic()

    from paceline import cluster as fleet
    from paceline.cli.options import extra_services
    from paceline.cli.progress import StageBars

    bars = StageBars()
    bars.say(f"starting the installation in {directory} …")
    runtime = fleet.start(
        settings, directory, detach=False, extra_services=extra_services(directory)
    )
    try:
        ready_s = time.monotonic() - began
        bars.say(f"ready in {ready_s:.1f} s: {runtime.endpoints.prefect_ui_url}")
        with bars:  # ends before the summary begins: both write to the same screen
            summary = _run(runtime, data, bars)
        summary["ready_seconds"] = round(ready_s, 3)
        summary["total_seconds"] = round(time.monotonic() - began, 3)
        if keep:
            with _interruptible() as stopped:
                _report(runtime, summary, as_json, keep)
                _keep_open(directory, stopped)
        else:
            _report(runtime, summary, as_json, keep)
    finally:
        fleet.stop(directory)
    return 0


def _run(runtime: Runtime, data: Path | None, listener: Any) -> dict[str, Any]:
    point_prefect_at(runtime)
    from prefect.logging.handlers import APILogHandler

    from paceline.flows.lifecycle import run_lifecycle
    from paceline.tasks.run import listen

    source = None if data is None else str(data.absolute())
    run_id = _unfinished(runtime.state_dir, source) or new_run_id()
    _mark(runtime.state_dir, run_id=run_id, data=source, finished=False)
    end = listen(listener)
    try:
        summary = run_lifecycle(data=source, state_dir=str(runtime.state_dir), run_id=run_id)
    finally:
        end()
        # Prefect sends its log in batches; once its server has stopped it would retry for a minute.
        APILogHandler().flush()
    _mark(runtime.state_dir, run_id=run_id, data=source, finished=True)
    assert isinstance(summary, dict)
    return summary


def _unfinished(state_dir: Path, data: str | None) -> str | None:
    """Return the id of the run that an earlier demo of the same data did not finish."""
    try:
        marker = json.loads((state_dir / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(marker, dict) or "run_id" not in marker:
        return None
    same = marker.get("data") == data and not marker.get("finished")
    return str(marker["run_id"]) if same else None


def _mark(state_dir: Path, **fields: Any) -> None:
    write_private(state_dir / MARKER, json.dumps(fields).encode())


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets, instead of ending this process midway."""
    stopped = SignalEvent()
    before = {
        each: signal.signal(each, lambda *_: stopped.set())
        for each in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stopped
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _keep_open(directory: Path, stopped: threading.Event) -> None:
    """Wait until ``stopped`` is set; raise NotReady where the installation ends by itself."""
    from paceline import cluster as fleet

    click.echo("Ctrl-C stops everything.", err=True)
    while not stopped.wait(2.0):
        if not fleet.status(directory).running:
            raise NotReady(
                "the installation ended by itself",
                where=directory / "logs" / "supervisor.log",
                do="Read that log; `paceline demo` goes on from where it was.",
            )


def _report(runtime: Runtime, summary: dict[str, Any], as_json: bool, keep: bool) -> None:
    if as_json:
        click.echo(json.dumps(summary))
        return

    show_summary(runtime, summary, pages_open=keep)


def show_summary(runtime: Runtime, summary: dict[str, Any], *, pages_open: bool) -> None:
    """Print ``summary`` (docs/schemas/demo.json) for a person."""
    console = Console()
    model, registry = summary["model"], summary["registry"]
    done = "everything was already done" if summary["already_done"] else "complete"
    head = (
        f"[bold]{model['model_id']}[/] v{model['base_version']} → v{model['version']}: {done} "
        f"in {summary['total_seconds']:.0f} s   run {summary['run_id']}"
    )
    console.print(Panel(head, title="Paceline"))
    console.print(_stages(summary))
    console.print(_movement(summary))
    console.print(_scores(summary))
    console.print(
        f"[bold]{registry['alias']}[/]: {registry['model_id']} version {registry['version']} in "
        f"the registry (previous: {registry['previous'] or 'none'}), evidence "
        f"{registry['evidence_digest'][:16]}…",
        highlight=False,
    )
    for note in summary["notes"]:
        console.print(f"! {note}", highlight=False, markup=False)
    for name, target in summary["links"].items():
        console.print(f"  {name:<8} {target}", highlight=False, soft_wrap=True)
    if pages_open:
        secrets = runtime.secrets
        console.print(f"  Prefect asks for: {secrets.prefect_auth}", highlight=False)
        if secrets.mlflow_auth:
            console.print(f"  MLflow asks for:  {secrets.mlflow_auth}", highlight=False)
        console.print(f"  The fleet page asks for: {secrets.coordinator_token}", highlight=False)
    else:
        console.print("  The pages are closed; `paceline demo --keep` or `paceline up` opens them.")


def _stages(summary: dict[str, Any]) -> Table:
    table = Table(title="Stages", title_justify="left", expand=False)
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("")
    for each in summary["stages"]:
        state = "already done" if each["already_done"] else "done"
        table.add_row(each["stage"], f"{each['seconds']:.1f}", state)
    return table


def _movement(summary: dict[str, Any]) -> Table:
    topology = summary["distribution"]["topology"]
    table = Table(title=f"Distribution ({topology})", title_justify="left", expand=False)
    for name in ("", "nodes", "bound", "predicted", "measured", "from S3", "reused"):
        table.add_column(name, justify="right" if name else "left")
    for name in ("distribution", "rollout"):
        each = summary[name]
        table.add_row(
            name,
            str(each["workers"]),
            f"{each['bound_seconds']:.2f} s",
            f"{each['predicted_seconds']:.2f} s",
            f"{each['seconds']:.2f} s",
            f"{each['origin_bytes'] / 1e6:.1f} MB",
            f"{each['pieces_reused']} pieces",
        )
    return table


def _scores(summary: dict[str, Any]) -> Table:
    evaluation = summary["evaluation"]
    table = Table(
        title=f"Held-out files: {evaluation['documents']} files, {evaluation['bytes']} bytes",
        title_justify="left",
        expand=False,
    )
    table.add_column("model")
    table.add_column("bits per byte", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, each in sorted(
        evaluation["bits_per_byte"].items(), key=lambda item: item[1]["value"]
    ):
        table.add_row(name, f"{each['value']:.3f}", f"{each['low']:.3f} to {each['high']:.3f}")
    return table
