"""Metrics of each rank: time, tokens, MFU, memory, stragglers, alerts, traces, Prometheus exporter.

The loop calls ``StepMetrics``; the decisions (``stragglers``, ``Alerts``) are pure.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
