"""Bootstrap confidence intervals over documents (Efron 1979; paired as in Koehn 2004).

A figure is Σ bits / Σ bytes. Documents are drawn with replacement; the same draws serve every
model, so that a difference between two models is paired document by document. Percentile intervals.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.wire.training import Interval

Reals = NDArray[np.float64]

_ROWS = 128  # draws held in memory at once


class Resampler:
    """One fixed set of draws over documents of ``sizes`` bytes."""

    def __init__(self, sizes: Reals, *, samples: int, confidence: float, seed: int) -> None:
        assert len(sizes) and (sizes > 0).all(), "held-out documents are never empty"
        self._sizes = np.asarray(sizes, dtype=np.float64)
        self._samples, self._seed = samples, seed
        tail = (1 - confidence) / 2
        self._quantiles = (tail, 1 - tail)

    def ratio(self, bits: Reals) -> Interval:
        """Return Σ ``bits`` / Σ bytes with its interval; ``bits`` may be a paired difference."""
        estimates = self.draw(np.asarray(bits, dtype=np.float64)[None, :])[0]
        low, high = np.quantile(estimates, self._quantiles)
        value = float(bits.sum() / self._sizes.sum())
        # Percentiles may miss the estimate itself where documents are few; an interval holds it.
        return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))

    def draw(self, bits_MD: Reals) -> Reals:
        """Return each of M figures under each draw, (M, samples); all share the draws."""
        random = np.random.default_rng(self._seed)
        count = len(self._sizes)
        even = np.full(count, 1 / count)
        estimates = []
        for start in range(0, self._samples, _ROWS):
            rows = min(_ROWS, self._samples - start)
            weights_SD = random.multinomial(count, even, size=rows).astype(np.float64)
            estimates.append(bits_MD @ weights_SD.T / (weights_SD @ self._sizes))
        return np.concatenate(estimates, axis=1)
