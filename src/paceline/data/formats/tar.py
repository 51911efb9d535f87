"""WebDataset tar: members of one key that stand together are one sample.

``dir/000017.frames.npy`` belongs to the sample ``dir/000017`` as ``frames``. By extension: npy is
an array, json gives numbers and perhaps the text, txt (or the text field's own extension) is the
text, cls is a whole number, anything else is kept as bytes (uint8), for a transform to decode.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.formats.jsonl import sample_of
from paceline.data.formats.sample import (
    MAX_SAMPLE_BYTES,
    Array,
    Sample,
    Unusable,
    checked,
    clean_array,
)
from paceline.errors import InvalidInput

MAX_MEMBERS = 256  # of one sample


def read_tar(path: Path, name: str, fields: Any) -> Iterator[Sample | Unusable]:
    """Yield the file's samples; ``fields``: see ``formats.Fields``."""
    key: str | None = None
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # or the list of all members stays in memory
                if not member.isfile():
                    continue
                its_key, extension = _split(member.name)
                if its_key != key:
                    if key is not None:
                        yield _sample(key, members, fields.text)
                    key, members = its_key, {}
                held = sum(len(each) for each in members.values())
                if held + member.size > MAX_SAMPLE_BYTES or len(members) >= MAX_MEMBERS:
                    members[""] = b""  # told apart below; the rest of it is not kept
                    continue
                body = archive.extractfile(member)
                assert body is not None  # it is a file
                members[extension] = body.read()
            if key is not None:
                yield _sample(key, members, fields.text)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InvalidInput(
            "tar file cannot be read", got=str(error)[:300], where=name, do="Write it again."
        ) from error


def _split(name: str) -> tuple[str, str]:
    """Return key and extension: the base name's first dot parts them."""
    directory, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{directory}{slash}{stem}", extension


def _sample(key: str, members: dict[str, bytes], text_field: str) -> Sample | Unusable:
    if "" in members:
        return Unusable(key, "a member without extension, or too large")
    text: bytes | None = None
    features: dict[str, Array] = {}
    for extension, body in sorted(members.items()):
        *stem, kind = extension.split(".")
        column = ".".join(stem) or kind
        if extension == text_field or (text is None and extension == "txt"):
            text = body
            continue
        try:
            found = _decoded(key, column, kind, body, text_field)
        except (ValueError, OSError, EOFError, RecursionError, SyntaxError) as error:
            return Unusable(key, f"{extension}: {str(error)[:100]}")
        if isinstance(found, Unusable):
            return found
        text = found.text if found.text is not None else text
        if twice := set(features) & set(found.features):
            return Unusable(key, f"{min(twice)!r} is there twice")
        features |= found.features
    return checked(Sample(key, text, None, features))


def _decoded(key: str, column: str, kind: str, body: bytes, text_field: str) -> Sample | Unusable:
    if kind == "json":
        import json

        value = json.loads(body)
        if not isinstance(value, dict):
            value = {column: value}
        if not set(value) - {text_field} and isinstance(value.get(text_field), str):
            return Sample(key, value[text_field].encode())
        found = sample_of(key, value, text_field)
        # A member that says nothing in numbers is no reason to refuse the others.
        return Sample(key) if isinstance(found, Unusable) and "neither" in found.reason else found
    if kind == "npy":
        array = clean_array(np.load(io.BytesIO(body), allow_pickle=False))
    elif kind == "cls":
        array = np.array(int(body), dtype=np.int64)
    else:
        array = np.frombuffer(body, dtype=np.uint8)
    return Sample(key, None, None, {column: array})
