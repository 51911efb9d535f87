"""The order of shards and the columns that rows are read in: pure functions of a snapshot's record.

Each epoch has its own order of shards, cut into groups; samples are shuffled within a group. So
memory and read-ahead are bounded by a group, and resuming in the middle of an epoch costs one
group. The rows of a global batch may be read in *columns*, each from its own shards, so that a rank
opens only its columns' shards. A *reader* is one share of the data with a disk of its own, usually
a node. Nothing here depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.config import DataSettings
from paceline.data.snapshot import Shard, require_columns
from paceline.errors import InvalidInput

AT_ONCE_BYTES = 16 * 1024 * 1024
MOST_AT_ONCE = 16  # the number of connections
SHUFFLE_SHARDS = 16  # in a group, for shards of a usual size
# Rows that a group should hold: bin packing wastes about one row a group, and a group of few rows
# is a poor shuffle. Large shards reach it with few, tiny ones need more.
GROUP_ROWS = 1024
GROUP_BATCHES = 16  # minimum, so that lengths in a bucket are similar and lanes end together
MAX_GROUP_SHARDS = 1024
MAX_GROUP_TOKENS = 1 << 28  # 0.5 M documents: planned in 0.2 to 0.4 s with 100 MB
# For wide groups: every rank plans all documents, 5 µs each on a busy core, before its first batch.
MAX_GROUP_DOCUMENTS = 1 << 21
USUAL_COLUMNS = 16  # default maximum, independent of readers
COLUMN_ROWS = 512  # of a group, in each column: packing wastes about a row in each


def fewest_shards(tokens: Sequence[int]) -> int:
    """Return the minimum number of shards in a group; ``tokens``: of each shard. Lower for huge
    shards."""
    mean = max(1, sum(tokens) // max(1, len(tokens)))
    return min(SHUFFLE_SHARDS, max(2, MAX_GROUP_TOKENS // mean))


def group_shards(tokens: Sequence[int], context: int, global_batch: int) -> int:
    """Return the number of shards in a group of enough rows and batches; ``tokens``: of each
    shard."""
    rows = max(GROUP_ROWS, GROUP_BATCHES * global_batch)
    mean = max(1, sum(tokens) // max(1, len(tokens)))
    return min(max(fewest_shards(tokens), -(-rows * context // mean)), MAX_GROUP_SHARDS)


def shards_for_columns(usual: int, columns: int, tokens: Sequence[int], context: int) -> int:
    """Return the number of shards in a group read in ``columns``; ``usual``: with one column."""
    if columns == 1:
        return usual
    mean = max(1, sum(tokens) // max(1, len(tokens)))
    enough = min(-(-COLUMN_ROWS * columns * context // mean), MAX_GROUP_SHARDS)
    return max(usual, columns, enough)


def columns_read(wanted: range, global_batch: int, columns: int) -> range:
    """Return the columns that contain the rows ``wanted`` of a batch."""
    deep = global_batch // columns
    return range(wanted.start // deep, (wanted.stop - 1) // deep + 1)


def copies(columns: int, global_batch: int, readers: int) -> float:
    """Return how many times ``readers``, each with its own disk, fetch the data in total."""
    edges = [global_batch * each // readers for each in range(readers + 1)]
    shares = (range(*edges[each : each + 2]) for each in range(readers))
    return sum(len(columns_read(each, global_batch, columns)) for each in shares if each) / columns


def choose_columns(
    wanted: int,
    tokens: Sequence[int],
    context: int,
    global_batch: int,
    readers: int = 1,
    documents: int = 0,
) -> int:
    """Return how many columns the rows of a global batch are read in: ``wanted``, if it is not 0.

    For 0, as many as leave each column enough rows and shards of a group: at most ``USUAL_COLUMNS``
    for up to that many ``readers``; for more readers, the number with which they fetch least.
    ``readers`` is that of the job's start and does not change when ranks are lost. ``tokens``: of
    each shard; ``documents``: of all shards. Raises InvalidInput where ``wanted`` does not divide
    the batch.
    """
    if wanted:
        require_columns(wanted, global_batch)
        return wanted
    limits = _limit(tokens, context, documents)
    if documents and fewest_shards(tokens) < SHUFFLE_SHARDS:  # few, huge shards a group
        most = limits
    else:
        mean = sum(tokens) // max(1, len(tokens))
        shards = min(group_shards(tokens, context, global_batch), len(tokens) // 2)
        most = min(shards, shards * mean // max(1, context) // COLUMN_ROWS)
    usual = _divisors(global_batch, min(USUAL_COLUMNS, most))[-1]
    if readers <= USUAL_COLUMNS:
        return usual
    found = [each for each in _divisors(global_batch, limits) if each >= usual] or [usual]
    return min(found, key=lambda each: (round(copies(each, global_batch, readers), 6), each))


def _limit(tokens: Sequence[int], context: int, documents: int) -> int:
    """Return the largest number of columns.

    A column has two shards an epoch and ``COLUMN_ROWS`` rows; a group's bounded number of shards
    holds so many tokens of each, and not more documents than can be planned.
    """
    total, mean = sum(tokens), sum(tokens) // max(1, len(tokens))
    wanted = COLUMN_ROWS * max(1, context)  # tokens of a column, in a group
    most = min(len(tokens) // 2, total // wanted)
    if documents:
        most = min(most, MAX_GROUP_DOCUMENTS * total // (documents * max(wanted, mean)))
    return most if mean >= wanted else min(most, MAX_GROUP_SHARDS * mean // wanted)


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, max(1, min(most, number)) + 1) if number % each == 0]


def tokens_seen(settings: DataSettings, shards: Sequence[Shard], context: int) -> int:
    """Return the maximum number of tokens a token attends to: the context, or the mean document
    length.

    The mean applies where documents are masked from each other. It underestimates the work, because
    the tokens of long documents attend to more.
    """
    if settings.batching not in ("packed", "bucketed"):
        return context
    documents = max(1, sum(each.samples for each in shards))
    return min(context, -(-sum(each.stream_bytes for each in shards) // documents))


def columns_by(
    settings: DataSettings,
    shards: Sequence[Shard],
    context: int,
    global_batch: int,
    readers: int = 1,
) -> int:
    """Return the columns that ``settings`` set, or that suit ``shards`` and ``readers``.

    Bucketed rows default to one column: the n-th longest documents of several columns are not
    similar enough.
    """
    if settings.batching == "bucketed" and not settings.columns:
        return 1
    tokens = [each.stream_bytes for each in shards]
    planned = sum(each.samples for each in shards)  # windows or documents
    if settings.batching == "windows":
        planned = sum(tokens) // max(1, context)
    return choose_columns(settings.columns, tokens, context, global_batch, readers, planned)


# The order of shards.


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

    def shards_for(self, epoch: int, group: int, columns: range) -> npt.NDArray[np.int64]:
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


def open_concurrency(wanted: int, sizes: Sequence[int]) -> int:
    """Return how many shards to fetch and open concurrently: ``wanted``, or more for small shards.

    For small shards the store's latency dominates.
    """
    mean = max(1, sum(sizes) // max(1, len(sizes)))
    return max(wanted, min(MOST_AT_ONCE, AT_ONCE_BYTES // mean))
