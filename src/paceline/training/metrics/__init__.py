"""Metrics of each rank: time, tokens, MFU, memory, stragglers, alerts, traces, Prometheus exporter.

The loop calls ``Numbers``; the decisions (``stragglers``, ``Alerts``) are pure.
"""

from paceline.training.metrics.alerts import AlertChange, Alerts, Straggler, stragglers
from paceline.training.metrics.device import flops_per_token, matmul_peak
from paceline.training.metrics.exporter import Exporter
from paceline.training.metrics.meter import Numbers
from paceline.training.metrics.tracing import Aside, Tracer, Uploaded

__all__ = [
    "AlertChange",
    "Alerts",
    "Aside",
    "Exporter",
    "Numbers",
    "Straggler",
    "Tracer",
    "Uploaded",
    "flops_per_token",
    "matmul_peak",
    "stragglers",
]
