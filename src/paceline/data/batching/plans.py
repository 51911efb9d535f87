"""Four batching plans: packed, bucketed, carried (stateful) and windows.

Packed: whole documents, best-fit bin packing, several a row, masked from each other. A document
longer than the context is cut; the positions of its pieces continue, but each piece is attended to
alone (a model without carried state cannot look back past its row). Bin packing runs within one
group, so padding is about one row a group plus what no document is short enough to fill.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from paceline.data.batching.rows import DocumentPlan, Ints, Plan, Rows, rows_of
from paceline.data.loading import ShardOrder, fewest_shards, shards_for_columns
from paceline.data.snapshot import require_windows
from paceline.errors import InvalidInput

# Bucketed: documents of similar length in one batch, one a row, padded to the batch's longest.
#
# A group's documents are sorted by length and cut into batches, and the order of batches is
# shuffled. The shortest documents form a last batch with empty rows of weight 0: batches do not
# cross groups, because lengths would then not be similar.

# Widths are multiples of this: matrix units prefer it, sequence parallelism needs it, and compiled
# code sees fewer shapes.
WIDTH_STEP = 8


class BucketedPlan(DocumentPlan):
    """Batches of documents of similar length; T differs between batches and is the same on all
    ranks."""

    batching = "bucketed"
    shares = "documents"

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's rows: a multiple of the global batch.

        Each column sorts its own documents. Their lengths come from the same distribution, so that
        the n-th batch of each column is about as long.
        """
        pieces = self.pieces(epoch, group)
        deep = self.global_batch // self.columns  # rows of a batch in one column
        generator = self.generator(epoch, group)
        parts = self.parts(pieces)
        batches = max(-(-(each.stop - each.start) // deep) for each in parts)
        rank_P = np.empty(len(pieces.length_P), dtype=np.int64)
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
        return rows_of(pieces, row_P, batches * self.global_batch, width_R=width_R)


# Carried (stateful): long documents are cut; each row continues the same row of the batch before.
#
# Row r of every global batch is lane r: one document after another, each cut every ``context``
# tokens, each starting at a row's start with fresh state. Documents are assigned longest first to
# the lane with the least load, so that the lanes of a group end together; lanes that end early have
# empty rows of weight 0. Lanes depend on the global batch and not on the number of ranks, and a
# data rank has the same rows in every batch, so that state never moves. With columns, each column
# has its own lanes and its own documents.


class StatefulPlan(DocumentPlan):
    """Lanes of long documents; state is carried within a document and reset at the next one."""

    batching = "carried"

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's rows: a multiple of the global batch."""
        pieces = self.pieces(epoch, group)
        assert pieces.position_P is not None, "whole documents"
        columns = self.columns
        lanes = self.global_batch // columns  # per column
        generator = self.generator(epoch, group)
        row_P = np.zeros(len(pieces.length_P), dtype=np.int64)
        most = 0
        for column, part in enumerate(self.parts(pieces)):
            position_P = pieces.position_P[part]
            if not len(position_P):
                continue
            heads = np.flatnonzero(position_P == 0)  # one per document
            parts_D = np.diff(np.append(heads, len(position_P)))
            step_D, lane_D, steps = assign_lanes(parts_D, lanes, generator)
            step_P = np.repeat(step_D - heads, parts_D) + np.arange(len(position_P))
            lane_P = np.repeat(lane_D, parts_D)
            row_P[part] = (step_P * lanes + lane_P) * columns + column
            most = max(most, steps)
        count = most * self.global_batch
        carries_R = np.zeros(count, dtype=np.bool_)
        carries_R[row_P] = pieces.position_P > 0
        return rows_of(pieces, row_P, count, carries_R=carries_R)


def assign_lanes(
    parts_D: Ints, lanes: int, generator: np.random.Generator
) -> tuple[Ints, Ints, int]:
    """Return each document's first step and lane, and the number of steps of the longest lane."""
    documents = len(parts_D)
    mixed = generator.permutation(documents)
    by_length = mixed[np.argsort(-parts_D[mixed], kind="stable")]
    tie = generator.permutation(lanes).tolist()  # order among empty lanes
    heap = [(0, order, lane) for lane, order in enumerate(tie)]
    heapq.heapify(heap)
    lane_D = np.zeros(documents, dtype=np.int64)
    parts = parts_D.tolist()
    for document in by_length.tolist():
        load, order, lane = heap[0]
        lane_D[document] = lane
        heapq.heapreplace(heap, (load + parts[document], order, lane))
    steps = max(load for load, _, _ in heap)
    # Within a lane, documents are in random order, not longest first.
    order_D = mixed[np.argsort(lane_D[mixed], kind="stable")]
    ends = np.cumsum(parts_D[order_D])
    begins = ends - parts_D[order_D]
    lanes_in_order = lane_D[order_D]
    first = np.searchsorted(lanes_in_order, lanes_in_order, side="left")
    step_D = np.empty(documents, dtype=np.int64)
    step_D[order_D] = begins - begins[first]
    return step_D, lane_D, steps


# Windows: each shard's framed stream is cut every ``context`` tokens; windows are shuffled within a
# group.
#
# A window is ``context + 1`` tokens; windows overlap by one, so that each token is predicted once.
# The last ``< context + 1`` tokens of a shard form no window. Needs only the lengths of the
# streams, which are in the snapshot's record.

EMPTY = -1


class WindowPlan(Plan):
    """Windows of streams of ``stream_tokens``; batches continue into the next group and epoch."""

    batching = "windows"
    needs_lengths = False

    def __init__(
        self,
        stream_tokens: Sequence[int],
        context: int,
        global_batch: int,
        seed: int,
        shards_in_group: int | None = None,
        *,
        columns: int = 1,
    ) -> None:
        if context < 1:
            raise InvalidInput("bad stream settings", got=f"context {context}", wanted="≥ 1")
        self.windows = np.array([max(0, (size - 1) // context) for size in stream_tokens])
        self.samples = int(self.windows.sum())  # of one epoch
        require_windows(stream_tokens, context)
        usual = fewest_shards(stream_tokens)
        in_group = shards_in_group or shards_for_columns(usual, columns, stream_tokens, context)
        order = ShardOrder(self.windows.tolist(), seed, in_group, columns)
        super().__init__(context, global_batch, order)

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's windows, shuffled: an equal part for each column, padded with an empty
        row."""
        shards = self.shards(epoch, group)
        counts = self.windows[shards]
        first = np.cumsum(counts) - counts
        total = int(counts.sum())
        window_P = np.arange(total) - np.repeat(first, counts)
        packed = (np.repeat(shards, counts) << 32) + window_P
        generator = self.generator(epoch, group)
        columns = self.columns
        deep = -(-total // columns)
        laid = np.full((deep, columns), EMPTY)
        for column in range(columns):
            part = packed[total * column // columns : total * (column + 1) // columns]
            laid[: len(part), column] = generator.permutation(part)
        in_order = laid.reshape(-1)
        filled = in_order != EMPTY
        packed = in_order[filled]
        return Rows(
            first_R1=np.concatenate([[0], np.cumsum(filled)]),
            shard_P=packed >> 32,
            start_P=(packed & 0xFFFFFFFF) * self.context,
            length_P=np.full(len(packed), self.context),
        )


# Best fit decreasing: which pieces share a row, so that padding is minimal.
#
# D. S. Johnson, "Near-optimal bin packing algorithms" (1973): longest first, each into the fullest
# row that still has space. Rows with equal space are interchangeable, and so are pieces of equal
# length, so that whole runs are placed at once: the work grows with the number of different
# lengths, not with the number of pieces (1 M pieces of up to 2,048 tokens).


def best_fit(length_P: Ints, capacity: int) -> Ints:
    """Return the row of each piece; rows are numbered from 0 in the order they were opened.

    Lengths are 1 to ``capacity``. The pieces of a row never add up to more than ``capacity``.
    """
    order = np.argsort(-length_P, kind="stable")
    sizes = length_P[order]
    edges = np.flatnonzero(np.diff(sizes)) + 1
    runs = np.split(order, edges)
    row_P = np.empty(len(length_P), dtype=np.int64)
    # free space → stacks of rows with that much left; ``rooms`` are its keys, sorted
    open_rows: dict[int, list[Ints]] = {}
    rooms: list[int] = []
    opened = 0

    def leave(room: int, rows: Ints) -> None:
        if room == 0 or not len(rows):
            return
        if room not in open_rows:
            open_rows[room] = []
            insort(rooms, room)
        open_rows[room].append(rows)

    for run in runs:
        if not len(run):
            continue
        length = int(length_P[run[0]])
        placed = 0
        while placed < len(run):
            at = bisect_left(rooms, length)
            left = len(run) - placed
            if at < len(rooms):
                room = rooms[at]
                rows = open_rows[room].pop()
                if not open_rows[room]:
                    del open_rows[room], rooms[at]
            else:
                room = capacity
                rows = np.arange(opened, opened - (-left // (capacity // length)))
                opened += len(rows)
            # A row that received one piece is still the fullest that fits, so it is filled as far
            # as possible before the next row is considered.
            each = room // length
            used = min(len(rows), -(-left // each))
            count = min(left, used * each)
            row_P[run[placed : placed + count]] = np.repeat(rows[:used], each)[:count]
            placed += count
            last = count - (used - 1) * each  # pieces in the last row used
            leave(room - each * length, rows[: used - 1])
            leave(room - last * length, rows[used - 1 : used])
            leave(room, rows[used:])
    return row_P


class PackedPlan(DocumentPlan):
    """Rows of whole documents; batches continue into the next group and epoch."""

    batching = "packed"

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's rows, shuffled.

        Each column packs its own documents; a column with fewer rows than another has empty ones at
        the end.
        """
        pieces = self.pieces(epoch, group)
        generator = self.generator(epoch, group)
        row_P = np.zeros(len(pieces.length_P), dtype=np.int64)
        most = 0
        for column, part in enumerate(self.parts(pieces)):
            packed = best_fit(pieces.length_P[part], self.context)
            count = int(packed.max()) + 1 if len(packed) else 0
            mixed = generator.permutation(count)
            row_P[part] = mixed[packed] * self.columns + column
            most = max(most, count)
        return rows_of(pieces, row_P, most * self.columns, masked=True)
