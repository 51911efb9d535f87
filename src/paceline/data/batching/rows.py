"""Rows of a group of shards: the result of a batching plan, and the Plan protocol.

Positions are in a shard's framed token stream: separator, document, separator, …, document,
separator. A document of n tokens is n + 1 inputs there (its separator and its tokens) and the n + 1
targets one position later (its tokens and the separator that ends it).

With C columns, row n of a group belongs to column n mod C, so that any run of rows that begins at a
multiple of C has equally many of each. ``rows_of_batch`` puts the rows of one column side by side,
so that a rank, whose rows are adjacent, reads few columns.

Shape letters: R rows of a group, P pieces of all its rows, C columns, S runs of C rows, D
documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.data.loading.columns import group_shards, shards_for_columns
from paceline.data.loading.ordering import ShardOrder
from paceline.errors import CorruptData

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """One group's rows, in order; row r holds pieces first_R1[r] to first_R1[r+1].

    A row without pieces is empty and has weight 0.
    """

    first_R1: Ints  # noqa: N815 - arrays carry shape letters; R + 1 of them
    shard_P: Ints  # noqa: N815 - index into the split's shards
    start_P: Ints  # noqa: N815 - of the piece's inputs in the shard's framed stream
    length_P: Ints  # noqa: N815 - inputs, and as many targets
    document_P: Ints | None = None  # noqa: N815 - index within its shard; None: pieces cross documents
    position_P: Ints | None = None  # noqa: N815 - of the piece's first input in its document
    carries_R: npt.NDArray[np.bool_] | None = None  # noqa: N815
    width_R: Ints | None = None  # noqa: N815 - T of the row's batch; None: context
    masked: bool = False  # several documents a row, masked from each other
    # Where only some columns' pieces are present: the weighted tokens of each run of ``columns``
    # rows; the first run begins with row 0.
    tokens_S: Ints | None = None  # noqa: N815

    def __len__(self) -> int:
        return len(self.first_R1) - 1

    @cached_property
    def tokens_R1(self) -> Ints:  # noqa: N802
        """Return the number of weighted tokens before each row, and of all rows as the last entry.

        Where ``tokens_S`` is set, all rows of a run have the value of its first row.
        """
        if self.tokens_S is not None:
            columns = len(self) // max(1, len(self.tokens_S))
            before_S1 = np.concatenate([[0], np.cumsum(self.tokens_S)])
            return np.append(np.repeat(before_S1[:-1], columns), before_S1[-1])
        return np.concatenate([[0], np.cumsum(self.length_P)])[self.first_R1]


@dataclass(frozen=True)
class SharedPlan:
    """A shared plan: summary of a group for readers of some columns, with some bytes a batch."""

    count_C: tuple[int, ...]  # noqa: N815 - rows of each column that are not empty
    tokens_S: tuple[int, ...]  # noqa: N815 - weighted tokens of each run of one row a column


class Plan(Protocol):
    """The rows of every group of every epoch: a pure function of (seed, epoch, group)."""

    batching: str
    context: int
    global_batch: int
    seed: int
    columns: int
    needs_lengths: bool  # of documents; else the snapshot's record suffices

    @property
    def groups(self) -> int:
        """Return the number of groups in an epoch."""
        ...

    def shards(self, epoch: int, group: int, columns: range | None = None) -> Ints:
        """Return the indexes of the group's shards in fetch order, or of those that ``columns``
        read."""
        ...

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's rows; raises CorruptData where lengths cannot be read."""
        ...


def identity(plan: Plan) -> dict[str, Any]:
    """Return the settings that a saved position must share with ``plan``."""
    return {
        "batching": plan.batching,
        "context": plan.context,
        "global_batch": plan.global_batch,
        "seed": plan.seed,
        "columns": plan.columns,
    }


def rows_of_batch(wanted: range, global_batch: int, columns: int) -> Ints:
    """Return the indexes, among the next ``global_batch`` rows, of the rows ``wanted`` of a batch.

    The first ``global_batch / columns`` rows of a batch are the first column's, and so on.
    """
    rows = np.arange(wanted.start, wanted.stop)
    deep = global_batch // columns
    return (rows % deep) * columns + rows // deep


# The documents of a group, cut where they are longer than a row: shared by three of the plans.

# Indexes of shards → the lengths of each one's documents, in tokens without separators.
Lengths = Callable[[Sequence[int]], Sequence[npt.NDArray[Any]]]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of documents, at most ``context`` inputs each, ordered by shard and document."""

    shard_P: Ints  # noqa: N815 - arrays carry shape letters
    document_P: Ints  # noqa: N815
    start_P: Ints  # noqa: N815 - in the shard's framed stream
    position_P: Ints  # noqa: N815 - in the document
    length_P: Ints  # noqa: N815

    def __len__(self) -> int:
        return len(self.length_P)

    def only(self, wanted_P: npt.NDArray[np.bool_]) -> Pieces:
        """Return the pieces where ``wanted_P`` is true."""
        return Pieces(
            self.shard_P[wanted_P],
            self.document_P[wanted_P],
            self.start_P[wanted_P],
            self.position_P[wanted_P],
            self.length_P[wanted_P],
        )

    def rows(
        self,
        row_P: Ints,
        count: int,
        *,
        masked: bool = False,
        width_R: Ints | None = None,
        carries_R: npt.NDArray[np.bool_] | None = None,
        tokens_S: Ints | None = None,
    ) -> Rows:
        """Return ``count`` rows, piece p in row ``row_P[p]``; pieces of a row keep their order."""
        order = np.argsort(row_P, kind="stable")
        per_row = np.bincount(row_P, minlength=count)
        return Rows(
            first_R1=np.concatenate([[0], np.cumsum(per_row)]),
            shard_P=self.shard_P[order],
            start_P=self.start_P[order],
            length_P=self.length_P[order],
            document_P=self.document_P[order],
            position_P=self.position_P[order],
            carries_R=carries_R,
            width_R=width_R,
            masked=masked,
            tokens_S=tokens_S,
        )


def cut(shards: Sequence[int], lengths: Sequence[npt.NDArray[Any]], context: int) -> Pieces:
    """Return the documents of ``shards`` as pieces; all but the last of each fill a whole row."""
    counts = [len(each) for each in lengths]
    framed_D = np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64) + 1
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
    )


class DocumentPlan:
    """Base of the plans of whole documents: groups of shards, their pieces, and columns of pieces.

    Document lengths come from the shards' indexes and are the same on every rank; an index that
    cannot be read raises CorruptData, because ranks that plan from different lengths would train on
    different batches. ``documents`` (one count per shard) is needed by plans whose columns get
    equal numbers of documents; by default columns get equal numbers of tokens.
    """

    batching = ""
    needs_lengths = True
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
        self.context = context
        self.global_batch = global_batch
        self.seed = seed
        self.columns = columns
        self._by_number = self.shares == "documents" and documents is not None
        usual = shards_in_group or group_shards(stream_tokens, context, global_batch)
        self._order = ShardOrder(
            documents if self._by_number and documents else [each - 1 for each in stream_tokens],
            seed,
            shards_in_group or shards_for_columns(usual, columns, stream_tokens, context),
            columns,
        )
        self._lengths = lengths
        self._tokens = np.asarray(stream_tokens, dtype=np.int64) - 1  # of pieces, in each shard

    @property
    def groups(self) -> int:
        """Return the number of groups in an epoch."""
        return self._order.groups

    def shards(self, epoch: int, group: int, columns: range | None = None) -> Ints:
        """Return the indexes of the group's shards, or of those that ``columns`` read."""
        return self._order.read_by(epoch, group, columns or range(self.columns))

    def pieces(self, epoch: int, group: int) -> Pieces:
        """Return the group's pieces."""
        shards = [int(each) for each in self.shards(epoch, group)]
        return cut(shards, self._lengths(shards), self.context)

    def parts(self, pieces: Pieces) -> list[slice]:
        """Return each column's pieces: adjacent whole documents, an equal part of the group.

        A document belongs to the column in which its middle falls.
        """
        if self.columns == 1:
            return [slice(0, len(pieces))]
        heads = np.flatnonzero(pieces.position_P == 0)
        weight_D = np.ones(len(heads), dtype=np.int64)
        if not self._by_number and len(heads):
            weight_D = np.add.reduceat(pieces.length_P, heads)
        ends = np.cumsum(weight_D)
        total = int(ends[-1]) if len(ends) else 1
        column_D = np.minimum((2 * ends - weight_D) * self.columns // (2 * total), self.columns - 1)
        first = np.searchsorted(column_D, np.arange(self.columns + 1))
        edges = np.append(heads, len(pieces))[first].tolist()
        return [slice(*edges[each : each + 2]) for each in range(self.columns)]

    def pieces_of(self, epoch: int, group: int, columns: range) -> tuple[Pieces, Ints]:
        """Return the pieces of adjacent ``columns`` and the column of each.

        Reads only the lengths of these columns' shards. Raises CorruptData where the snapshot's
        record disagrees with them. Requires columns of equal numbers of tokens.
        """
        shards = [int(each) for each in self.shards(epoch, group, columns)]
        pieces = cut(shards, self._lengths(shards), self.context)
        held = np.bincount(pieces.shard_P, pieces.length_P, minlength=len(self._tokens))
        if wrong := [each for each in shards if held[each] != self._tokens[each]]:
            raise CorruptData(
                "shards are not as long as the snapshot says",
                got=[int(held[each]) for each in wrong[:5]],
                wanted=[int(self._tokens[each]) for each in wrong[:5]],
                where=f"shards {wrong[:5]}",
            )
        every = self.shards(epoch, group)
        before = np.zeros(len(self._tokens), dtype=np.int64)
        before[every] = np.cumsum(self._tokens[every]) - self._tokens[every]
        total = max(1, int(self._tokens[every].sum()))
        heads = np.flatnonzero(pieces.position_P == 0)
        weight_D = np.add.reduceat(pieces.length_P, heads) if len(heads) else heads
        shard_D = pieces.shard_P[heads]
        ends_D = np.cumsum(weight_D)
        if len(heads):  # positions in the group: shards in between may be other columns'
            first_D = np.searchsorted(
                place_D := np.cumsum(np.diff(shard_D, prepend=-1) != 0), place_D
            )
            ends_D += before[shard_D] - (ends_D - weight_D)[first_D]
        column_D = np.minimum(
            (2 * ends_D - weight_D) * self.columns // (2 * total), self.columns - 1
        )
        column_P = np.repeat(column_D, np.diff(np.append(heads, len(pieces))))
        ours = (column_P >= columns.start) & (column_P < columns.stop)
        return pieces.only(ours), column_P[ours]

    def generator(self, epoch: int, group: int) -> np.random.Generator:
        """Return the group's own random generator."""
        return self._order.generator(epoch, group + 1)
