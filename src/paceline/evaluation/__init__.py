"""Judging a candidate: bits per byte on held-out documents, baselines, intervals, and the gate.

``python -m paceline.evaluation.run`` measures in a process of its own; ``decide`` is pure. Knows no
registry and no scheduler; heavy libraries are imported where they are used.
"""

from paceline.evaluation.gate import EXCEPTED, LINEAGE, decide
from paceline.evaluation.report import as_frame, as_markdown, plot_report

__all__ = ["EXCEPTED", "LINEAGE", "as_frame", "as_markdown", "decide", "plot_report"]
