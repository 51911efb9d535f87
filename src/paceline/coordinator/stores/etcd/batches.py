"""How much goes into one of etcd's transactions, and changes as the operations of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.coordinator.stores.etcd.layout import Change, Put
from paceline.coordinator.stores.etcd.messages import delete, put

OPS = 100  # of one transaction: etcd takes 128
BYTES = 1_000_000  # of one transaction: etcd takes 1.5 MiB


def _size(change: Change) -> int:
    if isinstance(change, Put):
        return len(change.key) + len(change.value)
    return len(change.start) + len(change.end)


def fits(changes: Sequence[Change]) -> bool:
    """Return whether ``changes`` go into one transaction, beside the tip."""
    return len(changes) < OPS and sum(map(_size, changes)) < BYTES


def batches(changes: Iterable[Change]) -> Iterable[list[Change]]:
    """Yield ``changes`` in order, as many at once as fit."""
    batch: list[Change] = []
    for each in changes:
        if not fits([*batch, each]):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def ops_of(changes: Iterable[Change]) -> list[Any]:
    """Return ``changes`` as operations."""
    return [
        put(each.key, each.value) if isinstance(each, Put) else delete(each.start, each.end)
        for each in changes
    ]
