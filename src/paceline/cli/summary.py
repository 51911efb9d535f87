"""The one screen at the end of a run."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from paceline.profile import Runtime


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
