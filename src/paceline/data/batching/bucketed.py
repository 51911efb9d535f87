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

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's rows: a multiple of the global batch."""
        pieces = self.pieces(epoch, group)
        size = self.global_batch
        batches = -(-len(pieces) // size)
        generator = self.generator(epoch, group)
        shuffled = generator.permutation(len(pieces))  # among documents of one length
        by_length = shuffled[np.argsort(-pieces.length_P[shuffled], kind="stable")]
        batch_order = generator.permutation(batches)
        rank_P = np.empty(len(pieces), dtype=np.int64)
        rank_P[by_length] = np.arange(len(pieces))
        row_P = batch_order[rank_P // size] * size + rank_P % size
        width_of = np.zeros(batches, dtype=np.int64)
        longest = pieces.length_P[by_length[::size]]
        width_of[batch_order] = np.minimum(-(-longest // WIDTH_STEP) * WIDTH_STEP, self.context)
        return pieces.rows(row_P, batches * size, width_R=np.repeat(width_of, size))
