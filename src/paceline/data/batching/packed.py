"""Packed: whole documents, best fit, several a row, masked from each other.

A document longer than the context is cut; its pieces' positions go on, and each piece stands alone
(a model without carried state cannot look back past its row). Best fit runs within one group, so
what stays empty is about one row a group plus what no document is short enough to fill.
"""

from __future__ import annotations

import numpy as np

from paceline.data.batching.fit import best_fit
from paceline.data.batching.pieces import DocumentPlan
from paceline.data.batching.rows import Rows


class PackedPlan(DocumentPlan):
    """Rows of whole documents; batches go on into the next group and epoch."""

    batching = "packed"

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's rows, mixed."""
        pieces = self.pieces(epoch, group)
        row_P = best_fit(pieces.length_P, self.context)
        count = int(row_P.max()) + 1 if len(row_P) else 0
        mixed = self.generator(epoch, group).permutation(count)
        return pieces.rows(mixed[row_P], count, masked=True)


def waste(rows: Rows, context: int) -> float:
    """Return the share of a group's places that hold no token."""
    width = len(rows) * context if rows.width_R is None else int(np.sum(rows.width_R))
    return 1.0 - float(rows.tokens_R1[-1]) / width if width else 0.0
