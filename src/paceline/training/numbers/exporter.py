"""A rank's figures for Prometheus: a page on a loopback port, and a file that says where it is.

The port is the system's choice, and nothing listens beyond this host. A Prometheus or an agent on
the node finds every rank through ``file_sd_configs`` over ``<directory>/*.json``; the file goes
away with the rank. Every name stands here and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from paceline.training.loop import StepReport

_GAUGES = {
    "loss": ("loss_nats", "Mean loss of the newest step, over all ranks, in nats a token."),
    "grad_norm": ("gradient_norm", "Norm of the gradient before it is clipped."),
    "lr": ("learning_rate", "Learning rate of the newest step."),
    "step_seconds": ("step_seconds", "Seconds of the newest step."),
    "busy_seconds": ("busy_seconds", "Seconds this rank worked before it waited for another."),
    "tokens_per_second": ("tokens_per_second", "Tokens a second of the whole gang."),
    "data_wait_share": ("data_wait_ratio", "Share of recent time spent waiting for data."),
    "checkpoint_stall_share": (
        "checkpoint_stall_ratio",
        "Share of recent time that checkpoints stopped training.",
    ),
    "mfu": ("mfu_ratio", "Model operations a second as a share of the measured matmul peak."),
    "matmul_peak_flops": ("matmul_peak_flops", "Operations a second that this device reaches."),
    "utilisation": ("accelerator_utilisation_ratio", "Share of the time the accelerator works."),
    "rss_peak_bytes": ("rss_peak_bytes", "Peak resident memory of the rank."),
    "cuda_peak_bytes": ("cuda_peak_bytes", "Peak memory of the rank on its GPU."),
    "cuda_reserved_bytes": ("cuda_reserved_bytes", "Memory that torch holds on the GPU."),
    "reduce_probe_seconds": ("all_reduce_probe_seconds", "Seconds of an all-reduce of 1 MiB."),
    "reduce_bytes_per_second": ("all_reduce_bytes_per_second", "Bandwidth of that all-reduce."),
    "reduced_bytes": ("gradient_bytes", "Bytes of gradients given to be reduced in a step."),
    "held_out_loss": ("held_out_loss_nats", "Loss on held-out data, in nats a token."),
    "held_out_bits_per_byte": ("held_out_bits_per_byte", "Bits a byte on held-out data."),
}
_PREFIX = "paceline_training_"


@dataclass(eq=False)  # a registry keeps collectors by identity
class RankMetrics(Collector):
    """The newest figures of a rank, computed into metrics when they are asked for."""

    labels: Mapping[str, str]
    _figures: dict[str, float] = field(default_factory=dict)
    _step: int = 0
    _steps: int = 0
    _skipped: int = 0
    _tokens: float = 0.0
    _alerts: frozenset[str] = frozenset()
    _slow: dict[int, float] = field(default_factory=dict)

    def take(self, report: StepReport) -> None:
        """Take a step's report; figures that are not in it stay as they were."""
        self._figures = self._figures | report.figures | report.held_out
        self._figures |= {
            "loss": report.loss, "grad_norm": report.grad_norm, "lr": report.learning_rate
        }  # fmt: skip
        self._step = report.step
        self._steps += 1
        self._skipped += not report.taken
        self._tokens += report.tokens_per_second * report.seconds
        for change in report.alerts:
            names = {change.name}
            self._alerts = self._alerts | names if change.raised else self._alerts - names
        self._slow = {each.rank: each.factor for each in report.slow}

    def describe(self) -> list[Metric]:
        """Return nothing: describing would need figures before there are any."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest step."""
        names, values = list(self.labels), list(self.labels.values())
        shown = self._figures
        for key, (name, text) in _GAUGES.items():
            if key in shown:
                gauge = GaugeMetricFamily(_PREFIX + name, text, labels=names)
                gauge.add_metric(values, shown[key])
                yield gauge
        step = GaugeMetricFamily(_PREFIX + "step", "Steps of the job so far.", labels=names)
        step.add_metric(values, self._step)
        yield step
        for name, text, count in (
            ("steps", "Steps of this attempt.", self._steps),
            ("steps_skipped", "Steps whose update was not taken.", self._skipped),
            ("tokens", "Tokens of the whole gang in this attempt.", self._tokens),
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


class Exporter:
    """Serves a rank's metrics until it is closed; ``take`` is the loop's ``on_step``."""

    def __init__(self, labels: Mapping[str, str], targets: Path | None = None) -> None:
        self._metrics = RankMetrics(labels)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._metrics)
        self._server, self._thread = start_http_server(0, "127.0.0.1", registry)
        self.port: int = self._server.server_port
        self._target: Path | None = None
        if targets is not None:
            targets.mkdir(parents=True, exist_ok=True)
            self._target = targets / f"{'-'.join(labels.values())}.json"
            written = self._target.with_suffix(".new")
            entry = {"targets": [f"127.0.0.1:{self.port}"], "labels": dict(labels)}
            written.write_text(json.dumps([entry]) + "\n")
            written.replace(self._target)

    def take(self, report: StepReport) -> None:
        """Show ``report``'s figures from now on."""
        self._metrics.take(report)

    def close(self) -> None:
        """Stop serving and take the file away."""
        if self._target is not None:
            with contextlib.suppress(FileNotFoundError):  # the state directory was cleared
                self._target.unlink()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
