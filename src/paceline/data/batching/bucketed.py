"""Bucketed: documents of like length in one batch, one a row, padded to the batch's longest.

A group's documents are sorted by length and cut into batches, whose order is then mixed. What is
left over, its shortest, is a batch with empty rows of weight 0: batches do not cross groups here,
for then lengths would not be alike.
"""

from __future__ import annotations

import numpy as np

from paceline.data.batching.pieces import DocumentPlan
from paceline.data.batching.rows import Rows

# Widths are multiples of this: matrix units like it, sequence parallelism needs it, and compiled
# code sees fewer shapes.
WIDTH_STEP = 8


class BucketedPlan(DocumentPlan):
    """Batches of documents of like length; T differs from batch to batch, the same on all ranks."""

    batching = "bucketed"
    shares = "documents"

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's rows: a multiple of the global batch.

        Each column sorts its own documents: their lengths are drawn from the same shards' mixture,
        so that the n-th batch of each is about as long.
        """
        pieces = self.pieces(epoch, group)
        deep = self.global_batch // self.columns  # rows of a batch in one column
        generator = self.generator(epoch, group)
        parts = self.parts(pieces)
        batches = max(-(-(each.stop - each.start) // deep) for each in parts)
        rank_P = np.empty(len(pieces), dtype=np.int64)
        longest = np.zeros(batches, dtype=np.int64)
        for part in parts:
            length_P = pieces.length_P[part]
            shuffled = generator.permutation(len(length_P))  # among documents of one length
            by_length = shuffled[np.argsort(-length_P[shuffled], kind="stable")]
            rank_P[part.start + by_length] = np.arange(len(length_P))
            heads = length_P[by_length[::deep]]
            longest[: len(heads)] = np.maximum(longest[: len(heads)], heads)
        batch_order = generator.permutation(batches)
        column_P = np.repeat(np.arange(self.columns), [each.stop - each.start for each in parts])
        row_P = batch_order[rank_P // deep] * self.global_batch
        row_P += rank_P % deep * self.columns + column_P
        width_of = np.zeros(batches, dtype=np.int64)
        width_of[batch_order] = np.minimum(-(-longest // WIDTH_STEP) * WIDTH_STEP, self.context)
        width_R = np.repeat(width_of, self.global_batch)
        return pieces.rows(row_P, batches * self.global_batch, width_R=width_R)
