"""Which shards come when: pure functions of (seed, epoch), whatever the number of ranks.

Each epoch has its own order of shards, cut into groups; samples are mixed within a group. So memory
and look-ahead are bounded by a group, and to jump into the middle of an epoch costs one group.
Knows how many shards there are, not what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidInput

SHUFFLE_SHARDS = 16  # in a group, where shards are of a usual size
# A group should hold so many rows: what best fit leaves over is about one row a group, and a group
# of few rows is a poor shuffle. Large shards reach it with few, tiny ones need more.
GROUP_ROWS = 1024
GROUP_BATCHES = 16  # at least, so that lengths in a bucket are alike and lanes end together
MAX_GROUP_SHARDS = 1024
MAX_GROUP_TOKENS = 1 << 28  # 0.5 M documents: planned in 0.2 to 0.4 s and 100 MB


class ShardOrder:
    """The groups of shards of every epoch."""

    def __init__(self, shards: int, seed: int, group_shards: int = SHUFFLE_SHARDS) -> None:
        if shards < 1 or group_shards < 1:
            raise InvalidInput(
                "bad order of shards",
                got=f"{shards} shards in groups of {group_shards}",
                wanted="≥ 1",
            )
        self.shards = shards
        self.seed = seed
        self.group_shards = group_shards
        self.groups = -(-shards // group_shards)  # in an epoch
        self._epoch: tuple[int, npt.NDArray[np.int64]] | None = None

    def group(self, epoch: int, group: int) -> npt.NDArray[np.int64]:
        """Return the indexes of the shards of one group, in order."""
        start = group * self.group_shards
        return self._permutation(epoch)[start : start + self.group_shards]

    def generator(self, epoch: int, stream: int) -> np.random.Generator:
        """Return the epoch's generator number ``stream``: 0 for shards, ``group + 1`` for rows."""
        # Philox is counter-based: its bits for a key are the same on every platform and version.
        seeds = np.random.SeedSequence([self.seed & 0xFFFFFFFFFFFFFFFF, epoch, stream])
        return np.random.Generator(np.random.Philox(seeds))

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        kept = self._epoch  # read once: the thread that plans ahead may change it
        if kept is None or kept[0] != epoch:
            kept = (epoch, self.generator(epoch, 0).permutation(self.shards))
            self._epoch = kept
        return kept[1]


def fewest_shards(tokens: Sequence[int]) -> int:
    """Return how many shards of so many ``tokens`` make a group: fewer where they are huge."""
    mean = max(1, sum(tokens) // max(1, len(tokens)))
    return min(SHUFFLE_SHARDS, max(2, MAX_GROUP_TOKENS // mean))


def group_shards(tokens: Sequence[int], context: int, global_batch: int) -> int:
    """Return how many shards of so many ``tokens`` make a group of enough rows and batches."""
    rows = max(GROUP_ROWS, GROUP_BATCHES * global_batch)
    mean = max(1, sum(tokens) // max(1, len(tokens)))
    return min(max(fewest_shards(tokens), -(-rows * context // mean)), MAX_GROUP_SHARDS)
