"""Windows: each shard's framed stream cut every ``context`` tokens, mixed within a group.

A window is ``context + 1`` tokens; windows overlap by one, so that each token is predicted once. A
shard's last ``< context + 1`` tokens make no window: ``tail_tokens`` counts them. Needs only the
streams' lengths, which stand in the snapshot's record.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.data.batching.rows import Ints, Rows
from paceline.data.columns import fewest_shards, shards_for_columns
from paceline.data.order import ShardOrder
from paceline.data.requirements import require_windows
from paceline.errors import InvalidInput

EMPTY = -1


class WindowPlan:
    """Windows of streams of ``stream_tokens``; batches go on into the next group and epoch."""

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
        self.context = context
        self.global_batch = global_batch
        self.seed = seed
        self.columns = columns
        self.windows = np.array([max(0, (size - 1) // context) for size in stream_tokens])
        self.tail_tokens = int(sum(stream_tokens)) - int(self.windows.sum()) * context
        self.samples = int(self.windows.sum())  # of one epoch
        require_windows(stream_tokens, context)
        usual = fewest_shards(stream_tokens)
        self._order = ShardOrder(
            self.windows.tolist(),
            seed,
            shards_in_group or shards_for_columns(usual, columns, stream_tokens, context),
            columns,
        )

    @property
    def groups(self) -> int:
        """Return how many groups an epoch has."""
        return self._order.groups

    def shards(self, epoch: int, group: int, columns: range | None = None) -> Ints:
        """Return the indexes of the group's shards, or of those that ``columns`` read."""
        return self._order.read_by(epoch, group, columns or range(self.columns))

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's windows, mixed: each column an equal stretch of them, and an empty
        row at the end where they do not divide."""
        shards = self.shards(epoch, group)
        counts = self.windows[shards]
        first = np.cumsum(counts) - counts
        total = int(counts.sum())
        window_P = np.arange(total) - np.repeat(first, counts)
        packed = (np.repeat(shards, counts) << 32) + window_P
        generator = self._order.generator(epoch, group + 1)
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
