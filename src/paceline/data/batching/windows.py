"""Windows: each shard's framed stream cut every ``context`` tokens, mixed within a group.

A window is ``context + 1`` tokens; windows overlap by one, so that each token is predicted once. A
shard's last ``< context + 1`` tokens make no window: ``tail_tokens`` counts them. Needs only the
streams' lengths, which stand in the snapshot's record.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.data.batching.rows import Ints, Rows
from paceline.data.order import ShardOrder, fewest_shards
from paceline.errors import InvalidInput, InvalidSnapshot


class WindowPlan:
    """Windows of streams of ``stream_tokens``; batches go on into the next group and epoch."""

    batching = "windows"

    def __init__(
        self,
        stream_tokens: Sequence[int],
        context: int,
        global_batch: int,
        seed: int,
        shards_in_group: int | None = None,
    ) -> None:
        if context < 1:
            raise InvalidInput("bad stream settings", got=f"context {context}", wanted="≥ 1")
        self.context = context
        self.global_batch = global_batch
        self.seed = seed
        self.windows = np.array([max(0, (size - 1) // context) for size in stream_tokens])
        self.tail_tokens = int(sum(stream_tokens)) - int(self.windows.sum()) * context
        self.samples = int(self.windows.sum())  # of one epoch
        if self.samples == 0:
            raise InvalidSnapshot(
                "snapshot is too small for one sample",
                got=f"{sum(stream_tokens)} tokens in {len(stream_tokens)} shard(s)",
                wanted=f"a shard of at least {context + 1} tokens",
                do="Use more data, or a smaller model.context.",
            )
        self._order = ShardOrder(
            len(stream_tokens), seed, shards_in_group or fewest_shards(stream_tokens)
        )

    @property
    def groups(self) -> int:
        """Return how many groups an epoch has."""
        return self._order.groups

    def shards(self, epoch: int, group: int) -> Ints:
        """Return the indexes of the group's shards."""
        return self._order.group(epoch, group)

    def rows(self, epoch: int, group: int) -> Rows:
        """Return the group's windows, mixed."""
        packed = np.concatenate(
            [
                (int(each) << 32) + np.arange(self.windows[each], dtype=np.int64)
                for each in self.shards(epoch, group)
            ]
        )
        packed = self._order.generator(epoch, group + 1).permutation(packed)
        return Rows(
            first_R1=np.arange(len(packed) + 1),
            shard_P=packed >> 32,
            start_P=(packed & 0xFFFFFFFF) * self.context,
            length_P=np.full(len(packed), self.context),
        )
