"""What a training cost, and what the next one would cost, from the profile's price table.

Pure functions of what was recorded. A figure that was not recorded, or has no price, stays None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
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

By = Literal["model", "job", "day"]
HOUR_S = 3600.0
GB = 1e9
IN_STEPS = ("useful", "data_wait", "checkpoint")  # classes of time that grow with the steps


def price_of(kind: str, table: Mapping[str, float]) -> float | None:
    """Return the entry of ``kind``: its own, else the longest whose words it contains."""
    if kind in table:
        return table[kind]
    names = [
        name for name in table if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", kind, re.IGNORECASE)
    ]
    return table[max(names, key=len)] if names else None


def per_hour(accelerators: Mapping[str, int], table: Mapping[str, float]) -> float | None:
    """Return what all accelerators together take by ``table``; None where a kind is missing."""
    found = [(count, price_of(kind, table)) for kind, count in accelerators.items()]
    known = [count * each for count, each in found if each is not None]
    return sum(known) if found and len(known) == len(found) else None


def cost_of(training: TrainResult | TrainingUsage, prices: PriceSettings) -> TrainingCost:
    """Return what ``training`` cost.

    Accelerators are paid for the whole time for which the job held their nodes; its classes of time
    share the price. Data read from the object store, and checkpoints written, are not recorded.
    """
    usage = training if isinstance(training, TrainingUsage) else TrainingUsage.of(training)
    hours, held = usage.seconds / HOUR_S, usage.accelerators
    rate, kilowatts, hourly = _rates(held, prices)
    total = None if hourly is None else hourly * hours
    by_class = usage.by_class if total is not None and usage.seconds > 0 else {}

    def each(count: float | None) -> float | None:
        return total / count if total is not None and count else None

    def of_bytes(count: int | None, price: float | None) -> float | None:
        return None if count is None or price is None else count / GB * price

    per_token = each(usage.tokens)
    return TrainingCost(
        **usage.model_dump(),
        currency=prices.currency,
        accelerator_hours=sum(held.values()) * hours if held else None,
        energy_kwh=None if kilowatts is None else kilowatts * hours,
        price_by_class={
            name: (total or 0.0) * seconds / usage.seconds for name, seconds in by_class.items()
        },
        total=total,
        per_step=each(usage.steps),
        per_1k_tokens=None if per_token is None else per_token * 1000,
        per_epoch=(
            None
            if per_token is None or usage.epoch_tokens is None
            else per_token * usage.epoch_tokens
        ),
        egress=of_bytes(usage.egress_bytes, prices.per_gb_egress),
        storage_a_month=of_bytes(usage.checkpoint_bytes, prices.per_gb_month),
        unknown=tuple(_unknown(usage, prices, rate, kilowatts)),
    )


def _rates(
    accelerators: Mapping[str, int], prices: PriceSettings
) -> tuple[float | None, float | None, float | None]:
    """Return the machines' price an hour, their kW, and the price an hour with energy."""
    rate = per_hour(accelerators, prices.per_hour)
    watts = per_hour(accelerators, prices.watts)
    kilowatts = None if watts is None else watts / 1000
    if rate is None:
        return None, kilowatts, None
    rate *= prices.spot_factor
    return rate, kilowatts, rate + (kilowatts or 0.0) * (prices.per_kwh or 0.0)


def _unknown(
    usage: TrainingUsage, prices: PriceSettings, rate: float | None, kilowatts: float | None
) -> Iterable[str]:
    if not usage.accelerators:
        yield "accelerators: not recorded"
    elif rate is None:
        missing = [e for e in usage.accelerators if price_of(e, prices.per_hour) is None]
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
    """Return the sums of ``costs`` by model, job or day (UTC), dearest first."""
    groups: dict[str, list[TrainingCost]] = {}
    for each in costs:
        groups.setdefault(_group_of(each, by), []).append(each)
    made = [_group(name, members) for name, members in groups.items()]
    return sorted(made, key=lambda each: -(each.price or 0.0))


def _group_of(cost: TrainingCost, by: By) -> str:
    if by == "day":
        return day_of(cost)
    return (cost.model_id if by == "model" else cost.job_id) or "not recorded"


def day_of(usage: TrainingUsage) -> str:
    """Return the day (UTC) on which its run began."""
    at = usage.started_at
    return "not recorded" if at is None else datetime.fromtimestamp(at, UTC).date().isoformat()


def _group(name: str, members: Sequence[TrainingCost]) -> CostGroup:
    def total(read: Callable[[TrainingCost], float | None]) -> float | None:
        known = [value for each in members if (value := read(each)) is not None]
        return sum(known) if known else None

    split = [each for each in members if each.by_class and each.accelerator_hours]
    weights = [each.accelerator_hours or 0.0 for each in split]
    shares = [each.by_class["useful"] / each.seconds for each in split if each.seconds]
    useful = sum(w * s for w, s in zip(weights, shares, strict=False))
    return CostGroup(
        name=name,
        trainings=len(members),
        accelerator_hours=total(lambda each: each.accelerator_hours),
        useful_share=useful / sum(weights) if sum(weights) else None,
        energy_kwh=total(lambda each: each.energy_kwh),
        price=total(lambda each: each.total),
        without_price=sum(each.total is None for each in members),
    )


def cost_row(each: TrainingCost | CostGroup) -> dict[str, Any]:
    """Return a flat row of a table: a column for each class of time and one for its price."""
    row = each.model_dump(mode="json")
    if isinstance(each, TrainingCost):
        row["accelerators"] = held_text(each.accelerators)
        row["unknown"] = "; ".join(each.unknown)
        del row["by_class"], row["price_by_class"]
        for name in TIME_CLASSES:
            row[f"{name}_s"] = each.by_class.get(name)
            row[f"{name}_price"] = each.price_by_class.get(name)
    return row


def held_text(accelerators: Mapping[str, int]) -> str:
    """Return the accelerators in words."""
    named = (f"{count} × {kind}" for kind, count in accelerators.items())
    return ", ".join(named) or "not recorded"


def estimate(
    prices: PriceSettings,
    *,
    steps: int,
    earlier: Sequence[TrainingUsage] = (),
    tokens_per_step: float | None = None,
    tokens_per_second: float | None = None,
    accelerators: Mapping[str, int] | None = None,
) -> CostEstimate:
    """Return what ``steps`` steps would take and cost.

    What is not given is that of ``earlier`` trainings of the same configuration, newest first. The
    lower end has their best speed and no failure, the upper end their worst speed and their largest
    share of recovery. Raises InvalidInput where neither says tokens a step, or tokens a second.
    """
    measured = [each for each in earlier if _speed(each)]
    speeds = [tokens_per_second] if tokens_per_second else [_speed(each) for each in measured]
    if tokens_per_step is None and measured:
        tokens_per_step = measured[0].tokens_per_step
    if not speeds or not tokens_per_step:
        raise InvalidInput(
            "nothing to base an estimate on",
            got=f"{len(measured)} trainings with tokens a step and a second",
            wanted="an earlier training, or tokens per step and per second",
        )
    held = dict(accelerators or (measured[0].accelerators if measured else {}))
    split = [each for each in measured if each.by_class]
    begins = [each.by_class["idle"] for each in split] or [0.0]
    lost = [each.by_class["recovery"] / (_in_steps(each) or 1.0) for each in split] or [0.0]
    tokens = steps * tokens_per_step

    def hours(speed: float, share: float, begin: float) -> float:
        return (tokens / speed * (1 + share) + begin) / HOUR_S

    time = Range(
        value=hours(median(speeds), mean(lost), mean(begins)),
        low=hours(max(speeds), 0.0, min(begins)),
        high=hours(min(speeds), max(lost), max(begins)),
    )
    _, kilowatts, hourly = _rates(held, prices)
    return CostEstimate(
        currency=prices.currency,
        steps=steps,
        tokens=tokens,
        accelerators=held,
        tokens_per_second=Range(value=median(speeds), low=min(speeds), high=max(speeds)),
        hours=time,
        accelerator_hours=_times(time, sum(held.values()) or None),
        energy_kwh=_times(time, kilowatts),
        price=_times(time, hourly),
        based_on=tuple(_basis(measured, split, tokens_per_second, held, hourly)),
    )


def _times(hours: Range, factor: float | None) -> Range | None:
    if factor is None:
        return None
    return Range(value=hours.value * factor, low=hours.low * factor, high=hours.high * factor)


def _in_steps(usage: TrainingUsage) -> float:
    return sum(usage.by_class[name] for name in IN_STEPS)


def _speed(usage: TrainingUsage) -> float:
    """Return tokens a second of its steps with evaluations and stalls; 0: not recorded."""
    if not usage.tokens:
        return 0.0
    if usage.by_class:
        return usage.tokens / _in_steps(usage) if _in_steps(usage) else 0.0
    return usage.tokens_per_second or 0.0


def _basis(
    measured: Sequence[TrainingUsage],
    split: Sequence[TrainingUsage],
    given: float | None,
    held: Mapping[str, int],
    hourly: float | None,
) -> Iterable[str]:
    if given:
        yield f"speed: {given:g} tokens/s, as given; no range of it is known"
    else:
        names = ", ".join(each.run_id or each.job_id for each in measured[:3])
        more = f" and {len(measured) - 3} more" if len(measured) > 3 else ""
        yield f"speed: as measured in {names}{more}"
        if len(measured) == 1:
            yield "one training: the range holds no variation of its speed"
    yield (
        f"start, end and recovery: as in {len(split)} earlier trainings"
        if split
        else "start, end and recovery: not counted, no earlier training recorded them"
    )
    if not held:
        yield "accelerators: not known, so no price"
    elif hourly is None:
        yield "price: [prices] per_hour has none for each kind"
