"""Data sets: immutable snapshots of sharded samples in S3 or on disk, streamed, packed, validated.

A snapshot is named by its content: the same files, split and labels give the same digest. Does not
depend on models or training; imports pandas and Great Expectations only to validate a snapshot.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.data.loading.samples import Document, content_digest, documents
from paceline.data.loading.shards import ShardCache
from paceline.data.snapshot import Shard, Snapshot, Split, load_snapshot, require_purpose
from paceline.data.validation import ValidationReport, require_valid, validate_snapshot

if TYPE_CHECKING:
    from paceline.data.build import build_snapshot
    from paceline.data.loading.batch import Batch
    from paceline.data.loading.stream import PlannedStream, Stream, open_stream
    from paceline.data.tokenizer import tokenizer_of

# Imported on first use, because they need numpy.
_LATE = {
    "Batch": "loading.batch",
    "build_snapshot": "build",
    "PlannedStream": "loading.stream",
    "Stream": "loading.stream",
    "open_stream": "loading.stream",
    "tokenizer_of": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"paceline.data.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Batch",
    "Document",
    "PlannedStream",
    "Shard",
    "ShardCache",
    "Snapshot",
    "Split",
    "Stream",
    "ValidationReport",
    "build_snapshot",
    "content_digest",
    "documents",
    "load_snapshot",
    "open_stream",
    "require_purpose",
    "require_valid",
    "tokenizer_of",
    "validate_snapshot",
]
