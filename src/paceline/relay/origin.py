"""Reading pieces from the source: an S3 prefix by parallel ranged GETs, or a local directory.

Every object is pinned to the ETag it had when this worker first looked, so that versions never mix;
every piece is checked against the manifest like a peer's. Bytes are counted for the origin fuse and
paced by the same link as everything that comes in. Which pieces to read is decided elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from paceline.errors import PacelineError, SourceChanged, SourceMissing, StorageFailed, StorageFull
from paceline.manifest import FileEntry, Manifest, Piece
from paceline.relay.counters import Counters
from paceline.relay.events import (
    LocalFailed,
    PieceRejected,
    PieceVerified,
    SessionEvent,
    SourceAlive,
    SourceFailed,
)
from paceline.relay.extents import Extent
from paceline.relay.pacing import Pacer
from paceline.relay.staging import Staging
from paceline.wire.plan import Source

MIB = 1024 * 1024
PARALLEL_RANGES = 4
MAX_RANGE = 16 * MIB
LEAST_RANGES = 16  # of a small model, so that the first piece does not wait for half of it


class RangeReader(Protocol):
    """Something that fills memory with part of a file of the model."""

    def read(self, file: FileEntry, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` of ``file``; raises SourceChanged, SourceMissing, …"""


class DirectoryReader:
    """A model in a local directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, file: FileEntry, offset: int, view: memoryview) -> None:
        """Fill ``view``; see RangeReader."""
        path = self._directory / file.path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceMissing("cannot read the source", got=error.strerror, where=path) from error
        try:
            size = os.fstat(descriptor).st_size
            if size != file.size:
                raise _changed(path, size, file.size)
            done = 0
            while done < len(view):
                got = os.preadv(descriptor, [view[done:]], offset + done)
                if not got:
                    raise _changed(path, offset + done, file.size)
                done += got
        finally:
            os.close(descriptor)


class S3Reader:
    """A model below an S3 prefix; ``store`` is an ObjectStore."""

    def __init__(self, url: str, store: S3Ranges) -> None:
        self._url = url
        self._store = store
        self._lock = threading.Lock()
        self._etags: dict[str, str] = {}

    def read(self, file: FileEntry, offset: int, view: memoryview) -> None:
        """Fill ``view``; see RangeReader."""
        url = f"{self._url.rstrip('/')}/{file.path}"
        with self._lock:
            etag = self._etags.get(url)
            if etag is None:
                info = self._store.head(url)
                if info.size != file.size:
                    raise _changed(url, info.size, file.size)
                etag = self._etags[url] = info.etag
        self._store.read_range_into(url, offset, view, etag=etag, size=file.size)


class LazyReader:
    """Opens its source at the first read, on the reading thread: importing boto3 takes a while."""

    def __init__(self, open_source: Callable[[str], RangeReader], url: str) -> None:
        self._open_source = open_source
        self._url = url
        self._lock = threading.Lock()
        self._reader: RangeReader | None = None

    def read(self, file: FileEntry, offset: int, view: memoryview) -> None:
        """Fill ``view``; see RangeReader."""
        with self._lock:
            if self._reader is None:
                self._reader = self._open_source(self._url)
        self._reader.read(file, offset, view)


class ObjectHead(Protocol):
    """Size and ETag of one object."""

    @property
    def size(self) -> int: ...
    @property
    def etag(self) -> str: ...


class S3Ranges(Protocol):
    """The two calls of ``objects.ObjectStore`` that reading needs."""

    def head(self, url: str) -> ObjectHead: ...
    def read_range_into(
        self, url: str, offset: int, view: memoryview, *, etag: str, size: int | None = None
    ) -> None: ...


class OriginStream:
    """Reads requested pieces with a few threads until it fails or is closed."""

    def __init__(
        self,
        *,
        source: Source,
        stream: int,
        worker_id: str,
        reader: RangeReader,
        staging: Staging,
        pacer: Pacer,
        counters: Counters,
        report: Callable[[SessionEvent], None],
    ) -> None:
        self._source = source
        self._stream = stream
        self._worker_id = worker_id
        self._reader = reader
        self._staging = staging
        self._pacer = pacer
        self._counters = counters
        self._report = report
        self._range_bytes = range_bytes(staging.manifest)
        self._ready = threading.Condition()
        self._queue: deque[Extent] = deque()
        self._closed = False
        threads = PARALLEL_RANGES if staging.manifest.total_size > MIB else 1
        for number in range(threads):
            threading.Thread(target=self._run, name=f"origin-{number}", daemon=True).start()

    def request(self, extent: Extent) -> None:
        """Ask for pieces; returns at once."""
        with self._ready:
            self._queue.append(extent)
            self._ready.notify_all()

    def close(self) -> None:
        """Stop reading; a range under way is finished and dropped."""
        with self._ready:
            self._closed = True
            self._queue.clear()
            self._ready.notify_all()

    def _next(self) -> Extent | None:
        """Return the next run of pieces of one file, at most a range long; None when closed."""
        manifest = self._staging.manifest
        with self._ready:
            self._ready.wait_for(lambda: self._closed or self._queue)
            if self._closed:
                return None
            first, stop = self._queue.popleft()
            head = manifest.piece_of(first)
            take = max(1, self._range_bytes // manifest.piece_bytes)
            end = min(stop, first + take, manifest.file_pieces(head.file_index).stop)
            if end < stop:
                self._queue.appendleft(Extent(end, stop))
            return Extent(first, end)

    def _run(self) -> None:
        try:
            with self._staging.using():
                while (extent := self._next()) is not None:
                    self._read(extent)
        except (StorageFull, StorageFailed) as error:
            self._report(LocalFailed(error))
        except PacelineError as error:
            if not self._closed:
                self._report(SourceFailed(self._source.key, self._stream, error))
            self.close()
        except Exception as error:
            lost = SourceMissing("reading the source failed", got=error, where=self._source.key)
            self._report(SourceFailed(self._source.key, self._stream, lost))
            self.close()
            raise

    def _read(self, extent: Extent) -> None:
        manifest = self._staging.manifest
        pieces = [manifest.piece_of(piece) for piece in range(*extent)]
        offset, size = pieces[0].file_offset, sum(piece.length for piece in pieces)
        file = manifest.files[pieces[0].file_index]
        self._report(SourceAlive(self._source.key, self._stream))
        data = memoryview(bytearray(size))
        self._reader.read(file, offset, data)
        self._counters.add(origin=size)
        for piece in pieces:
            view = data[piece.file_offset - offset :][: piece.length]
            for at in range(0, piece.length, self._pacer.block_bytes):
                self._pacer.take(min(self._pacer.block_bytes, piece.length - at))
                if self._closed:
                    return
            self._keep(piece, view)

    def _keep(self, piece: Piece, view: memoryview) -> None:
        key, staging = self._source.key, self._staging
        if hashlib.sha256(view).hexdigest() != piece.sha256:
            self._counters.add(refetched=len(view))
            staging.edges.judged(key, self._worker_id, corrupt=1)
            self._report(PieceRejected(key, self._stream, Extent(piece.index, piece.index + 1)))
            return
        staging.edges.judged(key, self._worker_id, matched=1)
        if staging.claim(piece.index):
            try:
                staging.write(staging.descriptor(piece.file_index), view, piece.file_offset)
            except BaseException:
                staging.release(piece.index)
                raise
            staging.hold(piece)
        else:
            self._counters.add(refetched=len(view))
        self._report(PieceVerified(key, self._stream, Extent(piece.index, piece.index + 1)))


def range_bytes(manifest: Manifest) -> int:
    """Return how long one GET is: up to 16 MiB, shorter for small models, never beyond a chunk."""
    wanted = min(MAX_RANGE, manifest.chunk_bytes, manifest.total_size // LEAST_RANGES)
    return max(manifest.piece_bytes, wanted)


def _changed(where: object, got: int, wanted: int) -> SourceChanged:
    return SourceChanged(
        "the source is not what the manifest describes",
        got=f"{got} bytes",
        wanted=f"{wanted} bytes",
        where=where,
        do="Publish under a new version; a published version never changes.",
    )
