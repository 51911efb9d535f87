"""Choose how many columns the rows of a global batch are read in, and estimate the cost per reader.

A reader is one share of the data with a disk of its own, usually a node. ``ordering`` and
``batching`` define columns. Pure arithmetic on a snapshot's record: no numpy, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import DataSettings
from paceline.data.snapshot import Shard, require_columns

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

# Thresholds for a warning before a job starts: bytes an epoch of all readers together,
TOLD_BYTES = 1 << 30
COPIES_TOLD = 1.5  # times that the data are fetched,
LENGTHS_TOLD = 0.5  # or lengths, as a share of the shards that a reader fetches
LENGTH_BYTES = 4
SHARING_READERS = 8  # with so many readers, plans of groups are shared (``batching.prefetch``),
SHARING_LENGTHS = 0.01  # if all lengths exceed this share of the readers' shards


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


def columns_of(
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
    limits = min(_limits(tokens, context, documents).values())
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


def _limits(tokens: Sequence[int], context: int, documents: int) -> dict[str, int]:
    """Return the largest number of columns that each limit allows.

    The limits are shards (two an epoch in each column), rows, small shards (a group's bounded
    number of shards must hold enough tokens), and documents planned per group.
    """
    total, mean = sum(tokens), sum(tokens) // max(1, len(tokens))
    wanted = COLUMN_ROWS * max(1, context)  # tokens of a column, in a group
    shards = len(tokens) // 2
    # A group has a shard of each column, and more where shards are small.
    planned = (
        MAX_GROUP_DOCUMENTS * total // (documents * max(wanted, mean)) if documents else shards
    )
    small = MAX_GROUP_SHARDS * mean // wanted if mean < wanted else shards
    return {"shards": shards, "rows": total // wanted, "small": small, "planned": planned}


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
    planned = _planned(settings, shards, context)
    return columns_of(settings.columns, tokens, context, global_batch, readers, planned)


def _planned(settings: DataSettings, shards: Sequence[Shard], context: int) -> int:
    """Return the number of windows or documents in all of ``shards``."""
    if settings.batching == "windows":
        return sum(each.stream_bytes for each in shards) // max(1, context)
    return sum(each.samples for each in shards)


@dataclass(frozen=True)
class ReadingCost:
    """The cost of an epoch for so many readers, each with its own disk."""

    columns: int
    readers: int
    copies: float  # of the data, fetched by all readers together
    lengths_share: float  # bytes of lengths, relative to the shards fetched
    shares_outlines: bool = False  # then each reader needs only its own shards' lengths
    advice: str = ""  # recommended settings; empty: none

    def __str__(self) -> str:
        """Return a one-sentence summary."""
        return (
            f"{self.readers} readers in {self.columns} columns fetch the data "
            f"{self.copies:.1f} times in all, lengths beside it {self.lengths_share:.0%}"
        )


def reading(
    settings: DataSettings,
    shards: Sequence[Shard],
    context: int,
    global_batch: int,
    readers: int,
    *,
    sharing: bool = True,
) -> ReadingCost:
    """Return the cost of reading ``shards`` for ``readers``; raises InvalidInput as ``columns_of``.

    ``sharing``: readers share plans where that saves enough.
    """
    columns = columns_by(settings, shards, context, global_batch, readers)
    times = copies(columns, global_batch, readers)
    size = sum(each.bytes for each in shards)
    every = LENGTH_BYTES * sum(each.samples for each in shards)
    # Windows need no lengths. Otherwise each reader needs all lengths, or, with shared plans, one
    # reader needs all and each its own.
    lengths = 0 if settings.batching == "windows" else readers * every
    shared = (
        sharing
        and settings.batching == "packed"
        and readers >= SHARING_READERS
        and columns > 1
        and lengths > SHARING_LENGTHS * times * size
    )
    if shared:
        lengths = int((1 + times) * every)
    advice = []
    if times > COPIES_TOLD and (times - 1) * size > TOLD_BYTES:
        advice.append(_advice(settings, shards, context, readers))
    if lengths > max(TOLD_BYTES, LENGTHS_TOLD * times * size):
        advice.append("every reader plans from the lengths of all documents: windows need none")
    share = lengths / (times * size)
    return ReadingCost(columns, readers, times, share, shared, "; ".join(advice))


def _advice(settings: DataSettings, shards: Sequence[Shard], context: int, readers: int) -> str:
    if settings.columns:
        return "set data.columns to 0, or to a divisor of the batch that the readers divide"
    if settings.batching == "bucketed":
        return "use data.batching packed, or set data.columns (batches are then less alike)"
    tokens = [each.stream_bytes for each in shards]
    limits = _limits(tokens, context, _planned(settings, shards, context))
    if limits["rows"] < readers:
        need = readers * COLUMN_ROWS * context
        return f"use fewer nodes, or data of {need} tokens: {sum(tokens)} are few rows for each"
    if limits["shards"] < readers:
        return f"build the snapshot in at least {2 * readers} shards (data.shard_bytes)"
    if limits["small"] < readers:
        return "build the snapshot in larger shards (data.shard_bytes)"
    if limits["planned"] < readers:
        return (
            "build the snapshot in smaller shards (data.shard_bytes), or use data.batching "
            "windows: so many shards are too many documents to plan at once"
        )
    return "make training.batch_sequences a multiple of the nodes"
