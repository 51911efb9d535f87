"""The rows of one group, as a plan gives them, and what a stream needs of a plan.

Everything is said in terms of a shard's framed token stream: separator, document, separator, …,
document, separator. A document of n tokens is n + 1 inputs there (its separator and its tokens)
and the n + 1 targets one place later (its tokens and the separator that ends it).

With C columns a group's row number n is of column n mod C: any stretch of rows that begins at a
multiple of C has as many of each. ``rows_of_batch`` puts the rows of one column side by side, so
that a rank, whose rows are neighbours, reads few columns.

Shape letters: R rows of a group, P pieces of all its rows, C columns, S stretches of C rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """One group's rows, in the order they come; row r holds pieces first_R1[r] to first_R1[r+1].

    A row without pieces is empty: of weight 0.
    """

    first_R1: Ints  # noqa: N815 - arrays carry shape letters; R + 1 of them
    shard_P: Ints  # noqa: N815 - index into the split's shards
    start_P: Ints  # noqa: N815 - of the piece's inputs in the shard's framed stream
    length_P: Ints  # noqa: N815 - inputs, and as many targets
    document_P: Ints | None = None  # noqa: N815 - index within its shard; None: crosses documents
    position_P: Ints | None = None  # noqa: N815 - of the piece's first input in its document
    carries_R: npt.NDArray[np.bool_] | None = None  # noqa: N815
    width_R: Ints | None = None  # noqa: N815 - T of the batch that the row is in; None: context
    masked: bool = False  # several documents a row, which must not see each other
    # Where only some columns' pieces are here: the weighted tokens of each stretch of ``columns``
    # rows, of which the first begins with row 0.
    tokens_S: Ints | None = None  # noqa: N815

    def __len__(self) -> int:
        return len(self.first_R1) - 1

    @cached_property
    def tokens_R1(self) -> Ints:  # noqa: N802
        """Return the number of weighted tokens before each row, and of all rows at the end; where
        ``tokens_S`` is known, before each stretch's first row (the others' are as theirs)."""
        if self.tokens_S is not None:
            columns = len(self) // max(1, len(self.tokens_S))
            before_S1 = np.concatenate([[0], np.cumsum(self.tokens_S)])
            return np.append(np.repeat(before_S1[:-1], columns), before_S1[-1])
        return np.concatenate([[0], np.cumsum(self.length_P)])[self.first_R1]


@dataclass(frozen=True)
class Outline:
    """What a reader of some columns needs to know of all: few bytes a batch, none a document."""

    count_C: tuple[int, ...]  # noqa: N815 - rows of each column that are not empty
    tokens_S: tuple[int, ...]  # noqa: N815 - weighted tokens of each stretch of a row a column


class Plan(Protocol):
    """Rows of every group of every epoch: a pure function of (seed, epoch, group)."""

    batching: str
    context: int
    global_batch: int
    seed: int
    columns: int
    needs_lengths: bool  # of documents; else the record says enough

    @property
    def groups(self) -> int:
        """Return how many groups an epoch has."""
        ...

    def shards(self, epoch: int, group: int, columns: range | None = None) -> Ints:
        """Return the indexes of the group's shards, in the order they should be fetched; of those,
        the ones that ``columns`` read."""
        ...

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's rows; raises CorruptData where lengths cannot be read."""
        ...


def identity(plan: Plan) -> dict[str, Any]:
    """Return what a position must agree on with ``plan``."""
    return {
        "batching": plan.batching,
        "context": plan.context,
        "global_batch": plan.global_batch,
        "seed": plan.seed,
        "columns": plan.columns,
    }


def rows_of_batch(wanted: range, global_batch: int, columns: int) -> Ints:
    """Return which of the ``global_batch`` rows that come next are the rows ``wanted`` of a batch:
    the first ``global_batch / columns`` rows of a batch are the first column's, and so on."""
    rows = np.arange(wanted.start, wanted.stop)
    deep = global_batch // columns
    return (rows % deep) * columns + rows // deep
