"""How data is shared out: which split a sample belongs to (a pure function of its key and the
snapshot's seed), and whether rows can be read in so many columns. Knows no numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from paceline.errors import InvalidInput


def in_held_out(key: str, share: float, seed: int) -> bool:
    """Return whether a sample belongs to the held-out split: a function of its key and the seed."""
    return draw(key, seed) < share


def assign_splits(keys: Sequence[str], share: float, seed: int) -> set[str]:
    """Return the held-out keys; of few samples, at least one falls on each side."""
    held_out = {key for key in keys if in_held_out(key, share, seed)}
    by_draw = sorted(keys, key=lambda key: (draw(key, seed), key))
    if not held_out:
        held_out = {by_draw[0]}
    elif len(held_out) == len(keys):
        held_out.remove(by_draw[-1])
    return held_out


def draw(key: str, seed: int) -> float:
    """Return a number in [0, 1) that is the key's own under this seed."""
    digest = hashlib.sha256(f"split:{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64


def require_columns(columns: int, global_batch: int) -> None:
    """Raise InvalidInput unless ``columns`` divide the rows of a global batch; 0: any number may be
    chosen."""
    if columns and global_batch % columns:
        raise InvalidInput(
            "columns do not divide the global batch",
            got=f"{columns} columns, {global_batch} sequences",
            wanted="a divisor",
            where="data.columns",
            do="Set data.columns to a divisor of training.batch_sequences, or to 0.",
        )


def require_batching(batching: str, columns: Sequence[str]) -> None:
    """Raise InvalidInput where samples with ``columns`` cannot be batched so."""
    if batching == "windows" and columns:
        raise InvalidInput(
            "windows have no features: they cross the edges of samples",
            got=f"samples with {', '.join(columns)}",
            wanted="data.batching packed, bucketed or carried",
            where="data.batching",
            do="Set data.batching=packed (fields of JSONL that are numbers are features), or leave "
            "those fields out.",
        )
