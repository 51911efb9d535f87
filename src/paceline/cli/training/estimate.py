"""`paceline estimate`: what training a model would take on meshes of accelerators, before any ran.

Reads a config.json and a profile; needs no installation, and starts nothing.
"""

from __future__ import annotations

import click

from paceline.cli.commands import Sections
from paceline.cli.options import (
    json_option,
    notice,
    print_table,
    profile_options,
    read_profile,
    show,
)
from paceline.jobs import DescribedModel, estimate_meshes, money
from paceline.schemas import MeshEstimate, MeshEstimates
from paceline.units import duration, size


@click.command(
    cls=Sections,
    sections={
        "Gang": "accelerator ranks meshes precision",
        "Training": "tokens context rank_sequences batch_sequences",
        "Model and prices": "vocabulary profile overrides",
    },
)
@click.argument("model")
@click.option("--accelerator", required=True, metavar="KIND",
              help="H100, H200, A100, or one of the profile's [hardware].")  # fmt: skip
@click.option("--ranks", type=click.IntRange(1, 1_000_000), multiple=True, default=(8, 64, 512),
              show_default=True, help="Accelerators of the gang (repeatable).")  # fmt: skip
@click.option("--mesh", "meshes", multiple=True, metavar="MESH",
              help="shard8xtp8, dp16xpp4, dp (repeatable; default: the usual ones). dp takes the "
              "ranks that are left where it is not named.")  # fmt: skip
@click.option("--tokens", type=click.FloatRange(min=1),
              help="Of the whole training, 3e11: adds hours, energy and price.")  # fmt: skip
@click.option("--context", type=click.IntRange(min=2),
              help="Tokens of a row; default: 4,096, or what the model can read.")  # fmt: skip
@click.option("--rank-sequences", type=click.IntRange(min=1), default=4, show_default=True,
              help="Rows a step for each rank.")  # fmt: skip
@click.option("--batch-sequences", type=click.IntRange(min=1),
              help="Rows a step for the whole gang, instead.")  # fmt: skip
@click.option("--precision", type=click.Choice(["float64", "float32", "bfloat16", "float16"]),
              help="Of the products; default: the accelerator's first.")  # fmt: skip
@click.option("--vocabulary", type=click.IntRange(min=2), default=32_768, show_default=True,
              help="Tokens of a model that is a number of parameters.")  # fmt: skip
@profile_options
@json_option
def estimate(
    model: str,
    accelerator: str,
    vocabulary: int,
    profile: str,
    overrides: tuple[str, ...],
    as_json: bool,
    **given: object,
) -> int:
    """Estimate step time, efficiency, memory, energy and price of training MODEL, by mesh.

    MODEL is a directory, its config.json, or a number of parameters (7B). Prices, checkpoints,
    recomputation and the like are those of the profile: --set training.activation_checkpointing=true.
    """  # noqa: E501 - a setting is one word
    described = DescribedModel.read(model, vocabulary)
    found = estimate_meshes(described, accelerator, read_profile(profile, overrides), **given)  # type: ignore[arg-type] # checked by click
    if as_json:
        show(found, as_json)
    else:
        _show(found)
    return 0


def _show(found: MeshEstimates) -> None:
    click.echo(
        f"{found.model}: {found.parameters:,} parameters, {found.precision}, rows of "
        f"{found.context:,} tokens, on {found.accelerator}"
    )
    names = ("ranks", "mesh", "step", "tokens/s", "efficiency", "MFU", "memory a rank", "fits")
    more = ("hours", "kWh", f"price {found.currency}") if found.tokens else ()
    print_table((*names, *more), [_cells(each, found) for each in found.rows])
    for line in found.based_on:
        notice(line, mark="")


def _cells(row: MeshEstimate, found: MeshEstimates) -> tuple[str, ...]:
    step = f"{row.step_s * 1000:.3g} ms" if row.step_s < 1 else duration(row.step_s)
    cells = (
        str(row.ranks), row.mesh, step, f"{row.tokens_per_second:,.0f}", f"{row.efficiency:.1%}",
        f"{row.mfu:.1%}", size(row.memory_bytes), "yes" if row.fits else "no",
    )  # fmt: skip
    if not found.tokens:
        return cells
    return (
        *cells,
        money(row.hours),
        money(row.energy_kwh, "no watts"),
        money(row.price, "no price"),
    )
