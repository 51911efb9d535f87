"""Carried: long documents cut; each row goes on where the same row stopped a batch before.

Row r of every global batch is lane r: one document after another, each cut every ``context``
tokens, each beginning at a row's start with fresh state. Documents are dealt to lanes longest
first, to the lane with least so far, so that lanes of a group end together; lanes that end early
have empty rows of weight 0. Lanes depend on the global batch and not on the number of ranks, and a
data rank's rows are the same in every batch: state stays where it is. With columns, each column
has its own lanes and its own documents.
"""

from __future__ import annotations

import heapq

import numpy as np

from paceline.data.batching.pieces import DocumentPlan
from paceline.data.batching.rows import Ints, Rows


class CarriedPlan(DocumentPlan):
    """Lanes of long documents; state is carried within a document and begins anew with the next."""

    batching = "carried"

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's rows: a multiple of the global batch."""
        pieces = self.pieces(epoch, group)
        columns = self.columns
        lanes = self.global_batch // columns  # of each column
        generator = self.generator(epoch, group)
        row_P = np.zeros(len(pieces), dtype=np.int64)
        most = 0
        for column, part in enumerate(self.parts(pieces)):
            position_P = pieces.position_P[part]
            if not len(position_P):
                continue
            heads = np.flatnonzero(position_P == 0)  # one a document
            parts_D = np.diff(np.append(heads, len(position_P)))
            step_D, lane_D, steps = deal(parts_D, lanes, generator)
            step_P = np.repeat(step_D - heads, parts_D) + np.arange(len(position_P))
            lane_P = np.repeat(lane_D, parts_D)
            row_P[part] = (step_P * lanes + lane_P) * columns + column
            most = max(most, steps)
        count = most * self.global_batch
        carries_R = np.zeros(count, dtype=np.bool_)
        carries_R[row_P] = pieces.position_P > 0
        return pieces.rows(row_P, count, carries_R=carries_R)


def deal(parts_D: Ints, lanes: int, generator: np.random.Generator) -> tuple[Ints, Ints, int]:
    """Return each document's first step and lane, and how many steps the longest lane has."""
    documents = len(parts_D)
    mixed = generator.permutation(documents)
    by_length = mixed[np.argsort(-parts_D[mixed], kind="stable")]
    tie = generator.permutation(lanes).tolist()  # which of several empty lanes is first
    heap = [(0, order, lane) for lane, order in enumerate(tie)]
    heapq.heapify(heap)
    lane_D = np.zeros(documents, dtype=np.int64)
    parts = parts_D.tolist()
    for document in by_length.tolist():
        load, order, lane = heap[0]
        lane_D[document] = lane
        heapq.heapreplace(heap, (load + parts[document], order, lane))
    steps = max(load for load, _, _ in heap)
    # Within a lane documents come in a random order, not longest first.
    order_D = mixed[np.argsort(lane_D[mixed], kind="stable")]
    ends = np.cumsum(parts_D[order_D])
    begins = ends - parts_D[order_D]
    lanes_in_order = lane_D[order_D]
    first = np.searchsorted(lanes_in_order, lanes_in_order, side="left")
    step_D = np.empty(documents, dtype=np.int64)
    step_D[order_D] = begins - begins[first]
    return step_D, lane_D, steps
