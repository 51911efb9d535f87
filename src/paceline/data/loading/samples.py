"""The samples of one shard, by number: tokens, features, text. Knows no disk, no store, no order.

Two layouts: columns (version 2, see ``formats.columns``), where everything is a view into the
file's memory and costs nothing, and JSONL (version 1), which is parsed once.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.data.loading.shards import ShardCache
from paceline.data.snapshot import Snapshot, Split
from paceline.errors import CorruptData
from paceline.storage import ObjectStore

Array = npt.NDArray[Any]


class ShardSamples(Protocol):
    """What a reader gets of one shard; ``i`` counts from 0 in the shard's own order.

    A context manager: while it is open, its shard stays in the node's cache. Arrays are read-only,
    and stay good after it is closed. A sample that is bad in itself raises CorruptData.
    """

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def key(self, i: int) -> str:
        """Return what names the sample within its snapshot."""
        ...

    def tokens(self, i: int) -> Array:
        """Return the sample's tokens: 1-D, uint8, uint16 or uint32; empty where it has none."""
        ...

    def features(self, i: int) -> dict[str, Array]:
        """Return the sample's arrays by column name."""
        ...

    def text_bytes(self, i: int) -> bytes:
        """Return the sample's text, UTF-8; raises InvalidInput where the snapshot keeps none."""
        ...

    def flat(self) -> tuple[Array, npt.NDArray[np.int64]] | None:
        """Return all samples' tokens end to end, and where each stops (int64[samples]); None where
        samples are made one by one, each when it is asked for."""
        ...

    def expect(self, samples: Sequence[int]) -> None:
        """Say which samples are read next; what is made when it is read is begun now, and kept
        until the next call."""
        ...

    def close(self) -> None:
        """Let the cache have the shard's place; a second call does nothing."""
        ...

    def __enter__(self) -> ShardSamples: ...

    def __exit__(self, *_: object) -> None: ...


class TextSamples:
    """Samples of a shard of version 1: each is a text, and its bytes are its tokens."""

    def __init__(self, keys: list[str], texts: list[bytes]) -> None:
        assert len(keys) == len(texts)
        self._keys, self._texts = keys, texts

    def __len__(self) -> int:
        return len(self._texts)

    def key(self, i: int) -> str:
        """Return the document's path."""
        return self._keys[i]

    def tokens(self, i: int) -> Array:
        """Return the text's bytes, uint8."""
        return np.frombuffer(self._texts[i], dtype=np.uint8)

    def features(self, i: int) -> dict[str, Array]:
        """Return nothing: version 1 has none."""
        assert 0 <= i < len(self)
        return {}

    def text_bytes(self, i: int) -> bytes:
        """Return the text."""
        return self._texts[i]

    def flat(self) -> tuple[Array, npt.NDArray[np.int64]]:
        """Return all texts' bytes end to end, and where each stops."""
        ends = np.cumsum([len(each) for each in self._texts], dtype=np.int64)
        return np.frombuffer(b"".join(self._texts), dtype=np.uint8), ends

    def expect(self, samples: Sequence[int]) -> None:
        """Do nothing: they are here."""

    def close(self) -> None:
        """Do nothing: the texts are in memory."""

    def __enter__(self) -> TextSamples:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def text_samples(data: bytes, *, documents: int, text_bytes: int) -> TextSamples:
    """Return the samples of a shard of version 1, of so many documents and so much text; raises
    ValueError for what is none."""
    keys, texts = _json_lines(data)
    if sum(len(each) for each in texts) != text_bytes:
        raise ValueError("its text is not as long as the snapshot says")
    if len(texts) != documents:
        raise ValueError("it has not as many documents as the snapshot says")
    return TextSamples(keys, texts)


def _json_lines(data: bytes) -> tuple[list[str], list[bytes]]:
    """Return the documents of a shard of version 1; raises ValueError for what is none."""
    keys, texts = [], []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            fields = json.loads(line)
            if set(fields) != {"path", "sha256", "n_bytes", "text"}:
                raise ValueError(f"fields {sorted(fields)}")
            text = fields["text"].encode("utf-8")
            if hashlib.sha256(text).hexdigest() != fields["sha256"]:
                raise ValueError("a digest that is not its text's")
            keys.append(str(fields["path"]))
            texts.append(text)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"line {number} is not a document: {error}"[:200]) from error
    return keys, texts


def length_of(tokens: Array, features: Mapping[str, Array]) -> int:
    """Return what counts as a sample's length: its tokens; without any, the first axis of its first
    feature (by name) that has one; else 1 for its scalars, and 0 where it has nothing at all."""
    if len(tokens):
        return len(tokens)
    axes = (len(features[name]) for name in sorted(features) if features[name].ndim)
    return next(axes, 1 if features else 0)


# The documents of a split, one after another: what evaluation reads. Knows no tokens.

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
