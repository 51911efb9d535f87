"""Shards on their way to the store while the next ones are made; a bounded number of them."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from paceline.data.snapshot import Shard
from paceline.errors import InvalidInput, SourceMissing
from paceline.objects import ObjectStore, join_url

UPLOADS = 4  # at once


class Uploads:
    """Sends shards while the next ones are made; what is there already is not sent again."""

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
        """Upload the shard at ``path``, which is removed then, and its lengths; waits while four
        are under way."""
        self._running.append(self._pool.submit(self._send, shard, path, lengths))
        while len(self._running) > UPLOADS:
            self.uploaded += self._running.popleft().result()

    def finish(self) -> None:
        """Return when everything sent is there; raises what stopped any of it."""
        while self._running:
            self.uploaded += self._running.popleft().result()

    def put(self, url: str, data: bytes) -> None:
        """Write a small object unless exactly this is there."""
        try:
            if self._store.get_bytes(url, max_bytes=max(len(data), 1)) == data:
                return
        except (SourceMissing, InvalidInput):  # not there, or larger
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
