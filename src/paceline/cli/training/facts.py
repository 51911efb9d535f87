"""Text for `paceline train`: the facts at its start and the summary at its end. No printing."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.data import Snapshot
    from paceline.models import ModelConfig
    from paceline.schemas.training import TrainJob, TrainResult

JOB_FILE, METRICS_FILE = "job.json", "metrics.jsonl"  # beside a job's checkpoints
REASONS = 3  # quarantine reasons in the summary


def facts(job: TrainJob, snapshot: Snapshot, config: ModelConfig | None) -> list[str]:
    """Return lines on model and data, for the user to check before training."""
    record = snapshot.record
    train, aside = snapshot.of_split("train"), snapshot.of_split("held-out")
    lines = [
        f"  data    {record.documents:,} samples, {snapshot.tokens:,} tokens: "
        f"{sum(each.tokens for each in train):,} to learn from, "
        f"{sum(each.tokens for each in aside):,} held out",
        f"  model   {_shape(job, config)}",
    ]
    if record.cut_at_bytes is not None:
        lines.append(
            f"! data are cut at {record.cut_at_bytes:,} bytes: more of them is taken with "
            "--set data.max_bytes=…"
        )
    if record.skipped:
        lines.append(
            f"! {record.skipped:,} left out, e.g. {'; '.join(record.skipped_examples[:2])}"
        )
    if record.duplicates:
        lines.append(f"  {record.duplicates:,} samples that say the same as another are left out")
    if (wanted := job.settings.ranks * job.settings.threads_per_rank) > (cores := _cores()):
        lines.append(
            f"! {job.settings.ranks} ranks of {job.settings.threads_per_rank} threads take turns "
            f"on {cores} cores: a step takes about {wanted / cores:.1f} times as long"
        )
    return lines


def _shape(job: TrainJob, config: ModelConfig | None) -> str:
    from paceline.models import count_parameters

    if config is None:
        return job.settings.code_ref
    return (
        f"{count_parameters(config):,} parameters: {config.num_hidden_layers} layers of width "
        f"{config.hidden_size}, context {config.context}, {config.vocab_size} tokens"
    )


def beside(job: TrainJob, checkpoints: Path) -> str | None:
    """Return a line on another training in this directory, where ``job`` has not begun yet."""
    if checkpoints.exists() or not checkpoints.parent.is_dir():
        return None
    found = {each.name: _saved_step(each) for each in checkpoints.parent.iterdir()}
    known = [f"{name} (step {step})" for name, step in sorted(found.items()) if step]
    if not known:
        return None
    return (
        f"! below this directory is also {', '.join(known[:3])}: its data, model or settings are "
        f"others, so {job.job_id} begins at its first step"
    )


def summary(job: TrainJob, result: TrainResult) -> list[str]:
    """Return the summary that is printed at the end of a run."""
    from paceline.training.single import checkpoints_of, record_of, shown

    record = record_of(job)
    lines = [
        f"done: {result.steps} steps on {result.ranks} ranks in {result.seconds:.1f} s, "
        f"{result.tokens_per_second:,.0f} tokens/s",
        f"  loss          {_shown(result.first_loss)} → {_shown(result.final_loss)} nats a token",
    ]
    if "held_out_loss" in result.held_out:
        lines.append(f"  held out      {held_out(result.held_out)}")
    lines += [
        f"  waiting       data {result.data_wait_share:.1%}, "
        f"checkpoints {result.checkpoint_stall_share:.1%}",
        f"  checkpoints   {len(result.checkpoints)} in {shown(checkpoints_of(job))}",
    ]
    if (record / METRICS_FILE).exists():
        lines.append(f"  each step     {record / METRICS_FILE}")
    if (record / "traces").exists():
        lines.append(f"  traces        {record / 'traces'} (for Perfetto)")
    lines.append(f"  model         {shown(result.export_url)}")
    if result.ledger is not None:
        ledger = result.ledger
        parts = {name: getattr(ledger, name) for name in type(ledger).model_fields}
        told = [
            f"{name.removesuffix('_s').replace('_', ' ')} {seconds:.1f}"
            for name, seconds in parts.items()
            if name not in ("wall_s", "goodput") and seconds >= 0.05
        ]
        lines.append(f"  seconds       {', '.join(told)} of {ledger.wall_s:.1f}")
        lines.append(f"  goodput       {ledger.goodput:.1%} from the first step to the last")
    for restart in result.restarts:
        lines.append(
            f"  restart       {restart.kind}: {restart.reason}; {restart.lost_steps} steps lost, "
            f"{restart.seconds:.1f} s"
        )
    if result.skipped_batches or result.quarantined_shards:
        lines.append(
            f"  needs review  {len(result.quarantined_shards)} shards or samples, "
            f"batches passed over: {list(result.skipped_batches)}"
        )
        lines += [f"                {each}" for each in result.passed_over[:REASONS]]
    return lines


def held_out(figures: dict[str, float] | dict[str, object]) -> str:
    """Return an evaluation's figures as text."""
    nats, bits = (number(figures.get(each)) for each in ("held_out_loss", "held_out_bits_per_byte"))
    return f"{nats:.4f} nats a token" + ("" if math.isnan(bits) else f", {bits:.3f} bits a byte")


def _saved_step(directory: Path) -> int:
    """Return the newest step with a checkpoint generation in a job's directory, or 0."""
    names = [each.name.split("-") for each in directory.glob("step-*")]
    return max((int(each[1]) for each in names if each[1].isdecimal()), default=0)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def number(value: object) -> float:
    """Return the JSON value ``value`` as a float, NaN where it is not a number."""
    return float(value) if isinstance(value, int | float) else float("nan")
