"""The samples of one shard, by number: tokens, features, text. Knows no disk, no store, no order.

Two layouts: columns (version 2, see ``formats.columns``), where everything is a view into the
file's memory and costs nothing, and JSONL (version 1), which is parsed once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

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
