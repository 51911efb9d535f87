"""Batch and Position: one rank's share of a global batch, and a position in the data stream.

Shape letters: B rows of this share, T tokens of a row, D documents of a row at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidInput

Tokens = npt.NDArray[Any]  # uint8, uint16 or int32, by the vocabulary's size

PADDING = -1  # in ``documents_BT``: no document


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch; its arrays are writable and belong to this batch.

    ``weights_BT`` is 0 for padding and for the samples of a shard in quarantine, else 1. The step's
    gradient is that of (the sum over the global batch of weighted losses) / ``global_weight``.
    """

    step: int  # number of the global batch in its stream, from 0
    inputs_BT: Tokens  # noqa: N815 - tensors carry shape letters
    targets_BT: Tokens  # noqa: N815
    weights_BT: npt.NDArray[np.float32]  # noqa: N815
    rows: range  # this share's rows within the global batch
    # Σ weights over the whole global batch as planned (quarantine is found later, maybe on some
    # ranks only): every rank computes it without communication.
    global_tokens: float
    global_pairs: float = 0.0  # of the whole global batch; 0 where samples are no pairs of answers
    documents_BT: npt.NDArray[np.int32] | None = None  # noqa: N815 - None: no masks
    positions_BT: npt.NDArray[np.int32] | None = None  # noqa: N815 - None: 0 … T - 1
    # Whether the row continues the same row of the batch before; else its state is reset.
    carries_B: npt.NDArray[np.bool_] | None = None  # noqa: N815
    # name → (B, T, …) for per-token features; else (B, D, …): those of document d of row b, d as in
    # documents_BT (0 where that is None)
    features: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()  # shards, or samples of shards, skipped so far

    @property
    def global_weight(self) -> float:
        """Return the number of losses in the whole global batch: its pairs, else its tokens."""
        return self.global_pairs or self.global_tokens

    def split(self, parts: int) -> list[Batch]:
        """Return exactly ``parts`` parts, by rows, for gradient accumulation and pipeline stages.

        With fewer rows than parts, the rest are one row each, of weight 0: ranks with uneven shares
        must run the model equally often.
        """
        if parts < 1:
            raise InvalidInput("batch split in no parts", got=parts, wanted="at least 1")
        rows = len(self.rows)
        filled = min(parts, rows)
        edges = [rows * part // filled for part in range(filled + 1)]
        found = [self._of(slice(*edges[part : part + 2])) for part in range(filled)]
        if filled < parts:
            last = self._of(slice(rows - 1, rows))
            empty = replace(last, weights_BT=np.zeros_like(last.weights_BT))
            found += [empty] * (parts - filled)
        return found

    def _of(self, part: slice) -> Batch:
        names = ("inputs", "targets", "weights", "documents", "positions")
        fields = [f"{name}_BT" for name in names] + ["carries_B"]
        arrays = {name: getattr(self, name) for name in fields}
        cut: dict[str, Any] = {
            name: None if array is None else array[part] for name, array in arrays.items()
        }
        return replace(
            self,
            features={name: array[part] for name, array in self.features.items()},
            rows=self.rows[part],
            **cut,
        )


# A position in a stream, as small JSON that is valid for any number of ranks.


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of the next global batch: its number, and the row it starts with.

    Includes the settings that define rows and batches, so that a stream with other settings rejects
    it.
    """

    batching: str
    context: int
    global_batch: int
    seed: int
    columns: int = 1  # of a batch's rows; positions saved by older versions have none
    batch: int = 0
    epoch: int = 0
    group: int = 0  # of shards, within the epoch
    item: int = 0  # row within the group

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def resumed(self, kept: Mapping[str, Any] | None) -> Position:
        """Return the position saved by ``to_json``, or this one if ``kept`` is None.

        Raises InvalidInput for one that is malformed or of a stream with other settings.
        """
        if kept is None:
            return self
        kept = {"columns": 1, **kept}
        names = {each.name for each in fields(self)}
        numbers = names - {"batching"}
        if set(kept) != names or any(
            type(kept[name]) is not int or (name != "seed" and kept[name] < 0) for name in numbers
        ):
            raise InvalidInput(
                "not a position in a data stream", got=dict(kept), wanted=f"{sorted(names)}"
            )
        for name in ("batching", "context", "global_batch", "seed", "columns"):
            if kept[name] != getattr(self, name):
                raise InvalidInput(
                    f"position is of a stream with another {name}",
                    got=kept[name],
                    wanted=getattr(self, name),
                    do="Resume with the settings the job began with, or start a new job.",
                )
        return Position(**kept)
