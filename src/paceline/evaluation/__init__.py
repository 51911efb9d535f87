"""Evaluation of candidate models: bits per byte on held-out documents, baselines, and the gate.

``python -m paceline.evaluation.run`` scores models in a separate process; ``decide`` is pure. Does
not depend on the registry or a scheduler; heavy libraries are imported where they are used.
"""

from paceline.evaluation.gate import EXCEPTED, LINEAGE, decide
from paceline.evaluation.report import as_frame, as_markdown, plot_report

__all__ = ["EXCEPTED", "LINEAGE", "as_frame", "as_markdown", "decide", "plot_report"]
