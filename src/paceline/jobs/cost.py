"""What a training cost, and what the next one would cost, from the profile's price table.

Pure functions of what was recorded. A figure that was not recorded, or has no price, stays None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import prod
from statistics import mean, median
from typing import Any, Literal

from paceline.config import PriceSettings
from paceline.errors import InvalidInput
from paceline.schemas import (
    TIME_CLASSES,
    CostEstimate,
    CostGroup,
    Range,
    TrainingCost,
    TrainingUsage,
    TrainResult,
)
from paceline.text import shortened

By = Literal["model", "job", "team", "project", "day"]
HOUR_S = 3600.0
GB = 1e9
MONTH_S = 365.25 * 86_400 / 12


def named_kind(kind: str, table: Iterable[str]) -> str | None:
    """Return the name in ``table`` that is ``kind``, else the longest whose words it contains."""
    words = {name: rf"(?<!\w){re.escape(name)}(?!\w)" for name in table}
    names = [name for name, each in words.items() if re.search(each, kind, re.IGNORECASE)]
    return kind if kind in names else max(names, key=len, default=None)


def price_of(kind: str, table: Mapping[str, float]) -> float | None:
    """Return the entry of ``kind``: its own, else the longest whose words it contains."""
    name = named_kind(kind, table)
    return None if name is None else table[name]


def _sum(accelerators: Mapping[str, int], table: Mapping[str, float]) -> float | None:
    """Return ``table``'s entries for all of them; None where a kind has none."""
    found = [_product(price_of(kind, table), count) for kind, count in accelerators.items()]
    known = [each for each in found if each is not None]
    return sum(known) if found and len(known) == len(found) else None


def cost_of(training: TrainResult | TrainingUsage, prices: PriceSettings) -> TrainingCost:
    """Return what ``training`` cost.

    Accelerators are paid for the whole time for which the job held their nodes; its classes of time
    share that price. What the kept checkpoints take is paid for as if they had taken it all along.
    """
    usage = training if isinstance(training, TrainingUsage) else TrainingUsage.of(training)
    hours = usage.seconds / HOUR_S
    hourly, kilowatts = _rates(usage.accelerators, prices, usage.node_share, usage.spot_share)
    machines = _product(hourly, hours)
    egress = _product(usage.egress_bytes, prices.per_gb_egress, 1 / GB)
    storage_a_month = _product(usage.checkpoint_bytes, prices.per_gb_month, 1 / GB)
    kept_s = usage.seconds if usage.kept_s is None else usage.kept_s
    storage = _product(storage_a_month, kept_s / MONTH_S)
    total = None if machines is None else machines + (egress or 0.0) + (storage or 0.0)
    per_token = None if total is None or not usage.tokens else total / usage.tokens
    of_second = _product(hourly, 1 / HOUR_S)
    by_class = usage.by_class if of_second is not None else {}
    return TrainingCost(
        **usage.model_dump(),
        currency=prices.currency,
        accelerator_hours=_product(_count(usage.accelerators, usage.node_share), hours),
        energy_kwh=_product(kilowatts, hours),
        price_by_class={name: each * (of_second or 0.0) for name, each in by_class.items()},
        total=total,
        per_step=None if total is None or not usage.steps else total / usage.steps,
        per_1k_tokens=_product(per_token, 1000),
        per_epoch=_product(per_token, usage.epoch_tokens),
        egress=egress,
        storage=storage,
        storage_a_month=storage_a_month,
        unknown=tuple(_unknown(usage, prices, kilowatts)),
    )


def held_price(
    accelerators: Mapping[str, int], seconds: float, prices: PriceSettings
) -> float | None:
    """Return what it costs to hold ``accelerators`` for ``seconds``; None where one has no price.

    Energy that has a price of its own is in it.
    """
    return _product(_rates(accelerators, prices)[0], seconds / HOUR_S)


def held_energy(
    accelerators: Mapping[str, int], seconds: float, prices: PriceSettings
) -> float | None:
    """Return the kWh of ``accelerators`` in ``seconds``; None where one has no watts."""
    return _product(_rates(accelerators, prices)[1], seconds / HOUR_S)


def _product(*factors: float | None) -> float | None:
    """Return the product; None where a factor is not known."""
    known = [each for each in factors if each is not None]
    return prod(known) if len(known) == len(factors) else None


def _count(accelerators: Mapping[str, int], node_share: float | None) -> float | None:
    """Return how many there are of all kinds; None where none is recorded."""
    count = sum(accelerators.values())
    return count * (1.0 if node_share is None else node_share) or None


def _rates(
    accelerators: Mapping[str, int],
    prices: PriceSettings,
    node_share: float | None = None,
    spot_share: float | None = None,
) -> tuple[float | None, float | None]:
    """Return what all together cost an hour, with energy that has a price of its own, and kW.

    Without a ``spot_share`` all of them count as the profile's ``spot_factor`` says.
    """
    held = 1.0 if node_share is None else node_share
    spot = 1.0 if spot_share is None else spot_share
    factor = spot * prices.spot_factor + (1 - spot)
    hourly = _product(_sum(accelerators, prices.per_hour), held, factor)
    kilowatts = _product(_sum(accelerators, prices.watts), held, 1 / 1000)
    if hourly is not None:
        hourly += _product(kilowatts, prices.per_kwh) or 0.0
    return hourly, kilowatts


def _unknown(usage: TrainingUsage, prices: PriceSettings, kilowatts: float | None) -> Iterator[str]:
    missing = [each for each in usage.accelerators if price_of(each, prices.per_hour) is None]
    if not usage.accelerators:
        yield "accelerators: not recorded"
    elif missing:
        yield f"no price in [prices] per_hour for {', '.join(missing)}"
    elif prices.per_kwh is not None and kilowatts is None:
        yield "energy is not in the price: no watts for each kind"
    if not usage.by_class:
        yield "classes of time: not recorded"
    if usage.began_at_step:
        yield f"begins at step {usage.began_at_step}: what came before is not in these figures"
    if usage.restarts and usage.accelerators:
        yield "a node that was lost is counted as held: the price is at most this"


def grouped(costs: Sequence[TrainingCost], by: By) -> list[CostGroup]:
    """Return the sums of ``costs`` by model, job (of the queue, else training), team, project or
    day (UTC), dearest first."""
    names: dict[By, Callable[[TrainingCost], str]] = {
        "model": lambda each: each.model_id,
        "job": lambda each: each.queued_job_id or each.job_id,
        "team": lambda each: each.team,
        "project": lambda each: each.project,
        "day": day_of,
    }
    groups: dict[str, list[TrainingCost]] = {}
    for each in costs:
        groups.setdefault(names[by](each) or "not recorded", []).append(each)
    made = [
        CostGroup(
            name=name,
            trainings=len(members),
            accelerator_hours=_known(each.accelerator_hours for each in members),
            useful_hours=_known(_product(e.accelerator_hours, e.useful_share) for e in members),
            energy_kwh=_known(each.energy_kwh for each in members),
            queue_hours=_known(_product(each.queue_s, 1 / HOUR_S) for each in members),
            price=_known(each.total for each in members),
            egress=_known(each.egress for each in members),
            storage=_known(each.storage for each in members),
            without_price=sum(each.total is None for each in members),
            estimate=next((e.estimate for e in members if e.estimate and by == "job"), None),
        )
        for name, members in groups.items()
    ]
    return sorted(made, key=lambda each: -(each.price or 0.0))


def day_of(usage: TrainingUsage) -> str:
    """Return the day (UTC) on which its run began; "" where it is not recorded."""
    at = usage.started_at
    return "" if at is None else datetime.fromtimestamp(at, UTC).date().isoformat()


def _known(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) if known else None


def cost_row(each: TrainingCost | CostGroup) -> dict[str, Any]:
    """Return a flat row of a table: a column for each class of time and one for its price."""
    row = each.model_dump(mode="json")
    guess = row.pop("estimate", {})
    for name in ("hours", "accelerator_hours", "energy_kwh", "price"):
        row[f"estimated_{name}"] = (guess.get(name) or {}).get("value")
    if isinstance(each, TrainingCost):
        row["accelerators"] = held_text(each.accelerators, each.node_share)
        row["unknown"] = "; ".join(each.unknown)
        del row["by_class"], row["price_by_class"]
        for name in TIME_CLASSES:
            row[f"{name}_s"] = each.by_class.get(name)
            row[f"{name}_price"] = each.price_by_class.get(name)
    return row


def held_text(accelerators: Mapping[str, int], node_share: float | None = None) -> str:
    """Return the accelerators in words; of nodes that others share, their share."""
    held = 1.0 if node_share is None else node_share
    named = (f"{count * held:.6g} × {kind}" for kind, count in accelerators.items())
    return ", ".join(named) or "not recorded"


def money(value: float | None, missing: str = "not recorded") -> str:
    """Return a figure with two places, or three significant digits where it is small."""
    if value is None:
        return missing
    return f"{value:,.2f}" if value >= 1 or not value else f"{value:.3g}"


def range_text(found: Range | None, unit: str = "") -> str:
    """Return an estimated figure with its range, for people."""
    if found is None:
        return "not known"
    return f"{money(found.value)} ({money(found.low)} to {money(found.high)}){unit}"


def compared(
    guess: CostEstimate, hours: float, energy_kwh: float | None, price: float | None
) -> dict[str, str]:
    """Return what was estimated of a job at its submission beside what it took so far, by name."""
    rows = (
        ("hours", guess.hours, hours, ""),
        ("energy", guess.energy_kwh, energy_kwh, " kWh"),
        ("price", guess.price, price, f" {guess.currency}"),
    )
    return {
        name: f"{range_text(expected, unit)} estimated, {money(actual, 'not known')} so far"
        for name, expected, actual, unit in rows
        if expected is not None
    }


def estimate(
    prices: PriceSettings,
    *,
    steps: int,
    earlier: Sequence[TrainingUsage] = (),
    tokens_per_step: float | None = None,
    tokens_per_second: float | None = None,
    accelerators: Mapping[str, int] | None = None,
    capacity: str = "",
    basis: str = "as given",
) -> CostEstimate:
    """Return what ``steps`` steps would take and cost on nodes of ``capacity`` (spot, on-demand);
    ``basis`` is where a given speed is from.

    What is not given is that of ``earlier`` trainings of the same configuration, newest first. The
    lower end has their best speed and no failure, the upper end their worst speed and their largest
    share of recovery. Raises InvalidInput where neither says tokens a step, or tokens a second.
    """
    measured = [each for each in earlier if _speed(each)]
    speeds = [tokens_per_second] if tokens_per_second else [_speed(each) for each in measured]
    tokens_per_step = tokens_per_step or (measured[0].tokens_per_step if measured else None)
    if not speeds or not tokens_per_step:
        raise InvalidInput(
            "nothing to base an estimate on",
            got=f"{len(measured)} trainings with tokens a step and a second",
            wanted="an earlier training, or tokens per step and per second",
        )
    first = measured[0] if measured and not accelerators else None
    held = dict(first.accelerators if first else accelerators or {})
    node_share = first.node_share if first else None
    spot_share = {"spot": 1.0, "on-demand": 0.0}.get(capacity, first.spot_share if first else None)
    split = [each.by_class for each in measured if _in_steps(each.by_class)]
    idle = [each["idle"] for each in split] or [0.0]
    lost = [each["recovery"] / _in_steps(each) for each in split] or [0.0]
    tokens = steps * tokens_per_step

    def times(factor: float | None) -> Range | None:
        if factor is None:
            return None
        figures = {
            "value": (median(speeds), mean(lost), mean(idle)),
            "low": (max(speeds), 0.0, min(idle)),
            "high": (min(speeds), max(lost), max(idle)),
        }
        return Range(**{
            name: (tokens / speed * (1 + share) + begin) / HOUR_S * factor
            for name, (speed, share, begin) in figures.items()
        })  # fmt: skip

    hourly, kilowatts = _rates(held, prices, node_share, spot_share)
    hours = times(1)
    assert hours is not None
    return CostEstimate(
        currency=prices.currency,
        steps=steps,
        tokens=tokens,
        accelerators=held,
        tokens_per_second=Range(value=median(speeds), low=min(speeds), high=max(speeds)),
        hours=hours,
        accelerator_hours=times(_count(held, node_share)),
        energy_kwh=times(kilowatts),
        price=times(hourly),
        based_on=(
            f"speed: {tokens_per_second:g} tokens/s, {basis}; no range of it is known"
            if tokens_per_second
            else _measured_speed(measured),
            "start and end, and recovery as a share of the steps' time: "
            + (f"as in {len(split)} trainings" if split else "not counted, none recorded them"),
            *([] if hourly is not None else ["price: not known for each of the accelerators"]),
        ),
    )


def _measured_speed(measured: Sequence[TrainingUsage]) -> str:
    """Return the basis of a speed that is that of ``measured`` trainings."""
    text = f"speed: as measured in {shortened([e.run_id or e.job_id for e in measured], 3)}"
    return text + ("; one training shows no variation of it" if len(measured) == 1 else "")


def like(chosen: TrainingUsage, usages: Sequence[TrainingUsage]) -> list[TrainingUsage]:
    """Return ``chosen`` and the trainings of its configuration, but for their steps."""

    def what(each: TrainingUsage) -> tuple[object, ...]:
        held = each.accelerators, each.ranks, each.node_share
        return each.model_id, held, round(each.tokens_per_step or 0)

    return [chosen, *(e for e in usages if e is not chosen and what(e) == what(chosen))]


def _in_steps(seconds: Mapping[str, float]) -> float:
    """Return the seconds that grow with the number of steps."""
    return sum(seconds.get(name, 0.0) for name in ("useful", "data_wait", "checkpoint"))


def _speed(usage: TrainingUsage) -> float:
    """Return tokens a second of its steps with evaluations and stalls; 0: not recorded."""
    seconds = _in_steps(usage.by_class)
    return (usage.tokens or 0.0) / seconds if seconds else usage.tokens_per_second or 0.0
