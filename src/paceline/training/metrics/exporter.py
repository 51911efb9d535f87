"""Prometheus exporter of a rank: metrics on a loopback port, and a service-discovery file.

The system chooses the port, and nothing listens beyond this host. A Prometheus or an agent on the
node finds every rank through ``file_sd_configs`` over ``<directory>/*.json``. A rank removes its
file when it closes; the file of a killed rank is removed by the next rank that starts on its host.
Metrics of the whole gang come from rank 0 alone, so that sums over ranks are right. All metric
names are defined here (the rules in deployments/prometheus use them).
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.training.deadlines import Deadlines, slowest_step_s

if TYPE_CHECKING:
    from paceline.training.loop import StepReport

# Metrics of the whole gang; only rank 0 exports them.
_OF_GANG = {
    "loss": ("loss_nats", "Mean loss of the newest step over all ranks, in nats a token."),
    "grad_norm": ("gradient_norm", "Norm of the newest step's gradient before it was clipped."),
    "lr": ("learning_rate", "Learning rate of the newest step."),
    "tokens_per_second": ("tokens_per_second", "Tokens a second of the newest step, all ranks."),
    "reward_margin": ("reward_margin", "By how much the chosen answers' rewards are higher."),
    "reward_accuracy": ("reward_accuracy_ratio", "Share of pairs whose chosen answer's is higher."),
    "held_out_loss": ("held_out_loss_nats", "Loss on held-out data, in nats a token."),
    "held_out_bits_per_byte": ("held_out_bits_per_byte", "Bits a byte of held-out data."),
}
_OF_RANK = {
    "step_seconds": ("step_seconds", "Duration of the newest step."),
    "busy_seconds": (
        "busy_seconds", "Time of the newest step that this rank worked, not waiting for another."
    ),
    "data_wait_share": ("data_wait_ratio", "Share of the last 20 steps spent waiting for data."),
    "checkpoint_stall_share": (
        "checkpoint_stall_ratio", "Share of the last 20 steps that checkpoints held up."
    ),
    "mfu": ("mfu_ratio", "Model operations a second as a share of the measured matmul peak."),
    "matmul_peak_flops": (
        "matmul_peak_operations_per_second", "Floating point operations a second of this device."
    ),
    "utilisation": ("accelerator_utilisation_ratio", "Share of the time the accelerator works."),
    "rss_peak_bytes": ("resident_memory_peak_bytes", "Peak resident memory of the rank."),
    "cuda_peak_bytes": ("accelerator_memory_peak_bytes", "Peak memory of the rank on its GPU."),
    "cuda_reserved_bytes": ("accelerator_memory_reserved_bytes", "GPU memory that torch holds."),
    "reduce_probe_seconds": ("all_reduce_probe_seconds", "Duration of an all-reduce of 1 MiB."),
    "reduce_bytes_per_second": ("all_reduce_bytes_per_second", "Bandwidth of that all-reduce."),
    "reduced_bytes": ("gradient_bytes", "Gradients given to be reduced in the newest step."),
}  # fmt: skip
_GAUGES = _OF_GANG | _OF_RANK
_PREFIX = "paceline_training_"


@dataclass(eq=False)  # a registry keeps collectors by identity
class RankMetrics(Collector):
    """Collector of a rank's newest values; a scrape converts them into metrics."""

    labels: Mapping[str, str]
    step_deadline_s: float | None = None
    clock: Callable[[], float] = time.time
    _figures: dict[str, float] = field(default_factory=dict)
    _step: int = 0
    _steps: int = 0
    _skipped: int = 0
    _tokens: float = 0.0
    _alerts: frozenset[str] = frozenset()
    _slow: dict[int, float] = field(default_factory=dict)
    _quarantined: int = 0
    _interval_s: float | None = None
    _slowest_s: float = 0.0

    def __post_init__(self) -> None:
        # Before the first step or checkpoint, their ages count from the start.
        self._stepped_at = self._saved_at = self.clock()

    def saved(self) -> None:
        """Record that a checkpoint was committed."""
        self._saved_at = self.clock()

    def take(
        self, report: StepReport, quarantined: int = 0, interval_s: float | None = None
    ) -> None:
        """Record a step's report; values that it lacks stay as they were.

        ``interval_s``: expected time between two checkpoints; None where it is unknown yet.
        """
        self._stepped_at = self.clock()
        self._interval_s = interval_s
        self._quarantined = quarantined
        self._figures = self._figures | report.figures | report.held_out
        self._figures |= {
            "loss": report.loss, "grad_norm": report.grad_norm, "lr": report.learning_rate
        }  # fmt: skip
        self._step = report.step
        self._steps += 1
        self._slowest_s = slowest_step_s(self._slowest_s, report.figures.get("step_seconds", 0.0))
        self._skipped += not report.applied
        figures = report.figures
        self._tokens += figures.get("tokens_per_second", 0.0) * figures.get("step_seconds", 0.0)
        for change in report.alerts:
            names = {change.name}
            self._alerts = self._alerts | names if change.raised else self._alerts - names
        self._slow = {each.rank: each.factor for each in report.slow}

    def describe(self) -> list[Metric]:
        """Return nothing: a description would need values before there are any."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest step."""
        names, values = list(self.labels), list(self.labels.values())
        leads = self.labels.get("rank", "0") == "0"
        shown = self._figures
        deadline_s = Deadlines(step_s=self.step_deadline_s).of("step", self._slowest_s)
        for key, (name, text) in (_GAUGES if leads else _OF_RANK).items():
            if key in shown:
                yield _gauge(name, text, names, values, shown[key])
        for name, text, value in (
            ("step", "Steps of the job so far.", float(self._step)),
            ("last_step_timestamp_seconds", "When the newest step ended.", self._stepped_at),
            ("step_deadline_seconds", "How long a step may take.", deadline_s),
            ("quarantined_shards", "Shards or samples passed over as bad.", self._quarantined),
        ):
            yield _gauge(name, text, names, values, value)
        if leads:
            at = "When the newest checkpoint was committed, or this attempt began."
            name = "last_checkpoint_timestamp_seconds"
            yield _gauge(name, at, names, values, self._saved_at)
            if self._interval_s is not None:
                text = "Time from one checkpoint to the next, as things are."
                yield _gauge("checkpoint_interval_seconds", text, names, values, self._interval_s)
        for name, text, count in (
            ("steps", "Steps of this attempt.", self._steps),
            ("steps_skipped", "Steps whose update was not taken.", self._skipped),
            *([("tokens", "Tokens of this attempt, all ranks.", self._tokens)] if leads else []),
        ):
            counter = CounterMetricFamily(_PREFIX + name, text, labels=names)
            counter.add_metric(values, count)
            yield counter
        alert = GaugeMetricFamily(
            _PREFIX + "alert", "1 while the alert stands.", labels=[*names, "name"]
        )
        for each in sorted(self._alerts):
            alert.add_metric([*values, each], 1)
        yield alert
        slow = GaugeMetricFamily(
            _PREFIX + "straggler_factor",
            "How many times as long as the others a slow rank works.",
            labels=[*names, "slow_rank"],
        )
        for rank, factor in self._slow.items():
            slow.add_metric([*values, str(rank)], factor)
        yield slow


def _gauge(
    name: str, text: str, names: list[str], values: list[str], value: float
) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(_PREFIX + name, text, labels=names)
    gauge.add_metric(values, value)
    return gauge


class Exporter(RankMetrics):
    """Serves a rank's metrics until it is closed; ``take`` is the loop's ``on_step`` callback."""

    def __init__(
        self, labels: Mapping[str, str], targets: Path, *, step_deadline_s: float | None
    ) -> None:
        super().__init__(labels, step_deadline_s)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, self._thread = start_http_server(0, "127.0.0.1", registry)
        self.port: int = self._server.server_port
        targets.mkdir(parents=True, exist_ok=True)
        _sweep(targets)
        self._target = targets / f"{'-'.join(labels.values())}.json"
        written = self._target.with_suffix(".new")
        # Prometheus drops labels with the prefix __tmp_: they identify the file's owner.
        owner = {"__tmp_pid": str(os.getpid()), "__tmp_host": platform.node()}
        entry = {"targets": [f"127.0.0.1:{self.port}"], "labels": {**labels, **owner}}
        written.write_text(json.dumps([entry]) + "\n")
        written.replace(self._target)

    def close(self) -> None:
        """Stop serving and remove the discovery file."""
        self._target.unlink(missing_ok=True)  # the state directory may have been cleared
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sweep(targets: Path) -> None:
    """Remove the files of this host's ranks that have ended: their ports no longer answer."""
    for path in targets.glob("*.json"):
        try:
            (entry,) = json.loads(path.read_text())
            pid, host = int(entry["labels"]["__tmp_pid"]), entry["labels"]["__tmp_host"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # another rank removed it, or the file is not ours
        if host == platform.node() and not Path("/proc", str(pid)).exists():
            path.unlink(missing_ok=True)
