"""Read shards from the store through a cache on this node's disk, verified at each opening.

A corrupt shard raises CorruptData and stays in quarantine, with its reason; a store that does not
answer raises ServiceUnavailable and quarantines nothing. Does not decide the order of samples.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.loading.cache import CachedFile, DiskCache, Mapped
from paceline.data.loading.fetch import Fetcher
from paceline.data.snapshot import (
    LOSS_MASK,
    Shard,
    Snapshot,
    Split,
    require_purpose,
    root_url,
    store_at,
)
from paceline.errors import CorruptData, DataRejected, SourceMissing
from paceline.storage import ObjectStore, join_url

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.data.formats import ShardSamples
    from paceline.data.loading.transform import ProcessTransform

log = logging.getLogger(__name__)

LIMIT_BYTES = 10_000 * 1024 * 1024
MOST_CONNECTIONS = 16  # half of the store's pool, so that each may be hedged
AHEAD = 3  # shards opened before they are read
BAD_SAMPLES_ALLOWED = 8  # bad samples always allowed
WHITE_SPACE = b" \t\n\r\v\f"


class ShardCache:
    """The shards of one snapshot on this node's disk; a context manager, thread-safe.

    ``quarantined`` lists corrupt shards by digest and bad samples by ``digest#index``.
    ``limit_bytes`` bounds the whole directory, which the processes of a node share. ``transforms``
    runs the user's transform of each sample and is closed with this cache; more than
    ``max_bad_share`` of failed samples raise DataRejected. Raises InvalidSnapshot at once where
    ``purpose`` (or ``project``) is not the snapshot's.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        store: ObjectStore,
        directory: Path,
        *,
        limit_bytes: int = LIMIT_BYTES,
        transforms: ProcessTransform | None = None,
        max_bad_share: float = 1.0,
        purpose: str | None = None,
        project: str | None = None,
    ) -> None:
        if purpose is not None:
            require_purpose(snapshot, purpose, project)
        self.snapshot = snapshot
        self.quarantined: dict[str, str] = {}
        self.fetched = self.fetched_bytes = 0
        self.verify_s = 0.0
        self._transforms, self._max_bad_share = transforms, max_bad_share
        self._transformed = self._bad = 0  # samples
        self._disk = DiskCache(directory, limit_bytes)
        self._fetcher = Fetcher(store_at(snapshot.url, store), MOST_CONNECTIONS)
        self._lock = threading.Lock()

    def __enter__(self) -> ShardCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop fetching; open samples stay valid."""
        self._fetcher.close()
        if self._transforms is not None:
            self._transforms.close()

    @property
    def hedges(self) -> int:
        return self._fetcher.hedges

    def samples(self, shard: Shard) -> ShardSamples:
        """Return the shard's samples, to be closed; raises CorruptData for a corrupt shard."""
        return self._samples(shard, self._transforms)

    def opened(
        self, shards: Iterable[Shard], ahead: int = AHEAD
    ) -> Iterator[tuple[Shard, ShardSamples | CorruptData]]:
        """Yield each shard with its samples, open until the next one, or why it is corrupt.

        The next ``ahead`` shards are opened meanwhile.
        """
        coming = iter(shards)
        running: deque[tuple[Shard, Future[ShardSamples]]] = deque()
        with ThreadPoolExecutor(1 + ahead, thread_name_prefix="shard-ahead") as pool:
            try:
                while True:
                    for shard in islice(coming, 1 + ahead - len(running)):
                        running.append((shard, pool.submit(self.samples, shard)))
                    if not running:
                        return
                    shard, future = running.popleft()
                    try:
                        samples = future.result()
                    except CorruptData as error:
                        yield shard, error
                        continue
                    with samples:
                        yield shard, samples
            finally:
                for _, future in running:
                    close_later(future)

    def lengths(self, shard: Shard) -> npt.NDArray[np.int32]:
        """Return each sample's length in the shard's order: int32[samples]; see ``length_of``."""
        found: npt.NDArray[np.int32] = self.index(shard)[0]
        return found

    def index(self, shard: Shard) -> npt.NDArray[np.int32]:
        """Return the samples' lengths and, with a loss mask, how many of their tokens count:
        int32[1 or 2, samples].

        Reads the small file beside the shard, or the shard itself where that is damaged.
        """
        import numpy as np

        rows = 2 if self.snapshot.is_masked else 1
        name, size = shard.lengths_name, 4 * shard.samples * rows
        try:
            held, data, _ = self._file(name, size, shard.lengths_sha256)
        except (CorruptData, SourceMissing):
            log.warning("lengths are damaged, reading the shard shard=%s", shard.sha256[:12])
        else:
            held.close()
            found: npt.NDArray[np.int32] = np.frombuffer(bytes(data), dtype="<i4")
            return found.reshape(rows, shard.samples)
        with self._samples(shard, None) as samples:
            return samples.index()

    def report(self, sample: str, why: str | None) -> None:
        """Count a transformed sample and put it in quarantine if there is a reason ``why``.

        Raises DataRejected where too many are bad.
        """
        with self._lock:
            self._transformed += 1
            if why is None:
                return
            self.quarantined[sample] = why
            self._bad += 1
            bad, tried = self._bad, self._transformed
        shard, _, row = sample.partition("#")
        log.warning("sample quarantined shard=%s row=%s why=%s", shard[:12], row, why)
        if bad > max(BAD_SAMPLES_ALLOWED, self._max_bad_share * tried):
            raise DataRejected(
                "a transform fails on too many samples",
                got=f"{bad} of {tried}, the last one: {why}",
                wanted=f"at most {self._max_bad_share:.0%}, data.max_bad_share",
                where=sample,
                do="Run the transform on these samples.",
            )

    def _samples(self, shard: Shard, transforms: ProcessTransform | None) -> ShardSamples:
        if (why := self.quarantined.get(shard.sha256)) is not None:
            raise self._corrupt(shard, why)
        try:
            held, data, is_new = self._file(shard.name, shard.bytes, shard.sha256)
        except SourceMissing as error:
            raise self._corrupt(shard, "missing from the store") from error
        except CorruptData as error:
            why = f"its bytes do not match its digest: {error.got}"
            raise self._corrupt(shard, why) from error
        self.fetched += is_new
        self.fetched_bytes += is_new * shard.bytes
        try:
            return self._parsed(shard, held, data, transforms)
        except ValueError as error:
            held.close()
            raise self._corrupt(shard, str(error)) from error

    def _parsed(
        self, shard: Shard, held: CachedFile, data: Mapped, transforms: ProcessTransform | None
    ) -> ShardSamples:
        from paceline.data.formats import ShardSamples, read_columns

        arrays, snapshot = read_columns(data), self.snapshot
        stored = (arrays, shard.samples, snapshot.vocabulary, snapshot.columns, held.close)
        if transforms is None:
            return ShardSamples(*stored)
        from paceline.data.loading.transform import TransformedSamples

        return TransformedSamples(shard.sha256, transforms, self.quarantined, self.report, *stored)

    def _file(self, name: str, size: int, sha256: str) -> tuple[CachedFile, Mapped, bool]:
        """Return a verified file, in use, its bytes, and whether they come from the store.

        Raises SourceMissing, CorruptData where the store's content is not this, and the errors of
        ``Fetcher`` and ``DiskCache``.
        """
        held = self._disk.open(name)
        if held is not None:
            data = held.map()
            if self._is(data, size, sha256):
                return held, data, False
            # maybe a bad disk: fetch it again from the store
            log.warning("cached file is corrupt, fetching again name=%s", name)
            self._disk.discard(held)
        with self._disk.making(name, size) as part:
            if isinstance(part, CachedFile):  # another process wrote it meanwhile
                data = part.map()
                if self._is(data, size, sha256):
                    return part, data, False
                self._disk.discard(part)
            else:
                url = join_url(root_url(self.snapshot.url), "shards", name)
                self._fetcher.fetch(url, size, part.write)
                data = part.map()
                if self._is(data, size, sha256):
                    return part.commit(), data, True
        raise CorruptData("file is corrupt", got="another content", where=name)

    def _is(self, data: Mapped, size: int, sha256: str) -> bool:
        began_s = time.perf_counter()
        right = len(data) == size and hashlib.sha256(data).hexdigest() == sha256
        self.verify_s += time.perf_counter() - began_s
        return right

    def _corrupt(self, shard: Shard, why: str) -> CorruptData:
        with self._lock:
            self.quarantined.setdefault(shard.sha256, why)
        return CorruptData(
            "data shard is corrupt",
            got=why,
            wanted=f"sha256 {shard.sha256[:16]}…, {shard.bytes} bytes",
            where=self.snapshot.shard_url(shard),
            do="Build the snapshot again; validating it lists every bad shard.",
        )


def close_later(future: Future[Any]) -> None:
    """Cancel the opening of a shard, or close the shard once it is open."""

    def close(done: Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().close()

    future.cancel()
    future.add_done_callback(close)


# The documents of a split as text, for evaluation.


def content_digest(text: bytes) -> bytes:
    """Return a digest that is equal for texts that differ only in white space (about 1 GB/s)."""
    return hashlib.sha256(text.translate(None, WHITE_SPACE)).digest()


@dataclass(frozen=True)
class Conversation:
    """The tokens of a conversation, and which of them a loss counts."""

    tokens: npt.NDArray[Any]
    mask: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Document:
    """One document: its path and text; of a conversation the text is what assistants say in it.

    Of a pair of answers ``conversation`` is the chosen one.
    """

    path: str
    text: bytes
    conversation: Conversation | None = None
    rejected: Conversation | None = None


def documents(
    snapshot: Snapshot,
    split: Split,
    store: ObjectStore,
    cache_dir: Path,
    max_bytes: int | None = None,
    *,
    text_of: Callable[[npt.NDArray[Any]], bytes] | None = None,
) -> Iterator[Document]:
    """Yield whole documents of ``split``, up to ``max_bytes`` of text (at least one).

    The training split of a tokenised snapshot keeps tokens only: ``text_of`` (a tokenizer's
    ``text``) decodes them, and what assistants say in conversations. Of a pair of answers this is
    the conversation with the chosen one. Raises CorruptData for a corrupt shard, InvalidInput where
    its samples have no text.
    """
    import numpy as np

    taken = 0
    with ShardCache(snapshot, store, cache_dir) as cache:
        for _, samples in cache.opened(snapshot.of_split(split)):
            if isinstance(samples, CorruptData):
                raise samples
            for i in range(len(samples)):
                sides: list[Conversation] = []
                if snapshot.is_masked and text_of is not None:
                    tokens = samples.sides(i)
                    masks = np.split(samples.features(i)[LOSS_MASK], [len(tokens[0])])
                    sides = [Conversation(*each) for each in zip(tokens, masks, strict=False)]
                    text = text_of(sides[0].tokens[sides[0].mask])
                elif samples.keeps_text or text_of is None:
                    text = samples.text_bytes(i)
                else:
                    text = text_of(samples.tokens(i))
                if max_bytes is not None and taken and taken + len(text) > max_bytes:
                    return
                taken += len(text)
                yield Document(samples.key(i), text, *sides)
