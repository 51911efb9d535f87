"""Reuses what this disk already holds in any version: linked, cloned or copied, then verified.

A file that a version holds whole is cloned (where the filesystem shares blocks) or linked: then it
takes no space and no time. A linked file is the same file as the version's; both are read-only, and
are copied before a write. Everything else is copied piece by piece. A piece counts as held only
after its bytes, as they lie in the new version, matched their digest.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from pathlib import Path

from paceline import hashing
from paceline.manifest import FileEntry, Manifest, Piece
from paceline.relay.store.staging import Staging, disk_errors

FICLONE = 0x40049409  # linux/fs.h: share all blocks of another file
RUN = 16 * 1024 * 1024  # copied at once
BLOCK = 512 * 1024  # per read when copying without the kernel, and per piece when hashing
THREADS = 8  # copying and hashing release the GIL


@dataclass(slots=True)
class LocalContent:
    """Where the versions of a disk hold files and pieces, by digest."""

    files: dict[str, Path] = field(default_factory=dict)
    pieces: dict[str, tuple[Path, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, copies: Iterable[tuple[Path, Manifest]], wanted: Manifest) -> LocalContent:
        """Return what ``copies`` hold of ``wanted``, later ones first choice; some of it may be
        corrupt.
        """
        held = cls()
        files = {file.sha256 for file in wanted.files if file.size}
        pieces = {digest for file in wanted.files for digest in file.pieces}
        for directory, manifest in copies:
            for file in manifest.files:
                path = directory / file.path
                if file.sha256 in files:
                    held.files[file.sha256] = path
                for number, digest in enumerate(file.pieces):
                    if digest in pieces:
                        held.pieces[digest] = (path, number * manifest.piece_bytes)
        return held


def bring_files(data: Path, manifest: Manifest, held: LocalContent) -> None:
    """Link or clone the files of ``manifest`` that are ``held`` whole into ``data``, unless they
    exist.
    """
    for file in manifest.files:
        source = held.files.get(file.sha256)
        if source is None:
            continue
        target = data / file.path
        with disk_errors(data):
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists() and not _clone(source, target, file):
                _link(source, target)


def settle_files(staging: Staging, held: LocalContent) -> None:
    """Verify the files of ``bring_files``, from now or before a crash, and hold their pieces; a
    linked file with a wrong byte is replaced by a copy that can be repaired.
    """

    def settle(index: int) -> None:
        file = staging.manifest.files[index]
        if not (file.sha256 in held.files or staging.is_linked(index)):
            return
        descriptor = staging.descriptor(index)
        pieces = [staging.manifest.piece_of(each) for each in staging.manifest.file_pieces(index)]
        good = list(compress(pieces, _matching(descriptor, pieces)))
        if len(good) < len(pieces) and staging.is_linked(index):
            staging.make_own(index)
        for piece in good:
            if piece.index not in staging.verified and staging.claim(piece.index):
                staging.hold(piece)
                staging.reused(piece.length)

    _for_each_file(staging, settle)


def copy_pieces(staging: Staging, held: LocalContent) -> None:
    """Copy every missing piece that is ``held``, neighbours together."""

    def copy(index: int) -> None:
        buffer = bytearray(BLOCK)
        for source, offset, run in _claimed_runs(staging, index, held):
            descriptor = staging.descriptor(index)
            try:
                _copied(source, offset, descriptor, run, buffer)
                good = _matching(descriptor, run)
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
    staging: Staging, index: int, held: LocalContent
) -> Iterator[tuple[Path, int, list[Piece]]]:
    """Claim and yield missing pieces of a file that are adjacent in one held file."""
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
    """Run ``work`` for each file that lacks pieces, several at once, and commit."""
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
    """Copy the bytes of ``run`` between files, sharing blocks where the filesystem can; bytes that
    cannot be read are left out, and will not match their digest.
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


def _matching(descriptor: int, pieces: Sequence[Piece]) -> list[bool]:
    """Return, for each of ``pieces``, whether its bytes in the file match its digest."""
    room = memoryview(bytearray(hashing.LANES * BLOCK))
    places = [room[at : at + BLOCK] for at in range(0, len(room), BLOCK)]
    found: list[bool] = []
    for group in hashing.groups(pieces):
        hashes = [hashing.sha256() for _ in group]
        for done in range(0, max(piece.length for piece in group), BLOCK):
            work = []
            for piece, digest, place in zip(group, hashes, places, strict=False):
                view = place[: max(0, min(BLOCK, piece.length - done))]
                work.append((digest, view[: _read(descriptor, view, piece.file_offset + done)]))
            hashing.update_each(work)
        found += [
            hashing.proven(digest.hexdigest(), piece.sha256, partial(_bytes, descriptor, piece))
            for piece, digest in zip(group, hashes, strict=True)
        ]
    return found


def _read(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` and return how much of it the file had."""
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if not got:
            break
        done += got
    return done


def _bytes(descriptor: int, piece: Piece) -> Iterator[memoryview]:
    view = memoryview(bytearray(BLOCK))
    for done in range(0, piece.length, BLOCK):
        wanted = view[: min(BLOCK, piece.length - done)]
        yield wanted[: _read(descriptor, wanted, piece.file_offset + done)]
