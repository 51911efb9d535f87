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
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, NoReturn

from paceline.errors import InvalidManifest
from paceline.manifest.build import MAX_FILES, check_name
from paceline.manifest.model import FORMAT, Chunk, FileEntry, Manifest, Signature, check_paths
from paceline.manifest.sizes import LEAST_PIECE, MAX_CHUNKS, MAX_PIECE, MAX_PIECES

MAX_MANIFEST_BYTES = 48 * 1024 * 1024  # MAX_PIECES digests of 67 bytes, and room for the rest
MAX_UNICODE_BYTES = 16 * 1024 * 1024  # one character beyond ASCII can make a str four times wider
MAX_ESCAPES = 1 << 22  # backslashes; the canonical form has one for each quote in a path
MAX_TOTAL = 1 << 50  # a petabyte, far below what JSON numbers hold exactly
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
_HEX = re.compile(r"[0-9a-f]*")
_TOP = {
    "format": str,
    "model_id": str,
    "version": str,
    "total_size": int,
    "chunk_size": int,
    "piece_size": int,
    "files": list,
    "chunks": list,
    "global_checksum": str,
}
_FILE = {"path": str, "size": int, "sha256": str, "pieces": list}
_SIGNATURE: dict[str, type] = {"public_key": str, "value": str}
_CHUNK = {"chunk_id": int, "offset": int, "size": int, "checksum": str}


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
    loaded = _load(raw)
    signature = _signature(loaded.pop("signature")) if _is_signed(loaded) else None
    document = _fields(loaded, _TOP, "manifest")
    if document["format"] != FORMAT:
        _refuse("unknown manifest format", repr(document["format"])[:100], FORMAT, "format")
    model_id = check_name("model_id", document["model_id"])
    version = check_name("version", document["version"])
    piece = _number(document["piece_size"], LEAST_PIECE, MAX_PIECE, "piece_size")
    chunk = _number(document["chunk_size"], piece, MAX_TOTAL, "chunk_size")
    files = _files(document["files"], piece)
    chunks = _chunks(document["chunks"], chunk)
    _check_tiling(document["total_size"], files, chunks, piece)
    manifest = Manifest.of(
        model_id=model_id,
        version=version,
        piece_bytes=piece,
        chunk_bytes=chunk,
        files=files,
        chunks=chunks,
        signature=signature,
    )
    stated = _digest(document["global_checksum"], "global_checksum")
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


def _load(raw: bytes) -> Any:
    def refuse_number(text: str) -> NoReturn:
        _refuse("manifest has a number that is no integer", text[:50], "an integer", "")

    def integer(text: str) -> int:
        if len(text) > 20:
            _refuse("number is too long", f"{len(text)} digits", "at most 20", "")
        return int(text)

    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=refuse_number,
            parse_float=refuse_number,
            parse_int=integer,
        )
    except (ValueError, RecursionError) as error:
        raise InvalidManifest(
            "manifest is not JSON", got=str(error)[:200], wanted="a UTF-8 JSON object"
        ) from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        _refuse("manifest has a duplicate key", repr(twice)[:100], "each key once", "")
    return result


def _fields(value: Any, kinds: dict[str, type], where: str) -> dict[str, Any]:
    if type(value) is not dict:
        _refuse("not an object", type(value).__name__, "an object", where)
    if value.keys() != kinds.keys():
        got = ", ".join(sorted(repr(key)[:40] for key in list(value)[:20])) or "none"
        _refuse("wrong keys", got, ", ".join(kinds), where)
    for key, kind in kinds.items():
        if type(value[key]) is not kind:  # exactly: True is not an integer here
            _refuse("wrong type", type(value[key]).__name__, kind.__name__, f"{where}.{key}")
    return value


def _is_signed(document: Any) -> bool:
    return type(document) is dict and "signature" in document


def _signature(value: Any) -> Signature:
    # Only the form; ``signing`` checks the key and the signature.
    fields = _fields(value, _SIGNATURE, "signature")
    public_key = _digest(fields["public_key"], "signature.public_key")
    text = fields["value"]
    if len(text) != 128 or not _HEX.fullmatch(text):
        _refuse("bad signature", repr(text)[:100], "128 lower-case hex digits", "signature.value")
    return Signature(public_key, text)


def _files(values: list[Any], piece: int) -> tuple[FileEntry, ...]:
    if not 1 <= len(values) <= MAX_FILES:
        _refuse("bad number of files", len(values), f"1 to {MAX_FILES}", "files")
    files = []
    for index, value in enumerate(values):
        where = f"files[{index}]"
        fields = _fields(value, _FILE, where)
        size = _number(fields["size"], 0, MAX_TOTAL, f"{where}.size")
        digests = fields["pieces"]
        wanted = -(-size // piece)
        if len(digests) != wanted:
            _refuse("wrong number of pieces", len(digests), wanted, f"{where}.pieces")
        _digests(digests, f"{where}.pieces")
        sha256 = _digest(fields["sha256"], f"{where}.sha256")
        files.append(FileEntry(fields["path"], size, sha256, tuple(digests)))
    check_paths(file.path for file in files)
    return tuple(files)


def _chunks(values: list[Any], chunk_bytes: int) -> tuple[Chunk, ...]:
    if not 1 <= len(values) <= MAX_CHUNKS:
        _refuse("bad number of chunks", len(values), f"1 to {MAX_CHUNKS}", "chunks")
    chunks = []
    offset = 0
    for index, value in enumerate(values):
        where = f"chunks[{index}]"
        fields = _fields(value, _CHUNK, where)
        _number(fields["chunk_id"], index, index, f"{where}.chunk_id")
        _number(fields["offset"], offset, offset, f"{where}.offset")
        size = _number(fields["size"], 1, chunk_bytes, f"{where}.size")
        checksum = _digest(fields["checksum"], f"{where}.checksum")
        chunks.append(Chunk(index, offset, size, checksum))
        offset += size
    return tuple(chunks)


def _check_tiling(
    total: int, files: tuple[FileEntry, ...], chunks: tuple[Chunk, ...], piece: int
) -> None:
    """Check that files and chunks both tile ``[0, total)`` and that chunks hold whole pieces."""
    total = _number(total, 1, MAX_TOTAL, "total_size")
    for what, end in (
        ("files", sum(file.size for file in files)),
        ("chunks", chunks[-1].offset + chunks[-1].size),
    ):
        if end != total:
            _refuse(f"{what} do not tile the model", f"{end} bytes", f"{total} bytes", what)
    if sum(len(file.pieces) for file in files) > MAX_PIECES:
        _refuse("too many pieces", "more", MAX_PIECES, "files[].pieces")
    edges = iter([*accumulate((file.size for file in files), initial=0)])
    start, end = next(edges), next(edges)
    for chunk in chunks:
        while end <= chunk.offset:
            start, end = end, next(edges)
        if (chunk.offset - start) % piece:
            _refuse("chunk begins inside a piece", chunk.offset, f"{start} + n x {piece}", "chunks")


def _digests(values: list[Any], where: str) -> None:
    # One pass of C code for all of a file's digests; the slow path only names the invalid one.
    good: Callable[[Any], bool] = lambda each: type(each) is str and len(each) == 64  # noqa: E731
    if all(map(good, values)) and _HEX.fullmatch("".join(values)):
        return
    for index, value in enumerate(values):
        if type(value) is not str:
            _refuse("wrong type", type(value).__name__, "str", f"{where}[{index}]")
        _digest(value, f"{where}[{index}]")


def _digest(value: str, where: str) -> str:
    if len(value) != 64 or not _HEX.fullmatch(value):
        _refuse("bad digest", repr(value)[:100], "64 lower-case hex digits", where)
    return value


def _number(value: int, least: int, most: int, where: str) -> int:
    if not least <= value <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        _refuse("number out of range", value, wanted, where)
    return value


def _refuse(what: str, got: object, wanted: object, where: str) -> NoReturn:
    raise InvalidManifest(what, got=got, wanted=wanted, where=where or None)
