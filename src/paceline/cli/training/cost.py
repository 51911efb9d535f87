"""`paceline cost`: what the installation's trainings and jobs cost, one by class of its time, and
an estimate of the next one. Calls the coordinator; imports neither MLflow nor pandas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from paceline.cli.commands import Sections
from paceline.cli.options import (
    json_option,
    notice,
    print_table,
    read_profile,
    refuse_typed,
    show,
    state_option,
)
from paceline.config import find_installation
from paceline.jobs import (
    HOUR_S,
    By,
    compared,
    cost_of,
    cost_row,
    costs_of_installation,
    day_of,
    estimate,
    grouped,
    held_text,
    like,
    money,
    range_text,
)
from paceline.registry import require_run_prefix
from paceline.schemas import (
    CostEstimate,
    CostGroup,
    CostsShown,
    TrainingCost,
    TrainingCosts,
    TrainingUsage,
    one_of,
)
from paceline.units import duration, size

MISSING = "not recorded"
CLASS_NAMES = {
    "useful": "steps",
    "data_wait": "waiting for data",
    "checkpoint": "checkpoint stalls",
    "recovery": "restarts, lost steps",
    "idle": "start and end",
}


@click.command(
    cls=Sections,
    sections={
        "Show": "by csv_file",
        "Estimate": "steps profile",
        "Estimate with --steps": "tokens_per_step tokens_per_second accelerators",
    },
)
@click.argument("run_id", required=False)
@click.option("--by", type=click.Choice(get_args(By)), help="Sum up by one of these.")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write the rows there, too.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1),
              help="Estimate a training of so many steps, like RUN_ID or as the next options say."
              )  # fmt: skip
@click.option("--tokens-per-step", type=click.FloatRange(min=0, min_open=True),
              help="Default: as in the earlier trainings like it.")  # fmt: skip
@click.option("--tokens-per-second", type=click.FloatRange(min=0, min_open=True),
              help="Of the whole gang; default: as in the earlier trainings like it.")  # fmt: skip
@click.option("--on", "accelerators", multiple=True, type=(str, click.IntRange(min=1)),
              metavar="KIND COUNT", help="Accelerators that it would hold; cpu 2: two nodes."
              )  # fmt: skip
@click.option("--profile", help="Take the prices of this profile, not the installation's.")
@state_option
@json_option
def cost(
    run_id: str | None,
    by: By | None,
    csv_file: Path | None,
    steps: int | None,
    accelerators: tuple[tuple[str, int], ...],
    profile: str | None,
    state: Path | None,
    as_json: bool,
    **speeds: Any,
) -> int:
    """Show what the installation's trainings and each attempt of a job cost; RUN_ID: one run, by
    class of its time.

    Prices are those of [prices] in the profile, as they are now. What has none, or was not
    recorded, is named and not counted.
    """
    if run_id:
        require_run_prefix(run_id)
    if not steps:
        refuse_typed("Estimate with --steps", got="no --steps N")
    # With all figures and prices given no installation is needed.
    alone = profile is not None and steps is not None and not run_id
    reads = run_id or not steps
    runtime = None if alone else find_installation(state)
    prices = read_profile(profile or "embedded", ()).prices
    known = TrainingCosts(prices=prices, usages=())
    if runtime is not None:
        mine = known.model_copy(update={"prices": runtime.profile.prices})
        known = costs_of_installation(runtime) if reads or runtime.is_login else mine
        prices = prices if profile else known.prices
    usages: Sequence[TrainingUsage] = known.usages if reads else ()
    if run_id:
        usages = _of_run(run_id, usages, alike=steps is not None)
    found = CostsShown(
        currency=prices.currency,
        trainings=tuple(cost_of(each, prices) for each in usages),
        without_result=0 if run_id else known.without_result,
    )
    if steps:
        guess = estimate(prices, steps=steps, earlier=usages, accelerators=dict(accelerators),
                         **speeds)  # fmt: skip
        found = found.model_copy(update={"estimate": guess})
    if by:
        found = found.model_copy(update={"groups": tuple(grouped(found.trainings, by))})
    if csv_file:
        _write_csv(csv_file, found.groups or found.trainings)
    if as_json:
        show(found, as_json)
    else:
        _show(found, one=bool(run_id), by=by)
    for note in known.notes if reads else ():
        notice(note)
    if known.left_out and reads and not run_id:
        notice(f"{known.left_out} older rows are left out")
    return 0


def _of_run(run_id: str, usages: Sequence[TrainingUsage], *, alike: bool) -> list[TrainingUsage]:
    """Return the attempts of the run that ``run_id`` begins, or one and the trainings like it."""
    whole = one_of("run with a recorded training", run_id, {each.run_id: each for each in usages})
    found = [each for each in usages if each.run_id == whole]
    if not alike:
        return found
    chosen = next((each for each in found if each.tokens), found[0])
    return like(chosen, usages)


def _write_csv(path: Path, rows: Sequence[TrainingCost | CostGroup]) -> None:
    import csv

    flat = [cost_row(each) for each in rows]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]) if flat else ["run_id"])
        writer.writeheader()
        writer.writerows(flat)


def _show(found: CostsShown, *, one: bool, by: By | None) -> None:
    if found.estimate is not None:
        _show_estimate(found.estimate)
    elif one:
        for each in found.trainings:
            _show_one(each)
        _show_compared(found.trainings)
    elif by:
        sums = [by, "trainings", "accelerator-hours", "in steps", "kWh", "hours queued",
                f"price {found.currency}"]  # fmt: skip
        sums += ["estimated hours", f"estimated {found.currency}"] if by == "job" else []
        print_table(sums, [_group_row(each)[: len(sums)] for each in found.groups])
    elif found.trainings:
        names = ("run", "model", "team", "state", "day", "steps", "time", "held", "in steps", "kWh",
                 f"price {found.currency}", "per 1k tokens")  # fmt: skip
        print_table(names, [_row(each) for each in found.trainings])
    else:
        click.echo("no training is recorded")
    if found.without_result:
        notice(f"{found.without_result} trainings without a result (they run, or failed) and "
               "without a job are not counted")  # fmt: skip
    if not one and any(each.total is None for each in found.trainings):
        notice("some have no price: `paceline cost RUN` says why; prices stand in the profile's "
               "[prices]")  # fmt: skip


def _row(each: TrainingCost) -> tuple[str, ...]:
    missing = "no price" if each.total is None else MISSING
    return (
        each.run_id, each.model_id, each.team, each.state or "succeeded", day_of(each),
        str(each.steps), duration(each.seconds),
        held_text(each.accelerators, each.node_share),
        _share(each.useful_share), money(each.energy_kwh),
        money(each.total, missing), money(each.per_1k_tokens, missing),
    )  # fmt: skip


def _group_row(each: CostGroup) -> tuple[str, ...]:
    price = money(each.price, "no price")
    if each.price is not None and each.without_price:
        price += f" and {each.without_price} without"
    figures = (each.accelerator_hours, each.useful_hours, each.energy_kwh, each.queue_hours)
    guess = each.estimate
    expected = (guess and guess.accelerator_hours, guess and guess.price)
    cells = (money(one.value if one else None, "") for one in expected)
    return each.name, str(each.trainings), *map(money, figures), price, *cells


def _show_compared(attempts: Sequence[TrainingCost]) -> None:
    """Print what was estimated of the job whose attempts these are, beside what they took."""
    for each in grouped(attempts, "job"):
        if each.estimate is not None:
            hours = sum(attempt.seconds for attempt in attempts) / HOUR_S
            _lines(compared(each.estimate, hours, each.energy_kwh, each.price))


def _show_one(cost: TrainingCost) -> None:
    attempt = f", attempt {cost.attempt}: {cost.state}" if cost.queued_job_id else ""
    held = held_text(cost.accelerators, cost.node_share)
    click.echo(f"{cost.run_id}: {cost.model_id}, {cost.job_id}{attempt}, {cost.steps} steps in "
               f"{duration(cost.seconds)} on {held}")  # fmt: skip
    rows = [
        (CLASS_NAMES[name], f"{seconds:,.1f}", _share(seconds / (cost.seconds or 1.0)),
         money(cost.price_by_class.get(name), "no price"))
        for name, seconds in cost.by_class.items()
    ]  # fmt: skip
    paid = {"egress": cost.egress, "checkpoints, kept so far": cost.storage}
    rows += [(name, "", "", money(each)) for name, each in paid.items() if each is not None]
    rows.append(("all", f"{cost.seconds:,.1f}", _share(1.0), money(cost.total, "no price")))
    if cost.queue_s is not None:
        rows.append(("before: queue", f"{cost.queue_s:,.1f}", "", money(0.0)))
    print_table(("time", "seconds", "share", f"price {cost.currency}"), rows)
    _lines({
        "per step": money(cost.per_step),
        "per 1k tokens": money(cost.per_1k_tokens),
        "per epoch": money(cost.per_epoch),
        "accelerators": f"{money(cost.accelerator_hours)} hours",
        "energy": f"{money(cost.energy_kwh)} kWh",
        "egress": _bytes(cost.egress_bytes, cost.egress),
        "checkpoints": _bytes(cost.checkpoint_bytes, cost.storage_a_month, " a month"),
        "written": MISSING if cost.written_bytes is None else size(cost.written_bytes),
    })  # fmt: skip
    for each in cost.unknown:
        notice(each)


def _show_estimate(guess: CostEstimate) -> None:
    _lines({
        "steps": f"{guess.steps}, {guess.tokens:,.0f} tokens, on {held_text(guess.accelerators)}",
        "tokens/s": range_text(guess.tokens_per_second),
        "hours": range_text(guess.hours),
        "accelerators": range_text(guess.accelerator_hours, " hours"),
        "energy": range_text(guess.energy_kwh, " kWh"),
        "price": range_text(guess.price, f" {guess.currency}"),
    })  # fmt: skip
    _lines({f"based on {n}": each for n, each in enumerate(guess.based_on, start=1)})


def _lines(figures: Mapping[str, str]) -> None:
    for name, value in figures.items():
        click.echo(f"{name:<14} {value}")


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0%}"


def _bytes(count: int | None, price: float | None, more: str = "") -> str:
    if count is None:
        return MISSING
    return f"{size(count)}, " + ("no price" if price is None else f"{money(price)}{more}")
