"""The order of shards: pure functions of (seed, epoch), independent of the number of ranks.

Each epoch has its own order of shards, cut into groups; samples are shuffled within a group. So
memory and read-ahead are bounded by a group, and resuming in the middle of an epoch costs one
group. The rows of a global batch may be read in *columns*, each from its own shards, so that a rank
opens only its columns' shards. Uses the sizes of shards, not their contents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.data.loading.columns import SHUFFLE_SHARDS
from paceline.errors import InvalidInput

AT_ONCE_BYTES = 16 * 1024 * 1024
MOST_AT_ONCE = 16  # the number of connections


class ShardOrder:
    """The groups of shards of every epoch, and which column reads which of them.

    ``sizes`` (one a shard: tokens, documents or windows, whatever columns divide equally) decide
    only which shards each column reads. With one column a group is ``group_shards`` of the epoch's
    order (the last one fewer). With more, each shard belongs to the same column in every epoch, so
    that a node's cache holds the shards that it needs again; a group has a part of each column's
    own order, one column after the other, and each column reads an equal part of the concatenation.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seed: int,
        group_shards: int = SHUFFLE_SHARDS,
        columns: int = 1,
    ) -> None:
        if not sizes or group_shards < 1:
            raise InvalidInput(
                "bad order of shards",
                got=f"{len(sizes)} shards in groups of {group_shards}",
                wanted="≥ 1",
            )
        self.shards = len(sizes)
        self.seed = seed
        self.columns = columns
        self.group_shards = group_shards
        if columns == 1:
            self.groups = -(-self.shards // group_shards)  # in an epoch
        else:  # a last group of few shards would leave most columns empty
            self.groups = max(1, self.shards // group_shards)
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._own = self._dealt() if columns > 1 else [np.arange(self.shards)]
        self._epoch: tuple[int, list[npt.NDArray[np.int64]]] | None = None

    def group(self, epoch: int, group: int) -> npt.NDArray[np.int64]:
        """Return the indexes of the shards of one group, in order, column by column."""
        orders = self._orders(epoch)
        if self.columns == 1:
            start = group * self.group_shards
            return orders[0][start : start + self.group_shards]
        parts = [
            each[len(each) * group // self.groups : len(each) * (group + 1) // self.groups]
            for each in orders
        ]
        return np.concatenate(parts)

    def read_by(self, epoch: int, group: int, columns: range) -> npt.NDArray[np.int64]:
        """Return the shards of a group that adjacent ``columns`` read, by sizes.

        For equal shards these are the columns' share, and one more where a boundary falls inside a
        shard.
        """
        shards = self.group(epoch, group)
        if len(columns) == self.columns:
            return shards
        ends = np.cumsum(self._sizes[shards])
        total = int(ends[-1]) if len(ends) else 0
        starts = ends - self._sizes[shards]
        mine = (ends * self.columns > columns.start * total) & (
            starts * self.columns < columns.stop * total
        )
        return shards[mine]

    def generator(self, epoch: int, stream: int) -> np.random.Generator:
        """Return the epoch's random generator ``stream``: 0 for shards, ``group + 1`` for rows."""
        return _generator([self.seed & 0xFFFFFFFFFFFFFFFF, epoch, stream])

    def _orders(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        kept = self._epoch  # read once: the thread that plans ahead may change it
        if kept is None or kept[0] != epoch:
            generator = self.generator(epoch, 0)
            kept = (epoch, [each[generator.permutation(len(each))] for each in self._own])
            self._epoch = kept
        return kept[1]

    def _dealt(self) -> list[npt.NDArray[np.int64]]:
        """Return each column's shards: largest first, in alternating direction, equal sizes
        shuffled."""
        mixed = _generator([self.seed & 0xFFFFFFFFFFFFFFFF, 0, 0, 1]).permutation(self.shards)
        by_size = mixed[np.argsort(-self._sizes[mixed], kind="stable")]
        turn, place = np.divmod(np.arange(self.shards), self.columns)
        column = np.where(turn % 2 == 0, place, self.columns - 1 - place)
        return [by_size[column == each] for each in range(self.columns)]


def _generator(words: list[int]) -> np.random.Generator:
    # Philox is counter-based: its bits for a key are the same on every platform and version.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def opened_at_once(wanted: int, sizes: Sequence[int]) -> int:
    """Return how many shards to fetch and open concurrently: ``wanted``, or more for small shards.

    For small shards the store's latency dominates.
    """
    mean = max(1, sum(sizes) // max(1, len(sizes)))
    return max(wanted, min(MOST_AT_ONCE, AT_ONCE_BYTES // mean))
