"""How many columns the rows of a global batch are read in, and what that costs each reader.

A reader is one share of the data with a disk of its own, as a rule a node. ``order`` and
``batching`` say what a column is. Pure arithmetic on a snapshot's record: no numpy, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import DataSettings
from paceline.data.snapshot import Shard, require_columns

SHUFFLE_SHARDS = 16  # in a group, where shards are of a usual size
# A group should hold so many rows: what best fit leaves over is about one row a group, and a group
# of few rows is a poor shuffle. Large shards reach it with few, tiny ones need more.
GROUP_ROWS = 1024
GROUP_BATCHES = 16  # at least, so that lengths in a bucket are alike and lanes end together
MAX_GROUP_SHARDS = 1024
MAX_GROUP_TOKENS = 1 << 28  # 0.5 M documents: planned in 0.2 to 0.4 s and 100 MB
# Of wide groups: every rank plans all of them, 5 µs each on a busy core, before its first batch.
MAX_GROUP_DOCUMENTS = 1 << 21
USUAL_COLUMNS = 16  # whatever the readers are: a shard each, in a group of a usual size
COLUMN_ROWS = 512  # of a group, in each column: what packing leaves over is about a row in each

# What is worth a word before a job starts: so many bytes an epoch, of all readers together,
TOLD_BYTES = 1 << 30
COPIES_TOLD = 1.5  # for data that are fetched so many times,
LENGTHS_TOLD = 0.5  # or for lengths, as a share of the shards that a reader fetches
LENGTH_BYTES = 4
SHARING_READERS = 8  # so many share outlines of groups (``batching.outlines``),
SHARING_LENGTHS = 0.01  # where lengths of all are more than this beside their own shards


def fewest_shards(tokens: Sequence[int]) -> int:
    """Return how many shards of so many ``tokens`` make a group: fewer where they are huge."""
    mean = max(1, sum(tokens) // max(1, len(tokens)))
    return min(SHUFFLE_SHARDS, max(2, MAX_GROUP_TOKENS // mean))


def group_shards(tokens: Sequence[int], context: int, global_batch: int) -> int:
    """Return how many shards of so many ``tokens`` make a group of enough rows and batches."""
    rows = max(GROUP_ROWS, GROUP_BATCHES * global_batch)
    mean = max(1, sum(tokens) // max(1, len(tokens)))
    return min(max(fewest_shards(tokens), -(-rows * context // mean)), MAX_GROUP_SHARDS)


def shards_for_columns(usual: int, columns: int, tokens: Sequence[int], context: int) -> int:
    """Return how many shards make a group that is read in ``columns``, where one read as a whole
    has ``usual`` of them."""
    if columns == 1:
        return usual
    mean = max(1, sum(tokens) // max(1, len(tokens)))
    enough = min(-(-COLUMN_ROWS * columns * context // mean), MAX_GROUP_SHARDS)
    return max(usual, columns, enough)


def columns_read(wanted: range, global_batch: int, columns: int) -> range:
    """Return the columns that the rows ``wanted`` of a batch are in."""
    deep = global_batch // columns
    return range(wanted.start // deep, (wanted.stop - 1) // deep + 1)


def copies(columns: int, global_batch: int, readers: int) -> float:
    """Return how often ``readers`` with a disk each fetch the data, all of them together."""
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
    """Return how many columns the rows of a global batch are read in: ``wanted``, where it is set.

    For 0, as many as leave each one enough rows of a group and shards of its own: at most
    ``USUAL_COLUMNS``, whatever ``readers`` there are up to that number; of more, those with which
    they fetch least, as the job began (``readers`` does not change when ranks are lost).
    ``tokens`` are the shards', ``documents`` how many are in all of them. Raises InvalidInput where
    ``wanted`` does not divide the batch.
    """
    if wanted:
        require_columns(wanted, global_batch)
        return wanted
    limits = min(_limits(tokens, context, documents).values())
    if documents and fewest_shards(tokens) < SHUFFLE_SHARDS:  # groups are small, shards are huge
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
    """Return how many columns each of these has enough of: shards (two an epoch in each column),
    rows, shards of a size that a group's bounded number of them suffices, documents planned."""
    total, mean = sum(tokens), sum(tokens) // max(1, len(tokens))
    wanted = COLUMN_ROWS * max(1, context)  # tokens of a column, in a group
    shards = len(tokens) // 2
    # A group has a shard of each column, and more where they are small.
    planned = (
        MAX_GROUP_DOCUMENTS * total // (documents * max(wanted, mean)) if documents else shards
    )
    small = MAX_GROUP_SHARDS * mean // wanted if mean < wanted else shards
    return {"shards": shards, "rows": total // wanted, "small": small, "planned": planned}


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, max(1, min(most, number)) + 1) if number % each == 0]


def tokens_seen(settings: DataSettings, shards: Sequence[Shard], context: int) -> int:
    """Return how many tokens a token may see at most, its own document's where documents are apart:
    their mean length, which counts long ones, whose tokens see more, too little."""
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
    """Return the columns that ``settings`` ask for, or that suit ``shards`` and ``readers``.

    Bucketed rows are read whole unless it is asked for: the n-th longest documents of several
    columns are not alike enough.
    """
    if settings.batching == "bucketed" and not settings.columns:
        return 1
    tokens = [each.stream_bytes for each in shards]
    planned = _planned(settings, shards, context)
    return columns_of(settings.columns, tokens, context, global_batch, readers, planned)


def _planned(settings: DataSettings, shards: Sequence[Shard], context: int) -> int:
    """Return how many things there are to be planned in all of ``shards``."""
    if settings.batching == "windows":
        return sum(each.stream_bytes for each in shards) // max(1, context)
    return sum(each.samples for each in shards)


@dataclass(frozen=True)
class Reading:
    """What an epoch costs so many readers, each with a disk of its own."""

    columns: int
    readers: int
    copies: float  # of the data that all of them fetch together
    lengths_share: float  # lengths of documents, beside the shards that one reader fetches
    shares_outlines: bool = False  # so that each needs only its own shards' lengths
    advice: str = ""  # what there is to be set; empty: nothing is worth a word

    def __str__(self) -> str:
        """Return it as a sentence."""
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
) -> Reading:
    """Return what reading ``shards`` costs ``readers``; raises InvalidInput as ``columns_of``.

    ``sharing``: they share outlines where that is worth it.
    """
    columns = columns_by(settings, shards, context, global_batch, readers)
    times = copies(columns, global_batch, readers)
    size = sum(each.bytes for each in shards)
    every = LENGTH_BYTES * sum(each.samples for each in shards)
    # windows are planned without any; else each reader needs all, or one of them and each its own
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
    return Reading(columns, readers, times, share, shared, "; ".join(advice))


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
