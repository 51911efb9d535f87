"""Text: each file is one document, named by its path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.data.formats.sample import MAX_DOCUMENT_BYTES, Sample, Unusable, checked


def read_text(path: Path, name: str, fields: object = None) -> Iterator[Sample | Unusable]:
    """Yield the file's document; ``fields`` mean nothing here."""
    del fields
    try:
        with path.open("rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        yield Unusable(name, error.strerror or "unreadable")
        return
    yield checked(Sample(name, text))
