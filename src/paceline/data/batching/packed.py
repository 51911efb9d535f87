"""Packed: whole documents, best fit, several a row, masked from each other.

A document longer than the context is cut; its pieces' positions go on, and each piece stands alone
(a model without carried state cannot look back past its row). Best fit runs within one group, so
what stays empty is about one row a group plus what no document is short enough to fill.
"""

from __future__ import annotations

import numpy as np

from paceline.data.batching.fit import best_fit
from paceline.data.batching.pieces import DocumentPlan
from paceline.data.batching.rows import Outline, Rows
from paceline.errors import CorruptData


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

    def outline(self, rows: Rows) -> Outline:
        """Return what readers of some columns need to know of all: ``rows`` are the group's."""
        filled_RC = np.diff(rows.first_R1).reshape(-1, self.columns) > 0
        return Outline(
            tuple(filled_RC.sum(axis=0).tolist()),
            tuple(np.diff(rows.tokens_R1[:: self.columns]).tolist()),
        )

    def rows_of(self, epoch: int, group: int, columns: range, outline: Outline) -> Rows:
        """Return the group's rows, of which only those of ``columns`` have pieces: as many of
        these, and the same, as of ``rows``. Reads only these columns' lengths; raises CorruptData
        where ``outline`` is not this group's.
        """
        pieces, column_P = self.pieces_of(epoch, group, columns)
        total = int(self._tokens[self.shards(epoch, group)].sum())
        generator = self.generator(epoch, group)
        row_P = np.zeros(len(pieces), dtype=np.int64)
        most = max(outline.count_C, default=0)
        fits = len(outline.count_C) == self.columns and len(outline.tokens_S) == most
        if not fits or sum(outline.tokens_S) != total or min(outline.count_C) < 0:
            raise _other_outline(f"{len(outline.count_C)} columns, {sum(outline.tokens_S)} tokens")
        for column, count in enumerate(outline.count_C[: columns.stop]):
            mixed = generator.permutation(count)  # others' too: each takes from the generator
            if column < columns.start:
                continue
            part = column_P == column
            packed = best_fit(pieces.length_P[part], self.context)
            found = int(packed.max()) + 1 if len(packed) else 0
            if found != count:
                raise _other_outline(f"{found} rows in column {column}, not {count}")
            row_P[part] = mixed[packed] * self.columns + column
        tokens_S = np.asarray(outline.tokens_S, dtype=np.int64)
        return pieces.rows(row_P, most * self.columns, masked=True, tokens_S=tokens_S)


def _other_outline(got: str) -> CorruptData:
    return CorruptData("a group's outline is another group's", got=got)


def waste(rows: Rows, context: int) -> float:
    """Return the share of a group's places that hold no token."""
    width = len(rows) * context if rows.width_R is None else int(np.sum(rows.width_R))
    return 1.0 - float(rows.tokens_R1[-1]) / width if width else 0.0
