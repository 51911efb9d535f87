"""Readers of JSONL (each line is a sample) and of text files (each file is a document).

In JSONL one field is the text, one the key, and numbers are features; other fields are dropped. A
line without a key field is named by its file and line number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.data.formats.sample import (
    MAX_COLUMN_NAME,
    MAX_DOCUMENT_BYTES,
    MAX_JSON_BYTES,
    Sample,
    UnusableSample,
    checked,
    json_array,
    parsed_json,
)
from paceline.errors import InvalidInput


def read_jsonl(path: Path, name: str, fields: Any) -> Iterator[Sample | UnusableSample]:
    """Yield the file's samples; ``fields``: see ``formats.Fields``.

    Raises InvalidInput for a file that the disk cannot read.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_JSON_BYTES + 1):
                number += 1
                where = f"{name}:{number}"
                if line.strip():
                    yield _sample(line, where, fields)
                while len(line) > MAX_JSON_BYTES and not line.endswith(b"\n"):
                    line = file.readline(MAX_JSON_BYTES + 1)  # skip the rest of the line
    except OSError as error:
        raise InvalidInput(
            "JSONL file cannot be read", got=error.strerror or str(error), where=name
        ) from error


def _sample(line: bytes, where: str, fields: Any) -> Sample | UnusableSample:
    try:
        value = parsed_json(line)
    except ValueError as error:
        return UnusableSample(where, str(error))
    if not isinstance(value, dict):
        return UnusableSample(where, "not an object")
    key = value.pop(fields.key, None)
    if key is not None and not isinstance(key, str | int):
        return UnusableSample(where, f"its {fields.key!r} is no name")
    return sample_of(where if key is None else str(key), value, fields.text)


def sample_of(key: str, value: Mapping[str, object], text_field: str) -> Sample | UnusableSample:
    """Return the sample in a JSON object."""
    text = value.get(text_field)
    if text is not None and not isinstance(text, str):
        return UnusableSample(key, f"its {text_field!r} is no text")
    features = {}
    for name, each in value.items():
        try:
            array = None if name == text_field else json_array(each)
        except (ValueError, OverflowError) as error:  # ragged, or an integer larger than any float
            return UnusableSample(key, f"{name[:MAX_COLUMN_NAME]!r}: {str(error)[:100]}")
        if array is not None:
            features[name] = array
    try:
        encoded = None if text is None else text.encode("utf-8")
    except UnicodeEncodeError:  # an unpaired surrogate, which JSON can encode
        return UnusableSample(key, "not UTF-8")
    return checked(Sample(key, encoded, None, features))


def read_text(path: Path, name: str, fields: object = None) -> Iterator[Sample | UnusableSample]:
    """Yield the file as one document, named by its path; ``fields`` are ignored."""
    del fields
    try:
        with path.open("rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        yield UnusableSample(name, error.strerror or "unreadable")
        return
    yield checked(Sample(name, text))
