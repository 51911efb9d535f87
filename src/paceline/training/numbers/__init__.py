"""Figures of each rank: time, tokens, MFU, memory, stragglers, alerts, traces, and their exporter.

``Numbers`` is what the loop calls; everything that decides (``stragglers``, ``Alerts``) is pure.
"""

from paceline.training.numbers.alerts import AlertChange, Alerts
from paceline.training.numbers.exporter import Exporter
from paceline.training.numbers.flops import flops_per_token, matmul_peak
from paceline.training.numbers.meter import Numbers
from paceline.training.numbers.stragglers import Straggler, stragglers
from paceline.training.numbers.tracing import Aside, Tracer, Uploaded

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
