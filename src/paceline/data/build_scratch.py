"""Scratch storage of a snapshot build: a SQLite catalog, and uploads in the background.

The catalog holds names of files in order, the keys and contents seen, and features to be joined: a
source may have more of these than fit in memory. SQLite runs without durability, because the file
is deleted with the build.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from paceline.data.formats import Array, Sample, pack_sample, unpack_sample
from paceline.data.snapshot import Shard
from paceline.errors import InvalidInput, SourceMissing
from paceline.storage import ObjectStore, join_url

PAGE = 1000  # file names in memory at once
CACHE_KIB = 32 * 1024  # of pages in memory


class Catalog:
    """Files, seen keys and features of one build; a context manager, for one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._base = sqlite3.connect(path, isolation_level=None)
        self._base.executescript(
            f"""
            PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{CACHE_KIB};
            CREATE TABLE files(rank BLOB, name TEXT, size INTEGER, PRIMARY KEY(rank, name))
                WITHOUT ROWID;
            CREATE TABLE seen(what BLOB PRIMARY KEY) WITHOUT ROWID;
            CREATE TABLE features(key TEXT PRIMARY KEY, arrays BLOB);
            BEGIN;
            """
        )

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()
        self._path.unlink(missing_ok=True)

    def add_file(self, rank: bytes, name: str, size: int) -> None:
        """Store a file of the source, to be read in the order of its rank."""
        self._base.execute("INSERT INTO files VALUES (?, ?, ?)", (rank, name, size))

    def files(self) -> Iterator[tuple[str, int]]:
        last: tuple[bytes, str] = (b"", "")
        page = "SELECT rank, name, size FROM files WHERE (rank, name) > (?, ?) ORDER BY 1, 2"
        while rows := self._base.execute(f"{page} LIMIT {PAGE}", last).fetchall():
            for _, name, size in rows:
                yield name, size
            last = rows[-1][:2]

    @property
    def total_bytes(self) -> int:
        """Return the size of all files together."""
        (size,) = self._base.execute("SELECT COALESCE(SUM(size), 0) FROM files").fetchone()
        return int(size)

    def is_new(self, what: bytes) -> bool:
        """Return whether ``what`` (a key, a digest) is seen for the first time, and store it."""
        cursor = self._base.execute("INSERT OR IGNORE INTO seen VALUES (?)", (what,))
        return cursor.rowcount == 1

    def forget_seen(self) -> None:
        """Delete all seen keys and digests, for another pass."""
        self._base.execute("DELETE FROM seen")

    def put_features(self, key: str, arrays: Mapping[str, Array]) -> None:
        """Store features of the sample called ``key``; another file may add more to it.

        Raises InvalidInput where one of them is already stored.
        """
        before = self.features(key) or {}
        if twice := sorted(set(before) & set(arrays)):
            raise InvalidInput(
                "features of a sample are given twice",
                got=f"{twice[0]!r} of {key!r}",
                wanted="one row a key",
                do="Remove the duplicate rows from the feature files.",
            )
        packed = pack_sample(Sample(key, features={**before, **arrays}))
        self._base.execute("INSERT OR REPLACE INTO features VALUES (?, ?)", (key, packed))

    def features(self, key: str) -> Mapping[str, Array] | None:
        """Return the features stored for ``key``, or None."""
        held = self._base.execute("SELECT arrays FROM features WHERE key = ?", (key,)).fetchone()
        return unpack_sample(held[0]).features if held else None


# Background uploads of finished shards, a bounded number at a time.

UPLOADS = 4  # concurrent


class Uploads:
    """Uploads shards while the next ones are built; skips objects that already exist."""

    def __init__(self, url: str, store: ObjectStore) -> None:
        self.uploaded = 0
        self._url, self._store = url, store
        self._pool = ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload")
        self._running: deque[Future[int]] = deque()

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def send(self, shard: Shard, path: Path, lengths: bytes) -> None:
        """Upload the shard at ``path`` and its lengths, then remove the file.

        Blocks while ``UPLOADS`` uploads are in flight.
        """
        self._running.append(self._pool.submit(self._send, shard, path, lengths))
        while len(self._running) > UPLOADS:
            self.uploaded += self._running.popleft().result()

    def finish(self) -> None:
        """Wait until all uploads are complete; raises the first upload's error."""
        while self._running:
            self.uploaded += self._running.popleft().result()

    def put(self, url: str, data: bytes) -> None:
        """Write a small object unless an identical one exists."""
        try:
            if self._store.get_bytes(url, max_bytes=max(len(data), 1)) == data:
                return
        except (SourceMissing, InvalidInput):  # absent, or larger
            pass
        self._store.put_bytes(url, data)
        self.uploaded += 1

    def _send(self, shard: Shard, path: Path, lengths: bytes) -> int:
        sent = 0
        beside = join_url(self._url, "shards", shard.lengths_name)
        if self._size(beside) != len(lengths):
            self._store.put_bytes(beside, lengths)
            sent += 1
        target = join_url(self._url, "shards", shard.name)
        if self._size(target) != shard.bytes:
            self._store.upload_file(path, target, shard.sha256)
            sent += 1
        path.unlink()
        return sent

    def _size(self, url: str) -> int | None:
        try:
            return self._store.head(url).size
        except SourceMissing:
            return None
