"""Reading shards: from S3 through a cache on this node's disk, verified each time they are read.

A bad shard raises CorruptData, or is put in quarantine and passed over where the caller allows it.
The cache is shared by all processes of a node; files appear in it by rename. Knows no samples.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data.build import parse_line
from paceline.data.snapshot import Shard, Snapshot, Split, require_purpose
from paceline.errors import CorruptData, SourceMissing
from paceline.objects import ObjectStore

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.data.samples import ShardSamples

log = logging.getLogger(__name__)

SEPARATOR = 0xFF  # never part of UTF-8 text; the models' separator byte


@dataclass(frozen=True)
class Document:
    """One document as evaluation and training see it."""

    path: str
    text: bytes


@dataclass(frozen=True)
class Line:
    """One document as its shard states it, before anything about it was checked."""

    path: str
    sha256: str
    n_bytes: int
    text: bytes


class ShardCache:
    """The shards of one snapshot on this disk; ``quarantined`` names the ones found bad."""

    def __init__(self, snapshot: Snapshot, store: ObjectStore, directory: Path) -> None:
        self.snapshot = snapshot
        self.quarantined: dict[str, str] = {}  # sha256 → why
        self._store = store
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()

    def read(self, shard: Shard) -> bytes:
        """Return the shard's verified bytes; raises CorruptData, and the shard is in quarantine."""
        path = self._directory / shard.name
        try:
            cached = path.read_bytes()
        except FileNotFoundError:
            cached = None
        if cached is not None and _matches(cached, shard):
            return cached
        if cached is not None:  # a bad disk or a half-written file: the source decides
            log.warning("cached shard is corrupt, fetching again shard=%s", shard.sha256[:12])
            path.unlink(missing_ok=True)
        return self._fetch(shard, path)

    def lengths(self, shard: Shard) -> npt.NDArray[np.int32]:
        """Return each sample's length in tokens, in the shard's order, without reading the shard
        itself where the snapshot has an index (version 2)."""
        import numpy as np

        samples = self.samples(shard)
        return np.array([len(samples.tokens(i)) for i in range(len(samples))], dtype=np.int32)

    def samples(self, shard: Shard) -> ShardSamples:
        """Return the shard's samples; raises CorruptData, and the shard is in quarantine."""
        from paceline.data.samples import TextSamples

        lines = self.lines(shard)
        return TextSamples([line.path for line in lines], [line.text for line in lines])

    def prefetch(self, shards: Sequence[Shard]) -> None:
        """Say which shards come next, in this order; a few of them are fetched ahead."""

    def lines(self, shard: Shard) -> list[Line]:
        """Return the documents of the shard; raises CorruptData for one that cannot be parsed."""
        data = self.read(shard)
        found = []
        for number, raw in enumerate(data.splitlines(), start=1):
            try:
                fields = parse_line(raw)
                found.append(
                    Line(
                        str(fields["path"]),
                        str(fields["sha256"]),
                        int(str(fields["n_bytes"])),
                        str(fields["text"]).encode("utf-8"),
                    )
                )
            except ValueError as error:
                where = f"{self.snapshot.shard_url(shard)} line {number}"
                raise self._bad(shard, "not a document", where) from error
        return found

    def token_bytes(self, shard: Shard) -> bytes:
        """Return the shard's token stream: separator, document, separator, … separator."""
        parts = [line.text for line in self.lines(shard)]
        edge = bytes([SEPARATOR])
        stream = edge + edge.join(parts) + edge
        if len(stream) != shard.stream_bytes:
            raise self._bad(shard, "its text is not as long as the snapshot says", shard.name)
        return stream

    def _fetch(self, shard: Shard, path: Path) -> bytes:
        url = self.snapshot.shard_url(shard)
        try:
            data = self._get(url, shard)
        except SourceMissing as error:
            raise self._bad(shard, "missing from the store", url) from error
        if not _matches(data, shard):
            raise self._bad(shard, "its bytes do not match its digest", url)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return data

    def _get(self, url: str, shard: Shard) -> bytes:
        if self._store.head(url).size != shard.bytes:
            return b""
        return self._store.get_bytes(url, max_bytes=shard.bytes)

    def _bad(self, shard: Shard, why: str, where: str) -> CorruptData:
        with self._lock:
            self.quarantined.setdefault(shard.sha256, why)
        return CorruptData(
            "data shard is corrupt",
            got=why,
            wanted=f"sha256 {shard.sha256[:16]}…, {shard.bytes} bytes",
            where=where,
            do="Build the snapshot again; `paceline data validate` lists every bad shard.",
        )


def documents(
    snapshot: Snapshot,
    split: Split,
    store: ObjectStore,
    cache_dir: Path,
    max_bytes: int | None = None,
    *,
    purpose: str | None = None,
    quarantine: dict[str, str] | None = None,
) -> Iterator[Document]:
    """Yield the documents of ``split``, whole ones, up to ``max_bytes`` of text (at least one).

    A corrupt shard raises CorruptData; where a ``quarantine`` dict is given, it is noted there
    (digest → why) and passed over. Raises InvalidSnapshot where ``purpose`` is not the snapshot's.
    """
    if purpose is not None:
        require_purpose(snapshot, purpose)
    cache = ShardCache(snapshot, store, cache_dir)
    taken = 0
    for shard in snapshot.of_split(split):
        try:
            lines = cache.lines(shard)
        except CorruptData:
            if quarantine is None:
                raise
            quarantine |= cache.quarantined
            log.warning("shard quarantined shard=%s", shard.sha256[:12])
            continue
        for line in lines:
            if max_bytes is not None and taken and taken + len(line.text) > max_bytes:
                return
            taken += len(line.text)
            yield Document(line.path, line.text)


def _matches(data: bytes, shard: Shard) -> bool:
    return len(data) == shard.bytes and hashlib.sha256(data).hexdigest() == shard.sha256
