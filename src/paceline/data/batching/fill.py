"""Copying tokens into a plan's rows: from pieces to one rank's arrays.

Shape letters: B rows, T tokens a row, D documents a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.batch import PADDING
from paceline.data.batching.rows import Rows

Tokens = npt.NDArray[Any]
Stream = Callable[[int], "Tokens | None"]  # index of a shard → its framed stream; None: quarantined


@dataclass
class Filled:
    """One share's arrays; ``missing`` names the shards whose pieces have weight 0."""

    inputs_BT: Tokens  # noqa: N815
    targets_BT: Tokens  # noqa: N815
    weights_BT: npt.NDArray[np.float32]  # noqa: N815
    documents_BT: npt.NDArray[np.int32] | None  # noqa: N815
    positions_BT: npt.NDArray[np.int32] | None  # noqa: N815
    carries_B: npt.NDArray[np.bool_] | None  # noqa: N815
    missing: set[int] = field(default_factory=set)


def fill(
    taken: Sequence[tuple[Rows, int, int]],
    width: int,
    stream: Stream,
    separator: int,
    dtype: npt.DTypeLike,
) -> Filled:
    """Return the arrays of rows ``start`` to ``stop`` of each ``(rows, start, stop)``, stacked."""
    count = sum(stop - start for _, start, stop in taken)
    masked = any(rows.document_P is not None for rows, _, _ in taken)
    carried = any(rows.carries_R is not None for rows, _, _ in taken)
    shape = (count, width)
    filled = Filled(
        inputs_BT=np.full(shape, separator, dtype=dtype),
        targets_BT=np.full(shape, separator, dtype=dtype),
        weights_BT=np.zeros(shape, dtype=np.float32),
        documents_BT=np.full(shape, PADDING, dtype=np.int32) if masked else None,
        positions_BT=np.zeros(shape, dtype=np.int32) if masked else None,
        carries_B=np.zeros(count, dtype=np.bool_) if carried else None,
    )
    row = 0
    for rows, start, stop in taken:
        _fill(filled, row, rows, start, stop, stream)
        if filled.carries_B is not None and rows.carries_R is not None:
            filled.carries_B[row : row + stop - start] = rows.carries_R[start:stop]
        row += stop - start
    return filled


def _fill(filled: Filled, row: int, rows: Rows, start: int, stop: int, stream: Stream) -> None:
    first = rows.first_R1[start : stop + 1].tolist()
    pieces = slice(first[0], first[-1])
    shards = rows.shard_P[pieces].tolist()
    starts = rows.start_P[pieces].tolist()
    lengths = rows.length_P[pieces].tolist()
    positions = None if rows.position_P is None else rows.position_P[pieces].tolist()
    piece = 0
    for edge in first[1:]:
        column = number = 0
        while piece < edge - first[0]:
            length, at = lengths[piece], starts[piece]
            end = column + length
            tokens = stream(shards[piece])
            if tokens is None:
                filled.missing.add(shards[piece])
            else:
                filled.inputs_BT[row, column:end] = tokens[at : at + length]
                filled.targets_BT[row, column:end] = tokens[at + 1 : at + length + 1]
                filled.weights_BT[row, column:end] = 1.0
            if filled.documents_BT is not None and filled.positions_BT is not None:
                filled.documents_BT[row, column:end] = number
                position = positions[piece] if positions is not None else 0
                filled.positions_BT[row, column:end] = np.arange(position, position + length)
            column, number, piece = end, number + 1, piece + 1
        row += 1
