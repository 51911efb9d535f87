"""A metric of one's own: how much of what a model writes repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.schemas import MetricSample

LENGTH = 4  # characters of a run


def repeated(samples: Sequence[MetricSample]) -> list[float]:
    """Return of each prediction the share of its runs of characters that were there before;
    ``code_ref`` of a metric names this function."""
    return [share_of_repeated_runs(each.prediction) for each in samples]


def share_of_repeated_runs(text: str) -> float:
    """Return the share; of a text without runs 0."""
    runs = [text[at : at + LENGTH] for at in range(len(text) - LENGTH + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
