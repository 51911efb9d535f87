"""Parses untrusted bytes into a manifest, or raises ``InvalidManifest``; no other exception.

Bounds come first: the size in bytes, then the number of values and the depth, counted without
building any of them. Then JSON without duplicate keys, then each field, then the consistency of the
fields, and last the checksum over all of it. It uses no files and no network.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, NoReturn

from pydantic import Field, TypeAdapter, ValidationError

from paceline.errors import InvalidManifest
from paceline.manifest.build import MAX_FILES, check_name
from paceline.manifest.model import (
    EXACT,
    FORMATS,
    Chunk,
    FileEntry,
    Manifest,
    Signature,
    Size,
    check_paths,
)
from paceline.manifest.sizes import MAX_CHUNKS, MAX_PIECE, MAX_PIECES, MIN_ALLOWED_PIECE
from paceline.schemas import PieceHash, Sha256

MAX_MANIFEST_BYTES = 48 * 1024 * 1024  # MAX_PIECES digests of 67 bytes, and room for the rest
MAX_UNICODE_BYTES = 16 * 1024 * 1024  # one character beyond ASCII can make a str four times wider
MAX_ESCAPES = 1 << 22  # backslashes; the canonical form has one for each quote in a path
LARGE_BYTES = 1024 * 1024  # larger documents are parsed one at a time: each takes up to 256 MB
_MAX_COMMAS = MAX_PIECES + 4 * MAX_FILES + 4 * MAX_CHUNKS + 16
_MAX_OBJECTS = 2 * MAX_FILES + MAX_CHUNKS + 3  # arrays too
_DEEPEST = 4  # {"files": [{"pieces": […

_MAX_KEYS = 4 * MAX_FILES + 4 * MAX_CHUNKS + 16
_MAX_STRINGS = MAX_PIECES + 6 * MAX_FILES + 5 * MAX_CHUNKS + 32  # values and keys
# Possessive: the plain form stores every position for backtracking, and took 11 GB for one string
# of 96 MB. The closing quote is optional, so that a match at a quote never fails: a string without
# an end would be scanned again from each quote in it (52 KB took 11 s).
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_large = threading.Lock()
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},:"))
_MAX_FIELDS = 16  # of one object


@dataclass(frozen=True, slots=True)
class _Document:
    """The fields of a manifest; ``signature`` and ``piece_hash`` may be absent."""

    __pydantic_config__ = EXACT

    format: str
    model_id: str
    version: str
    total_size: Annotated[Size, Field(ge=1)]
    chunk_size: Size
    piece_size: Annotated[int, Field(strict=True, ge=MIN_ALLOWED_PIECE, le=MAX_PIECE)]
    files: Annotated[
        tuple[FileEntry, ...], Field(min_length=1, max_length=MAX_FILES, fail_fast=True)
    ]
    chunks: Annotated[tuple[Chunk, ...], Field(min_length=1, max_length=MAX_CHUNKS, fail_fast=True)]
    global_checksum: Sha256
    signature: Signature | None = None  # only its form is checked here, see ``signing``
    piece_hash: object = None


_DOCUMENT = TypeAdapter(_Document)


def parse_manifest(raw: bytes) -> Manifest:
    """Return the manifest in ``raw``; raises InvalidManifest naming got, wanted, where.

    Takes time linear in ``raw``. Large documents are parsed one at a time in a process: that bounds
    memory, and how long other threads wait for the interpreter (0.2 s; benchmarks/parsers.py).
    """
    with _large if len(raw) > LARGE_BYTES else nullcontext():
        return _parsed(raw)


def _parsed(raw: bytes) -> Manifest:
    if len(raw) > MAX_MANIFEST_BYTES:
        _refuse("manifest is too large", f"{len(raw)} bytes", f"at most {MAX_MANIFEST_BYTES}", "")
    if len(raw) > MAX_UNICODE_BYTES and not raw.isascii():
        got, wanted = f"{len(raw)} bytes beyond ASCII", f"at most {MAX_UNICODE_BYTES}"
        _refuse("manifest is too large for names beyond ASCII", got, wanted, "")
    _bound_structure(raw)
    document = _load(raw)
    piece_hash = _piece_hash(document)
    check_name("model_id", document.model_id)
    check_name("version", document.version)
    check_paths(file.path for file in document.files)
    _check_tiling(document)
    manifest = Manifest(
        model_id=document.model_id,
        version=document.version,
        piece_bytes=document.piece_size,
        chunk_bytes=document.chunk_size,
        files=document.files,
        chunks=document.chunks,
        piece_hash=piece_hash,
        signature=document.signature,
    )
    stated = document.global_checksum
    if stated != manifest.global_checksum:
        _refuse("manifest's checksum is wrong", stated, manifest.global_checksum, "global_checksum")
    return manifest


def _bound_structure(raw: bytes) -> None:
    if (escapes := raw.count(b"\\")) > MAX_ESCAPES:
        _refuse("manifest has too many escapes", escapes, MAX_ESCAPES, "")
    if (quotes := raw.count(b'"')) > 2 * _MAX_STRINGS + raw.count(b'\\"'):
        _refuse("manifest has too many strings", quotes // 2, _MAX_STRINGS, "")
    # Without its strings a document is only structure: a few bytes for each value.
    structure = _STRING.sub(b"", raw).translate(None, _NOT_STRUCTURE)
    if structure.count(b",") > _MAX_COMMAS:
        _refuse("manifest has too many values", structure.count(b","), _MAX_COMMAS, "")
    if structure.count(b":") > _MAX_KEYS:
        _refuse("manifest has too many keys", structure.count(b":"), _MAX_KEYS, "")
    brackets = structure.translate(None, b",:")
    if len(brackets) > 2 * _MAX_OBJECTS:
        _refuse("manifest has too many objects", len(brackets) // 2, _MAX_OBJECTS, "")
    if max(accumulate((1 if each in b"[{" else -1 for each in brackets), initial=0)) > _DEEPEST:
        _refuse("manifest is nested too deeply", "more", f"{_DEEPEST} levels", "")


def _load(raw: bytes) -> _Document:
    try:
        loaded = json.loads(raw.decode("utf-8"), object_pairs_hook=_each_key_once)
    except (ValueError, RecursionError) as error:
        raise InvalidManifest(
            "manifest is not JSON", got=str(error)[:200], wanted="a UTF-8 JSON object"
        ) from error
    if not isinstance(loaded, dict) or None in loaded.values():
        _refuse("not a manifest", type(loaded).__name__, "an object without null", "manifest")
    try:
        return _DOCUMENT.validate_python(loaded)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    where = "".join(f"[{n}]" if isinstance(n, int) else f".{n}"[:50] for n in first["loc"])
    value = first["input"]  # of a missing field: the whole object
    got = type(value).__name__ if isinstance(value, dict | list) else repr(value)[:100]
    raise InvalidManifest(
        "manifest has a bad value", got=got, wanted=first["msg"], where=where.lstrip(".")
    )


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        _refuse("manifest has a duplicate key", repr(twice)[:100], "each key once", "")
    if len(pairs) > _MAX_FIELDS:  # each unknown one would be an error of its own
        _refuse("object has too many keys", len(pairs), f"at most {_MAX_FIELDS}", "")
    return result


def _piece_hash(document: _Document) -> PieceHash:
    if document.format not in FORMATS.values():
        known = " or ".join(FORMATS.values())
        _refuse("unknown manifest format", repr(document.format)[:100], known, "format")
    # A manifest of SHA-256 pieces has one form, the older format.
    piece_hash: PieceHash = "sha256" if document.format == FORMATS["sha256"] else "blake3"
    wanted = None if piece_hash == "sha256" else piece_hash
    if document.piece_hash != wanted:
        _refuse("unknown piece hash", repr(document.piece_hash)[:100], repr(wanted), "piece_hash")
    return piece_hash


def _check_tiling(document: _Document) -> None:
    """Check that files and chunks both tile ``[0, total_size)``, that files have as many pieces as
    their size needs, and that chunks hold whole pieces.
    """
    piece, total, offset = document.piece_size, document.total_size, 0
    for index, chunk in enumerate(document.chunks):
        if (chunk.chunk_id, chunk.offset) != (index, offset):
            got, wanted = f"chunk {chunk.chunk_id} at {chunk.offset}", f"{index} at {offset}"
            _refuse("chunks are not consecutive", got, wanted, f"chunks[{index}]")
        if not 1 <= chunk.size <= document.chunk_size:
            wanted = f"1 to {document.chunk_size} bytes"
            _refuse("chunk has a bad size", chunk.size, wanted, f"chunks[{index}].size")
        offset += chunk.size
    for index, file in enumerate(document.files):
        if len(file.pieces) != (wanted_pieces := -(-file.size // piece)):
            where = f"files[{index}].pieces"
            _refuse("wrong number of pieces", len(file.pieces), wanted_pieces, where)
    for what, end in (("files", sum(file.size for file in document.files)), ("chunks", offset)):
        if end != total:
            _refuse(f"{what} do not tile the model", f"{end} bytes", f"{total} bytes", what)
    if piece > document.chunk_size:
        _refuse("chunk is smaller than a piece", document.chunk_size, piece, "chunk_size")
    if sum(len(file.pieces) for file in document.files) > MAX_PIECES:
        _refuse("too many pieces", "more", MAX_PIECES, "files[].pieces")
    edges = accumulate((file.size for file in document.files), initial=0)
    start, end = next(edges), next(edges)
    for chunk in document.chunks:
        while end <= chunk.offset:
            start, end = end, next(edges)
        if (chunk.offset - start) % piece:
            _refuse("chunk begins inside a piece", chunk.offset, f"{start} + n x {piece}", "chunks")


def _refuse(what: str, got: object, wanted: object, where: str) -> NoReturn:
    raise InvalidManifest(what, got=got, wanted=wanted, where=where or None)
