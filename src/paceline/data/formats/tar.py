"""WebDataset tar reader: adjacent members with the same key are one sample.

``dir/000017.frames.npy`` belongs to the sample ``dir/000017`` as ``frames``. By extension: npy is
an array, json gives numbers and perhaps the text, txt (or the text field's own extension) is the
text, cls is an integer, anything else is stored as bytes (uint8) for a transform to decode.

Reads forward, one member at a time. The standard library parses the header blocks; what lies
between (long names, PAX records, sparse maps) is parsed here, because ``tarfile`` reads it whole,
with regular expressions that can take quadratic time, and recursively.
"""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data.formats.decompressed import Damaged, Decompressed
from paceline.data.formats.sample import (
    MAX_SAMPLE_BYTES,
    Array,
    Fields,
    Sample,
    UnusableSample,
    check_sample,
    clean_array,
    parsed_json,
    require_numbers,
)
from paceline.data.formats.text import sample_of
from paceline.errors import InvalidInput

MAX_MEMBERS = 256  # per sample
MAX_EXTENSION_BYTES = 1024 * 1024  # of a long name, or PAX records
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE)
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def read_tar(path: Path, name: str, fields: Fields) -> Iterator[Sample | UnusableSample]:
    """Yield the file's samples.

    Raises InvalidInput where the archive itself is damaged.
    """
    key: str | None = None
    members: dict[str, bytes] = {}
    held, fault = 0, None
    try:
        with Decompressed(path) as file:
            for member in _members(file):
                its_key, extension = _split(member.name)
                if its_key != key:
                    if key is not None:
                        yield _sample(key, members, fault, fields.text)
                    key, members, held, fault = its_key, {}, 0, None
                held += member.size
                if not extension:
                    fault = fault or "a member without extension"
                elif held > MAX_SAMPLE_BYTES or len(members) >= MAX_MEMBERS:
                    fault = fault or "too large"
                fault = fault or member.fault
                if fault is None:
                    members[extension] = member.read(file)
                else:
                    members = {}  # drop what was read of the sample
            if key is not None:
                yield _sample(key, members, fault, fields.text)
    except (Damaged, OSError) as error:
        raise InvalidInput(
            "tar file cannot be read", got=str(error)[:300], where=name, do="Write it again."
        ) from error


@dataclass
class _Member:
    """A regular file of an archive; its content follows, until ``left`` bytes are read."""

    name: str
    size: int
    left: int  # including the padding of its last block
    fault: str | None = None

    def read(self, file: Decompressed) -> bytes:
        body = file.read(self.size)
        if len(body) < self.size:
            raise Damaged("it ends within a member")
        self.left -= self.size
        return body


def _members(file: Decompressed) -> Iterator[_Member]:
    """Yield the archive's regular files; skips the unread rest of one before the next."""
    name: str | None = None  # from extension headers, for the next member
    size: int | None = None
    fault: str | None = None
    while (info := _header(file)) is not None:
        if info.type in (*_NAMES, *_PAX, tarfile.XGLTYPE):
            if info.type not in (tarfile.GNUTYPE_LONGNAME, *_PAX):
                file.skip(_blocks(info.size))  # link targets, global PAX records
            elif info.size > MAX_EXTENSION_BYTES:
                fault = f"a header of {info.size} bytes, at most {MAX_EXTENSION_BYTES} wanted"
                file.skip(_blocks(info.size))
            else:
                raw = file.read(info.size)
                file.skip(_blocks(info.size) - len(raw))
                if info.type == tarfile.GNUTYPE_LONGNAME:
                    name = _text(raw.partition(b"\0")[0])
                else:
                    try:
                        name, size = _pax(raw, name, size)
                    except ValueError as error:
                        fault = f"PAX records: {error}"
            continue
        if info.type == tarfile.GNUTYPE_SPARSE or (size is not None and size < 0):
            fault = "a sparse member: make the archive without sparse files"
        if info.type in _FILES:
            held = info.size if size is None or size < 0 else size
            member = _Member(info.name if name is None else name, held, _blocks(held), fault)
            yield member
            file.skip(member.left)
        elif info.type not in tarfile.SUPPORTED_TYPES:
            file.skip(_blocks(info.size))
        name, size, fault = None, None, None
    if (name, size, fault) != (None, None, None):
        raise Damaged("it ends after the header of a member")


def _header(file: Decompressed) -> tarfile.TarInfo | None:
    """Return the next header, None at the end of the archive."""
    block = file.read(tarfile.BLOCKSIZE)
    if not block.strip(b"\0") and len(block) in (0, tarfile.BLOCKSIZE):
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise Damaged(f"a header is damaged: {error}") from error
    if info.size < 0:
        raise Damaged(f"a member of {info.size} bytes")
    more = info.type == tarfile.GNUTYPE_SPARSE and block[482]
    while more:  # extension blocks of a sparse member's map
        block = file.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise Damaged("it ends within a sparse member's map")
        more = block[504]
    return info


def _pax(raw: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Return the name and size in PAX records, or the given ones where they have none.

    A size of -1 marks a sparse member. Raises ValueError for malformed records.
    """
    at = 0
    while at < len(raw) and raw[at]:
        space = raw.find(b" ", at, at + 20)
        if space < 0 or not raw[at:space].isdigit():
            raise ValueError("no length")
        end = at + int(raw[at:space])
        if not space + 1 < end <= len(raw):
            raise ValueError("a length that leaves them")
        keyword, _, value = raw[space + 1 : end - 1].partition(b"=")
        if keyword == b"path":
            name = _text(value)
        elif keyword == b"size" and size != -1:
            if not value.isdigit() or len(value) > 20:
                raise ValueError("a size that is no number")
            size = int(value)
        elif keyword.startswith(b"GNU.sparse."):
            size = -1
        at = end
    return name, size


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape").rstrip("/")


def _blocks(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _split(name: str) -> tuple[str, str]:
    """Return key and extension, separated at the first dot of the base name."""
    directory, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{directory}{slash}{stem}", extension


def _sample(
    key: str, members: dict[str, bytes], fault: str | None, text_field: str
) -> Sample | UnusableSample:
    if fault is not None:
        return UnusableSample(key, fault)
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
        except (ValueError, OverflowError) as error:
            return UnusableSample(key, f"{extension[:100]}: {str(error)[:100]}")
        if isinstance(found, UnusableSample):
            return found
        text = found.text if found.text is not None else text
        if twice := set(features) & set(found.features):
            return UnusableSample(key, f"{min(twice)!r} is there twice")
        features |= found.features
    return check_sample(Sample(key, text, None, features))


def _decoded(
    key: str, column: str, kind: str, body: bytes, text_field: str
) -> Sample | UnusableSample:
    if kind == "json":
        value = parsed_json(body)
        if not isinstance(value, dict):
            value = {column: value}
        if not set(value) - {text_field} and isinstance(value.get(text_field), str):
            return Sample(key, value[text_field].encode())
        found = sample_of(key, value, text_field)
        # A JSON member without numbers is no reason to reject the others.
        is_empty = isinstance(found, UnusableSample) and "neither" in found.reason
        return Sample(key) if is_empty else found
    if kind == "npy":
        array = _npy(body)
    elif kind == "cls":
        array = np.array(int(body), dtype=np.int64)
    else:
        array = np.frombuffer(body, dtype=np.uint8)
    return Sample(key, None, None, {column: array})


def _npy(body: bytes) -> Array:
    """Return the array of an npy file, as a view where possible.

    Raises ValueError for an invalid file, and for one whose header claims more data than it has.
    """
    file = io.BytesIO(body)
    parse = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(file)
        if version not in parse:  # 3.0 is for field names, not for numbers
            raise ValueError(f"version {version}")
        shape, in_columns, dtype = parse[version](file)
    except Exception as error:  # numpy evaluates Python: its parser can raise anything
        raise ValueError(f"not npy: {type(error).__name__}: {str(error)[:60]}") from error
    require_numbers(dtype, shape)
    claimed, there = math.prod(shape) * dtype.itemsize, len(body) - file.tell()
    if claimed > there:
        raise ValueError(f"claims {claimed} bytes of numbers, has {there}")
    flat = np.frombuffer(body, dtype, math.prod(shape), file.tell())
    return clean_array(flat.reshape(shape, order="F" if in_columns else "C"))
