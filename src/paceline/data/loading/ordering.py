"""Which shards come when: pure functions of (seed, epoch), whatever the number of ranks.

Each epoch has its own order of shards, cut into groups; samples are mixed within a group. So memory
and look-ahead are bounded by a group, and to jump into the middle of an epoch costs one group. The
rows of a global batch may be read in *columns*, each from shards of its own: then a rank opens only
its columns' shards. Knows how large shards are, not what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.data.loading.columns import SHUFFLE_SHARDS
from paceline.errors import InvalidInput

AT_ONCE_BYTES = 16 * 1024 * 1024
MOST_AT_ONCE = 16  # as many as there are connections


class ShardOrder:
    """The groups of shards of every epoch, and which column reads which of them.

    ``sizes`` (one a shard, in whatever is shared out: tokens, documents, windows) decide only what
    falls to which column. With one column a group is ``group_shards`` of the epoch's order (the
    last one fewer). With more, each shard has its column for good, whatever the epoch, so that
    what a node keeps in its cache is what it will want again; a group has a part of each column's
    own order, one column after the other, and each column reads an equal stretch of all that.
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
        else:  # a last group of few shards would leave most columns without one
            self.groups = max(1, self.shards // group_shards)
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._own = self._dealt() if columns > 1 else [np.arange(self.shards)]
        self._epoch: tuple[int, list[npt.NDArray[np.int64]]] | None = None

    def group(self, epoch: int, group: int) -> npt.NDArray[np.int64]:
        """Return the indexes of the shards of one group, in order: column by column."""
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
        """Return those shards of a group that neighbouring ``columns`` read, going by sizes: of
        equal shards their share, and one more where an edge falls inside of one."""
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
        """Return the epoch's generator number ``stream``: 0 for shards, ``group + 1`` for rows."""
        return _generator([self.seed & 0xFFFFFFFFFFFFFFFF, epoch, stream])

    def _orders(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        kept = self._epoch  # read once: the thread that plans ahead may change it
        if kept is None or kept[0] != epoch:
            generator = self.generator(epoch, 0)
            kept = (epoch, [each[generator.permutation(len(each))] for each in self._own])
            self._epoch = kept
        return kept[1]

    def _dealt(self) -> list[npt.NDArray[np.int64]]:
        """Return each column's shards: largest first, to and fro, equal ones in any order."""
        mixed = _generator([self.seed & 0xFFFFFFFFFFFFFFFF, 0, 0, 1]).permutation(self.shards)
        by_size = mixed[np.argsort(-self._sizes[mixed], kind="stable")]
        turn, place = np.divmod(np.arange(self.shards), self.columns)
        column = np.where(turn % 2 == 0, place, self.columns - 1 - place)
        return [by_size[column == each] for each in range(self.columns)]


def _generator(words: list[int]) -> np.random.Generator:
    # Philox is counter-based: its bits for a key are the same on every platform and version.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def opened_at_once(wanted: int, sizes: Sequence[int]) -> int:
    """Return how many shards of so many bytes are fetched and opened at once: ``wanted``, and more
    where they are so small that waiting for the store is most of the time."""
    mean = max(1, sum(sizes) // max(1, len(sizes)))
    return max(wanted, min(MOST_AT_ONCE, AT_ONCE_BYTES // mean))
