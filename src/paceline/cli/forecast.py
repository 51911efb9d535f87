"""`paceline plan` and `paceline simulate`: what a deployment to a described fleet would take.

`plan` predicts each topology's duration, for a described fleet or the registered one; `simulate`
runs one deployment under a virtual clock and network, with failures. Neither moves a byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.commands import ExistingPath, Sections
from paceline.cli.options import (
    LINK,
    SIZE,
    json_option,
    show,
    state_option,
    to_option,
    with_options,
)
from paceline.client import CoordinatorClient
from paceline.config import find_installation
from paceline.errors import InvalidInput, NotReady
from paceline.plan import FleetDescription, plan_table, select_workers
from paceline.schemas import (
    COUNT_MAX,
    PlanRow,
    PlanTable,
    SimulationReport,
    Topology,
)
from paceline.units import size

if TYPE_CHECKING:
    from rich.table import Table

NO_BOUND = "assumed: no bound"
_COLUMNS = ("topology", "seconds", "× bound", "cross-rack", "source", "depth", "limit")
_FLEET = (
    click.option("--size", "size_bytes", **SIZE, required=True, help="The model's size: 500GB."),
    click.option("--workers", type=int, help="How many workers are to have it."),
    click.option("--link", "link_mbit", **LINK, help="Each worker's link, e.g. 10Gbps."),
    click.option(
        "--external",
        "external_mbit",
        **LINK,
        help="The link to the source (default: as fast as --link).",
    ),
    click.option(
        "--racks", type=int, default=0, help="Racks of equal size (default: 32 workers each)."
    ),
    click.option(
        "--oversubscription",
        type=float,
        default=1.0,
        show_default=True,
        help="A rack's links together / its uplink.",
    ),
    click.option(
        "--disk",
        "disk_mbit",
        **LINK,
        help="What a worker's disk writes, e.g. 2GB/s (default: no bound).",
    ),
    click.option(
        "--piece", "piece_bytes", **SIZE, help="Piece size (default: as publish would choose)."
    ),
    click.option("--chunk", "chunk_bytes", **SIZE, help="Chunk size (default: 0.8 s of the link)."),
    click.option(
        "--topology",
        type=click.Choice([str(each) for each in Topology]),
        default=str(Topology.AUTO),
        show_default=True,
        help="The one to use.",
    ),
    json_option,
)


FLEET_SECTIONS = {
    "Model": "size_bytes piece_bytes chunk_bytes",
    "Fleet": "workers link_mbit external_mbit racks oversubscription disk_mbit targets state",
    "Faults": "fail corrupt straggle faults seed",
}


@click.command(cls=Sections, sections=FLEET_SECTIONS)
@with_options(_FLEET)
@to_option
@state_option
def plan(
    topology: str, as_json: bool, targets: tuple[str, ...], state: Path | None, **fleet: Any
) -> int:
    """Forecast what each topology would take. Moves nothing, and needs no server with --workers.

    Without --workers it is for the registered workers of the installation, or those that --to
    selects, with their slowest link and their racks.
    """
    if targets and fleet["workers"] is not None:
        raise InvalidInput("two fleets", got="--to and --workers", wanted="one of them")
    origins = {"link_mbit": "given", "disk_mbit": "given" if fleet["disk_mbit"] else NO_BOUND}
    if fleet["workers"] is None:
        known, origins = _registered(targets, state)
        origins = {key: "given" if fleet[key] else origin for key, origin in origins.items()}
        fleet |= {key: value for key, value in known.items() if not fleet[key]}
    table = plan_table(FleetDescription(**_described(fleet)), Topology(topology))
    origins = {key.removesuffix("_mbit"): origin for key, origin in origins.items()}
    more = {"origins": origins, "disk_mbit": fleet["disk_mbit"] or 0.0}
    table = table.model_copy(update=more)
    if as_json:
        show(table, as_json)
    else:
        _show_plan(table)
    return 0


@click.command("simulate", cls=Sections, sections=FLEET_SECTIONS)
@with_options(_FLEET)
@click.option("--fail", type=float, default=0.0, help="Share of workers that die, e.g. 0.05.")
@click.option(
    "--corrupt", type=float, default=0.0, help="Share of transfers of pieces that arrive corrupt."
)
@click.option(
    "--straggle", type=float, default=0.0, help="Share of workers at a fifth of the link."
)
@click.option(
    "--faults",
    type=ExistingPath(path_type=Path, dir_okay=False),
    help="Observed faults, JSON: at_s, worker, kind (kill, silence, freeze, rate or corrupt).",
)
@click.option(
    "--seed",
    type=click.IntRange(0, COUNT_MAX),
    default=0,
    show_default=True,
    help="Same seed, same report.",
)
def simulating(topology: str, as_json: bool, faults: Path | None, **scenario: Any) -> int:
    """Simulate a deployment with the real planner, sessions and coordinator.

    Exit code 1 when an invariant did not hold; the report lists which.
    """
    from paceline.simulation import Scenario, read_faults, simulate

    observed = () if faults is None else read_faults(faults)
    described = _described(scenario)
    report = simulate(Scenario(topology=Topology(topology), faults=observed, **described))
    if as_json:
        show(report, as_json)
    else:
        _show_simulation(report)
    return 1 if report.violations else 0


def _described(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given; raises UsageError where the fleet is not described."""
    for option, name in (("--workers", "workers"), ("--link", "link_mbit")):
        if options[name] is None:
            raise click.UsageError(f"Missing option '{option}'.")
    return {name: value for name, value in options.items() if value is not None}


def _registered(
    targets: tuple[str, ...], state: Path | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return number, slowest link and disk and racks of the selected workers of the installation,
    and which of the figures were measured.
    """
    try:
        runtime = find_installation(state)
    except NotReady as error:
        raise InvalidInput(
            "no fleet to plan for",
            got="neither --workers nor an installation",
            wanted="--workers N --link SPEED",
            do="Describe the fleet, or log in to one: `paceline login URL`.",
        ) from error
    call_every = CoordinatorClient.of(runtime).workers()
    chosen = set(select_workers(";".join(targets), call_every))
    found = [each for each in call_every if each.worker_id in chosen]
    has = [each.inventory for each in found]
    disks = [each.disk_bytes_s * 8 / 1e6 for each in has if each and each.disk_bytes_s]
    interfaces = [each.interface_mbit for each in has if each and each.interface_mbit]
    link = min(each.link_mbit for each in found)
    slowest = min(interfaces, default=link)
    reported = f"measured on {len(disks)} of {len(found)}, the slowest"
    described = {
        "workers": len(found),
        "link_mbit": min(link, slowest),
        "disk_mbit": min(disks, default=None),
        "racks": len({(each.labels.zone, each.labels.rack) for each in found}),
    }
    return described, {
        "link_mbit": "reported: the slowest interface" if slowest < link else "assumed: profile",
        "disk_mbit": reported if disks else NO_BOUND,
    }


def _show_plan(forecast: PlanTable) -> None:
    from rich.console import Console

    console = Console()
    console.print(
        f"{size(forecast.size_bytes)} to {forecast.workers:,} worker{_s(forecast.workers)} in "
        f"{forecast.racks:,} rack{_s(forecast.racks)}, "
        f"links {_speed(forecast.link_mbit)}, source {_speed(forecast.external_mbit)}, "
        f"pieces {_piece(forecast.piece_bytes)}; no way can finish before "
        f"{_seconds(forecast.bound_seconds)} s",
        highlight=False,
    )
    disk = f"disk {size(round(forecast.disk_mbit / 8 * 1e6))}/s " if forecast.disk_mbit else "disk "
    origins = forecast.origins
    console.print(f"links {origins['link']}; {disk}{origins['disk']}", highlight=False)
    best = next(
        row for row in forecast.rows if row.topology == forecast.chosen and not row.reference
    )
    names: tuple[str, ...] = _COLUMNS
    unlimited = console.options.update(width=1000)
    while len(names) > 2 and console.width < (
        console.measure(_table(forecast, names), options=unlimited).maximum
    ):
        names = names[:-1]
    console.print(_table(forecast, names))
    if lacking := _COLUMNS[len(names) :]:
        console.print(f"Too narrow for {', '.join(lacking)}: a wider terminal or --json has them.")
    console.print("Dim rows are schemes to compare with; Paceline does not use them.")
    console.print(
        f"With the deaths that a fleet of this size must expect: {best.topology} takes "
        f"{_seconds(best.expected_seconds)} s.",
        highlight=False,
    )


def _table(forecast: PlanTable, names: tuple[str, ...]) -> Table:
    """Return the first columns, which are ``names``."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in names:
        left = name in ("topology", "limit")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    rows = sorted(forecast.rows, key=lambda row: (row.reference, row.predicted_seconds))
    for number, row in enumerate(rows):
        chosen = row.topology == forecast.chosen
        table.add_row(
            *_cells(row, chosen=chosen and not row.reference)[: len(names)],
            style="dim" if row.reference else "bold" if chosen else "",
            end_section=not row.reference and rows[number + 1].reference,
        )
    return table


def _cells(row: PlanRow, *, chosen: bool) -> tuple[str, ...]:
    return (
        f"{row.topology} ←" if chosen else row.topology,
        _seconds(row.predicted_seconds),
        f"{row.ratio:.3f}" if row.ratio < 100 else f"{row.ratio:,.0f}",
        size(row.cross_rack_bytes),
        size(row.origin_bytes),
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


def _speed(mbit: float) -> str:
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def _show_simulation(report: SimulationReport) -> None:
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
