"""`paceline plan`: the predicted duration of each topology for a fleet and a model."""

from __future__ import annotations

import click

from paceline.cli.options import SIZE, fleet_options, json_option
from paceline.plan import FleetDescription, plan_table
from paceline.schemas.command_results import PlanRow, PlanTable
from paceline.schemas.plan import Topology

_COLUMNS = ("topology", "seconds", "× bound", "cross-rack", "source", "depth", "limit")


@click.command()
@click.option("--size", **SIZE, required=True, help="The model's size, e.g. 500GB.")
@click.option("--workers", type=int, required=True, help="How many workers are to have it.")
@fleet_options
@click.option(
    "--topology",
    type=click.Choice([str(each) for each in Topology]),
    default=str(Topology.AUTO),
    show_default=True,
    help="Show this one as chosen.",
)
@json_option
def plan(
    size: int,
    workers: int,
    link: float,
    external: float | None,
    racks: int,
    oversubscription: float,
    disk: float | None,
    piece: int | None,
    chunk: int | None,
    topology: str,
    as_json: bool,
) -> int:
    """Forecast what each topology would take. Needs no server and moves nothing."""
    fleet = FleetDescription(
        size_bytes=size,
        workers=workers,
        link_mbit=link,
        external_mbit=external or 0.0,
        racks=racks,
        oversubscription=oversubscription,
        piece_bytes=piece or 0,
        chunk_bytes=chunk or 0,
        disk_mbit=disk or 0.0,
    )
    table = plan_table(fleet, Topology(topology))
    if as_json:
        click.echo(table.model_dump_json(indent=1))
    else:
        _show(table)
    return 0


def _show(told: PlanTable) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{_size(told.size_bytes)} to {told.workers:,} worker{_s(told.workers)} in "
        f"{told.racks:,} rack{_s(told.racks)}, "
        f"links {_speed(told.link_mbit)}, source {_speed(told.external_mbit)}, "
        f"pieces {_piece(told.piece_bytes)}; nobody can finish before "
        f"{_seconds(told.bound_seconds)} s",
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in _COLUMNS:
        left = name in ("topology", "limit")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    rows = sorted(told.rows, key=lambda row: (row.reference, row.predicted_seconds))
    best = next(row for row in told.rows if row.topology == told.chosen and not row.reference)
    for number, row in enumerate(rows):
        table.add_row(
            *_cells(row, chosen=row.topology == told.chosen and not row.reference),
            style="dim" if row.reference else "bold" if row.topology == told.chosen else "",
            end_section=not row.reference and rows[number + 1].reference,
        )
    console.print(table)
    console.print("Dim rows are schemes to compare with; Paceline does not use them.")
    console.print(
        f"With the deaths that a fleet of this size must expect: {best.topology} takes "
        f"{_seconds(best.expected_seconds)} s.",
        highlight=False,
    )


def _cells(row: PlanRow, *, chosen: bool) -> tuple[str, ...]:
    return (
        f"{row.topology} ←" if chosen else row.topology,
        _seconds(row.predicted_seconds),
        f"{row.ratio:.3f}" if row.ratio < 100 else f"{row.ratio:,.0f}",
        _size(row.cross_rack_bytes),
        _size(row.origin_bytes),
        f"{row.depth:,}",
        row.limited_by,
    )


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _piece(count: int) -> str:
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count / 1024:g} KiB"


def _seconds(value: float) -> str:
    if 0 < value < 0.001:
        return "< 0.001"
    return (
        f"{value:,.0f}" if value >= 10_000 else f"{value:,.1f}" if value >= 10 else f"{value:.3f}"
    )


def _size(count: int) -> str:
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return (
                f"{count / factor:,.3g} {unit}" if count < 1e18 else f"{count / factor:,.0f} {unit}"
            )
    return f"{count} B"


def _speed(mbit: float) -> str:
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"
