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
        """Return the group's rows, mixed; each column packs its own documents, and one with fewer
        rows than another has empty ones at the end."""
        pieces = self.pieces(epoch, group)
        generator = self.generator(epoch, group)
        row_P = np.zeros(len(pieces), dtype=np.int64)
        most = 0
        for column, part in enumerate(self.parts(pieces)):
            packed = best_fit(pieces.length_P[part], self.context)
            count = int(packed.max()) + 1 if len(packed) else 0
            mixed = generator.permutation(count)
            row_P[part] = mixed[packed] * self.columns + column
            most = max(most, count)
        return pieces.rows(row_P, most * self.columns, masked=True)


def waste(rows: Rows, context: int) -> float:
    """Return the share of a group's places that hold no token."""
    width = len(rows) * context if rows.width_R is None else int(np.sum(rows.width_R))
    return 1.0 - float(rows.tokens_R1[-1]) / width if width else 0.0
