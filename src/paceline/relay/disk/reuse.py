"""What this disk holds already, in whatever version: linked, cloned or copied, and verified again.

A file that a version holds whole is cloned (where the filesystem shares blocks) or linked: then it
takes no room and no time. A linked file is one with the version's own; both are read-only, and
whoever must write to it makes it its own first. Everything else is copied piece by piece. Nothing
counts as held before its bytes, as they lie in the new version, matched their digests.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.manifest import FileEntry, Manifest, Piece
from paceline.relay.disk.staging import Staging, disk_errors

if TYPE_CHECKING:
    from paceline.relay.disk.store import StoredVersion

FICLONE = 0x40049409  # linux/fs.h: share all blocks of another file
_COPY = 4 * 1024 * 1024
RUN = 16 * 1024 * 1024  # copied at once
THREADS = 8  # copying and hashing release the GIL


@dataclass(slots=True)
class Holdings:
    """Where the versions of a disk hold files and pieces, by digest."""

    files: dict[str, Path] = field(default_factory=dict)
    pieces: dict[str, tuple[Path, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, versions: Iterable[tuple[StoredVersion, Manifest]], wanted: Manifest) -> Holdings:
        """Return what ``versions`` hold of ``wanted``, newest last."""
        held = cls()
        files = {file.sha256 for file in wanted.files if file.size}
        pieces = {digest for file in wanted.files for digest in file.pieces}
        for stored, manifest in versions:
            if manifest.digest == wanted.digest:
                continue
            for file in manifest.files:
                path = stored.path / file.path
                if file.sha256 in files:
                    held.files[file.sha256] = path
                for number, digest in enumerate(file.pieces):
                    if digest in pieces:
                        held.pieces[digest] = (path, number * manifest.piece_bytes)
        return held


def bring_files(data: Path, manifest: Manifest, held: Holdings) -> None:
    """Put the files of ``manifest`` that are ``held`` whole into ``data``, unless one is there."""
    for file in manifest.files:
        source = held.files.get(file.sha256)
        if source is None:
            continue
        target = data / file.path
        with disk_errors(data):
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists() and not _clone(source, target, file):
                _link(source, target)


def settle_files(staging: Staging, held: Holdings) -> None:
    """Verify what ``bring_files`` brought, now or before a crash, and hold it; a linked file with a
    wrong byte becomes one of our own, to be mended.
    """

    def settle(index: int) -> None:
        file = staging.manifest.files[index]
        if not (file.sha256 in held.files or staging.is_linked(index)):
            return
        descriptor = staging.descriptor(index)
        buffer = bytearray(min(_COPY, staging.manifest.piece_bytes))
        pieces = [staging.manifest.piece_of(each) for each in staging.manifest.file_pieces(index)]
        good = [piece for piece in pieces if _matches(descriptor, piece, buffer)]
        if len(good) < len(pieces) and staging.is_linked(index):
            staging.make_own(index)
        for piece in good:
            if piece.index not in staging.verified and staging.claim(piece.index):
                staging.hold(piece)
                staging.reused(piece.length)

    _for_each_file(staging, settle)


def copy_pieces(staging: Staging, held: Holdings) -> None:
    """Copy every missing piece that is ``held``, neighbours together."""

    def copy(index: int) -> None:
        buffer = bytearray(min(_COPY, staging.manifest.piece_bytes))
        for source, offset, run in _claimed_runs(staging, index, held):
            descriptor = staging.descriptor(index)
            try:
                _copied(source, offset, descriptor, run, buffer)
                good = [_matches(descriptor, piece, buffer) for piece in run]
            except BaseException:
                for piece in run:
                    staging.release(piece.index)
                raise
            for piece, matches in zip(run, good, strict=True):
                if matches:
                    staging.hold(piece)
                    staging.reused(piece.length)
                else:
                    staging.release(piece.index)

    _for_each_file(staging, copy)


def _claimed_runs(
    staging: Staging, index: int, held: Holdings
) -> Iterator[tuple[Path, int, list[Piece]]]:
    """Claim and yield missing pieces of a file that lie side by side in one file that is held."""
    manifest = staging.manifest
    run: list[Piece] = []
    source, start, end = Path(), 0, 0
    for number in manifest.file_pieces(index):
        piece = manifest.piece_of(number)
        found = None if number in staging.verified else held.pieces.get(piece.sha256)
        if run and (found != (source, end) or end - start >= RUN or run[-1].index + 1 != number):
            yield source, start, run
            run = []
        if found is None or not staging.claim(number):
            continue
        if not run:
            source, start = found
            end = start
        run.append(piece)
        end += piece.length
    if run:
        yield source, start, run


def _for_each_file(staging: Staging, work: Callable[[int], None]) -> None:
    """Do ``work`` for each file that lacks pieces, several at once, and commit."""
    manifest = staging.manifest
    wanted = [
        index
        for index in range(len(manifest.files))
        if any(piece not in staging.verified for piece in manifest.file_pieces(index))
    ]
    if not wanted:
        return
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool, staging.using():
        running = [pool.submit(work, index) for index in wanted]
        try:
            for each in running:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    staging.commit()


def _clone(source: Path, target: Path, file: FileEntry) -> bool:
    """Return whether ``target`` now shares all blocks of ``source``, as a file of its own."""
    try:
        origin = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(origin).st_size != file.size:
            return False
        fresh = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.ioctl(fresh, FICLONE, origin)
        except OSError:  # ext4, tmpfs, another filesystem
            target.unlink()
            return False
        finally:
            os.close(fresh)
    finally:
        os.close(origin)
    return True


def _link(source: Path, target: Path) -> None:
    try:
        if source.lstat().st_mode & 0o222:
            return  # published before files were read-only: copied, piece by piece
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another filesystem, too many links, gone meanwhile: copied, piece by piece
        return


def _copied(source: Path, offset: int, target: int, run: list[Piece], buffer: bytearray) -> None:
    """Copy the bytes of ``run`` between files, sharing blocks where the filesystem can; what could
    not be read is missing there, and will not match.
    """
    try:
        origin = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # collected meanwhile: fetched like any other
    try:
        at, length = run[0].file_offset, sum(piece.length for piece in run)
        done, by_kernel = 0, hasattr(os, "copy_file_range")
        while done < length:
            if by_kernel:
                try:
                    got = os.copy_file_range(
                        origin, target, length - done, offset + done, at + done
                    )
                except OSError:  # other filesystems, older kernels
                    by_kernel = False
                    continue
            else:
                view = memoryview(buffer)[: min(len(buffer), length - done)]
                got = os.preadv(origin, [view], offset + done)
                if got:
                    with disk_errors(source):
                        got = os.pwrite(target, view[:got], at + done)
            if not got:
                return
            done += got
    finally:
        os.close(origin)


def _matches(descriptor: int, piece: Piece, buffer: bytearray) -> bool:
    digest, view, done = hashlib.sha256(), memoryview(buffer), 0
    while done < piece.length:
        got = os.preadv(
            descriptor, [view[: min(len(buffer), piece.length - done)]], piece.file_offset + done
        )
        if not got:
            return False
        digest.update(view[:got])
        done += got
    return digest.hexdigest() == piece.sha256
