"""The documents of a split, one after another: what evaluation reads. Knows no tokens."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.data.shards import ShardCache
from paceline.data.snapshot import Snapshot, Split
from paceline.errors import CorruptData
from paceline.objects import ObjectStore

log = logging.getLogger(__name__)

WHITE_SPACE = b" \t\n\r\v\f"


def content_digest(text: bytes) -> bytes:
    """Return what two documents share whose texts differ in white space only (about 1 GB/s)."""
    return hashlib.sha256(text.translate(None, WHITE_SPACE)).digest()


@dataclass(frozen=True)
class Document:
    """One document as evaluation sees it."""

    path: str
    text: bytes


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
    (digest → why) and passed over. Raises InvalidSnapshot where ``purpose`` is not the snapshot's,
    InvalidInput where its samples have no text.
    """
    taken = 0
    with ShardCache(snapshot, store, cache_dir, ahead=2, purpose=purpose) as cache:
        shards = snapshot.of_split(split)
        for number, shard in enumerate(shards):
            cache.prefetch(shards[number : number + 3])
            try:
                samples = cache.samples(shard)
            except CorruptData:
                if quarantine is None:
                    raise
                quarantine |= cache.quarantined
                log.warning("shard quarantined shard=%s", shard.sha256[:12])
                continue
            with samples:
                for i in range(len(samples)):
                    text = samples.text_bytes(i)
                    if max_bytes is not None and taken and taken + len(text) > max_bytes:
                        return
                    taken += len(text)
                    yield Document(samples.key(i), text)
