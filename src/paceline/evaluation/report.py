"""Evaluation reports for people: a table, a page of markdown, a plot. Computes no figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.schemas import (
    EvaluationReport,
    Evidence,
    Interval,
    MetricScore,
    ModelScore,
    Serving,
)

if TYPE_CHECKING:
    import pandas as pd

_COLOURS = {"transformer": "#2f6fb2", "ngram": "#b07d2b", "compressor": "#8a8f98"}


def as_frame(report: EvaluationReport) -> pd.DataFrame:
    """Return a DataFrame with one row a model, best first; columns like ``bits_per_byte.low``."""
    import pandas as pd

    rows = [score.model_dump(mode="json") for score in _ranked(report)]
    return pd.json_normalize(rows).set_index("name") if rows else pd.DataFrame()


def _ranked(report: EvaluationReport) -> list[ModelScore]:
    return sorted(report.scores, key=lambda each: each.bits_per_byte.value)


def as_markdown(report: EvaluationReport) -> str:
    """Return the report as one page of markdown."""
    lines = [
        f"Held out: {scored_text(report)} of snapshot "
        f"`{report.snapshot_digest[:12]}`. Lower is better; intervals are bootstrapped over "
        "documents, differences are paired.",
        "",
        "| model | bits per byte | interval | latency | dtype | size |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for score in _ranked(report):
        bits = score.bits_per_byte
        lines.append(
            f"| {_cell(score.name)} | {bits.value:.3f} | {bits.low:.3f} to {bits.high:.3f} | "
            f"{'–' if score.latency_ms is None else f'{score.latency_ms:.1f} ms'} | "
            f"{score.dtype or '–'} | "
            f"{'–' if score.model_bytes is None else f'{score.model_bytes / 1e6:.1f} MB'} |"
        )
    lines += [
        f"| {_cell(name)} | – | {_cell(why)} | | | |" for name, why in report.failures.items()
    ]
    lines += [
        f"\nTraining snapshot `{each.snapshot_digest[:12]}`: {each.found} of "
        f"{each.held_out_documents} held-out documents are among its {each.training_documents}; "
        f"of {'–' if each.overlapping is None else each.overlapping} at least half the text is."
        for each in report.overlaps or ()
    ]
    lines += [
        f"\nOf the {rows.rows} rows of task {rows.task} {rows.found} are there."
        for each in report.overlaps or ()
        for rows in each.tasks
    ]
    lines += _of_tokens(report)
    lines += _serving(report)
    lines += _gains(report)
    lines += _tasks(report)
    lines += _metrics(report)
    lines += _slices(report)
    lines += _metric_slices(report)
    return "\n".join(lines) + "\n"


def scored_text(report: EvaluationReport) -> str:
    """Return how much text was scored, in words."""
    if report.of_assistants:
        return f"what assistants say in {report.documents} conversations, {report.bytes} bytes"
    return f"{report.documents} documents, {report.bytes} bytes"


def comparison_rows(report: EvaluationReport) -> list[str]:
    """Return two tables of markdown: each model's figure, and the candidate's differences."""
    rows = [
        f"| {_cell(each.name)} | {each.bits_per_byte.value:.4f} | {each.bits_per_byte.low:.4f} to "
        f"{each.bits_per_byte.high:.4f} | {each.tokens or '–'} |"
        for each in _ranked(report)
    ]
    head = ["| model | bits per byte | interval | tokens |", "|---|---:|---:|---:|"]
    return [*head, *rows, *_of_tokens(report), *_gains(report), *_tasks(report), *_metrics(report)]


def judgement_lines(evidence: Evidence) -> list[str]:
    """Return lines for a terminal: each model's bits per byte with its interval and what the
    candidate differs from it, each check of the gate, and the slices where the candidate is worse
    than the champion, or without one than the base."""
    report = evidence.evaluation
    candidate = report.score("candidate")
    gains = candidate.differences if candidate else {}
    rows = [("model", "bits per byte", "interval", "candidate − model", "", "")]
    for score in _ranked(report):
        bits, gain = score.bits_per_byte, gains.get(score.name)
        found = ("", "", "")
        if gain is not None:
            found = (f"{gain.value:+.4f}", f"{gain.low:+.4f} to {gain.high:+.4f}", _verdict(gain))
        rows.append((score.name, f"{bits.value:.4f}", f"{bits.low:.4f} to {bits.high:.4f}", *found))
    checks = evidence.gate.checks
    lines = [f"judged on {scored_text(report)} of snapshot {report.snapshot_digest[:12]}"]
    lines += _aligned(rows)
    lines += [f"{name}: no score, {why}" for name, why in report.failures.items()]
    for task in report.tasks:
        figures = ", ".join(f"{name} {each.value:.4f}" for name, each in task.scores.items())
        lines.append(f"task {task.task}/{task.metric}, higher is better: {figures}")
    for each in report.metrics:
        figures = ", ".join(f"{name} {its.value:.4f}" for name, its in each.scores.items())
        lines.append(f"metric {each.metric}, {_direction(each)}: {figures}")
    word = "passed" if evidence.gate.passed else "refused"
    lines += ["", f"gate: {word}, {sum(each.passed for each in checks)} of {len(checks)} checks"]
    marks = {True: "ok", False: "FAILED"}
    lines += _aligned(
        [(f"  {marks[c.passed]}", c.name, _cut(c.got), f"wanted {_cut(c.wanted)}") for c in checks]
    )
    other = "champion" if report.score("champion") else "base"
    if candidate is None or report.score(other) is None:
        return [*lines, "", f"slices: not compared, {other} or candidate has no score"]
    worse = [
        (f"  {row['slice']}: {row['name']}", f"{_figure(row, other):.4f}", "→", f"{ours:.4f}")
        for row in report.slices
        if (ours := _figure(row, "candidate")) > _figure(row, other)
    ]
    return [*lines, "", f"slices worse than {other}: {len(worse)}", *_aligned(worse)]


def plot_report(report: EvaluationReport, path: Path) -> Path:
    """Draw bits per byte with intervals, and by document size, into ``path`` (PNG); return it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranked = _ranked(report)[::-1]
    by_size = [row for row in report.slices if row["slice"] == "size"]
    figure = Figure(figsize=(12, 1.6 + 0.45 * max(len(ranked), 5)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for place, score in enumerate(ranked):
        bits, colour = score.bits_per_byte, _COLOURS[score.kind]
        left.plot([bits.low, bits.high], [place, place], color=colour, linewidth=2.5)
        left.plot([bits.value], [place], "o", color=colour)
        left.annotate(
            f"{bits.value:.3f}", (bits.value, place), xytext=(0, 6), textcoords="offset points",
            ha="center", fontsize=8,
        )  # fmt: skip
    left.set_yticks(range(len(ranked)), [each.name for each in ranked])
    left.set_ylim(-0.5, len(ranked) - 0.2)
    left.set_xlabel("bits per byte (lower is better)")
    left.set_title(f"{report.documents} held-out documents, {report.bytes:,} bytes", fontsize=10)
    left.grid(axis="x", alpha=0.3)
    for score in (each for each in report.scores if by_size):
        figures = [_figure(row, score.name) for row in by_size]
        style = "-o" if score.kind == "transformer" else "--"
        right.plot(range(len(figures)), figures, style, label=score.name, markersize=4)
    right.set_xticks(range(len(by_size)), [_short(str(row["name"])) for row in by_size], fontsize=8)
    right.set_xlabel("document size in bytes, quartiles")
    right.set_ylabel("bits per byte")
    right.grid(alpha=0.3)
    if by_size:
        right.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=110)
    return path


def _gains(report: EvaluationReport) -> list[str]:
    rows = [
        f"| {_cell(score.name)} − {_cell(other)} | {gain.value:+.4f} | "
        f"{gain.low:+.4f} to {gain.high:+.4f} | {_verdict(gain)} |"
        for score in report.scores
        for other, gain in score.differences.items()
        if score.name == "candidate"
    ]
    head = ["", "| difference in bits per byte | value | interval | |", "|---|---:|---:|---|"]
    return head + rows if rows else []


def _of_tokens(report: EvaluationReport) -> list[str]:
    rows = [
        f"| {_cell(each.name)} | {each.perplexity:.3f} | {each.token_accuracy:.2%} | "
        f"{each.calibration_error:.4f} | {each.tokens} |"
        for each in _ranked(report)
        if each.perplexity is not None
    ]
    head = [
        "",
        "| by the model's own tokens | perplexity | accuracy | calibration error | tokens |",
    ]
    return [*head, "|---|---:|---:|---:|---:|", *rows] if rows else []


def _serving(report: EvaluationReport) -> list[str]:
    rows = [
        f"| {_cell(score.name)} | {each.batch} × {each.context} | {each.prefill_ms:.1f} ms | "
        f"{each.decode_ms_per_token:.2f} ms | "
        f"{'–' if (peak := each.peak_memory_bytes) is None else f'{peak / 1e6:.0f} MB'} | "
        f"{_throughput(each)} | {_cell(_server(each))} |"
        for score in report.scores
        if (each := score.serving) is not None
    ]
    head = [
        "",
        "| served in float32 | rows × tokens | prefill | a token | peak memory | batch | machine |",
    ]
    return [*head, "|---|---|---:|---:|---:|---|---|", *rows] if rows else []


def _throughput(serving: Serving) -> str:
    if (rate := serving.tokens_per_second) is None:
        return "–"
    rows, pass_ms = serving.throughput_rows, serving.throughput_ms
    return f"{rows} × {serving.context}: {pass_ms:.1f} ms, {rate:,.0f} tokens a second"


def _server(serving: Serving) -> str:
    if serving.ranks > 1:
        alone = serving.model_copy(update={"ranks": 1})
        return f"{serving.ranks} ranks with a part of the weights each, of {_server(alone)}"
    if serving.gpu:
        return f"{serving.machine}: {serving.gpu}"
    threads = f"{serving.threads} thread{'' if serving.threads == 1 else 's'}"
    return f"{serving.machine}: {serving.cpu}, {threads}"


def _tasks(report: EvaluationReport) -> list[str]:
    rows = [
        f"| {_cell(each.task)}/{_cell(each.metric)} | {_cell(name)} | {figure.value:.4f} | "
        f"{figure.low:.4f} to {figure.high:.4f} | {each.documents} |"
        for each in report.tasks
        for name, figure in each.scores.items()
    ]
    task = "task, by the chat template" if report.tasks_as_chat else "task"
    head = ["", f"| {task} | model | figure | interval | documents |", "|---|---|---:|---:|---:|"]
    return head + rows if rows else []


def _metrics(report: EvaluationReport) -> list[str]:
    rows = [
        f"| {each.metric}, {_direction(each)} | {_cell(name)} | {_show(its)} | "
        f"{f'{_show(gain)}, {_verdict(gain, each.higher_is_better)}' if gain else '–'} |"
        for each in report.metrics
        for name, its in each.scores.items()
        for gain in (each.differences.get(name),)
    ]
    head = ["", "| metric | model | mean of the documents | candidate − model |"]
    return [*head, "|---|---|---|---|", *rows] if rows else []


def _direction(metric: MetricScore) -> str:
    return f"{'higher' if metric.higher_is_better else 'lower'} is better"


def _show(figure: Interval) -> str:
    return f"{figure.value:.4f} ({figure.low:.4f} to {figure.high:.4f})"


def _slices(report: EvaluationReport) -> list[str]:
    if not report.slices:
        return []
    names = [each.name for each in report.scores]
    other = next((each for each in ("champion", "base") if each in names), "")
    shown = [f"candidate − {other}"] if other else []
    lines = ["", f"| slice | documents | {' | '.join(map(_cell, [*names, *shown]))} |"]
    lines.append("|---|---:|" + "---:|" * len(names + shown))
    for row in report.slices:
        figures = " | ".join(f"{_figure(row, name):.3f}" for name in names)
        lines.append(
            f"| {_cell(str(row['slice']))}: {_cell(str(row['name']))} | {row['documents']} | "
            f"{figures} |{f' {_slice_gain(row, other)} |' if other else ''}"
        )
    return lines


def _metric_slices(report: EvaluationReport) -> list[str]:
    rows = [
        f"| {each.metric}, {_direction(each)} | {_cell(row['slice'])}: {_cell(row['name'])} | "
        f"{row['documents']} | {_cell(name)} | {_show(Interval.model_validate(figure))} | "
        f"{_slice_gain(row, name)} |"
        for each in report.metrics
        for row in map(dict[str, Any], each.slices)
        for name, figure in row["scores"].items()
    ]
    head = ["", "| metric | slice | documents | model | mean | candidate − model |"]
    return [*head, "|---|---|---:|---|---|---|", *rows] if rows else []


def _slice_gain(row: dict[str, object], other: str) -> str:
    gains = row.get("difference_to")
    if not isinstance(gains, dict) or other not in gains:
        return "–"
    gain = Interval.model_validate(gains[other])
    return f"{gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"


def _figure(row: dict[str, object], name: str) -> float:
    figures = row["bits_per_byte"]
    return float(figures.get(name, float("nan"))) if isinstance(figures, dict) else float("nan")


def _verdict(gain: Interval, higher_is_better: bool = False) -> str:
    if gain.low <= 0 <= gain.high:
        return "no difference shown"
    return "better" if (gain.low > 0) == higher_is_better else "worse"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [min(60, max(map(len, column))) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _cut(text: str) -> str:
    """Return ``text`` with its digests cut to 12 digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", text)


def _short(name: str) -> str:
    return name.removesuffix(" bytes").replace(" to ", "\nto ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
