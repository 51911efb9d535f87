"""Reuses what this disk already holds in any version: linked or copied, then verified.

A file that a version holds whole is linked: then it takes no space and no time. A linked file is
the same file as the version's; both are read-only, and it is copied before a write. Everything else
is copied piece by piece. A piece counts as held only after its bytes matched their digest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from paceline.manifest import Manifest
from paceline.relay.store.staging import Staging, disk_errors
from paceline.system import usable_cores

THREADS = 8  # copying and hashing release the GIL


@dataclass(slots=True)
class LocalContent:
    """Where the versions of a disk hold files (by SHA-256) and pieces (by digest)."""

    files: dict[str, Path] = field(default_factory=dict)
    pieces: dict[str, tuple[Path, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, copies: Iterable[tuple[Path, Manifest]], wanted: Manifest) -> LocalContent:
        """Return what ``copies`` hold of ``wanted``, later ones first choice; some of it may be
        corrupt. Pieces are found only in versions with the same piece hash.
        """
        held = cls()
        files = {file.sha256 for file in wanted.files if file.size}
        pieces = {digest for file in wanted.files for digest in file.pieces}
        for directory, manifest in copies:
            same_hash = manifest.piece_hash == wanted.piece_hash
            for file in manifest.files:
                path = directory / file.path
                if file.sha256 in files:
                    held.files[file.sha256] = path
                for number, digest in enumerate(file.pieces):
                    if same_hash and digest in pieces:
                        held.pieces[digest] = (path, number * manifest.piece_bytes)
        return held


def link_files(data: Path, manifest: Manifest, held: LocalContent) -> None:
    """Link the files of ``manifest`` that are ``held`` whole into ``data``, unless they exist."""
    for file in manifest.files:
        source = held.files.get(file.sha256)
        if source is None:
            continue
        target = data / file.path
        with disk_errors(data):
            target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not source.lstat().st_mode & 0o222:  # else published before files were read-only
                os.link(source, target, follow_symlinks=False)
        except OSError:  # it exists, too many links, gone meanwhile: copied, piece by piece
            continue


def verify_linked_files(staging: Staging, held: LocalContent) -> None:
    """Verify the files of ``link_files``, from now or before a crash, and hold their pieces; a
    linked file with a wrong byte is replaced by a copy that can be repaired.
    """

    def verify(index: int) -> None:
        manifest = staging.manifest
        if not (manifest.files[index].sha256 in held.files or staging.is_linked(index)):
            return
        descriptor, buffer = staging.descriptor(index), memoryview(bytearray(manifest.piece_bytes))
        pieces = [manifest.piece_of(each) for each in manifest.file_pieces(index)]
        good = [
            each
            for each in pieces
            if manifest.matches(each, _read(descriptor, buffer[: each.length], each.file_offset))
        ]
        if len(good) < len(pieces) and staging.is_linked(index):
            staging.copy_linked_file(index)
        for piece in good:
            if piece.index not in staging.verified and staging.claim(piece.index):
                staging.hold(piece)
                staging.reused(piece.length)

    _for_each_file(staging, verify)


def copy_pieces(staging: Staging, held: LocalContent) -> None:
    """Copy every missing piece that is ``held``."""

    def copy(index: int) -> None:
        manifest = staging.manifest
        buffer = memoryview(bytearray(manifest.piece_bytes))
        for number in manifest.file_pieces(index):
            piece = manifest.piece_of(number)
            found = held.pieces.get(piece.digest)
            if found is None or number in staging.verified:
                continue
            data = _read_file(found[0], buffer[: piece.length], found[1])
            if not manifest.matches(piece, data) or not staging.claim(number):
                continue
            try:
                staging.write(staging.descriptor(index), data, piece.file_offset)
            except BaseException:
                staging.release(number)
                raise
            staging.hold(piece)
            staging.reused(piece.length)

    _for_each_file(staging, copy)


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
    with ThreadPoolExecutor(min(THREADS, usable_cores())) as pool, staging.using():
        running = [pool.submit(work, index) for index in wanted]
        try:
            for each in running:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    staging.commit()


def _read_file(path: Path, view: memoryview, offset: int) -> memoryview:
    """Return what could be read: nothing from a version that was removed meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return view[:0]
    try:
        return _read(descriptor, view, offset)
    finally:
        os.close(descriptor)


def _read(descriptor: int, view: memoryview, offset: int) -> memoryview:
    """Fill ``view`` and return as much of it as the file has."""
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if not got:
            break
        done += got
    return view[:done]
