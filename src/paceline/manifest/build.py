"""Builds the manifest of a directory: one parallel read gives the digests of pieces, chunks, files.

Every byte is read once and hashed three times: by the piece hash, and by SHA-256 for its chunk and
for its file. Strands of files are digested in parallel; where there are fewer strands than cores,
the file's SHA-256 has a thread of its own. It writes nothing and does not depend on where the model
will be published.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.errors import AccessDenied, Cancelled, InvalidManifest, SourceChanged, SourceMissing
from paceline.manifest.finite import WeightsScan, scan_of
from paceline.manifest.model import (
    ACTIVE,
    MANIFEST_FILE,
    PIECE_HASHES,
    Chunk,
    FileEntry,
    Hash,
    Manifest,
    check_paths,
)
from paceline.manifest.progress import (
    DIGEST,
    IMPORT,
    ProgressCallback,
    ProgressCounter,
    ignore_progress,
    results,
)
from paceline.manifest.sizes import MIB, DigestRun, Sizes, choose_sizes, chunk_layout, strands
from paceline.schemas import MODEL_ID, NAME, PieceHash
from paceline.system import usable_cores

MAX_FILES = 100_000
BLOCK = 4 * MIB  # read and hashed at once, in whole pieces
MAX_STRANDS = 16  # bounds memory: a block each

_NAMES = {
    "model_id": (
        re.compile(MODEL_ID),
        "one to four names joined by /, each of letters, digits, . _ -",
    ),
    "version": (re.compile(NAME), "letters, digits, . _ and -, the first a letter or digit"),
}
MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """A file of the model as the scan saw it."""

    path: str
    size: int
    mtime_ns: int

    def require_unchanged(self, status: os.stat_result, where: Path) -> None:
        """Raise SourceChanged where the file has another size or modification time by now."""
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise self.changed(f"{status.st_size} bytes, mtime {status.st_mtime_ns}", where)

    def changed(self, got: object, where: Path) -> SourceChanged:
        return SourceChanged(
            "file changed while it was read",
            got=got,
            wanted=f"{self.size} bytes, mtime {self.mtime_ns}",
            where=where,
            do="Publish when nothing writes to the directory.",
        )


def build_manifest(
    directory: Path | str,
    *,
    model_id: str,
    version: str,
    link_mbit: float,
    piece_bytes: int = 0,
    chunk_bytes: int = 0,
    piece_hash: PieceHash | None = None,
) -> Manifest:
    """Return the manifest of the model in ``directory``; sizes of 0 follow from size and link, and
    ``piece_hash`` is "blake3" unless it is "sha256".

    Raises InvalidManifest (a symlink, a special file, colliding names, no bytes), InvalidInput
    (sizes out of range), SourceMissing, and SourceChanged where a file changes meanwhile.
    """
    check_name("model_id", model_id)
    check_name("version", version)
    root = Path(directory)
    found = scan_model(root)
    total = sum(file.size for file in found)
    sizes = choose_sizes(total, link_mbit, piece_bytes=piece_bytes, chunk_bytes=chunk_bytes)
    return digest(
        root, found, sizes, model_id=model_id, version=version, piece_hash=piece_hash or "blake3"
    )


def check_name(what: str, value: object) -> str:
    """Return a valid name of a model or version, else raise InvalidManifest."""
    pattern, wanted = _NAMES[what]
    if not isinstance(value, str) or len(value) > MAX_NAME or not pattern.fullmatch(value):
        got = repr(value)[:200]
        raise InvalidManifest(
            f"bad {what}", got=got, wanted=f"{wanted}; {MAX_NAME} characters", where=what
        )
    if what == "version" and value == ACTIVE:
        raise InvalidManifest(
            "a version cannot be called so",
            got=value,
            wanted="any other name",
            where=what,
            do="On a node it names the version that is active.",
        )
    return value


def scan_model(root: Path) -> list[ScannedFile]:
    """Return the files by path; follows no symlink but those of ``content_path``."""
    try:
        found = list(_walk(root, ""))
    except FileNotFoundError as error:
        raise SourceMissing(
            "model directory does not exist", got=root, do="Check the path."
        ) from error
    except NotADirectoryError as error:
        raise InvalidManifest(
            "model is not a directory", got=root, do="Name the directory that holds its files."
        ) from error
    except PermissionError as error:
        raise AccessDenied(
            "model cannot be read", got=error.strerror, where=error.filename, do="Check its mode."
        ) from error
    return require_model(found, root)


def require_model(found: list[ScannedFile], where: object) -> list[ScannedFile]:
    """Return the files sorted by path; raises InvalidManifest where they cannot be a model."""
    check_paths(file.path for file in found)
    if not any(file.size for file in found):
        got = f"{len(found)} empty files" if found else "no files"
        wanted = "at least one byte"
        raise InvalidManifest("model has no bytes", got=got, wanted=wanted, where=where)
    if len(found) > MAX_FILES:
        raise InvalidManifest("too many files", got=len(found), wanted=f"<= {MAX_FILES}")
    return sorted(found, key=lambda file: file.path)


def digest(
    root: Path,
    found: list[ScannedFile],
    sizes: Sizes,
    *,
    model_id: str,
    version: str,
    piece_hash: PieceHash,
    open_file: OpenFile | None = None,
    on_progress: ProgressCallback = ignore_progress,
    stopping: threading.Event | None = None,
    scans: dict[str, WeightsScan] | None = None,
) -> Manifest:
    """Read every file once and return the manifest; raises Cancelled soon after ``stopping`` is
    set, and the error of a file at once. ``scans`` gets what was found in each weights file.
    """
    chunk_sizes = chunk_layout([file.size for file in found], *sizes)
    reading = Digesting(
        root,
        found,
        sizes.piece_bytes,
        piece_hash,
        open_file=open_file,
        on_progress=on_progress,
        stopping=stopping,
        scans=scans,
    )
    files, checksums = reading.run(chunk_sizes)
    chunks: list[Chunk] = []
    offset = 0
    for size, checksum in zip(chunk_sizes, checksums, strict=True):
        chunks.append(Chunk(len(chunks), offset, size, checksum))
        offset += size
    return Manifest(
        model_id=model_id,
        version=version,
        piece_bytes=sizes.piece_bytes,
        chunk_bytes=sizes.chunk_bytes,
        files=tuple(files),
        chunks=tuple(chunks),
        piece_hash=piece_hash,
    )


class FileReader(Protocol):
    """Reads one file front to back; opened and closed as a context."""

    block: int  # the most bytes of one read: whole pieces

    def __enter__(self) -> FileReader: ...
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...
    def read(self, length: int) -> memoryview:
        """Return the next ``length`` bytes, or fewer whole pieces of them."""
        ...


OpenFile = Callable[[ScannedFile], FileReader]


class Digesting:
    """Reads ``found`` below ``root``, or by ``open_file``, and computes the digests of pieces and,
    unless ``only_pieces``, the SHA-256 of files and chunks (else "").
    """

    def __init__(
        self,
        root: Path,
        found: Sequence[ScannedFile],
        piece_bytes: int,
        piece_hash: PieceHash,
        *,
        only_pieces: bool = False,
        open_file: OpenFile | None = None,
        on_progress: ProgressCallback = ignore_progress,
        stopping: threading.Event | None = None,
        scans: dict[str, WeightsScan] | None = None,
    ) -> None:
        self._root, self._found = root, found
        self._scans = scans
        self._open = open_file or (lambda file: _Reader(root, file, piece_bytes))
        self._piece_bytes = piece_bytes
        stage = DIGEST if open_file is None else IMPORT
        self._new_piece_hash = PIECE_HASHES[piece_hash]
        self._new_sha256 = _NoHash if only_pieces else hashlib.sha256
        self._stopping = stopping or threading.Event()
        self._account = ProgressCounter(stage, sum(f.size for f in found), len(found), on_progress)
        self._aside: ThreadPoolExecutor | None = None  # hashes blocks for the file's SHA-256

    def run(self, chunk_sizes: Sequence[int]) -> tuple[list[FileEntry], list[str]]:
        """Return the files, and the checksums of the chunks, which are of these sizes."""
        runs = strands([file.size for file in self._found], chunk_sizes)
        cores = usable_cores()
        with (
            ThreadPoolExecutor(cores, thread_name_prefix="hash") as aside,
            ThreadPoolExecutor(min(cores, MAX_STRANDS), thread_name_prefix="read") as readers,
        ):
            self._aside = aside if len(runs) < cores else None
            running = [readers.submit(self._strand, each) for each in runs]
            done = results(readers, running, self._stopping)
        return [file for files, _ in done for file in files], [c for _, cs in done for c in cs]

    def _strand(self, strand: DigestRun) -> tuple[list[FileEntry], list[str]]:
        files: list[FileEntry] = []
        checksums: list[str] = []
        open_chunks = iter(strand.chunk_sizes)
        room, chunk_hash = 0, self._new_sha256()
        for file in self._found[strand.first_file : strand.last_file]:
            file_hash, pieces, left = self._new_sha256(), [], file.size
            scan = None if self._scans is None else scan_of(file.path)
            with self._open(file) as reader:
                while left:
                    if self._stopping.is_set():
                        raise Cancelled("digesting was stopped", where=self._root)
                    if room == 0:
                        room, chunk_hash = next(open_chunks), self._new_sha256()
                    block = reader.read(min(left, room, reader.block))
                    pieces += self._hash(block, file_hash, chunk_hash)
                    if scan is not None:
                        scan.update(block)
                    self._account.moved(len(block))
                    left -= len(block)
                    room -= len(block)
                    if room == 0:
                        checksums.append(chunk_hash.hexdigest())
            self._account.ended_file()
            if scan is not None and self._scans is not None:
                self._scans[file.path] = scan
            files.append(FileEntry(file.path, file.size, file_hash.hexdigest(), tuple(pieces)))
        return files, checksums

    def _hash(self, block: memoryview, file_hash: Hash, chunk_hash: Hash) -> list[str]:
        """Update both, and return the digests of the block's pieces."""
        if self._aside is None:
            file_hash.update(block)
        else:
            other = self._aside.submit(file_hash.update, block)
        chunk_hash.update(block)
        pieces = []
        for at in range(0, len(block), self._piece_bytes):
            piece = self._new_piece_hash()
            piece.update(block[at : at + self._piece_bytes])
            pieces.append(piece.hexdigest())
        if self._aside is not None:
            other.result()
        return pieces


class _NoHash:
    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Hash nothing."""

    def hexdigest(self) -> str:
        return ""


def content_path(root: Path, path: str) -> Path:
    """Return where the content of ``root``'s file ``path`` lies.

    A snapshot in Hugging Face's cache (``models--ORG--NAME/snapshots/COMMIT``) holds links to
    ``blobs`` beside it; those are followed, and no others.
    """
    place = root / path
    if root.absolute().parent.name == "snapshots" and place.is_symlink():
        target = place.resolve()
        if target.parent == root.resolve().parents[1] / "blobs":
            return target
    return place


def _walk(root: Path, prefix: str) -> Iterator[ScannedFile]:
    with os.scandir(root / prefix) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode) and (content := content_path(root, path)).exists():
                status = content.stat(follow_symlinks=False)
            if path == MANIFEST_FILE and stat.S_ISREG(status.st_mode):
                continue
            if stat.S_ISDIR(status.st_mode):
                yield from _walk(root, f"{path}/")
            elif stat.S_ISREG(status.st_mode):
                yield ScannedFile(path, status.st_size, status.st_mtime_ns)
            else:
                kind = "a symlink" if stat.S_ISLNK(status.st_mode) else "a special file"
                raise InvalidManifest(
                    f"model contains {kind}",
                    got=repr(path),
                    wanted="regular files only",
                    where=root,
                    do="Replace it by the file it stands for (`cp -rL` does), or remove it.",
                )


class _Reader:
    """Reads one file front to back into one reused buffer and detects a change of the file."""

    def __init__(self, root: Path, file: ScannedFile, piece_bytes: int) -> None:
        self._where = content_path(root, file.path)
        self._file = file
        self.block = max(piece_bytes, BLOCK // piece_bytes * piece_bytes)
        self._buffer = memoryview(bytearray(min(self.block, file.size)))

    def __enter__(self) -> _Reader:
        try:
            self._descriptor = os.open(self._where, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except PermissionError as error:
            raise AccessDenied(
                "file cannot be read", got=error.strerror, where=self._where, do="Check its mode."
            ) from error
        except OSError as error:
            raise self._file.changed(error.strerror, self._where) from error
        self._file.require_unchanged(os.fstat(self._descriptor), self._where)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._file.require_unchanged(os.fstat(self._descriptor), self._where)
        finally:
            os.close(self._descriptor)

    def read(self, length: int) -> memoryview:
        """Return the next ``length`` bytes; the view is valid until the next call."""
        done = 0
        while done < length:
            got = os.readv(self._descriptor, [self._buffer[done:length]])
            if not got:
                raise self._file.changed("it became shorter", self._where)
            done += got
        return self._buffer[:length]
