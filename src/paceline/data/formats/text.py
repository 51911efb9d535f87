"""The reader of each source format; here those of text (a file is a document) and of JSONL.

In JSONL one field is the text, one the key, and numbers are features; other fields are dropped. A
line without text is a conversation if it has ``messages``, or ``prompt`` and ``completion``. One
without a key field is named by its file and line number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.data.formats.decompressed import Damaged, Decompressed
from paceline.data.formats.sample import (
    MAX_COLUMN_NAME,
    MAX_DOCUMENT_BYTES,
    MAX_JSON_BYTES,
    Fields,
    Sample,
    UnusableSample,
    check_sample,
    conversation_of,
    is_conversation,
    json_array,
    parsed_json,
)
from paceline.errors import InvalidInput

SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": ("",),
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz"),
    "parquet": (".parquet", ".pq"),
    "tar": (".tar", ".tar.gz", ".tgz"),
}
Reader = Callable[[Path, str, Fields], Iterator[Sample | UnusableSample]]


@contextmanager
def open_reader(format_: str) -> Iterator[Reader]:
    """Yield the reader of a format: a generator function of (path, name in the source, fields).

    Parquet is read in a separate process, which ends with this context.
    """
    if format_ == "parquet":
        from paceline.data.formats.parquet_process import ParquetProcess

        with ParquetProcess() as process:
            yield process.samples
        return
    from paceline.data.formats.tar import read_tar

    yield {"text": read_text, "jsonl": read_jsonl, "tar": read_tar}[format_]


def read_jsonl(path: Path, name: str, fields: Fields) -> Iterator[Sample | UnusableSample]:
    """Yield the file's samples; raises InvalidInput for a file that the disk cannot read."""
    try:
        with Decompressed(path) as file:
            number = 0
            while line := file.readline(MAX_JSON_BYTES + 1):
                number += 1
                where = f"{name}:{number}"
                if line.strip():
                    yield _sample(line, where, fields)
                while len(line) > MAX_JSON_BYTES and not line.endswith(b"\n"):
                    line = file.readline(MAX_JSON_BYTES + 1)  # skip the rest of the line
    except (Damaged, OSError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise InvalidInput("JSONL file cannot be read", got=got, where=name) from error


def _sample(line: bytes, where: str, fields: Fields) -> Sample | UnusableSample:
    try:
        value = parsed_json(line)
    except ValueError as error:
        return UnusableSample(where, str(error))
    if not isinstance(value, dict):
        return UnusableSample(where, "not an object")
    key = value.pop(fields.key, None)
    if key is not None and not isinstance(key, str | int):
        return UnusableSample(where, f"its {fields.key!r} is no name")
    named = where if key is None else str(key)
    named = fields.name(named, lambda column: value.pop(column, None))
    return sample_of(named, value, fields.text)


def sample_of(key: str, value: Mapping[str, object], text_field: str) -> Sample | UnusableSample:
    """Return the sample in a JSON object."""
    text = value.get(text_field)
    if text is None and is_conversation(value):
        return conversation_of(key, value)
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
    return check_sample(Sample(key, encoded, None, features))


def read_text(path: Path, name: str, fields: Fields) -> Iterator[Sample | UnusableSample]:
    """Yield the file as one document, named by its path; ``fields`` are ignored."""
    del fields
    try:
        with path.open("rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        yield UnusableSample(name, error.strerror or "unreadable")
        return
    yield check_sample(Sample(name, text))
