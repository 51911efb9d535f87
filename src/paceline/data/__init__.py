"""Data: immutable snapshots of sharded text in S3, streamed, packed and validated.

A snapshot is named by its content: the same files, split and labels give the same digest. Knows no
model and no training; pandas and Great Expectations are imported when a snapshot is validated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.data.build import build_snapshot
from paceline.data.shards import Document, ShardCache, documents
from paceline.data.snapshot import Shard, Snapshot, Split, load_snapshot, require_purpose
from paceline.data.validate import ValidationReport, require_valid, validate_snapshot

if TYPE_CHECKING:
    from paceline.data.stream import Batch, SampleOrder, SampleStream

_LATE = {"Batch", "SampleOrder", "SampleStream"}  # they need numpy


def __getattr__(name: str) -> Any:
    if name in _LATE:
        from paceline.data import stream

        return getattr(stream, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Batch",
    "Document",
    "SampleOrder",
    "SampleStream",
    "Shard",
    "ShardCache",
    "Snapshot",
    "Split",
    "ValidationReport",
    "build_snapshot",
    "documents",
    "load_snapshot",
    "require_purpose",
    "require_valid",
    "validate_snapshot",
]
