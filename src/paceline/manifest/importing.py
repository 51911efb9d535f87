"""Imports a model that another party hosts, from a hub or a registry, once, into object storage.

The publisher left no manifest: the bytes are hashed while they pass from the remote server to
parts of S3 objects, so that no disk has to hold the model; ``manifest.json`` comes last, and from
then on the version is like any other. The origin budget holds for the import as a whole, whatever
fails: an object beside the manifest counts what was read, one importer at a time reads, and the
next one goes on with the parts that are in S3. (What the earlier one wrote is read back from S3 and
compared with the remote server's digests.)
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import secrets
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from paceline.errors import (
    Cancelled,
    Conflict,
    CorruptData,
    OriginBudgetExceeded,
    PacelineError,
    SourceChanged,
    SourceMissing,
)
from paceline.manifest.build import ScannedFile, check_name, digest, require_model
from paceline.manifest.finite import WeightsScan
from paceline.manifest.model import MANIFEST_FILE, Manifest
from paceline.manifest.progress import ProgressCallback, ignore_progress
from paceline.manifest.publish import fetch_manifest, read_record, record_unsound
from paceline.manifest.signing import sign_manifest
from paceline.manifest.sizes import MIB, choose_sizes
from paceline.schemas import Count, PieceHash, Record
from paceline.storage import ObjectStore, RemoteFile, RemoteModel, join_url
from paceline.system import usable_cores

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

RECORD_FILE = f"{MANIFEST_FILE}.import"
MIN_PART = 8 * MIB
MAX_PARTS = 9_000  # of one object; S3 allows 10,000
MAX_PARALLEL = 16  # parts in flight
LEASE_S = 20.0  # an importer whose record stays the same for so long has ended
BEAT_S = 4.0
SETTLE_S = 0.5  # of two that take over at once, the last to write is the one
LOOK_S = 1.0

log = logging.getLogger(__name__)


def import_model(
    source: RemoteModel,
    url: str,
    *,
    store: ObjectStore,
    cap_bytes: int,
    link_mbit: float,
    piece_bytes: int = 0,
    chunk_bytes: int = 0,
    piece_hash: PieceHash | None = None,
    key: Ed25519PrivateKey | None = None,
    on_progress: ProgressCallback = ignore_progress,
    stopping: threading.Event | None = None,
) -> Manifest:
    """Bring ``source`` below ``url`` and return its manifest; one that is there is not read again.

    At most ``cap_bytes`` are read from the remote server, by all attempts together, before
    OriginBudgetExceeded is raised. While another process imports the same version this one waits.
    Raises CorruptData where the bytes are not what the server lists, InvalidManifest for files that
    cannot be a model, Conflict where another process took over, and Cancelled soon after
    ``stopping`` is set.
    """
    check_name("model_id", source.model_id)
    check_name("version", source.version)
    remote = {file.path: file for file in source.files}
    found = require_model(
        [ScannedFile(file.path, file.size, 0) for file in source.files], source.url
    )
    sizes = choose_sizes(
        source.total_size, link_mbit, piece_bytes=piece_bytes, chunk_bytes=chunk_bytes
    )
    stopping = stopping or threading.Event()
    ledger = _ImportLedger(store, url, source.total_size, cap_bytes, stopping)
    manifest, scans = ledger.acquire(), dict[str, WeightsScan]()
    if manifest is None:
        with ledger, _Importer(source, url, store, ledger, sizes.piece_bytes, stopping) as importer:
            manifest = digest(
                Path(source.url),
                found,
                sizes,
                model_id=source.model_id,
                version=source.version,
                piece_hash=piece_hash or "blake3",
                open_file=lambda file: _ImportedFile(importer, remote[file.path]),
                on_progress=on_progress,
                stopping=stopping,
                scans=scans,
            )
            for entry in manifest.files:
                wanted = remote[entry.path].sha256
                if wanted and wanted != entry.sha256:
                    importer.discard(entry.path, entry.sha256, wanted)
        if key is not None:
            manifest = sign_manifest(manifest, key)
        ledger.require_ours()
        record_unsound(url, store, manifest, scans)
        store.put_bytes(join_url(url, MANIFEST_FILE), manifest.to_bytes())
        store.delete(join_url(url, RECORD_FILE))
        log.info("imported %s to %s digest=%s", source.url, url, manifest.digest)
    if (manifest.model_id, manifest.version) != (source.model_id, source.version):
        raise Conflict(
            "another model is published there",
            got=f"{manifest.model_id} {manifest.version}",
            wanted=f"{source.model_id} {source.version}",
            where=url,
        )
    return manifest


class ImportRecord(Record):
    """An import in progress, as stored beside the files."""

    by: str = Field(max_length=300)  # "": an attempt that ended by itself
    beat: Count = 0  # grows while the importer lives
    read_bytes: Count = 0  # from the remote server, by all attempts; written ahead


class _ImportLedger:
    """Who imports, and how much was read: an object that the importer rewrites while it lives."""

    def __init__(
        self, store: ObjectStore, url: str, total: int, cap: int, stopping: threading.Event
    ) -> None:
        self._store, self._url, self._cap, self._stopping = store, url, cap, stopping
        self._where = join_url(url, RECORD_FILE)
        slack = max(cap - total, MIB)
        # What a killed attempt read in vain is a fraction of what the budget leaves for failures.
        self.parallel = max(1, min(MAX_PARALLEL, slack // (4 * MIN_PART)))
        self._ahead = slack // 16
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._read = self._stored = 0
        self._me = ImportRecord(by=f"{socket.gethostname()[:200]}-{secrets.token_hex(8)}")
        self._over = threading.Event()
        self._lost: PacelineError | None = None

    def acquire(self) -> Manifest | None:
        """Return the manifest where another process brings it, else None: this one imports."""
        seen, since_s = None, time.monotonic()
        while True:
            try:
                return fetch_manifest(self._url, self._store)
            except SourceMissing:
                found = self._load()
            if found != seen:
                seen, since_s = found, time.monotonic()
                if found is not None and found.by:
                    log.warning("%s imports this version: waiting (%s)", found.by, self._url)
            if found is None or not found.by or time.monotonic() - since_s >= LEASE_S:
                self._read = self._stored = found.read_bytes if found else 0
                self._store_record()
                time.sleep(SETTLE_S)
                if (now := self._load()) is not None and now.by == self._me.by:
                    return None
                seen = None
            if self._stopping.wait(LOOK_S):
                raise Cancelled("the import was stopped", where=self._url)

    def __enter__(self) -> _ImportLedger:
        self._thread = threading.Thread(target=self._beat, name="import-beat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._lost is not None:
            raise self._lost
        if kind is not None:
            self._me = self._me.model_copy(update={"by": ""})
            self._stored = self._read  # exactly, from here on
            self._store_record()

    def reserve(self, count: int) -> None:
        """Count bytes before they are read; raises OriginBudgetExceeded."""
        with self._lock:
            if self._read + count > self._cap:
                raise OriginBudgetExceeded(
                    "the import would read more than the model's size allows",
                    got=f"{self._read} bytes read by all attempts, {count} more wanted",
                    wanted=f"at most {self._cap} bytes",
                    where=self._url,
                    do="What arrived is kept: allow more with --extra-origin.",
                )
            self._read += count
            if self._read <= self._stored:
                return
            self._stored = self._read + self._ahead
        self._store_record()

    def require_ours(self) -> None:
        """Raise Conflict where another process took the import over: this one was silent."""
        found = self._load()
        if found is None or found.by != self._me.by:
            raise Conflict(
                "another process took this import over",
                got=found.by if found else "it has ended",
                wanted=self._me.by,
                where=self._where,
                do="Wait for it; or run this again.",
            )

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self.require_ours()
                self._store_record()
            except Conflict as error:
                self._lost = error
                self._stopping.set()
                return
            except PacelineError as error:
                log.warning("the import's record is not written: %s", error)

    def _store_record(self) -> None:
        with self._writing:
            with self._lock:
                update = {"beat": self._me.beat + 1, "read_bytes": self._stored}
                self._me = self._me.model_copy(update=update)
            # Another writer's size in its place is found by ``require_ours``.
            with contextlib.suppress(CorruptData):
                self._store.put_bytes(self._where, self._me.model_dump_json().encode())

    def _load(self) -> ImportRecord | None:
        try:
            return read_record(ImportRecord, self._where, self._store)
        except SourceChanged:  # rewritten between its head and its bytes
            return self._load()


class _Importer:
    """Reads remote files in parts, several at once, and writes each part to S3 as it arrives."""

    def __init__(
        self,
        source: RemoteModel,
        url: str,
        store: ObjectStore,
        ledger: _ImportLedger,
        piece_bytes: int,
        stopping: threading.Event,
    ) -> None:
        self._source, self._url, self.store = source, url, store
        self._ledger, self._stopping = ledger, stopping
        self._piece_bytes = piece_bytes
        self.there = {info.url: info.size for info in store.list(url)}
        threads = min(len(source.files), usable_cores())  # files that are read at once
        self.ahead = max(1, -(-ledger.parallel // threads))
        self.pool = ThreadPoolExecutor(ledger.parallel, thread_name_prefix="import")

    def __enter__(self) -> _Importer:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def target(self, path: str) -> str:
        return join_url(self._url, path)

    def part_bytes(self, size: int) -> int:
        """Return the size of the parts of a file: whole pieces."""
        least = max(MIN_PART, -(-size // MAX_PARTS))
        return -(-least // self._piece_bytes) * self._piece_bytes

    def fetch(self, file: RemoteFile, offset: int, length: int) -> bytearray:
        """Return bytes of the remote file, counted."""
        if self._stopping.is_set():
            raise Cancelled("the import was stopped", where=file.url)
        self._ledger.reserve(length)
        return self._source.reader.read(file, offset, length, self._stopping)

    def discard(self, path: str, got: str, wanted: str) -> None:
        """Delete a file with wrong bytes and raise CorruptData."""
        self.store.delete(self.target(path))
        what, where = (
            "an imported file is not what its server lists",
            f"{path} of {self._source.url}",
        )
        do = "Run it again: only this file is read again."
        raise CorruptData(what, got=got, wanted=wanted, where=where, do=do)


class _ImportedFile:
    """One file as the hashing reads it: from the remote server by way of S3's parts, or from S3
    where an earlier attempt left all of it.
    """

    def __init__(self, importer: _Importer, file: RemoteFile) -> None:
        self._importer, self._file, self._target = importer, file, importer.target(file.path)
        self.block = self._part_bytes = importer.part_bytes(file.size)
        self._parts: deque[Future[bytearray]] = deque()
        self._next = 0  # first byte that no part was requested for
        self._part, self._at = memoryview(b""), 0
        self._git = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)

    def __enter__(self) -> _ImportedFile:
        store, file = self._importer.store, self._file
        self._upload = store.upload_parts(self._target, file.size, self._part_bytes)
        self._etag = ""
        if self._importer.there.get(self._target) == file.size and file.size:
            self._etag = store.head(self._target).etag
        elif self._upload.there:
            missing = self._upload.lengths.keys() - self._upload.there.keys()
            list(self._importer.pool.map(self._bring, sorted(missing)))
            self._upload.complete()
            self._etag = store.head(self._target).etag
        else:
            self._upload.begin()
            if not file.size:
                store.put_bytes(self._target, b"")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for each in self._parts:
            each.cancel()
        if kind is not None:
            return
        if not self._etag and self._file.size:
            self._upload.complete()
        if self._file.git_sha1 not in ("", self._git.hexdigest()):
            path, got = self._file.path, self._git.hexdigest()
            self._importer.discard(path, f"git {got}", f"git {self._file.git_sha1}")

    def read(self, length: int) -> memoryview:
        """Return the next bytes, at most ``length`` and never beyond a part."""
        if self._at == len(self._part):
            self._part, self._at = memoryview(self._take()), 0
        view = self._part[self._at : self._at + length]
        self._at += len(view)
        if self._file.git_sha1:
            self._git.update(view)
        return view

    def _take(self) -> bytearray:
        """Return the next part, and request those after it."""
        while len(self._parts) < self._importer.ahead and self._next < self._file.size:
            work = self._read_back if self._etag else self._bring
            self._parts.append(self._importer.pool.submit(work, self._next // self._part_bytes + 1))
            self._next += self._part_bytes
        return self._parts.popleft().result()

    def _bring(self, number: int) -> bytearray:
        offset, length = (number - 1) * self._part_bytes, self._upload.lengths[number]
        data = self._importer.fetch(self._file, offset, length)
        self._upload.write(number, io.BytesIO(data))
        return data

    def _read_back(self, number: int) -> bytearray:
        data = bytearray(self._upload.lengths[number])
        offset = (number - 1) * self._part_bytes
        self._importer.store.read_range_into(
            self._target, offset, memoryview(data), etag=self._etag, size=self._file.size
        )
        return data
