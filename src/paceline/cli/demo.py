"""`paceline demo`: start everything, run the lifecycle, show one screen, stop everything.

The supervisor holds the other end of a pipe of this process: however the demo process ends, the
servers stop and the state stays. The next `paceline demo` continues from there.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import (
    json_option,
    point_prefect_at,
    profile_options,
    read_profile,
    signal_handler,
    state_directory,
    state_option,
    there,
)
from paceline.config import Runtime
from paceline.errors import InvalidInput, NotReady, SourceMissing
from paceline.extras import require_extras
from paceline.relay import SignalEvent
from paceline.schemas import RunSummary, new_run_id
from paceline.system import write_private

if TYPE_CHECKING:
    from paceline.cli.progress import StageBars

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
    require_extras("flows", "train")
    if data is not None:
        # The base knows Python only; what is trained for a minute on other text beats none of them.
        overrides = ('gate.except_baselines=["ngram", "gzip", "xz"]', *overrides)
    settings = read_profile(profile, overrides)
    if data is not None and not data.is_dir():
        kind = InvalidInput if data.exists() else SourceMissing
        raise kind("no such data", got=data, wanted="a directory of text files")
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
            stopped = SignalEvent()
            # from before the summary: a script that has read it may end the demo at once
            with signal_handler(lambda *_: stopped.set(), signal.SIGINT, signal.SIGTERM):
                _report(runtime, summary, as_json, keep)
                _keep_open(directory, stopped)
        else:
            _report(runtime, summary, as_json, keep)
    finally:
        fleet.stop(directory)
    return 0


def _run(runtime: Runtime, data: Path | None, listener: StageBars) -> dict[str, Any]:
    point_prefect_at(runtime)
    from prefect.logging.handlers import APILogHandler

    from paceline.flows.lifecycle import run_lifecycle
    from paceline.tasks._support.run import listening

    source = None if data is None else str(data.absolute())
    run_id = _unfinished(runtime.state_dir, source) or new_run_id()
    _mark(runtime.state_dir, run_id=run_id, data=source, finished=False)
    try:
        with listening(listener):
            summary = run_lifecycle(data=source, state_dir=str(runtime.state_dir), run_id=run_id)
    except KeyboardInterrupt:
        listener.say(f"run {run_id} is interrupted; the same `paceline demo` goes on with it")
        raise
    finally:
        # Prefect sends its log in batches; once its server has stopped it would retry for a minute.
        APILogHandler().flush()
    _mark(runtime.state_dir, run_id=run_id, data=source, finished=True)
    return summary.model_dump(mode="json")


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


def _report(runtime: Runtime, answer: dict[str, Any], as_json: bool, keep: bool) -> None:
    """Print ``answer`` (docs/schemas/demo.json)."""
    if as_json:
        click.echo(json.dumps(answer))
        return
    from rich.console import Console
    from rich.markdown import Markdown

    from paceline.tasks._support.summary import as_markdown

    summary = RunSummary.model_validate(answer)
    console = Console()
    console.print(Markdown(as_markdown(summary)))
    lines = [f"  total     {summary.total_seconds:.0f} s"]
    lines += [f"  {name:<8}  {target}" for name, target in summary.links.items()]
    if keep:
        lines.append(f"  Prefect asks for: {runtime.secrets.prefect_auth}")
        if runtime.secrets.mlflow_auth:
            lines.append(f"  MLflow asks for:  {runtime.secrets.mlflow_auth}")
        lines.append(f"  The fleet page asks for: {runtime.secrets.coordinator_token}")
    else:
        lines.append("  The pages are closed; `paceline demo --keep` or `paceline up` opens them.")
    lines += [
        "Next, with a model and data of your own, each a directory:",
        f"  {there('up')}",
        f"  {there('lifecycle --model DIRECTORY --data DIRECTORY')}",
    ]
    click.echo("\n".join(lines))
