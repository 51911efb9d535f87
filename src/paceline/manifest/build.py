"""Builds the manifest of a directory: one parallel read gives the digests of pieces, chunks, files.

Every byte is read once and hashed three times, on all cores: strands of files in parallel, and
within a strand the three digests, on separate cores where some are free and in the SIMD lanes of
one core (``hashing``) where not. It writes nothing and does not depend on where the model will be
published.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline import hashing
from paceline.errors import AccessDenied, Cancelled, InvalidManifest, SourceChanged, SourceMissing
from paceline.manifest.model import ACTIVE, MANIFEST_FILE, Chunk, FileEntry, Manifest, check_paths
from paceline.manifest.progress import DIGEST, ProgressCallback, ProgressCounter, nobody, results
from paceline.manifest.sizes import MIB, DigestRun, Sizes, choose_sizes, lay_out
from paceline.schemas.base import NAME

MAX_FILES = 100_000
BLOCK = 4 * MIB  # read and hashed at once, in whole pieces
ASIDE = 128 * 1024  # smaller blocks are not worth waking another thread
MAX_STRANDS = 16  # bounds memory: two blocks each

_NAME = re.compile(NAME)


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """A file of the model as the scan saw it; a later change of size or mtime raises
    ``SourceChanged``.
    """

    path: str
    size: int
    mtime_ns: int


def build_manifest(
    directory: Path | str,
    *,
    model_id: str,
    version: str,
    link_mbit: float,
    piece_bytes: int = 0,
    chunk_bytes: int = 0,
) -> Manifest:
    """Return the manifest of the model in ``directory``; sizes of 0 follow from size and link.

    Raises InvalidManifest (a symlink, a special file, colliding names, no bytes), InvalidInput
    (sizes out of range), SourceMissing, and SourceChanged where a file changes meanwhile.
    """
    check_name("model_id", model_id)
    check_name("version", version)
    root = Path(directory)
    found = scan(root)
    total = sum(file.size for file in found)
    sizes = choose_sizes(total, link_mbit, piece_bytes=piece_bytes, chunk_bytes=chunk_bytes)
    return digest(root, found, sizes, model_id=model_id, version=version)


def check_name(what: str, value: object) -> str:
    """Return ``value`` where it is a valid name of a model or a version, else raise
    InvalidManifest.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidManifest(f"bad {what}", got=repr(value)[:200], wanted=NAME, where=what)
    if what == "version" and value == ACTIVE:
        raise InvalidManifest(
            "a version cannot be called so",
            got=value,
            wanted="any other name",
            where=what,
            do="On a node it names the version that is active.",
        )
    return value


def scan(root: Path) -> list[ScannedFile]:
    """Return the model's files in stream order (by path); follows no symlink."""
    try:
        found = sorted(_walk(root, ""), key=lambda file: file.path)
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
    check_paths(file.path for file in found)
    if not any(file.size for file in found):
        got = f"{len(found)} empty files" if found else "no files"
        raise InvalidManifest("model has no bytes", got=got, wanted="at least one byte", where=root)
    if len(found) > MAX_FILES:
        raise InvalidManifest("too many files", got=len(found), wanted=f"<= {MAX_FILES}")
    return found


def digest(
    root: Path,
    found: list[ScannedFile],
    sizes: Sizes,
    *,
    model_id: str,
    version: str,
    tell: ProgressCallback = nobody,
    stopping: threading.Event | None = None,
) -> Manifest:
    """Read every file once and return the manifest; raises Cancelled soon after ``stopping`` is
    set, and the error of a file at once.
    """
    account = ProgressCounter(DIGEST, sum(file.size for file in found), len(found), tell)
    strands = lay_out([file.size for file in found], *sizes)
    stopping = stopping or threading.Event()
    cores = os.cpu_count() or 1
    with (
        ThreadPoolExecutor(cores, thread_name_prefix="hash") as aside,
        ThreadPoolExecutor(min(cores, MAX_STRANDS), thread_name_prefix="read") as readers,
    ):
        running = [
            readers.submit(
                _digest_strand,
                root,
                found,
                strand,
                sizes.piece_bytes,
                _Hasher(aside, cores // max(1, len(strands))),
                stopping,
                account,
            )
            for strand in strands
        ]
        done = results(readers, running, stopping)
    files = tuple(file for entries, _ in done for file in entries)
    chunks: list[Chunk] = []
    offset = 0
    for _, digests in done:
        for size, checksum in digests:
            chunks.append(Chunk(len(chunks), offset, size, checksum))
            offset += size
    return Manifest.of(
        model_id=model_id,
        version=version,
        piece_bytes=sizes.piece_bytes,
        chunk_bytes=sizes.chunk_bytes,
        files=files,
        chunks=tuple(chunks),
    )


def _walk(root: Path, prefix: str) -> Iterator[ScannedFile]:
    with os.scandir(root / prefix) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            status = entry.stat(follow_symlinks=False)
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


def _digest_strand(
    root: Path,
    found: list[ScannedFile],
    strand: DigestRun,
    piece_bytes: int,
    hasher: _Hasher,
    stopping: threading.Event,
    account: ProgressCounter,
) -> tuple[list[FileEntry], list[tuple[int, str]]]:
    """Return the files and the (size, checksum) of the chunks of one strand."""
    files: list[FileEntry] = []
    chunks: list[tuple[int, str]] = []
    open_chunks = iter(strand.chunk_sizes)
    chunk_size, room, chunk_hash = 0, 0, hashing.sha256()
    for file in found[strand.first_file : strand.last_file]:
        file_hash = hashing.sha256()
        pieces: list[str] = []
        left = file.size
        with _Reader(root, file, piece_bytes) as reader:
            while left:
                if stopping.is_set():
                    raise Cancelled("digesting was stopped", where=root)
                if room == 0:
                    chunk_size = room = next(open_chunks)
                    chunk_hash = hashing.sha256()
                block = reader.read(min(left, room, reader.block))
                pieces += hasher.hash(block, file_hash, chunk_hash, piece_bytes)
                account.moved(len(block))
                left -= len(block)
                room -= len(block)
                if room == 0:
                    chunks.append((chunk_size, chunk_hash.hexdigest()))
        account.ended_file()
        files.append(FileEntry(file.path, file.size, file_hash.hexdigest(), tuple(pieces)))
    return files, chunks


class _Hasher:
    """Hashes a block three times, on up to ``cores`` cores: the caller's and those of ``aside``."""

    def __init__(self, aside: ThreadPoolExecutor, cores: int) -> None:
        self._aside = aside
        self._cores = min(3, max(1, cores)) if hashing.LANES > 1 else 3

    def hash(
        self, block: memoryview, file: hashing.Hash, chunk: hashing.Hash, piece_bytes: int
    ) -> list[str]:
        """Update ``file`` and ``chunk``, and return the digests of the block's pieces."""
        cut = [block[at : at + piece_bytes] for at in range(0, len(block), piece_bytes)]
        pieces = [hashing.sha256() for _ in cut]
        whole: list[tuple[hashing.Hash, memoryview]] = [(file, block), (chunk, block)]
        parts = list(zip(pieces, cut, strict=True))
        cores = self._cores if len(block) >= ASIDE else 1
        if cores == 1:
            hashing.update_each([*whole, *parts])
        else:
            shares = [whole[1:], parts] if cores == 3 else [parts]
            others = [self._aside.submit(hashing.update_each, share) for share in shares]
            hashing.update_each(whole[: 4 - cores])
            for other in others:
                other.result()
        return [each.hexdigest() for each in pieces]


class _Reader:
    """Reads one file front to back into one reused buffer and detects a change of the file."""

    def __init__(self, root: Path, file: ScannedFile, piece_bytes: int) -> None:
        self._where = root / file.path
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
            raise self._changed(error.strerror) from error
        self._check()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._check()
        finally:
            os.close(self._descriptor)

    def read(self, length: int) -> memoryview:
        """Return the next ``length`` bytes; the view is valid until the next call."""
        done = 0
        while done < length:
            got = os.readv(self._descriptor, [self._buffer[done:length]])
            if not got:
                raise self._changed("it became shorter")
            done += got
        return self._buffer[:length]

    def _check(self) -> None:
        status = os.fstat(self._descriptor)
        now = ScannedFile(self._file.path, status.st_size, status.st_mtime_ns)
        if now != self._file:
            raise self._changed(f"{now.size} bytes, mtime {now.mtime_ns}")

    def _changed(self, got: object) -> SourceChanged:
        return SourceChanged(
            "file changed while its digests were computed",
            got=got,
            wanted=f"{self._file.size} bytes, mtime {self._file.mtime_ns}",
            where=self._where,
            do="Publish when nothing writes to the directory.",
        )
