"""One model version on this node's disk while it arrives, and while it is served to peers.

Bytes go to preallocated files; a piece is *verified* once its digest matched (it may be forwarded)
and *durable* once its bytes and then its record in the piece log were fsynced (only that is
reported as held, I2). After ``kill -9`` or power loss exactly the logged pieces are trusted
(``piece_log``). Which pieces to fetch from which source is decided elsewhere.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from paceline.errors import Cancelled, StorageFailed, StorageFull
from paceline.manifest import Manifest, Piece
from paceline.relay.protocol import Extent, Extents
from paceline.relay.store.piece_log import PieceLog
from paceline.relay.store.requests import RequestQueue
from paceline.relay.store.traffic import EdgeCounters
from paceline.system import sync_directories, sync_directory

READ_ONLY = 0o444  # what is published never changes; a link to it is never written to
# A disk allocates any size at once. Memory (tmpfs) writes zeros, 2 s for 144 MB on a busy machine,
# and so does the C library where a filesystem cannot allocate. Allocation stops after this time,
# and the rest is allocated as pieces arrive: waiting for all of it would delay this node and every
# node that reads from it.
ALLOCATE_S = 0.1
FIRST_ALLOCATION = 16 * 1024 * 1024  # doubled each time
CLAIM_S = 5.0  # how long a stream waits for another one that writes the same piece


@contextmanager
def disk_errors(where: object) -> Iterator[None]:
    """Translate OSError into StorageFull (no space) or StorageFailed (the disk fails)."""
    try:
        yield
    except OSError as error:
        raise_disk_error(error, where)


def raise_disk_error(error: OSError, where: object) -> NoReturn:
    """Raise ``error`` as StorageFull or StorageFailed, or itself where it is neither."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise StorageFull(
            "the disk is full",
            got=error.strerror,
            where=where,
            do="Free space or collect old versions, then deploy again.",
        ) from error
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise StorageFailed(
            "this process may not open so many files",
            got=error.strerror,
            where=where,
            do="Raise its limit (ulimit -n, LimitNOFILE): all files of a model are open.",
        ) from error
    if error.errno in (errno.EIO, errno.EROFS, errno.EUCLEAN, errno.ENXIO):
        raise StorageFailed(
            "the disk refused to keep bytes",
            got=error.strerror,
            where=where,
            do="Check the disk; what was in progress there has been discarded.",
        ) from error
    raise error


def _is_read_only(path: Path) -> bool:
    try:
        return not path.lstat().st_mode & 0o222
    except FileNotFoundError:
        return False


class Staging:
    """The files of one manifest below ``directory``; ``published`` ones are complete already."""

    def __init__(self, manifest: Manifest, directory: Path, *, published: bool = False) -> None:
        self.manifest = manifest
        self.directory = directory
        self.published = published
        self.verified = Extents()
        self.durable = Extents()
        self.pending_bytes = 0  # verified, not yet durable
        self.reused_pieces = self.reused_bytes = 0
        self.edges = EdgeCounters()
        self.closed = False
        self.is_abandoned = False  # the missing pieces will not arrive here: peers look elsewhere
        self._mutex = threading.RLock()
        self._lock = threading.Condition(self._mutex)
        self._waiting = 0  # threads in ``_wait_for``
        self._requests: set[RequestQueue] = set()  # of the readers being served
        self._commit_lock = threading.Lock()
        self._claims: set[int] = set()
        # By claimed piece: the writer that receives it, and may be asked to leave it to another
        # stream that has all of it; a writer that finishes in an instant is not listed here.
        self.writers: dict[int, Callable[[], bool]] = {}
        self._fresh = Extents()  # verified since the last commit
        self._files: dict[int, int] = {}  # file index → descriptor, open until close()
        self._retired: list[int] = []  # descriptors of linked files that were replaced by copies
        self._dirty: set[int] = set()
        self._marks: PieceLog | None = None
        self._users = 0
        self.readers = 0  # peers that are being served
        if published:
            everything = Extent(0, manifest.piece_count)
            self.verified.add(everything)
            self.durable.add(everything)

    @property
    def data(self) -> Path:
        """Return the directory that holds the model's files."""
        return self.directory if self.published else self.directory / "data"

    # ── opening ──────────────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """Create and preallocate the files, and load the piece log of an earlier process.

        Raises StorageFull before a byte moves where the model does not fit. What could not be
        allocated in ALLOCATE_S is not reserved.
        """
        with disk_errors(self.directory):
            self.data.mkdir(parents=True, exist_ok=True)
            have = sum(self._allocated(file.path) for file in self.manifest.files)
            free = shutil.disk_usage(self.directory).free
            if self.manifest.total_size - have > free:
                raise StorageFull(
                    "the model does not fit on this disk",
                    got=f"{free} bytes free",
                    wanted=f"{self.manifest.total_size - have} more",
                    where=self.directory,
                    do="Free space or collect old versions, then deploy again.",
                )
            until_s = time.monotonic() + ALLOCATE_S
            fresh = [self._allocate(index, until_s) for index in range(len(self.manifest.files))]
            self._load_piece_log(trust=not any(fresh))
            if any(fresh):  # names must be as durable as the piece log
                sync_directories(self.data, (file.path for file in self.manifest.files))
                sync_directory(self.directory)
                sync_directory(self.directory.parent)

    def _allocated(self, path: str) -> int:
        try:
            return (self.data / path).stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    def _allocate(self, index: int, until_s: float) -> bool:
        """Return whether file ``index`` had to be created (or had another size)."""
        file = self.manifest.files[index]
        path = self.data / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = self.descriptor(index)
        before = os.fstat(descriptor).st_size
        if before == file.size:
            return False
        allocated, step = before, FIRST_ALLOCATION
        while allocated < file.size and time.monotonic() < until_s:
            os.posix_fallocate(descriptor, allocated, min(step, file.size - allocated))
            allocated, step = allocated + step, 2 * step
        os.ftruncate(descriptor, file.size)
        return True

    def _load_piece_log(self, *, trust: bool) -> None:
        self._marks = PieceLog(self.directory / "marks")
        if not trust:
            self._marks.clear()
            return
        with self._lock:
            for run in self._marks.load(self.manifest.piece_count):
                self.verified.add(run)
                self.durable.add(run)
                for queue in self._requests:
                    queue.became_verified(run)

    # ── pieces ───────────────────────────────────────────────────────────────────────────────────

    def claim(self, piece: int, wait_s: float = CLAIM_S) -> bool:
        """Return True when the caller alone may write ``piece``, False when it is verified already.

        Waits for another writer of the same piece; raises TimeoutError after ``wait_s``.
        """
        with self._mutex:  # not the Condition: its methods are Python calls, once a piece
            if piece not in self._claims and piece not in self.verified:
                self._claims.add(piece)
                return True
            free = self._wait_for(
                lambda: piece in self.verified or piece not in self._claims, wait_s
            )
            if piece in self.verified:
                return False
            if not free:
                raise TimeoutError(f"piece {piece} is being written by another stream")
            self._claims.add(piece)
            return True

    def claim_whole(self, piece: int) -> bool:
        """As ``claim``, for a stream that has all of ``piece`` in memory and verified: a stream
        that is still receiving it leaves it to this one. Raises TimeoutError after ``CLAIM_S``.
        """
        end_s = time.monotonic() + CLAIM_S
        while (writer := self.writers.pop(piece, None)) is None or not writer():
            try:
                return self.claim(piece, wait_s=0.05)
            except TimeoutError:  # claimed, but not by a writer that can leave it
                if time.monotonic() > end_s:
                    raise
        return True  # the writer's claim is ours now

    def keep(self, piece: Piece, data: memoryview) -> bool:
        """Write and hold a ``piece`` that is verified in memory; return False where it is held
        already. Raises TimeoutError as ``claim_whole`` does.
        """
        if not self.claim_whole(piece.index):
            return False
        try:
            self.write(self.descriptor(piece.file_index), data, piece.file_offset)
        except BaseException:
            self.release(piece.index)
            raise
        self.hold(piece)
        return True

    def release(self, piece: int) -> None:
        """Release a claim; what was written for ``piece`` does not count."""
        with self._lock:
            self._claims.discard(piece)
            self._lock.notify_all()

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Write ``data`` of a claimed piece."""
        try:
            while len(data):
                done = os.pwrite(descriptor, data, offset)
                data, offset = data[done:], offset + done
        except OSError as error:
            raise_disk_error(error, self.directory)

    def hold(self, *pieces: Piece) -> None:
        """Count claimed and written ``pieces`` as verified: their digests matched."""
        with self._mutex:
            for piece in pieces:
                self._claims.discard(piece.index)
                run = piece.index, piece.index + 1  # an Extent would be a Python call, once a piece
                if self.verified.add(run):
                    self._fresh.add(run)
                    self._dirty.add(piece.file_index)
                    self.pending_bytes += piece.length
                    for queue in self._requests:
                        queue.became_verified(Extent(*run))
            if self._waiting:
                self._lock.notify_all()

    def recheck_piece(self, index: int) -> bool:
        """Read a verified piece again and return whether it is corrupt; then it no longer counts as
        held: it is neither served nor published, and it is removed from the piece log.
        """
        piece = self.manifest.piece_of(index)
        with self._commit_lock, self.using(), disk_errors(self.directory):
            if index not in self.verified:
                return False
            descriptor = self.descriptor(piece.file_index)
            data = os.pread(descriptor, piece.length, piece.file_offset)
            if self.manifest.matches(piece, data):
                return False
            if self.is_linked(piece.file_index):
                self.copy_linked_file(piece.file_index)
            extent = Extent(index, index + 1)
            with self._lock:
                for extents in (self.verified, self.durable, self._fresh):
                    extents.remove(extent)
            if self._marks is not None:
                self._marks.clear()
                self._marks.append(self.durable)
            return True

    def is_linked(self, index: int) -> bool:
        """Return whether file ``index`` is a published version's too: never written to."""
        mode = os.fstat(self.descriptor(index)).st_mode
        return not self.published and not mode & 0o222

    def copy_linked_file(self, index: int) -> None:
        """Replace a linked file by a copy that can be repaired.

        Raises StorageFull where there is no space for one.
        """
        file = self.manifest.files[index]
        path = self.data / file.path
        fresh = path.with_name(f".{path.name}.own")
        with disk_errors(path), self.using():
            linked = self.descriptor(index)
            fresh.unlink(missing_ok=True)
            own = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                shutil.copyfile(path, fresh)
                os.ftruncate(own, file.size)
                os.fsync(own)
                fresh.replace(path)
                sync_directory(path.parent)
            except BaseException:
                os.close(own)
                raise
            with self._lock:
                self._files[index] = own
                self._retired.append(linked)  # a peer may be reading from it

    def reused(self, count: int) -> None:
        """Count a piece of ``count`` bytes that this disk held already."""
        with self._lock:
            self.reused_pieces += 1
            self.reused_bytes += count

    @contextmanager
    def requests(self) -> Iterator[RequestQueue]:
        """Open the queue of one reader's requests, which follows what is verified here."""
        queue = RequestQueue(
            self.verified,
            threading.Condition(self._mutex),
            lambda: self.closed or self.is_abandoned,
        )
        with self._lock:
            self._requests.add(queue)
        try:
            yield queue
        finally:
            with self._lock:
                self._requests.discard(queue)

    def _wait_for(self, condition: Callable[[], bool], wait_s: float) -> bool:
        self._waiting += 1
        try:
            return self._lock.wait_for(condition, wait_s)
        finally:
            self._waiting -= 1

    def _wake_readers(self) -> None:
        self._lock.notify_all()
        for queue in self._requests:
            queue.wake()

    @property
    def all_verified(self) -> bool:
        """Return whether every piece is verified (some may still have to become durable)."""
        return self.verified.count == self.manifest.piece_count

    # ── durability ───────────────────────────────────────────────────────────────────────────────

    def commit(self) -> list[Extent]:
        """Make every verified piece durable, data first and the piece log after; return the new
        runs.

        Raises StorageFull or StorageFailed; after that nothing here may be trusted or published.
        """
        with self._commit_lock, self.using(), disk_errors(self.directory):
            with self._lock:
                fresh, self._fresh = list(self._fresh), Extents()
                dirty, self._dirty = list(self._dirty), set()
                self.pending_bytes = 0
            if not fresh:
                return []
            for index in dirty:
                os.fdatasync(self.descriptor(index))
            if self._marks is None:
                raise AssertionError("pieces arrived for a model that is whole or not prepared")
            self._marks.append(fresh)
            with self._lock:
                for extent in fresh:
                    self.durable.add(extent)
            return fresh

    def give_up(self, is_abandoned: bool) -> None:
        """Set whether the missing pieces will not arrive here (a new plan may still bring them)."""
        with self._lock:
            self.is_abandoned = is_abandoned
            self._wake_readers()

    def moved(self, directory: Path) -> None:
        """Record that the files were published at ``directory``; open descriptors stay valid."""
        with self._lock:
            self.directory, self.published = directory, True
            self._close_piece_log()

    def withdrawn(self, directory: Path) -> None:
        """Record that the files were unpublished, to ``directory``; the good pieces stay held."""
        with self._commit_lock, disk_errors(directory):
            with self._lock:
                self.directory, self.published = directory, False
            self._marks = PieceLog(directory / "marks")
            self._marks.clear()
            self._marks.append(self.durable)

    def close(self) -> None:
        """End every use; descriptors are closed with the last one, never during a write."""
        with self._lock:
            self.closed = True
            self._wake_readers()
            self._close_descriptors()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the descriptors open inside the context; byte threads do all their work in it."""
        with self._lock:
            if self.closed:
                raise Cancelled("the model is no longer open here", where=self.directory)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._close_descriptors()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count a peer among the readers, and keep the descriptors open inside the context."""
        with self.using():
            with self._lock:
                self.readers += 1
            try:
                yield
            finally:
                with self._lock:
                    self.readers -= 1

    def _close_descriptors(self) -> None:
        if not self.closed or self._users:
            return
        for descriptor in (*self._files.values(), *self._retired):
            os.close(descriptor)
        self._files.clear()
        self._retired.clear()
        self._close_piece_log()

    def _close_piece_log(self) -> None:
        if self._marks is not None:
            self._marks.close()
            self._marks = None

    def descriptor(self, index: int) -> int:
        """Return the open descriptor of file ``index``; raises Cancelled after ``close``.

        Inside ``using`` it stays open; an open one costs a dictionary look-up.
        """
        if (known := self._files.get(index)) is not None:
            return known
        with self._lock:
            if self.closed:
                raise Cancelled("the model is no longer open here", where=self.directory)
            descriptor = self._files.get(index)
            if descriptor is None:
                path = self.data / self.manifest.files[index].path
                whole = self.published or _is_read_only(path)
                flags = os.O_RDONLY if whole else os.O_RDWR | os.O_CREAT
                descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                self._files[index] = descriptor
            return descriptor
