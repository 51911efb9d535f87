"""The manifest itself: one model version as a byte stream of files, pieces and chunks.

Files are concatenated in the order of ``files``. Each is cut into pieces of ``piece_bytes`` (the
last one shorter), so that a piece never crosses a file's edge; pieces are numbered through the
whole stream. A chunk is a run of whole pieces; chunks tile ``[0, total_size)``.

**Canonical form.** The document is the JSON object ::

    {"format": "paceline-manifest/2", "model_id", "version", "total_size",
     "chunk_size", "piece_size", "piece_hash": "blake3",
     "files":  [{"path", "size", "sha256", "pieces": [the piece hash of each piece]}],
     "chunks": [{"chunk_id", "offset", "size", "checksum": SHA-256 of the chunk's bytes}],
     "global_checksum",
     "signature": {"public_key", "value"}}    (only where it is signed; see ``signing``)

written by ``schemas.canonical_json``: keys sorted by code point, no spaces, UTF-8 without escapes
beyond JSON's own, integers in plain decimal. ``global_checksum`` is the SHA-256 of that same form
of the document *without* the keys ``global_checksum`` and ``signature``; it covers every digest,
name and size, and is what the rest of the code calls the manifest's digest.

A manifest whose pieces are hashed with SHA-256 has the format ``paceline-manifest/1`` and no
``piece_hash``: so there is one form of each manifest, and versions published before there was a
choice keep their digests.

This module reads and writes no files and does not validate what it is given: ``parse`` and
``build`` do.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Annotated, Protocol

from blake3 import blake3
from pydantic import ConfigDict, Field

from paceline.errors import CorruptData, InvalidManifest
from paceline.schemas import PieceHash, Sha256, canonical_json

FORMATS: dict[PieceHash, str] = {
    "sha256": "paceline-manifest/1",
    "blake3": "paceline-manifest/2",
}  # by piece hash
MANIFEST_FILE = "manifest.json"  # beside the model's files, never one of them


class Hash(Protocol):
    """An incremental hash, as ``hashlib`` has them; use it from one thread at a time."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object:
        """Hash more bytes; releases the GIL."""
        ...

    def hexdigest(self) -> str:
        """Return the digest so far in hex."""
        ...


# Digests of 32 bytes. Per CPU-second BLAKE3 hashes 5.8 GB, SHA-256 1.3 GB with SHA instructions and
# 0.4 GB without.
PIECE_HASHES: dict[PieceHash, Callable[[], Hash]] = {"blake3": blake3, "sha256": hashlib.sha256}


# What ``parse`` requires of the fields below, by pydantic.
EXACT = ConfigDict(extra="forbid")
MAX_TOTAL = 1 << 50  # a petabyte, far below what JSON numbers hold exactly
Size = Annotated[int, Field(strict=True, ge=0, le=MAX_TOTAL)]
SignatureHex = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the model; ``path`` is relative, with ``/`` between its components."""

    __pydantic_config__ = EXACT

    path: str
    size: Size
    sha256: Sha256
    pieces: Annotated[tuple[Sha256, ...], Field(fail_fast=True)]  # digest of each piece, in order


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of whole pieces; ``checksum`` is the SHA-256 of its bytes."""

    __pydantic_config__ = EXACT

    chunk_id: Size
    offset: Size
    size: Size
    checksum: Sha256


@dataclass(frozen=True, slots=True)
class Piece:
    """The unit that is verified and forwarded, and where its bytes are."""

    index: int
    file_index: int
    file_offset: int
    length: int
    digest: str  # by the manifest's piece hash
    stream_offset: int
    chunk_id: int


@dataclass(frozen=True, slots=True)
class Signature:
    """A publisher's signature of a manifest's digest (Ed25519), in hex."""

    __pydantic_config__ = EXACT

    public_key: Sha256  # 32 bytes too
    value: SignatureHex


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version of one model; ``build_manifest`` and ``parse_manifest`` make checked ones."""

    model_id: str
    version: str
    piece_bytes: int
    chunk_bytes: int
    files: tuple[FileEntry, ...]
    chunks: tuple[Chunk, ...]
    piece_hash: PieceHash = "blake3"
    signature: Signature | None = None
    # Computed; ``global_checksum`` does not cover the signature.
    total_size: int = field(init=False)
    global_checksum: str = field(init=False)
    # Returns a new hash of the kind that ``Piece.digest`` has.
    new_piece_hash: Callable[[], Hash] = field(init=False, repr=False, compare=False)
    # The first piece and byte of each file, and the first piece of each chunk; the last entry is
    # the end.
    _file_pieces: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _file_offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _chunk_pieces: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "new_piece_hash", PIECE_HASHES[self.piece_hash])
        put(self, "_file_pieces", tuple(accumulate((len(f.pieces) for f in self.files), initial=0)))
        put(self, "_file_offsets", tuple(accumulate((f.size for f in self.files), initial=0)))
        put(self, "total_size", self._file_offsets[-1])
        edges = [self.piece_at(chunk.offset) for chunk in self.chunks]
        put(self, "_chunk_pieces", (*edges, self.piece_count))
        checksum = hashlib.sha256()
        for part in self._document(complete=False):
            checksum.update(part)
        put(self, "global_checksum", checksum.hexdigest())

    @property
    def digest(self) -> str:
        """Return the global checksum: the identity of exactly this content."""
        return self.global_checksum

    @property
    def piece_count(self) -> int:
        return self._file_pieces[-1]

    @property
    def pieces(self) -> Iterator[Piece]:
        return (self.piece_of(index) for index in range(self.piece_count))

    def piece_of(self, index: int) -> Piece:
        """Return piece ``index``; raises IndexError beyond ``piece_count``."""
        if not 0 <= index < self._file_pieces[-1]:
            raise IndexError(f"piece {index} of {self.piece_count}")
        file_index = bisect_right(self._file_pieces, index) - 1
        file = self.files[file_index]
        within = index - self._file_pieces[file_index]
        file_offset = within * self.piece_bytes
        return Piece(
            index=index,
            file_index=file_index,
            file_offset=file_offset,
            length=min(self.piece_bytes, file.size - file_offset),
            digest=file.pieces[within],
            stream_offset=self._file_offsets[file_index] + file_offset,
            chunk_id=bisect_right(self._chunk_pieces, index) - 1,
        )

    def piece_at(self, stream_offset: int) -> int:
        """Return the index of the piece that holds byte ``stream_offset`` of the stream."""
        file_index = bisect_right(self._file_offsets, stream_offset) - 1
        if not 0 <= file_index < len(self.files):
            return self.piece_count
        within = (stream_offset - self._file_offsets[file_index]) // self.piece_bytes
        return self._file_pieces[file_index] + within

    def require_digest(self, digest: str | None, where: object) -> None:
        """Raise CorruptData where ``digest`` is given and is not that of this manifest."""
        if digest and digest != self.digest:
            raise CorruptData(
                "the source holds another model",
                got=self.digest,
                wanted=digest,
                where=where,
                do="Check the URL and the digest; a published version never changes.",
            )

    def file_pieces(self, file_index: int) -> range:
        """Return the indices of the pieces of file ``file_index``; an empty file has none."""
        return range(self._file_pieces[file_index], self._file_pieces[file_index + 1])

    def chunk_pieces(self, chunk_id: int) -> range:
        """Return the indices of the pieces of chunk ``chunk_id``; raises IndexError."""
        if not 0 <= chunk_id < len(self.chunks):
            raise IndexError(f"chunk {chunk_id} of {len(self.chunks)}")
        return range(self._chunk_pieces[chunk_id], self._chunk_pieces[chunk_id + 1])

    def matches(self, piece: Piece, data: bytes | memoryview) -> bool:
        """Return whether ``data`` has the digest of ``piece``."""
        found = self.new_piece_hash()
        found.update(data)
        return found.hexdigest() == piece.digest

    def to_bytes(self) -> bytes:
        """Return the canonical document; ``parse_manifest`` returns an equal manifest."""
        return b"".join(self._document(complete=True))

    def _document(self, *, complete: bool) -> Iterator[bytes]:
        """Yield the canonical document in parts (the largest possible one has 35 MB); without the
        checksum and the signature unless ``complete``.
        """
        yield b'{"chunk_size":%d,"chunks":[' % self.chunk_bytes
        for number, c in enumerate(self.chunks):
            yield b"," if number else b""
            yield canonical_json(
                {"chunk_id": c.chunk_id, "offset": c.offset, "size": c.size, "checksum": c.checksum}
            )
        yield b'],"files":['
        for number, f in enumerate(self.files):
            yield b"," if number else b""
            yield canonical_json(
                {"path": f.path, "size": f.size, "sha256": f.sha256, "pieces": f.pieces}
            )
        yield b'],"format":' + canonical_json(FORMATS[self.piece_hash])
        if complete:
            yield b',"global_checksum":' + canonical_json(self.global_checksum)
        yield b',"model_id":' + canonical_json(self.model_id)
        if self.piece_hash != "sha256":
            yield b',"piece_hash":' + canonical_json(self.piece_hash)
        yield b',"piece_size":%d' % self.piece_bytes
        if complete and self.signature is not None:
            yield b',"signature":' + canonical_json(
                {"public_key": self.signature.public_key, "value": self.signature.value}
            )
        yield b',"total_size":%d,"version":' % self.total_size
        yield canonical_json(self.version) + b"}"


# The order of versions, by name alone.

# The name of a node's link to its active version, beside the versions: reserved for it.
ACTIVE = "active"

_PARTS = re.compile(r"\d+|[^\d._-]+")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # a commit, or the digest of a registry's image


def is_older(version: str, than: str) -> bool:
    """Return whether ``version`` comes before ``than`` by name; digests come in no order."""
    if _DIGEST.fullmatch(version) or _DIGEST.fullmatch(than):
        return False
    return version_key(version) < version_key(than)


def directory_name(model_id: str) -> str:
    """Return the name of a model's one directory in a node's store: ``+`` for each ``/``."""
    return model_id.replace("/", "+")


def version_key(version: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts versions in natural order: ``v2 < v10``, ``1.9 < 1.10``.

    Digits compare as numbers and after letters at the same place; ``.``, ``_`` and ``-`` only
    separate, so ``1.0`` and ``1-0`` are equal.
    """
    return tuple(
        (1, int(part), "") if part.isdecimal() else (0, 0, part.casefold())
        for part in _PARTS.findall(version)
    )


# Valid paths of a model: one rule for building and parsing, without file system access.

MAX_PATH_BYTES = 1024
MAX_COMPONENT_BYTES = 255
MAX_DEPTH = 32


def check_paths(paths: Iterable[str]) -> None:
    """Raise InvalidManifest where a path could leave the model's directory, or where two of them
    are one file (or a file and a directory) after NFC and case folding, as on macOS.
    """
    # With NUL, which sorts before every character of a path, in place of "/", a file sorts right
    # before the paths below it. Sets of all parents took 0.9 GB for a manifest of 45 MB.
    folded = sorted((fold_path(check_path(path)).replace("/", "\0"), path) for path in paths)
    for (first, other), (second, path) in pairwise(folded):
        if second == first or second.startswith(f"{first}\0"):
            raise InvalidManifest(
                "two paths collide after NFC and case folding",
                got=f"{path!r} and {other!r}",
                wanted="paths that differ on every file system",
                do="Rename one of the files.",
            )


def check_path(path: str) -> str:
    """Return ``path`` where it is a plain relative path, else raise InvalidManifest."""
    problem = _problem(path)
    if problem:
        raise InvalidManifest(
            f"path {problem}",
            got=repr(path[:MAX_PATH_BYTES]),
            wanted="a relative path of plain components",
            where="files[].path",
            do="Rename the file.",
        )
    return path


def fold_path(path: str) -> str:
    """Return what a file system that ignores case and Unicode normal form compares."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _problem(path: str) -> str | None:
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return "is not Unicode text"
    if not path:
        return "is empty"
    if len(raw) > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES} bytes"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path:
        return "has a backslash"
    if any(byte < 0x20 or byte == 0x7F for byte in raw):
        return "has a control character"
    parts = path.split("/")
    if len(parts) > MAX_DEPTH:
        return f"is deeper than {MAX_DEPTH} directories"
    for part in parts:
        if part in ("", ".", ".."):
            return f"has the component {part!r}"
        if len(part.encode()) > MAX_COMPONENT_BYTES:
            return f"has a component longer than {MAX_COMPONENT_BYTES} bytes"
    if fold_path(path) == MANIFEST_FILE:
        return "is the manifest's own"
    return None
