"""Read shards from the store through a cache on this node's disk, prefetched and verified.

Every shard is hashed each time it is opened, on the prefetch threads where possible. A corrupt one
raises CorruptData and stays in quarantine, with its reason; a store that does not answer raises
ServiceUnavailable and quarantines nothing. Does not decide the order of samples.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline.data.loading.cache import CachedFile, DiskCache
from paceline.data.loading.fetch import Fetcher
from paceline.data.snapshot import Shard, Snapshot, require_purpose, store_at
from paceline.errors import CorruptData, SourceMissing, TemporaryError
from paceline.storage import ObjectStore

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.data.loading.samples import ShardSamples
    from paceline.data.loading.transform import FailureTally, Transform, Transforms

log = logging.getLogger(__name__)

LIMIT_BYTES = 10_000 * 1024 * 1024
MOST_CONNECTIONS = 16  # half of the store's pool, so that each may be hedged
OPEN_DEADLINE_S = 900.0  # for a shard that is being prefetched


@dataclass
class Opened:
    """A verified shard: its bytes as memory, and its file in the cache."""

    held: CachedFile
    data: mmap.mmap | bytes


class ShardCache:
    """The shards of one snapshot on this node's disk: a context manager that owns threads.

    ``quarantined`` lists corrupt shards by digest and bad samples by ``digest#index``.
    ``limit_bytes`` bounds the whole directory, which the processes of a node share. ``ahead``: the
    maximum number of prefetched shards. ``transform`` runs in this process; ``transforms`` is a
    runner, closed with this cache (see ``transform``). More than ``max_bad_share`` of failed
    samples raise DataRejected. Raises InvalidSnapshot at once where ``purpose`` (or ``project``) is
    not the snapshot's.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        store: ObjectStore,
        directory: Path,
        *,
        limit_bytes: int = LIMIT_BYTES,
        ahead: int = 4,
        transform: Transform | None = None,
        transforms: Transforms | None = None,
        max_bad_share: float = 1.0,
        purpose: str | None = None,
        project: str | None = None,
    ) -> None:
        if purpose is not None:
            require_purpose(snapshot, purpose, project)
        self.snapshot = snapshot
        self.quarantined: dict[str, str] = {}
        self.hits = self.fetched = self.fetched_bytes = 0
        self.verify_s = 0.0
        self._store = store_at(snapshot.url, store)
        self._transforms, self._max_bad_share = transforms, max_bad_share
        self._tally: FailureTally | None = None
        if transform is not None:
            from paceline.data.loading.transform import InlineTransform

            self._transforms = InlineTransform(transform)
        self._ahead = ahead
        self._disk = DiskCache(directory, limit_bytes)
        self._fetcher = Fetcher(self._store, MOST_CONNECTIONS)
        self._pool = ThreadPoolExecutor(ahead, thread_name_prefix="shard-ahead")
        self._lock = threading.Lock()
        self._coming: deque[Shard] = deque()
        self._running: dict[str, Future[Opened]] = {}

    def __enter__(self) -> ShardCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop fetching; open samples stay valid."""
        with self._lock:
            self._coming.clear()
            running, self._running = self._running, {}
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._fetcher.close()
        if self._transforms is not None:
            self._transforms.close()
        for each in running.values():
            each.add_done_callback(_let_go)

    @property
    def hedges(self) -> int:
        """Return the number of ranges requested a second time."""
        return self._fetcher.hedges

    def samples(self, shard: Shard) -> ShardSamples:
        """Return the shard's samples; raises CorruptData and quarantines a corrupt shard.

        A prefetched shard returns at once. Close the result after reading.
        """
        samples = self._plain(shard)
        if self._transforms is None:
            return samples
        from paceline.data.loading.transform import FailureTally, TransformedSamples

        with self._lock:
            self._tally = self._tally or FailureTally(self._max_bad_share)

        def bad(i: int, why: str) -> NoReturn:
            raise self._bad_sample(shard, i, why)

        prefix = f"{shard.sha256}#"
        with self._lock:
            named = [each for each in self.quarantined.items() if each[0].startswith(prefix)]
        known = {int(name.removeprefix(prefix)): why for name, why in named}
        return TransformedSamples(
            samples, self._transforms, bad, known, name=shard.sha256, tally=self._tally
        )

    def lengths(self, shard: Shard) -> npt.NDArray[np.int32]:
        """Return each sample's length in the shard's order: int32[samples].

        See ``length_of``. Reads the small file beside the shard, or the shard itself where there is
        none (snapshots of version 1) or where it is damaged.
        """
        import numpy as np

        if shard.lengths_sha256 is not None:
            raw = self._small(shard.lengths_name, 4 * shard.samples, shard.lengths_sha256)
            if raw is not None:
                return np.frombuffer(raw, dtype="<i4")
            log.warning("lengths are damaged, reading the shard shard=%s", shard.sha256[:12])
        with self._plain(shard) as samples:
            from paceline.data.loading.samples import length_of

            found = [length_of(samples.tokens(i), samples.features(i)) for i in range(len(samples))]
        return np.array(found, dtype=np.int32)

    def prefetch(self, shards: Sequence[Shard]) -> None:
        """Set which shards are read next, in order; the first few are fetched ahead.

        Shards of earlier calls that are not among these are released.
        """
        with self._lock:
            wanted = {each.sha256 for each in shards}
            dropped = [each for each in self._running if each not in wanted]
            for each in dropped:
                future = self._running.pop(each)
                future.cancel()  # a running one completes, then releases its shard
                future.add_done_callback(_let_go)
            known = self._running.keys() | self.quarantined.keys()
            self._coming = deque(
                {each.sha256: each for each in shards if each.sha256 not in known}.values()
            )
            self._start_more()

    # ── one shard ────────────────────────────────────────────────────────────────────────────────

    def _plain(self, shard: Shard) -> ShardSamples:
        """Return the shard's samples as stored, without transforms."""
        opened = self._open(shard)
        try:
            return self._parsed(shard, opened)
        except ValueError as error:
            opened.held.close()
            raise self._bad(shard, str(error), self.snapshot.shard_url(shard)) from error

    def _open(self, shard: Shard) -> Opened:
        """Return the shard, prefetched or loaded now."""
        if (why := self.quarantined.get(shard.sha256)) is not None:
            raise self._bad(shard, why, self.snapshot.shard_url(shard))
        with self._lock:
            ahead = self._running.pop(shard.sha256, None)
            self._coming = deque(each for each in self._coming if each.sha256 != shard.sha256)
            self._start_more()
        if ahead is not None and not ahead.cancel():
            try:
                return ahead.result(OPEN_DEADLINE_S)
            except (TemporaryError, TimeoutError) as error:  # perhaps long ago: try again
                log.warning("fetching ahead failed shard=%s error=%s", shard.sha256[:12], error)
        return self._load(shard)

    def _start_more(self) -> None:
        """Start prefetches up to the limit; call with the lock held."""
        while self._coming and len(self._running) < self._ahead:
            shard = self._coming.popleft()
            self._running[shard.sha256] = self._pool.submit(self._load, shard)

    def _load(self, shard: Shard) -> Opened:
        """Return the shard, verified, from the disk or the store."""
        held = self._disk.open(shard.name)
        if held is not None:
            opened = Opened(held, held.map())
            if self._is(opened.data, shard.bytes, shard.sha256):
                self.hits += 1
                return opened
            # maybe a bad disk: fetch it again from the store
            log.warning("cached shard is corrupt, fetching again shard=%s", shard.sha256[:12])
            self._disk.discard(held)
        url = self.snapshot.shard_url(shard)
        with self._disk.making(shard.name, shard.bytes) as part:
            if isinstance(part, CachedFile):  # another process wrote it meanwhile
                opened = Opened(part, part.map())
                if self._is(opened.data, shard.bytes, shard.sha256):
                    return opened
                self._disk.discard(part)
                raise self._bad(shard, "its bytes do not match its digest, twice", url)
            try:
                self._fetcher.fetch(url, shard.bytes, part.write)
            except SourceMissing as error:
                raise self._bad(shard, "missing from the store", url) from error
            except CorruptData as error:
                why = f"its bytes do not match its digest: {error.got}"
                raise self._bad(shard, why, url) from error
            data = part.map()
            if not self._is(data, shard.bytes, shard.sha256):
                raise self._bad(shard, "its bytes do not match its digest", url)
            self.fetched += 1
            self.fetched_bytes += shard.bytes
            return Opened(part.commit(), data)

    def _parsed(self, shard: Shard, opened: Opened) -> ShardSamples:
        if shard.lengths_sha256 is None:
            from paceline.data.loading.samples import text_samples

            data = bytes(opened.data)
            opened.held.close()
            return text_samples(data, documents=shard.samples, text_bytes=shard.text_bytes)
        from paceline.data.formats.shard_file import ColumnSamples

        snapshot = self.snapshot
        return ColumnSamples(
            opened.data,
            shard.samples,
            snapshot.vocabulary,
            snapshot.columns,
            on_close=opened.held.close,
        )

    def _small(self, name: str, size: int, sha256: str) -> bytes | None:
        """Return a small file from the cache or the store; None if it is damaged or missing."""
        held = self._disk.open(name)
        if held is not None:
            data = bytes(held.map())
            if self._is(data, size, sha256):
                held.close()
                return data
            self._disk.discard(held)
        url = f"{self.snapshot.shard_url(self.snapshot.shards[0]).rsplit('/', 1)[0]}/{name}"
        with self._disk.making(name, size) as part:
            if isinstance(part, CachedFile):
                data = bytes(part.map())
                part.close()
                return data if self._is(data, size, sha256) else None
            try:
                self._fetcher.fetch(url, size, part.write)
            except (SourceMissing, CorruptData):
                return None
            data = bytes(part.map())
            if not self._is(data, size, sha256):
                return None
            part.commit().close()
            return data

    def _is(self, data: mmap.mmap | bytes, size: int, sha256: str) -> bool:
        began_s = time.perf_counter()
        right = len(data) == size and hashlib.sha256(data).hexdigest() == sha256
        self.verify_s += time.perf_counter() - began_s
        return right

    def _bad(self, shard: Shard, why: str, where: str) -> CorruptData:
        with self._lock:
            self.quarantined.setdefault(shard.sha256, why)
        return CorruptData(
            "data shard is corrupt",
            got=why,
            wanted=f"sha256 {shard.sha256[:16]}…, {shard.bytes} bytes",
            where=where,
            do="Build the snapshot again; validating it lists every bad shard.",
        )

    def _bad_sample(self, shard: Shard, i: int, why: str) -> CorruptData:
        name = f"{shard.sha256}#{i}"
        with self._lock:
            known = name in self.quarantined
            self.quarantined.setdefault(name, why)
        if not known:
            log.warning("sample quarantined shard=%s row=%d why=%s", shard.sha256[:12], i, why)
        return CorruptData("data sample is bad", got=why, where=f"{shard.name} sample {i}")


def _let_go(future: Future[Opened]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().held.close()
