"""From the runs of a race to a table and a plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

ORDER = (
    *(
        "auto",
        "auto-killed",
        "auto-slowed",
        "auto-racks",
        "auto-mtls",
        "chain",
        "tree",
        "tree-of-chains",
    ),
    *(
        "mesh",
        "direct",
        "bare-chain",
        "bare-chain-tls",
        "libtorrent",
        "aria2",
        "aria2-s3",
        "boto3-s3",
    ),
)
TICKS = (1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
CPU_BOUND = 0.9  # of all cores busy: then the link was not the bound


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each number of hosts and row: median and worst of its runs."""
    lines = []
    found = {(run["hosts"], run["row"]): None for run in runs}
    for hosts, row in sorted(found, key=lambda each: (each[0], _place(each[1]))):
        mine = [run for run in runs if (run["hosts"], run["row"]) == (hosts, row)]
        good = [run for run in mine if "error" not in run]
        line: dict[str, Any] = {"hosts": hosts, "row": row, "runs": len(good)}
        line["failed"] = len(mine) - len(good)
        if good:
            ratios = [run["ratio"] for run in good]
            line |= {
                "ratio_median": round(statistics.median(ratios), 4),
                "ratio_worst": max(ratios),
                "goal": good[0]["goal"],
                "origin_ratio": round(max(run["origin_bytes"] / run["size"] for run in good), 3),
                "cross_rack": round(max(run["cross_rack_bytes"] / run["size"] for run in good), 2),
                "cpu_s_per_gb": round(
                    statistics.median(
                        run["usage"]["nodes_cpu_s"] / (run["size"] / 1e9 * hosts) for run in good
                    ),
                    2,
                ),
                "cpu_busy": max(run["usage"]["cpu_busy"] for run in good),
                "peak_mb": max(run["usage"]["nodes_peak_mb"] for run in good),
                "load": max(run["usage"]["load_before"] for run in good),
            }
            # Of the same repetition: the machine was as busy for both.
            chains = {run["repeat"]: run for run in runs if _is_yardstick(run, hosts)}
            of_chain = [
                run["usage"]["nodes_cpu_s"] / chains[run["repeat"]]["usage"]["nodes_cpu_s"]
                for run in good
                if run["repeat"] in chains
            ]
            if of_chain:
                line["cpu_of_chain"] = round(statistics.median(of_chain), 2)
                line["cpu_of_chain_worst"] = round(max(of_chain), 2)
            errors = [run["seconds"] / run["predicted_s"] for run in good if "predicted_s" in run]
            if errors:
                line["of_prediction"] = round(statistics.median(errors), 4)
        lines.append(line)
    return lines


def _is_yardstick(run: dict[str, Any], hosts: int) -> bool:
    return run["row"] == "bare-chain" and run["hosts"] == hosts and "error" not in run


def _place(row: str) -> tuple[int, str]:
    """Return where a row stands in the table; a sweep's rows carry their settings after a blank."""
    name = row.split(" ", maxsplit=1)[0]
    return (ORDER.index(name) if name in ORDER else len(ORDER), row)


def table(runs: list[dict[str, Any]]) -> str:
    """Return the summary as aligned text."""
    heads = ("hosts", "row", "runs", "median", "worst", "goal", "of plan", "origin", "x-rack")
    heads = (*heads, "CPU-s/GB", "CPU of bare chain", "worst", "busy", "MB", "load")
    keys = ("hosts", "row", "runs", "ratio_median", "ratio_worst", "goal", "of_prediction")
    keys = (*keys, "origin_ratio", "cross_rack", "cpu_s_per_gb", "cpu_of_chain")
    keys = (*keys, "cpu_of_chain_worst", "cpu_busy", "peak_mb", "load")
    rows = [heads]
    for line in summary(runs):
        cells = ["" if line.get(key) is None else f"{line[key]}" for key in keys]
        if line["failed"]:
            cells[2] += f" ({line['failed']} failed)"
        if line.get("cpu_busy", 0) > CPU_BOUND:
            cells[12] += "!"
        rows.append(tuple(cells))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw median and worst of every row by number of hosts."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    lines = [line for line in summary(result["runs"]) if line["runs"]]
    counts = sorted({line["hosts"] for line in lines})
    figure, axes = pyplot.subplots(
        1, len(counts), figsize=(1 + 5 * len(counts), 5), squeeze=False, layout="constrained"
    )
    for axis, hosts in zip(axes[0], counts, strict=True):
        mine = [line for line in lines if line["hosts"] == hosts]
        places = range(len(mine))
        ours = ["#2a6f97" if line["goal"] else "#89c2d9" for line in mine]
        colours = [
            "#b0b0b0" if line["row"].startswith(("lib", "aria2", "boto3")) else colour
            for line, colour in zip(mine, ours, strict=True)
        ]
        medians = [line["ratio_median"] for line in mine]
        above = [line["ratio_worst"] - line["ratio_median"] for line in mine]
        axis.barh(places, medians, color=colours, xerr=[[0.0] * len(mine), above], capsize=2)
        for place, line in zip(places, mine, strict=True):
            clear = max(line["ratio_worst"], line["goal"] or 0.0) * 1.02
            axis.text(clear, place, f"{line['ratio_median']:.3f}", va="center")
            if line["goal"]:
                axis.plot([line["goal"]] * 2, [place - 0.4, place + 0.4], color="#c1121f")
        axis.set_yticks(list(places), [line["row"] for line in mine])
        axis.set_xscale("log")
        right = max(line["ratio_worst"] for line in lines) * 1.5
        axis.set_xlim(0.9, right)
        axis.set_xticks([tick for tick in TICKS if tick <= right], minor=False)
        axis.set_xticks([], minor=True)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.invert_yaxis()
        one = next(run for run in result["runs"] if run["hosts"] == hosts)
        longest = max(run["bound_s"] for run in result["runs"] if run["hosts"] == hosts)
        axis.set_title(f"{hosts} hosts, {one['rate_mbit']:g} Mbit/s, S/B = {longest:g} s")
        axis.set_xlabel("seconds / bound (median, whisker: worst; red: goal)")
    figure.suptitle("One model from S3 to every host, verified by SHA-256")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
