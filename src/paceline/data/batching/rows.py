"""Rows of a group of shards, the result of a batching plan, and the base classes of plans.

Positions are in a shard's framed token stream: separator, document, separator, …, document,
separator. A document of n tokens is n + 1 inputs there (its separator and its tokens) and the n + 1
targets one position later (its tokens and the separator that ends it).

With C columns, row n of a group belongs to column n mod C, so that any run of rows that begins at a
multiple of C has equally many of each. ``rows_of_batch`` puts the rows of one column side by side,
so that a rank, whose rows are adjacent, reads few columns.

Shape letters: R rows of a group, P pieces of all its rows, C columns, D documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.loading import ShardOrder, group_shards, shards_for_columns

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Pieces:
    """Runs of inputs of one shard each; a piece of a whole-document plan is of one document."""

    shard_P: Ints  # noqa: N815 - arrays carry shape letters; index into the split's shards
    start_P: Ints  # noqa: N815 - of the piece's inputs in the shard's framed stream
    length_P: Ints  # noqa: N815 - inputs, and as many targets
    document_P: Ints | None = None  # noqa: N815 - index within its shard; None: pieces cross documents
    position_P: Ints | None = None  # noqa: N815 - of the piece's first input in its document
    counted_P: Ints | None = None  # noqa: N815 - targets that a loss mask counts; None: all

    def at(self, indexes: Ints) -> dict[str, Any]:
        """Return the fields of the pieces ``indexes``."""
        found = {each.name: getattr(self, each.name) for each in fields(Pieces)}
        return {name: None if each is None else each[indexes] for name, each in found.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows(Pieces):
    """One group's rows, in order; row r holds pieces first_R1[r] to first_R1[r+1].

    A row without pieces is empty and has weight 0.
    """

    first_R1: Ints  # noqa: N815 - R + 1 of them
    carries_R: npt.NDArray[np.bool_] | None = None  # noqa: N815
    width_R: Ints | None = None  # noqa: N815 - T of the row's batch; None: context
    masked: bool = False  # several documents a row, masked from each other

    def __len__(self) -> int:
        return len(self.first_R1) - 1

    @cached_property
    def tokens_R1(self) -> Ints:  # noqa: N802
        """Return the number of weighted tokens before each row, and of all rows as the last
        entry."""
        weight_P = self.length_P if self.counted_P is None else self.counted_P
        return np.concatenate([[0], np.cumsum(weight_P)])[self.first_R1]


class Plan:
    """The rows of every group of every epoch: a pure function of (seed, epoch, group)."""

    batching = ""
    needs_lengths = True  # of documents; else the snapshot's record suffices

    def __init__(self, context: int, global_batch: int, order: ShardOrder) -> None:
        self.context = context
        self.global_batch = global_batch
        self.seed = order.seed
        self.columns = order.columns
        self.groups = order.groups  # in an epoch
        self._order = order

    def shards(self, epoch: int, group: int, columns: range | None = None) -> Ints:
        """Return the indexes of the group's shards in fetch order, or of those that ``columns``
        read."""
        return self._order.shards_for(epoch, group, columns or range(self.columns))

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's rows; raises CorruptData where lengths cannot be read."""
        raise NotImplementedError

    def generator(self, epoch: int, group: int) -> np.random.Generator:
        """Return the group's own random generator."""
        return self._order.generator(epoch, group + 1)


def identity(plan: Plan) -> dict[str, Any]:
    """Return the settings that a saved position must share with ``plan``."""
    names = ("batching", "context", "global_batch", "seed", "columns")
    return {name: getattr(plan, name) for name in names}


def rows_of_batch(wanted: range, global_batch: int, columns: int) -> Ints:
    """Return the indexes, among the next ``global_batch`` rows, of the rows ``wanted`` of a batch.

    The first ``global_batch / columns`` rows of a batch are the first column's, and so on.
    """
    rows = np.arange(wanted.start, wanted.stop)
    deep = global_batch // columns
    return (rows % deep) * columns + rows // deep


# The documents of a group, cut where they are longer than a row: shared by three of the plans.

# Indexes of shards → the lengths of each one's documents, in tokens without separators, and with a
# loss mask how many tokens of each count: (1 or 2, documents).
Lengths = Callable[[Sequence[int]], Sequence[npt.NDArray[Any]]]


def rows_of(
    pieces: Pieces,
    row_P: Ints,
    count: int,
    *,
    masked: bool = False,
    width_R: Ints | None = None,
    carries_R: npt.NDArray[np.bool_] | None = None,
) -> Rows:
    """Return ``count`` rows, piece p in row ``row_P[p]``; pieces of a row keep their order."""
    return Rows(
        **pieces.at(np.argsort(row_P, kind="stable")),
        first_R1=np.concatenate([[0], np.cumsum(np.bincount(row_P, minlength=count))]),
        carries_R=carries_R,
        width_R=width_R,
        masked=masked,
    )


def cut_documents(
    shards: Sequence[int], lengths: Sequence[npt.NDArray[Any]], context: int
) -> Pieces:
    """Return the documents of ``shards`` in pieces of at most ``context`` inputs, in order."""
    index = [np.atleast_2d(each) for each in lengths]
    counts = [each.shape[1] for each in index]
    framed_D = np.concatenate([np.zeros(0, np.int64), *(each[0] for each in index)]) + 1
    counted_P = None
    if index and len(index[0]) > 1:
        counted_P = np.concatenate([each[1] for each in index]).astype(np.int64)
        assert framed_D.max(initial=0) <= context, "``require_whole`` refuses longer ones"
    shard_D = np.repeat(np.asarray(shards, dtype=np.int64), counts)
    within = [np.arange(count) for count in counts]
    document_D = np.concatenate([np.zeros(0, np.int64), *within])
    ends = np.cumsum(framed_D)
    first_of_shard = np.repeat(np.cumsum([0, *counts])[:-1], counts)
    before_D = ends - framed_D
    start_D = before_D - before_D[first_of_shard]  # of the document in its own shard's stream
    parts_D = -(-framed_D // context)
    total = int(parts_D.sum())
    part_P = np.arange(total) - np.repeat(np.cumsum(parts_D) - parts_D, parts_D)
    position_P = part_P * context
    return Pieces(
        shard_P=np.repeat(shard_D, parts_D),
        document_P=np.repeat(document_D, parts_D),
        start_P=np.repeat(start_D, parts_D) + position_P,
        position_P=position_P,
        length_P=np.minimum(np.repeat(framed_D, parts_D) - position_P, context),
        counted_P=counted_P,
    )


class DocumentPlan(Plan):
    """Base of the plans of whole documents: groups of shards, their pieces, and columns of pieces.

    Document lengths come from the shards' indexes and are the same on every rank; an index that
    cannot be read raises CorruptData, because ranks that plan from different lengths would train on
    different batches. ``documents`` (one count per shard) is needed by plans whose columns get
    equal numbers of documents; by default columns get equal numbers of tokens.
    """

    shares = "tokens"  # what is divided equally among columns: "tokens" or "documents"

    def __init__(
        self,
        stream_tokens: Sequence[int],
        lengths: Lengths,
        context: int,
        global_batch: int,
        seed: int,
        shards_in_group: int | None = None,
        *,
        columns: int = 1,
        documents: Sequence[int] | None = None,
    ) -> None:
        self._by_number = self.shares == "documents" and documents is not None
        sizes = [each - 1 for each in stream_tokens]
        if self._by_number and documents:
            sizes = list(documents)
        usual = group_shards(stream_tokens, context, global_batch)
        in_group = shards_in_group or shards_for_columns(usual, columns, stream_tokens, context)
        super().__init__(context, global_batch, ShardOrder(sizes, seed, in_group, columns))
        self._lengths = lengths

    def pieces(self, epoch: int, group: int) -> Pieces:
        shards = [int(each) for each in self.shards(epoch, group)]
        return cut_documents(shards, self._lengths(shards), self.context)

    def parts(self, pieces: Pieces) -> list[slice]:
        """Return each column's pieces: adjacent whole documents, an equal part of the group.

        A document belongs to the column in which its middle falls.
        """
        if self.columns == 1:
            return [slice(0, len(pieces.length_P))]
        heads = np.flatnonzero(pieces.position_P == 0)
        weight_D = np.ones(len(heads), dtype=np.int64)
        if not self._by_number and len(heads):
            weight_D = np.add.reduceat(pieces.length_P, heads)
        ends = np.cumsum(weight_D)
        total = int(ends[-1]) if len(ends) else 1
        column_D = np.minimum((2 * ends - weight_D) * self.columns // (2 * total), self.columns - 1)
        first = np.searchsorted(column_D, np.arange(self.columns + 1))
        edges = np.append(heads, len(pieces.length_P))[first].tolist()
        return [slice(*edges[each : each + 2]) for each in range(self.columns)]
