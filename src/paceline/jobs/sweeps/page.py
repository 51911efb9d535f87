"""The HTML page of a sweep: one file, drawings as inline SVG, no script, nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from paceline.schemas import SweepShown, SweepTrial

WIDTH, HEIGHT, MARGIN = 960, 320, 60
COLUMNS = ("parameters", "job", "steps", "reason")
STYLE = """body{font:14px sans-serif;margin:2em;max-width:60em}table{border-collapse:collapse}
td,th{padding:.2em .7em;text-align:left;border-bottom:1px solid #ddd}.best{font-weight:bold}
svg{width:100%;height:auto}text{font:11px sans-serif}
pre{white-space:pre-wrap;overflow-wrap:anywhere}"""


def page_of(found: SweepShown) -> str:
    """Return the page: parallel coordinates, importance of the parameters, and every trial."""
    goal = "highest" if found.maximize else "lowest"
    stopped = f" No other trial starts: {escape(found.stopped)}." if found.stopped else ""
    best = f"best: trial {found.best.number}" if found.best else "no trial is complete"
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"<title>Sweep {escape(found.name)}</title><style>{STYLE}</style></head><body>"
        f"<h1>Sweep {escape(found.name)}</h1>"
        f"<p>{len(found.trials)} trials, {goal} {escape(found.metric)}; {best}.{stopped}</p>"
        f"<h2>Parallel coordinates</h2>{_coordinates(found)}"
        f"<h2>Importance of the parameters</h2>{_importance(found.importance)}"
        f"<h2>Trials</h2>{_table(found)}"
        + (
            f"<p>Train the best again:</p><pre>{escape(found.reproduce)}</pre>"
            if found.best
            else ""
        )
        + "</body></html>\n"
    )


def _axis(values: Sequence[object]) -> dict[object, float]:
    """Return where each value lies on an axis, 0 to 1; wide ranges by their logarithm."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values):
        names = sorted(set(map(str, values)))
        return {v: names.index(str(v)) / max(1, len(names) - 1) for v in values}
    scale = math.log if min(numbers) > 0 and max(numbers) / min(numbers) > 50 else float
    low, high = scale(min(numbers)), scale(max(numbers))
    return {v: (scale(v) - low) / ((high - low) or 1.0) for v in numbers}


def _coordinates(found: SweepShown) -> str:
    drawn = [each for each in found.trials if each.value is not None and each.parameters]
    if not drawn:
        return "<p>No trial has a value.</p>"
    keys = [k for k in drawn[0].parameters if all(k in each.parameters for each in drawn)]
    columns = [(key, [each.parameters[key] for each in drawn]) for key in keys]
    columns.append((found.metric, [each.value for each in drawn]))
    gap = (WIDTH - 2 * MARGIN) / max(1, len(columns) - 1)
    axes = [(name, MARGIN + n * gap, _axis(values)) for n, (name, values) in enumerate(columns)]
    span = HEIGHT - 2 * MARGIN
    parts = []
    for number, trial in sorted(enumerate(drawn), key=lambda each: each[1] == found.best):
        points = " ".join(
            f"{x:.1f},{HEIGHT - MARGIN - span * places[values[number]]:.1f}"
            for (_, x, places), (_, values) in zip(axes, columns, strict=True)
        )
        is_best = trial == found.best
        colour = "#d62728" if is_best else "#1f77b4" if trial.state == "complete" else "#bbb"
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width='
            f'"{3 if is_best else 1}"><title>trial {trial.number}</title></polyline>'
        )
    for name, x, places in axes:
        ends = {place: value for value, place in places.items()}
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{MARGIN}" y2="{HEIGHT - MARGIN}" '
                     f'stroke="#333"/>{_label(x, 20, name)}')  # fmt: skip
        parts += [
            _label(x, HEIGHT - MARGIN + 18 - place * (span + 26), _figure(value))
            for place, value in ends.items()
            if place in (0.0, 1.0) or isinstance(value, str)
        ]
    legend = "red: the best; blue: complete; grey: pruned, with its last value"
    return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
            f"<p>{legend}</p>")  # fmt: skip


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'


def _importance(shares: Mapping[str, float]) -> str:
    if not shares:
        return "<p>Not known: too few trials are complete.</p>"
    bars = [
        f'<text x="0" y="{20 * n + 14}">{escape(name)}</text><rect x="320" y="{20 * n + 2}" '
        f'height="15" width="{500 * share:.1f}" fill="#1f77b4"/>'
        f'<text x="{326 + 500 * share:.1f}" y="{20 * n + 14}">{share:.0%}</text>'
        for n, (name, share) in enumerate(shares.items())
    ]
    return f'<svg viewBox="0 0 {WIDTH} {20 * len(bars)}" role="img">{"".join(bars)}</svg>'


def _table(found: SweepShown) -> str:
    head = "".join(
        f"<th>{escape(each)}</th>" for each in ("trial", "state", found.metric, *COLUMNS)
    )
    rows = "".join(
        f"<tr{' class=best' if each == found.best else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in trial_row(each))
        + "</tr>"
        for each in found.trials
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def trial_row(trial: SweepTrial) -> tuple[str, ...]:
    """Return a trial as a row of a table: number, state, metric, and COLUMNS."""
    return (
        str(trial.number), trial.state, _figure(trial.value),
        " ".join(f"{key}={_figure(value)}" for key, value in trial.parameters.items()),
        trial.job_id, f"{trial.step}/{trial.steps}", trial.reason,
    )  # fmt: skip


def _figure(value: object) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
