"""The HTML page of a snapshot's validation: one file, no script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from paceline.data.snapshot import Snapshot
from paceline.data.validation import ValidationReport

MOST_ROWS = 500  # of one table
COLUMNS = (
    "column",
    "kind",
    "samples",
    "length",
    "least",
    "mean",
    "greatest",
    "not finite",
    "moved",
)
STYLE = """body{font:14px sans-serif;margin:2em;max-width:75em}table{border-collapse:collapse}
td,th{padding:.2em .7em;text-align:left;vertical-align:top;border-bottom:1px solid #ddd}
td:last-child{overflow-wrap:anywhere}.failed{color:#b00020;font-weight:bold}"""
# A browser runs nothing of the page and loads nothing, whatever the data are called.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def validation_page(
    snapshot: Snapshot,
    report: ValidationReport,
    drift: Mapping[str, float],
    refused: str = "",
) -> str:
    """Return the page: checks, columns and how far each moved since the last snapshot of the
    source, and shards in quarantine; ``refused``: why the snapshot may not be trained on."""
    record, title = snapshot.record, f"Data snapshot {snapshot.digest[:12]}"
    verdict = "refused" if refused else "needs a review" if report.needs_review else "valid"
    facts = {
        "snapshot": snapshot.url,
        "source": record.source,
        "purpose, project": f"{snapshot.purpose}, {snapshot.project}",
        "samples": f"{report.documents:,} checked, {report.samples_left_out:,} left out of the "
        f"checks, {record.skipped:,} left out of the snapshot",
        "bytes": f"{report.total_bytes:,}",
        "verdict": verdict,
    }
    checks = [
        (each["name"], "passed" if each["passed"] else "failed", each["got"],
         "; ".join(each["examples"]))
        for each in report.checks
    ]  # fmt: skip
    columns: list[tuple[object, ...]] = [
        (each["column"], each["kind"], each["samples"],
         f"{each['mean_length']:.4g} ({each['shortest']} to {each['longest']})",
         each["least"], each["mean"], each["greatest"], each["not_finite"],
         f"{drift[each['column']]:.1%}" if each["column"] in drift else "")
        for each in report.columns
    ]  # fmt: skip
    gone = drift.keys() - {each["column"] for each in report.columns}
    columns += [(name, "is gone", *[""] * 6, f"{drift[name]:.1%}") for name in sorted(gone)]
    quarantined = [
        (each["shard"], each["split"], each["documents"], each["bytes"], each["reason"])
        for each in report.quarantined
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}: {verdict}</h1>"
        + (f'<p class="failed">{escape(refused)}</p>' if refused else "")
        + _table(("", ""), tuple(facts.items()))
        + "<h2>Checks</h2>"
        + _table(("check", "result", "found", "examples"), checks)
        + "<h2>Columns</h2>"
        + _table(COLUMNS, columns)
        + "<h2>Shards in quarantine</h2>"
        + (_table(("shard", "split", "samples", "bytes", "reason"), quarantined) or "<p>None.</p>")
        + "</body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:MOST_ROWS])
    more = len(rows) - MOST_ROWS
    return (
        f"<table><tr>{''.join(f'<th>{escape(each)}</th>' for each in head)}</tr>{lines}</table>"
        + (f"<p>{more:,} more are in the record beside this page.</p>" if more > 0 else "")
    )


def _cell(value: object) -> str:
    failed = " class=failed" if value in ("failed", "refused") else ""
    text = "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
    return f"<td{failed}>{escape(text)}</td>"
