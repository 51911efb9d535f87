"""Formats: what files of a source say (text, JSONL, Parquet, tar), and what a shard is on disk.

Each reader is a generator over one local file, in the file's own order, that holds one sample (of
Parquet: a few rows) in memory. Knows no snapshots, splits or stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.data.formats.sample import Sample, Unusable

Format = Literal["text", "jsonl", "parquet", "tar"]

SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": ("",),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet", ".pq"),
    "tar": (".tar", ".tar.gz", ".tgz"),
}


@dataclass(frozen=True)
class Fields:
    """Where a sample's text and its key are: JSONL fields, Parquet columns, a tar's extension."""

    text: str = "text"
    key: str = "key"


def reader(format_: Format) -> Callable[[Path, str, Fields], Iterator[Sample | Unusable]]:
    """Return the generator that reads one file: of (its place here, its name in the source, the
    fields). Parquet imports pyarrow, which takes a moment: only when it is asked for."""
    if format_ == "parquet":
        from paceline.data.formats.parquet import read_parquet

        return read_parquet
    from paceline.data.formats.jsonl import read_jsonl
    from paceline.data.formats.tar import read_tar
    from paceline.data.formats.text import read_text

    return {"text": read_text, "jsonl": read_jsonl, "tar": read_tar}[format_]


__all__ = ["SUFFIXES", "Fields", "Format", "Sample", "Unusable", "reader"]
