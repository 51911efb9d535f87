"""`paceline simulate`: one deployment under a virtual clock and network, with failures."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.options import SIZE, fleet_options, json_option
from paceline.schemas.base import COUNT_MAX
from paceline.schemas.command_results import SimulationReport
from paceline.schemas.plan import Topology
from paceline.simulation import Scenario, read_faults, simulate


@click.command(name="simulate")
@click.option("--workers", type=int, required=True, help="How many workers are to have the model.")
@click.option("--size", **SIZE, required=True, help="The model's size, e.g. 500GB.")
@fleet_options
@click.option(
    "--topology",
    type=click.Choice([str(each) for each in Topology]),
    default=str(Topology.AUTO),
    show_default=True,
)
@click.option("--fail", type=float, default=0.0, help="Share of workers that die, e.g. 0.05.")
@click.option(
    "--corrupt", type=float, default=0.0, help="Share of transfers of pieces that arrive corrupt."
)
@click.option(
    "--straggle", type=float, default=0.0, help="Share of workers at a fifth of the link."
)
@click.option(
    "--faults",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Observed faults, JSON: at_s, worker, kind (kill, silence, freeze, rate or corrupt).",
)
@click.option(
    "--seed",
    type=click.IntRange(0, COUNT_MAX),
    default=0,
    show_default=True,
    help="Same seed, same report.",
)
@json_option
def simulating(
    workers: int,
    size: int,
    link: float,
    external: float | None,
    racks: int,
    oversubscription: float,
    disk: float | None,
    piece: int | None,
    chunk: int | None,
    topology: str,
    fail: float,
    corrupt: float,
    straggle: float,
    faults: Path | None,
    seed: int,
    as_json: bool,
) -> int:
    """Simulate a deployment with the real planner, sessions and coordinator.

    Exit code 1 when an invariant did not hold; the report lists which.
    """
    report = simulate(
        Scenario(
            workers=workers,
            size_bytes=size,
            link_mbit=link,
            external_mbit=external,
            racks=racks,
            oversubscription=oversubscription,
            disk_mbit=disk,
            piece_bytes=piece or 0,
            chunk_bytes=chunk or 0,
            topology=Topology(topology),
            fail=fail,
            corrupt=corrupt,
            straggle=straggle,
            faults=read_faults(faults) if faults is not None else (),
            seed=seed,
        )
    )
    if as_json:
        click.echo(report.model_dump_json(indent=1))
    else:
        _show(report)
    return 1 if report.violations else 0


def _show(report: SimulationReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    complete = "all complete" if report.survivors_complete else "NOT ALL COMPLETE"
    rows = [
        ("topology", report.topology),
        ("seconds", f"{report.seconds:.1f}  ({report.ratio:.3f} x the bound)"),
        ("bound, plan", f"{report.bound_seconds:.1f}, {report.predicted_seconds:.1f}"),
        ("survivors", f"{report.survivors} of {report.workers}, {complete}"),
        ("from the source", f"{report.origin_bytes / 1e9:.1f} GB  ({report.origin_ratio:.4f} x)"),
        ("between racks", f"{report.cross_rack_bytes / 1e9:.1f} GB"),
        ("corrupt pieces", str(report.corrupt_pieces)),
        ("seed, events", f"{report.seed}, {report.events}"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    for violation in report.violations:
        console.print(
            f"violated: {violation}", style="red", markup=False, highlight=False, soft_wrap=True
        )
