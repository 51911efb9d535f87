"""Metrics of each rank: time, tokens, MFU, memory, stragglers, alerts, traces, Prometheus exporter.

The loop calls ``StepMetrics``; the decisions (``stragglers``, ``Alerts``) are pure.
"""

from paceline.training.metrics.alerts import AlertChange, Alerts, Straggler, stragglers
from paceline.training.metrics.device import flops_per_token, matmul_peak
from paceline.training.metrics.exporter import Exporter
from paceline.training.metrics.meter import StepMetrics
from paceline.training.metrics.tracing import BackgroundUpload, Tracer, TraceUploader

__all__ = [
    "AlertChange",
    "Alerts",
    "BackgroundUpload",
    "Exporter",
    "StepMetrics",
    "Straggler",
    "TraceUploader",
    "Tracer",
    "flops_per_token",
    "matmul_peak",
    "stragglers",
]
