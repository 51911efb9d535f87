"""File formats: readers of source files (text, JSONL, Parquet, tar), and the shard format.

Each reader is a generator over one local file, in the file's own order, that holds one sample (for
Parquet: a few rows) in memory. Does not depend on splits or stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.data.formats.sample import Sample, UnusableSample

Format = Literal["text", "jsonl", "parquet", "tar"]

SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": ("",),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet", ".pq"),
    "tar": (".tar", ".tar.gz", ".tgz"),
}


@dataclass(frozen=True)
class Fields:
    """The location of a sample's text and key: JSONL fields, Parquet columns, a tar member's
    extension."""

    text: str = "text"
    key: str = "key"


Reader = Callable[[Path, str, Fields], Iterator[Sample | UnusableSample]]


@contextmanager
def open_reader(format_: Format) -> Iterator[Reader]:
    """Yield the reader of a format: a generator function of (path, name in the source, fields).

    Parquet is read in a separate process, which ends with this context.
    """
    if format_ == "parquet":
        from paceline.data.formats.parquet_process import ParquetProcess

        with ParquetProcess() as process:
            yield process.samples
        return
    from paceline.data.formats.tar import read_tar
    from paceline.data.formats.text import read_jsonl, read_text

    yield {"text": read_text, "jsonl": read_jsonl, "tar": read_tar}[format_]


__all__ = ["SUFFIXES", "Fields", "Format", "Sample", "UnusableSample", "open_reader"]
