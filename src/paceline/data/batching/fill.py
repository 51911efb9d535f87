"""Copy tokens and features into the rows of a plan: one rank's arrays of a batch.

``layout`` computes what follows from positions alone, for all pieces at once; here each piece of a
document costs one copy of its tokens out of the memory-mapped shard.

Shape letters: B rows, T tokens of a row, D documents of a row, P pieces of documents, N token
positions of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.data.batching.open_shards import OpenShard
from paceline.data.batching.planner import Layout, PlannedBatches, lay_out
from paceline.data.batching.rows import Ints
from paceline.data.loading import Batch
from paceline.data.snapshot import (
    LOSS_MASK,
    MASK_COLUMN,
    REJECTED_COLUMN,
    Column,
    Vocabulary,
    require_token_features,
)
from paceline.errors import InvalidInput

Array = npt.NDArray[Any]
Get = Callable[[int], OpenShard | None]  # index of a shard → the shard, None if in quarantine


def token_dtype(vocab_size: int) -> npt.DTypeLike:
    """Return the smallest integer type for the tokens of a vocabulary of this size."""
    if vocab_size <= 2**8:
        return np.uint8
    return np.uint16 if vocab_size <= 2**16 else np.int32


class RowFiller:
    """Fills rows with the tokens and features of one snapshot; ``name``: of a shard by index."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        columns: Sequence[Column],
        name: Callable[[int], str],
        token_features: Collection[str] = (),
        begin: int | None = None,
    ) -> None:
        """``begin``: the first input of each document, by default the separator."""
        require_token_features(token_features, columns)
        self.token_features = frozenset(token_features)
        self.separator = vocabulary.separator
        self.begin = vocabulary.separator if begin is None else begin
        self.dtype = token_dtype(vocabulary.vocab_size)
        self.is_masked = MASK_COLUMN in columns
        self.is_paired = REJECTED_COLUMN in columns
        self.columns = [each for each in columns if each != MASK_COLUMN]
        self.name = name

    def fill(self, planned: PlannedBatches, rows: range, step: int, get: Get) -> list[Batch]:
        """Return the batches from ``step`` on, this rank's ``rows`` of each.

        Their arrays are views into larger arrays that do not overlap.
        """
        count = len(rows)
        layout = lay_out(planned, count)
        filling = _Filling(self, layout, get)
        inputs_N, targets_N = filling.tokens()
        documents_N = layout.slots() if planned.taken[0][0].masked else None
        positions_N = None if layout.position_P is None else layout.positions()
        carries_B = _carries(planned, len(layout.width_B))
        found = []
        for number, width in enumerate(planned.width_K):
            mine = range(number * count, (number + 1) * count)
            part = slice(*layout.begin_B1[[mine.start, mine.stop]].tolist())

            def cut(array: Array | None, part: slice = part, width: int = width) -> Any:
                return None if array is None else array[part].reshape(count, width)

            features = filling.features(mine, width) if self.columns else {}
            bad = {name for row, name in filling.bad if row in mine}
            found.append(
                Batch(
                    step=step + number,
                    inputs_BT=cut(inputs_N),
                    targets_BT=cut(targets_N),
                    weights_BT=cut(filling.weights_N),
                    rows=rows,
                    global_tokens=planned.tokens_K[number],
                    global_pairs=float(planned.pieces_K[number] if self.is_paired else 0),
                    documents_BT=cut(documents_N),
                    positions_BT=cut(positions_N),
                    carries_B=None if carries_B is None else carries_B[mine.start : mine.stop],
                    features=features,
                    skipped=tuple(sorted(bad)),
                )
            )
        return found


class _Parts(NamedTuple):
    """Pieces of documents of one shard: what a layout's pieces of it consist of."""

    row_P: Ints  # noqa: N815
    at_P: Ints  # noqa: N815 - first position
    length_P: Ints  # noqa: N815
    document_P: Ints  # noqa: N815
    position_P: Ints  # noqa: N815 - in the document


class _Filling:
    """One call of ``RowFiller.fill``; ``bad``: (row, name of an unreadable shard or sample)."""

    def __init__(self, filler: RowFiller, layout: Layout, get: Get) -> None:
        self._filler, self._layout, self._get = filler, layout, get
        self.weights_N = layout.weights()
        self.bad: list[tuple[int, str]] = []

    def tokens(self) -> tuple[Array, Array]:
        """Return inputs and targets.

        Targets are a piece's tokens, then the separator at the document's end. Inputs are the
        targets shifted by one, except for a piece's first input: the token that begins a document,
        or the token before the piece. With a loss mask inputs are a document's tokens, and targets
        those one later: rows are what transformers sees.
        """
        layout, separator = self._layout, self._filler.separator
        found: list[tuple[str, OpenShard, _Parts]] = []
        for index, these in layout.by_shard:
            shard, name = self._get(index), self._filler.name(index)
            if shard is not None:
                found.append((name, shard, self._parts(shard, these)))
                continue
            for each in these.tolist():
                at, length = int(layout.at_P[each]), int(layout.length_P[each])
                self._pass_over(int(layout.row_P[each]), at, length, name)
        for _, shard, parts in found:  # transforms start before the first result is needed
            shard.expect(parts.document_P)
        if self._filler.is_masked:
            self._weigh(found)
        targets = np.full(int(layout.begin_B1[-1]), separator, dtype=self._filler.dtype)
        before: list[tuple[Ints, Array]] = []  # positions of inputs, and their tokens
        for name, shard, parts in found:
            before += self._copy(targets, name, shard, parts)
        inputs = np.empty_like(targets)
        if self._filler.is_masked:
            inputs[:-1], inputs[-1:] = targets[1:], separator
            return targets, inputs
        inputs[1:] = targets[:-1]
        inputs[layout.begin_B1[:-1]] = self._filler.begin  # also in empty rows
        if found:
            inputs[np.concatenate([parts.at_P for _, _, parts in found])] = self._filler.begin
        for places, tokens in before:
            inputs[places] = tokens
        return inputs, targets

    def _weigh(self, found: Sequence[tuple[str, OpenShard, _Parts]]) -> None:
        """Set the weights to the documents' loss masks: at each input that of the next token."""
        self.weights_N[:] = 0.0
        for name, shard, parts in found:
            for row, at, length, document, _ in zip(*(x.tolist() for x in parts), strict=True):
                if (arrays := shard.features(document)) is None:
                    self._pass_over(row, at, length, f"{name}#{document}")
                else:
                    mask = arrays[LOSS_MASK][1:length]
                    self.weights_N[at : at + len(mask)] = mask

    def _parts(self, shard: OpenShard, these: Ints) -> _Parts:
        """Return the parts of documents that the pieces ``these`` of a shard consist of."""
        layout = self._layout
        row_P, at_P, length_P = layout.row_P[these], layout.at_P[these], layout.length_P[these]
        if layout.document_P is not None and layout.position_P is not None:
            return _Parts(row_P, at_P, length_P, layout.document_P[these], layout.position_P[these])
        start_P = layout.start_P[these]
        of, document_P = shard.overlaps(start_P, length_P)
        offset_P = shard.offsets_D1[document_P]
        begin_P = np.maximum(offset_P, start_P[of])
        end_P = np.minimum(shard.offsets_D1[document_P + 1], (start_P + length_P)[of])
        at_P = (at_P - start_P)[of] + begin_P
        return _Parts(row_P[of], at_P, end_P - begin_P, document_P, begin_P - offset_P)

    def _copy(
        self, targets: Array, name: str, shard: OpenShard, parts: _Parts
    ) -> list[tuple[Ints, Array]]:
        """Copy the tokens of ``parts``; return (positions, tokens) of the inputs before parts."""
        if shard.flat is not None:
            first, count = shard.first_D[parts.document_P], shard.count_D[parts.document_P]
            # negative: a sample with features only
            size = np.clip(count - parts.position_P, 0, parts.length_P)
            source = first + parts.position_P
            edges = (parts.at_P, parts.at_P + size, source, source + size)
            for low, high, begin, end in zip(*(each.tolist() for each in edges), strict=True):
                targets[low:high] = shard.flat[begin:end]
            going_on = np.flatnonzero((parts.position_P > 0) & (count > 0))
            if not len(going_on):
                return []
            return [(parts.at_P[going_on], shard.flat[source[going_on] - 1])]
        before: list[tuple[Ints, Array]] = []
        for row, at, length, document, position in zip(*(x.tolist() for x in parts), strict=True):
            tokens = shard.tokens(document)
            if tokens is None:
                self._pass_over(row, at, length, f"{name}#{document}")
                continue
            cut = tokens[position : position + length]
            targets[at : at + len(cut)] = cut
            if position and len(tokens):
                before.append((np.array([at]), tokens[position - 1 : position]))
        return before

    def features(self, rows: range, width: int) -> dict[str, Array]:
        """Return the features of the pieces in ``rows``: (B, T, …) per token, else (B, D, …)."""
        layout = self._layout
        assert layout.document_P is not None
        assert layout.position_P is not None
        taken: list[_Gathered] = []
        slots = 1
        low, high = np.searchsorted(layout.row_P, [rows.start, rows.stop]).tolist()
        for piece in range(low, high):
            index, document = int(layout.shard_P[piece]), int(layout.document_P[piece])
            row, length = int(layout.row_P[piece]), int(layout.length_P[piece])
            slot, name = int(layout.slot_P[piece]), f"{self._filler.name(index)}#{document}"
            slots = max(slots, slot + 1)
            if (shard := self._get(index)) is None:
                continue
            if (arrays := shard.features(document)) is None:
                self._pass_over(row, int(layout.at_P[piece]), length, name)
                continue
            column, position = int(layout.column_P[piece]), int(layout.position_P[piece])
            place = _Gathered(name, row - rows.start, slot, column, position, length, arrays)
            taken.append(place)
        return {
            each.name: _per_token(taken, each, (len(rows), width))
            if each.name in self._filler.token_features
            else _per_document(taken, each, (len(rows), slots))
            for each in self._filler.columns
        }

    def _pass_over(self, row: int, at: int, length: int, name: str) -> None:
        """Set the weight of an unreadable piece to 0 and record its name."""
        self.bad.append((row, name))
        self.weights_N[at : at + length] = 0.0


class _Gathered(NamedTuple):
    """The features of one piece, and its place among the rows and in its document."""

    name: str
    row: int
    slot: int  # index among the row's documents
    column: int
    position: int  # of its first input, in its document
    length: int
    arrays: dict[str, Array]


def _per_token(taken: Sequence[_Gathered], column: Column, shape: tuple[int, int]) -> Array:
    """Return one value for each token, cut as the tokens are, 0 elsewhere."""
    out: Array = np.zeros((*shape, *_sizes(column)), dtype=column.dtype)
    for each in taken:
        # The first input is the separator before the document, which has no feature value.
        lead = int(each.position == 0)
        first, count = each.position - 1 + lead, each.length - lead
        values = each.arrays[column.name][first : first + count]
        if len(values) != count:
            raise InvalidInput(
                "a feature is not as long as its sample",
                got=len(each.arrays[column.name]),
                wanted=f"at least {first + count}",
                where=f"{each.name} {column.name}",
                do="data.token_features names features with a value for each token.",
            )
        out[each.row, each.column + lead :][:count] = values
    return out


def _per_document(taken: Sequence[_Gathered], column: Column, shape: tuple[int, int]) -> Array:
    """Return one array for each document, padded with 0 to the longest."""
    axes: tuple[int, ...] = ()
    if column.shape:
        longest = max((len(each.arrays[column.name]) for each in taken), default=1)
        axes = (longest, *_sizes(column))
    out: Array = np.zeros((*shape, *axes), dtype=column.dtype)
    for each in taken:
        values = each.arrays[column.name]
        if values.ndim:
            out[each.row, each.slot, : len(values)] = values
        else:
            out[each.row, each.slot] = values
    return out


def _sizes(column: Column) -> tuple[int, ...]:
    assert None not in column.shape[1:], "only a column's first axis may differ"
    return tuple(each for each in column.shape[1:] if each is not None)


def _carries(planned: PlannedBatches, count: int) -> npt.NDArray[np.bool_] | None:
    if all(rows.carries_R is None for rows, _, _ in planned.taken):
        return None
    carries_B = np.zeros(count, dtype=np.bool_)
    for rows, ids, places in planned.taken:
        if rows.carries_R is not None:
            carries_B[places] = rows.carries_R[ids]
    return carries_B
