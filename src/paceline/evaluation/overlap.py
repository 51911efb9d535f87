"""Whether held-out documents occur in a candidate's training data: as copies, or in large part.

A *copy* is equal except for white space: under another name, in another shard or with other line
ends. A document *overlaps* when at least half of its shingles, runs of 50 bytes without white space
and ASCII case, occur anywhere in the training text: a copy with a changed header, a chapter in a
longer file. 50 bytes are about GPT-3's 13 words (Brown et al. 2020, appendix C), but need no words:
code and languages without spaces count alike. A share per document, as Llama 3 and Tulu 3 take it,
because single shingles (licences, imports) are shared by documents that are not copies. A document
with too few shingles overlaps when it equals a training text but for case, punctuation, white space
and a conversation's system message.

The training split is read shard by shard, once, in linear time: about 20 MB/s of a core. Memory
holds one shard, 32 bytes a held-out document and 12 a shingle; at most ``MAX_SHINGLES`` of them,
beyond which they are sampled by their hash, the same on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data import (
    WHITE_SPACE,
    ShardCache,
    Snapshot,
    content_digest,
    system_remover,
    tokenizer_of,
)
from paceline.errors import CorruptData
from paceline.schemas import Overlap
from paceline.storage import ObjectStore

EXAMPLES = 5
SHINGLE_BYTES = 50
OVERLAP_SHARE = 0.5  # of a document's shingles
MIN_SHINGLES = 32  # of a document; a share of fewer says little
MIN_FOLDED = 20  # characters of a document that is compared as folded: "Yes." is no copy of "yes"
MAX_SHINGLES = 4 * 1024 * 1024
_BLOCK_BYTES = 1024 * 1024
_FILTER_BITS = 26  # 64 MiB: at most 1 in 16 other shingles passes
_LOWER = bytes(range(256)).lower()
_MARKS = r"\s!-/:-@\[-`{-\xbf\u2000-\u206f\u3000-\u303f\uff01-\uff0f\uff1a-\uff20"
_LOOSE = re.compile(
    rf"(?<![\d{_MARKS}])[{_MARKS}]+|(?<=\d)[{_MARKS}]++(?!\d)"
)  # not between digits
_SPACE = re.compile(r" (?=[^\w ])|(?<=[^\w ]) ")

Hashes = NDArray[np.uint64]


def find_overlap(
    held_out: Iterable[tuple[str, bytes]],
    training: Snapshot,
    store: ObjectStore,
    cache_dir: Path,
    *,
    quarantined: Sequence[str] = (),
    answers: Mapping[str, bytes] | None = None,
    without_system: Callable[[bytes], bytes] = bytes,
    on_progress: Callable[[float], None] = lambda _fraction: None,
) -> Overlap:
    """Return how many of ``held_out`` (key, text) are in the training split of ``training``.

    Shards in ``quarantined`` were not used in training and are left out; any other unreadable shard
    raises CorruptData. Samples of a tokenised snapshot are compared as the text that their tokens
    decode to. Of conversations, ``answers`` (key → what assistants say) is what may overlap: many
    share a system prompt, which says nothing; ``without_system`` removes it from the text of one.
    """
    tokenizer = tokenizer_of(training, store)
    keys: dict[bytes, list[str]] = {}
    short = _ShortTexts()
    texts: list[tuple[str, bytes]] = []
    for key, text in held_out:
        if not text.strip():
            continue  # nothing to predict, and equal for every sample without text
        (tokens,) = tokenizer.encode([text])
        # What the tokenizer drops (case, rare letters) is missing on both sides. A string: the
        # tokenizer fails, so no shard has this text.
        seen = text if isinstance(tokens, str) else tokenizer.text(tokens)
        texts.append((key, seen))
        if not _has_shingles(seen if answers is None else answers[key]):
            short.add(key, without_system(seen))
        for digest in {content_digest(text), content_digest(seen)}:
            keys.setdefault(digest, []).append(key)
    left = {key for found in keys.values() for key in found}
    examples: list[str] = []
    shards = [each for each in training.of_split("train") if each.sha256 not in set(quarantined)]
    bare = system_remover(training, store)

    def training_texts() -> Iterator[bytes]:
        for number, (_, samples) in enumerate(cache.opened(shards), start=1):
            if isinstance(samples, CorruptData):
                raise samples
            for i in range(len(samples)):
                for text in map(tokenizer.text, samples.sides(i)):
                    for key in keys.get(content_digest(text), ()):
                        if key in left:
                            left.remove(key)
                            examples.append(f"{key} = {samples.key(i)}")
                    short.look_for(bare(text))
                    yield text
            on_progress(number / len(shards))

    if answers is not None:
        texts = [(key, answers[key]) for key, _ in texts]
    shingles = _Shingles(texts)
    with ShardCache(training, store, cache_dir) as cache:
        shingles.look_for(training_texts())
    near = [(key, share) for key, share in shingles.shares() if share >= OVERLAP_SHARE]
    near += [(key, 1.0) for key in short.found if key in left]  # others are copies
    return Overlap(
        snapshot_digest=training.digest,
        held_out_documents=len(texts),
        training_documents=sum(each.documents for each in shards),
        found=len(examples),
        examples=tuple(examples[:EXAMPLES]),
        overlapping=len(near),
        overlapping_examples=tuple(f"{key} {share:.0%}" for key, share in near[:EXAMPLES]),
    )


class _ShortTexts:
    """Documents with too few shingles, by their folded text, and which of them were found."""

    def __init__(self) -> None:
        self._keys: dict[str, list[str]] = {}
        self._most = 0  # bytes of a training text that can be one of them
        self.found: dict[str, None] = {}

    def add(self, key: str, text: bytes) -> None:
        if len(folded := _folded(text)) >= MIN_FOLDED:
            self._keys.setdefault(folded, []).append(key)
            self._most = max(self._most, 2 * len(text))

    def look_for(self, text: bytes) -> None:
        """Mark the documents that equal ``text``."""
        if len(text) <= self._most:
            self.found |= dict.fromkeys(self._keys.get(_folded(text), ()))


def _folded(text: bytes) -> str:
    """Return ``text`` without case, white space and punctuation. Between digits they stay: 1.5 is
    not 15, and 2 + 3 not 2 - 3."""
    said = " ".join(text.decode("utf-8", errors="replace").casefold().split())
    return _SPACE.sub("", _LOOSE.sub("", said))


def _has_shingles(text: bytes) -> bool:
    return len(text.translate(None, WHITE_SPACE)) >= SHINGLE_BYTES + MIN_SHINGLES - 1


class _Shingles:
    """The shingles of documents, and which of them were found in other text."""

    def __init__(self, documents: Sequence[tuple[str, bytes]]) -> None:
        total = sum(len(text) for _, text in documents)
        self._step = np.uint64(1)
        while total > MAX_SHINGLES * int(self._step):
            self._step *= np.uint64(2)
        each = [
            (key, _distinct(np.concatenate([_NONE, *self._hashes([text])])))
            for key, text in documents
        ]
        self._every = _distinct(np.concatenate([_NONE, *(found for _, found in each)]))
        self._places = [
            (key, np.searchsorted(self._every, found).astype(np.int32)) for key, found in each
        ]
        self._found = np.zeros(len(self._every), dtype=bool)
        # A table by the hashes' upper bits: a search among millions takes 20 times as long.
        self._filter = np.zeros(1 << _FILTER_BITS, dtype=bool)
        self._filter[self._every >> _FILTER_SHIFT] = True

    def look_for(self, texts: Iterable[bytes]) -> None:
        """Mark every shingle that occurs in one of ``texts``."""
        for hashes in self._hashes(texts):
            some = hashes[self._filter[hashes >> _FILTER_SHIFT]]
            places = np.minimum(np.searchsorted(self._every, some), len(self._every) - 1)
            self._found[places[self._every[places] == some]] = True

    def shares(self) -> Iterator[tuple[str, float]]:
        """Yield each document that has enough shingles, and the share of them that was found."""
        for key, places in self._places:
            if len(places) >= MIN_SHINGLES:
                yield key, float(self._found[places].mean())

    def _hashes(self, texts: Iterable[bytes]) -> Iterator[Hashes]:
        for block in _blocks(texts):
            hashes = _shingle_hashes(block)
            yield hashes if self._step == 1 else hashes[hashes & (self._step - np.uint64(1)) == 0]


def _blocks(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the texts without white space, one after the other, in blocks that overlap by a
    shingle. Each ends with a line feed: no shingle of one document reaches into the next."""
    held = bytearray()
    for text in texts:
        held += text.translate(_LOWER, WHITE_SPACE) + b"\n"
        while len(held) >= _BLOCK_BYTES + SHINGLE_BYTES:
            yield bytes(held[: _BLOCK_BYTES + SHINGLE_BYTES - 1])
            del held[:_BLOCK_BYTES]
    yield bytes(held)


def _distinct(hashes: Hashes) -> Hashes:
    """Return ``hashes`` sorted, each once; np.unique takes three times as long."""
    ordered = np.sort(hashes)
    found: Hashes = ordered[np.diff(ordered, prepend=~ordered[:1]) != 0]
    return found


# Hashes of all windows of a text at once (Karp and Rabin 1987), modulo 2**64: with prefix sums
# S(i) = Σ v(byte j)·p^j, a window's hash is (S(i + w) − S(i))·p^−i. The bytes' values are drawn at
# random, and the last lines mix the upper bits into the lower.

_VALUES: Hashes = np.random.default_rng(50).integers(0, 2**64, 256, dtype=np.uint64)
_BASE = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_NONE: Hashes = np.zeros(0, dtype=np.uint64)
_FILTER_SHIFT = np.uint64(64 - _FILTER_BITS)


def _powers(base: int) -> Hashes:
    powers = np.full(_BLOCK_BYTES + SHINGLE_BYTES, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_POWERS, _INVERSES = _powers(_BASE), _powers(pow(_BASE, -1, 2**64))


def _shingle_hashes(text: bytes) -> Hashes:
    """Return the hash of each run of ``SHINGLE_BYTES`` in ``text``, of at most a block."""
    if len(text) < SHINGLE_BYTES:
        return _NONE
    sums = np.cumsum(_VALUES[np.frombuffer(text, dtype=np.uint8)] * _POWERS[: len(text)])
    hashes = sums[SHINGLE_BYTES - 1 :].copy()
    hashes[1:] -= sums[:-SHINGLE_BYTES]
    hashes *= _INVERSES[: len(hashes)]
    hashes ^= hashes >> np.uint64(29)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(32)
    return hashes
