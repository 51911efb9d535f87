"""A snapshot as a table: one row a sample, with what can be judged of it and nothing else.

Column by column, so that a row costs about a hundred bytes; of a snapshot with more samples than
``MAX_ROWS``, whole shards are left out, evenly, and the table says so. Knows no expectations.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.data.samples import Array, ShardSamples, length_of
from paceline.data.shards import ShardCache
from paceline.data.snapshot import Shard, Snapshot
from paceline.data.splits import assign_splits, in_held_out
from paceline.errors import CorruptData

MAX_ROWS = 500_000
COLUMNS = (
    *("key", "content", "split", "purpose", "length", "length_in_file", "n_tokens", "n_bytes"),
    *("is_text", "is_finite"),
)


@dataclass
class Figures:
    """What a column's numbers look like, over all samples read."""

    name: str
    kind: str
    samples: int = 0
    shortest: int = 0
    longest: int = 0
    least: float = float("inf")
    greatest: float = float("-inf")
    total: float = 0.0
    count: int = 0
    not_finite: int = 0

    def add(self, array: Array) -> None:
        """Take one sample's array into account."""
        length = len(array) if array.ndim else 1
        self.shortest = length if not self.samples else min(self.shortest, length)
        self.longest = max(self.longest, length)
        self.samples += 1
        finite = array
        if array.dtype.kind == "f":
            finite = array[np.isfinite(array)] if array.ndim else array.reshape(1)
            finite = finite[np.isfinite(finite)].astype(np.float64)
            self.not_finite += array.size - finite.size
        if finite.size:
            self.least = min(self.least, float(finite.min()))
            self.greatest = max(self.greatest, float(finite.max()))
            self.total += float(finite.sum(dtype=np.float64))
            self.count += int(finite.size)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data; a column without numbers has none."""
        return {
            "column": self.name,
            "kind": self.kind,
            "samples": self.samples,
            "shortest": self.shortest,
            "longest": self.longest,
            "least": self.least if self.count else None,
            "greatest": self.greatest if self.count else None,
            "mean": self.total / self.count if self.count and np.isfinite(self.total) else None,
            "not_finite": self.not_finite,
        }


@dataclass
class Table:
    """The rows, by column; which shards are in quarantine; the figures of each column."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Figures] = field(default_factory=dict)
    samples_left_out: int = 0  # too many to look at

    def __len__(self) -> int:
        return len(self.columns["key"])

    @property
    def is_partial(self) -> bool:
        """Return whether some samples are not in it."""
        return bool(self.quarantined or self.samples_left_out)


def read_table(snapshot: Snapshot, cache: ShardCache, max_rows: int = MAX_ROWS) -> Table:
    """Return the table of ``snapshot``; a corrupt shard is in its quarantine, not an error."""
    table = Table()
    table.figures["tokens"] = Figures("tokens", snapshot.vocabulary.kind)
    for column in snapshot.columns:
        axes = "".join(f"[{'any' if each is None else each}]" for each in column.shape)
        table.figures[column.name] = Figures(column.name, f"{column.dtype}{axes}")
    shards = snapshot.shards
    step = -(-snapshot.record.documents // max_rows)
    looked_at = [each for number, each in enumerate(shards) if number % step == 0]
    if {each.split for each in looked_at} != {each.split for each in shards}:
        looked_at.append(shards[-1])  # the last is of the second split
    table.samples_left_out = snapshot.record.documents - sum(each.samples for each in looked_at)
    for number, shard in enumerate(looked_at):
        cache.prefetch(looked_at[number : number + 8])
        try:
            lengths = cache.lengths(shard)
            with cache.samples(shard) as samples:
                _add(table, snapshot, shard, samples, lengths)
        except CorruptData as error:
            table.quarantined.append(
                {
                    "shard": shard.sha256,
                    "split": shard.split,
                    "bytes": shard.bytes,
                    "documents": shard.samples,
                    "reason": str(error.got),
                }
            )
    _draw_splits(table, snapshot)
    return table


def _add(
    table: Table, snapshot: Snapshot, shard: Shard, samples: ShardSamples, lengths: Array
) -> None:
    rows: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    has_text = snapshot.vocabulary.kind == "bytes" and shard.text_bytes > 0
    for i in range(len(samples)):
        tokens, features = samples.tokens(i), samples.features(i)
        digest = hashlib.sha256(tokens.tobytes())
        finite = True
        table.figures["tokens"].add(tokens)
        n_bytes = tokens.nbytes
        for name in sorted(features):
            array = features[name]
            digest.update(f"\0{name}\0{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
            n_bytes += array.nbytes
            table.figures[name].add(array)
            if array.dtype.kind == "f":
                finite = finite and bool(np.isfinite(array).all())
        rows["key"].append(samples.key(i))
        rows["content"].append(digest.hexdigest())
        rows["length"].append(length_of(tokens, features))
        rows["length_in_file"].append(int(lengths[i]) if i < len(lengths) else -1)
        rows["n_tokens"].append(len(tokens))
        rows["n_bytes"].append(n_bytes)
        rows["is_text"].append(not has_text or _is_text(samples.text_bytes(i)))
        rows["is_finite"].append(finite)
    rows["split"] = [shard.split] * len(samples)
    rows["purpose"] = [snapshot.purpose] * len(samples)
    for name, values in rows.items():
        table.columns[name] += values


def _is_text(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in text


def _draw_splits(table: Table, snapshot: Snapshot) -> None:
    """Add the split that each key draws. Of few samples one was moved to fill a split; without all
    keys nobody knows which."""
    record, keys = snapshot.record, table.columns["key"]
    share, seed = record.held_out_share, record.seed
    if table.is_partial or not keys:
        held_out = {each for each in keys if in_held_out(each, share, seed)}
    else:
        held_out = assign_splits(sorted(set(keys)), share, seed)
    table.columns["split_of_key"] = ["held-out" if each in held_out else "train" for each in keys]
    table.columns["held_out"] = [float(each == "held-out") for each in table.columns["split"]]
