"""Disk cache: files of known size by name, within a byte limit, shared by all processes of a node.

Processes coordinate through kernel file locks, so that a killed process leaves nothing to clean up:

- *in use* is a shared ``flock`` on the file; a locked file is never removed;
- *being written* is an exclusive one on its ``.part``: a process that needs the same file waits for
  it (a fetch has its own deadline); a part without its lock is of a dead process and is removed;
- *space* is reserved under one lock of the directory, and the part is allocated at its full size at
  once, so that two processes never reserve the same space;
- *least recently used* is the file's modification time, set each time it is opened.

Does not verify contents: the reader of a file checks it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidInput, StorageFailed, StorageFull

Mapped = mmap.mmap | bytes

LOCK_FILE = ".lock"


class CachedFile:
    """A cached file in use: it stays on the disk until ``close`` or garbage collection."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor: int | None = descriptor
        self.path = path
        self.size = os.fstat(descriptor).st_size

    def map(self) -> Mapped:
        """Return the file's bytes as memory, which stays valid after ``close``."""
        assert self._descriptor is not None, "the file is closed"
        if not self.size:
            return b""  # an empty file cannot be mapped
        return mmap.mmap(self._descriptor, self.size, prot=mmap.PROT_READ)

    def close(self) -> None:
        """Allow other processes to remove the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # a mapping holds a copy of the descriptor, and with it the lock, unless it is unlocked
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


@dataclass
class PartialFile:
    """A file being written: ``write`` its bytes, check them, then ``commit`` or abandon it."""

    descriptor: int
    path: Path
    final: Path
    has_room: bool  # False: all other files are in use, so it is deleted when closed

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``; thread-safe."""
        with _translated(self.path):
            while data:
                written = os.pwrite(self.descriptor, data, offset)
                data, offset = data[written:], offset + written

    def map(self) -> Mapped:
        size = os.fstat(self.descriptor).st_size
        return mmap.mmap(self.descriptor, size, prot=mmap.PROT_READ) if size else b""

    def commit(self) -> CachedFile:
        """Rename the part to its final name and return it, in use."""
        with _translated(self.final):
            descriptor = os.dup(self.descriptor)
            if self.has_room:
                self.path.rename(self.final)
            else:
                self.path.unlink()
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        return CachedFile(descriptor, self.final)


class DiskCache:
    """See the module; ``limit_bytes`` bounds all files in ``directory`` together."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory = Path(directory)
        self.limit_bytes = limit_bytes
        with _translated(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)

    def open(self, name: str) -> CachedFile | None:
        """Return the file called ``name``, in use, or None if it is not cached."""
        path = self.directory / name
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:
                with contextlib.suppress(OSError):  # another user's file is still readable
                    os.utime(descriptor)
                return CachedFile(descriptor, path)
            os.close(descriptor)  # another process removed it

    def discard(self, held: CachedFile) -> None:
        """Remove a corrupt file; processes that have it open keep their mappings."""
        held.path.unlink(missing_ok=True)
        held.close()

    @contextlib.contextmanager
    def making(self, name: str, size: int) -> Iterator[PartialFile | CachedFile]:
        """Yield a Part to write ``size`` bytes to, or the file if another process wrote it
        meanwhile.

        A part that is not committed is removed. Raises InvalidInput where ``size`` alone exceeds
        the limit, StorageFull, StorageFailed.
        """
        if size > self.limit_bytes:
            raise InvalidInput(
                "cache is smaller than one file",
                got=f"{self.limit_bytes} bytes",
                wanted=f"at least {size} bytes",
                where=self.directory,
                do="Raise data.cache_bytes, or build the snapshot with smaller data.shard_bytes.",
            )
        path = self.directory / f".{name}.part"
        descriptor = self._own(path)
        try:
            held = self.open(name)
            if held is not None:
                path.unlink(missing_ok=True)
                yield held
                return
            fits = self._make_room(descriptor, size)
            yield PartialFile(descriptor, path, self.directory / name, fits)
        finally:
            # Remove the path only while it is still this part's: after a commit it may be another
            # process's.
            if _is_at(descriptor, path):
                path.unlink(missing_ok=True)
            os.close(descriptor)

    def used_bytes(self) -> int:
        """Return the bytes used, including parts."""
        return sum(size for _, _, size in self._listed())

    def _own(self, path: Path) -> int:
        """Return the descriptor of the part, locked exclusively; waits while another process writes
        it."""
        while True:
            with _translated(path):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Shared: a committed file keeps a shared lock while its rank uses it, and that rank
                # may wait for this one in an all-reduce.
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            else:
                if _is_at(descriptor, path):
                    return descriptor
            os.close(descriptor)  # finished since

    def _make_room(self, descriptor: int, size: int) -> bool:
        """Allocate the part, removing least recently used files; return whether it fits the
        limit."""
        with self._directory_lock(), _translated(self.directory):
            os.ftruncate(descriptor, 0)
            listed = sorted(self._listed())
            used = sum(each for _, _, each in listed)
            for _, path, its in listed:
                if used + size <= self.limit_bytes:
                    break
                if _remove_unless_used(path):
                    used -= its
            while size:
                try:
                    os.posix_fallocate(descriptor, 0, size)
                    break
                except OSError as error:  # other programs fill this disk too
                    if error.errno not in _FULL or not any(
                        _remove_unless_used(path) for _, path, _ in sorted(self._listed())
                    ):
                        raise
            return used + size <= self.limit_bytes

    def _listed(self) -> list[tuple[int, Path, int]]:
        """Return each file's time of use, path and size; removes the parts of dead processes.

        Another process may commit a part meanwhile: under either name the file counts once.
        """
        found = {}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name == LOCK_FILE or not entry.is_file(follow_symlinks=False):
                    continue
                path = Path(entry.path)
                if entry.name.endswith(".part") and _remove_unless_used(path):
                    continue
                committed = path.with_name(entry.name.removeprefix(".").removesuffix(".part"))
                for place in dict.fromkeys((path, committed)):
                    with contextlib.suppress(FileNotFoundError):
                        stat = place.stat()
                        found[stat.st_ino] = (stat.st_mtime_ns, place, stat.st_size)
                        break
        return list(found.values())

    @contextlib.contextmanager
    def _directory_lock(self) -> Iterator[None]:
        path = self.directory / LOCK_FILE
        with _translated(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


_FULL = {errno.ENOSPC, errno.EDQUOT}


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_unless_used(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(descriptor, path):
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                "no room for the data cache",
                got=error.strerror,
                where=path,
                do="Free space on this node, or lower data.cache_bytes.",
            ) from error
        raise StorageFailed("the data cache's disk refuses", got=error, where=path) from error
