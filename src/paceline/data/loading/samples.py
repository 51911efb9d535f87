"""The samples of one shard by index: tokens, features, text; and the documents of a split.

There are two layouts: columns (version 2, see ``formats.shard_file``), where everything is a view
into the file's memory, and JSONL (version 1), which is parsed once.
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
    """The samples of one open shard; ``i`` counts from 0 in the shard's own order.

    A context manager: while it is open, its shard stays in the node's cache. Arrays are read-only
    and stay valid after it is closed. A sample that cannot be read raises CorruptData.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def key(self, i: int) -> str:
        """Return the sample's name within its snapshot."""
        ...

    def tokens(self, i: int) -> Array:
        """Return the sample's tokens: 1-D, uint8, uint16 or uint32; empty where it has none."""
        ...

    def features(self, i: int) -> dict[str, Array]:
        """Return the sample's arrays by column name."""
        ...

    def text_bytes(self, i: int) -> bytes:
        """Return the sample's text, UTF-8; raises InvalidInput where the snapshot stores none."""
        ...

    def flat(self) -> tuple[Array, npt.NDArray[np.int64]] | None:
        """Return all samples' tokens end to end, and the end of each (int64[samples]).

        Returns None where each sample is computed on request.
        """
        ...

    def expect(self, samples: Sequence[int]) -> None:
        """Announce which samples are read next; samples that must be computed are started now.

        They are kept until the next call.
        """
        ...

    def close(self) -> None:
        """Allow the cache to remove the shard; a second call does nothing."""
        ...

    def __enter__(self) -> ShardSamples: ...

    def __exit__(self, *_: object) -> None: ...


class TextSamples:
    """Samples of a version 1 shard: each is a text, whose bytes are its tokens."""

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
        """Return no features: version 1 has none."""
        assert 0 <= i < len(self)
        return {}

    def text_bytes(self, i: int) -> bytes:
        """Return the text."""
        return self._texts[i]

    def flat(self) -> tuple[Array, npt.NDArray[np.int64]]:
        """Return all texts' bytes end to end, and the end of each."""
        ends = np.cumsum([len(each) for each in self._texts], dtype=np.int64)
        return np.frombuffer(b"".join(self._texts), dtype=np.uint8), ends

    def expect(self, samples: Sequence[int]) -> None:
        """Do nothing: all samples are in memory."""

    def close(self) -> None:
        """Do nothing: the texts are in memory."""

    def __enter__(self) -> TextSamples:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def text_samples(data: bytes, *, documents: int, text_bytes: int) -> TextSamples:
    """Return the samples of a version 1 shard.

    Raises ValueError unless ``data`` is one, with as many documents and text bytes as given.
    """
    keys, texts = _json_lines(data)
    if sum(len(each) for each in texts) != text_bytes:
        raise ValueError("its text is not as long as the snapshot says")
    if len(texts) != documents:
        raise ValueError("it has not as many documents as the snapshot says")
    return TextSamples(keys, texts)


def _json_lines(data: bytes) -> tuple[list[str], list[bytes]]:
    """Return the keys and texts of a version 1 shard; raises ValueError for invalid lines."""
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
    """Return a sample's length: its number of tokens.

    Without tokens: the first axis of its first feature (by name) that has one; else 1 for scalars,
    and 0 without features.
    """
    if len(tokens):
        return len(tokens)
    axes = (len(features[name]) for name in sorted(features) if features[name].ndim)
    return next(axes, 1 if features else 0)


# The documents of a split as text, for evaluation.

log = logging.getLogger(__name__)

WHITE_SPACE = b" \t\n\r\v\f"


def content_digest(text: bytes) -> bytes:
    """Return a digest that is equal for texts that differ only in white space (about 1 GB/s)."""
    return hashlib.sha256(text.translate(None, WHITE_SPACE)).digest()


@dataclass(frozen=True)
class Document:
    """One document: its path and text."""

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
    """Yield whole documents of ``split``, up to ``max_bytes`` of text (at least one).

    A corrupt shard raises CorruptData; with a ``quarantine`` dict it is recorded there (digest →
    reason) and skipped. Raises InvalidSnapshot where ``purpose`` is not the snapshot's,
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
