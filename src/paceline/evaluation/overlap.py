"""Whether held-out documents occur in a candidate's training data: as copies, or in large part.

A *copy* is equal except for white space: under another name, in another shard or with other line
ends. A document *overlaps* when at least half of its shingles, runs of 50 bytes without white space
and ASCII case, occur anywhere in the training text: a copy with a changed header, a chapter in a
longer file. 50 bytes are about GPT-3's 13 words (Brown et al. 2020, appendix C), but need no words:
code and languages without spaces count alike. A share per document, as Llama 3 and Tulu 3 take it,
because single shingles (licences, imports) are shared by documents that are not copies. A document
with too few shingles overlaps when it equals a training text but for case, punctuation, white space
and a conversation's system message.

*Rows of tasks* (prompt and right answer, also as the training's chat template writes them) are
found likewise, but for what several rows of a task share, such as an instruction: its training
split has that too. A row with too few shingles is found where all its runs of 16 bytes occur.

The training split is read shard by shard, once, in linear time: about 20 MB/s of a core. Memory
holds one shard, 32 bytes a held-out document and 12 a shingle; at most ``MAX_SHINGLES`` of them
(of tasks: as many again), beyond which they are sampled by their hash, the same on both sides.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from paceline.data import (
    WHITE_SPACE,
    ChatTemplate,
    ShardCache,
    Snapshot,
    Tokenizer,
    content_digest,
    snapshot_template,
    tokenizer_of,
)
from paceline.errors import CorruptData, InvalidInput
from paceline.schemas import Overlap, TaskOverlap
from paceline.storage import ObjectStore

EXAMPLES = 5
SHINGLE_BYTES = 50
SHORT_SHINGLE_BYTES = 16  # of a task's row that is too short for the others
_OF = "\0"  # between a task and its row
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
Rows = Mapping[str, Sequence[tuple[str, str]]]  # of each task: prompt, and answer as it follows


def find_overlap(
    held_out: Iterable[tuple[str, bytes]],
    training: Snapshot,
    store: ObjectStore,
    cache_dir: Path,
    *,
    quarantined: Sequence[str] = (),
    answers: Mapping[str, bytes] | None = None,
    without_system: Callable[[bytes], bytes] = bytes,
    tasks: Rows = MappingProxyType({}),
    on_progress: Callable[[float], None] = lambda _fraction: None,
) -> Overlap:
    """Return how many of ``held_out`` (key, text), and of the rows of each of ``tasks``, are in the
    training split of ``training``.

    Shards in ``quarantined`` were not used in training and are left out; any other unreadable shard
    raises CorruptData. Samples of a tokenised snapshot are compared as the text that their tokens
    decode to. Of conversations, ``answers`` (key → what assistants say) is what may overlap: many
    share a system prompt, which says nothing; ``without_system`` removes it from the text of one.
    """
    tokenizer = tokenizer_of(training, store)
    template = snapshot_template(training, store)
    whole = _Copies(tokenizer)
    texts: list[tuple[str, bytes]] = []
    for key, text in held_out:
        if not text.strip():
            continue  # nothing to predict, and equal for every sample without text
        seen = whole.add(key, text)
        texts.append((key, seen if answers is None else answers[key]))
        if not _has_shingles(texts[-1][1]):
            whole.short.add(key, without_system(seen))
    shingles = _Shingles(texts)
    rows = _TaskRows(tasks, tokenizer, template)
    shards = [each for each in training.of_split("train") if each.sha256 not in set(quarantined)]
    bare = bytes if template is None else template.without_system

    def training_texts() -> Iterator[bytes]:
        for number, (_, samples) in enumerate(cache.opened(shards), start=1):
            if isinstance(samples, CorruptData):
                raise samples
            for i in range(len(samples)):
                for text in map(tokenizer.text, samples.sides(i)):
                    digest, said = content_digest(text), bare(text)
                    whole.look_for(digest, said, samples.key(i))
                    rows.whole.look_for(digest, said, samples.key(i))
                    yield text
            on_progress(number / len(shards))

    with ShardCache(training, store, cache_dir) as cache:
        _look_for([shingles, *rows.shingles], training_texts())
    near = [(key, share) for key, share in shingles.shares(MIN_SHINGLES) if share >= OVERLAP_SHARE]
    near += [(key, 1.0) for key in whole.short.found if key in whole.left]  # others are copies
    return Overlap(
        snapshot_digest=training.digest,
        held_out_documents=len(texts),
        training_documents=sum(each.documents for each in shards),
        found=len(whole.found),
        examples=tuple(whole.found.values())[:EXAMPLES],
        overlapping=len(near),
        overlapping_examples=tuple(f"{key} {share:.0%}" for key, share in near[:EXAMPLES]),
        tasks=rows.overlaps(),
    )


class _Copies:
    """Documents by their whole text, and which of them are training texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._keys: dict[bytes, list[str]] = {}
        self.left: set[str] = set()  # not found
        self.found: dict[str, str] = {}  # with where it is
        self.short = _ShortTexts()

    def add(self, key: str, text: bytes) -> bytes:
        """Return ``text`` as it would be in the training data: what the tokenizer drops (case, rare
        letters) is missing on both sides."""
        (tokens,) = self._tokenizer.encode([text])
        # A string: the tokenizer fails, so no shard has this text.
        seen = text if isinstance(tokens, str) else self._tokenizer.text(tokens)
        for digest in {content_digest(text), content_digest(seen)}:
            self._keys.setdefault(digest, []).append(key)
        self.left.add(key)
        return seen

    def look_for(self, digest: bytes, said: bytes, where: str) -> None:
        """Mark the documents that equal the sample ``where`` (its digest, and what is said)."""
        for key in self._keys.get(digest, ()):
            if key in self.left:
                self.left.remove(key)
                self.found[key] = f"{key.rpartition(_OF)[2]} = {where}"
        self.short.look_for(said)


class _TaskRows:
    """The rows of tasks, and which of them were found; their keys are "TASK, _OF, row NUMBER"."""

    def __init__(self, tasks: Rows, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tasks, self.whole = _drawn(tasks, 1 if template is None else 2), _Copies(tokenizer)
        tasks = self._tasks
        long: list[tuple[str, bytes]] = []
        short: list[tuple[str, bytes]] = []
        for task, rows in tasks.items():
            for number, (prompt, answer) in enumerate(rows):
                key = f"{task}{_OF}row {number}"
                for text in _renderings(prompt, answer, template):
                    seen = self.whole.add(key, text)
                    (long if _has_shingles(seen) else short).append((key, seen))
        for key, seen in short:
            self.whole.short.add(key, seen)
        self._long = _Shingles(long, own=True)
        self._short = _Shingles(short, SHORT_SHINGLE_BYTES)
        self.shingles = (self._long, self._short)

    def overlaps(self) -> tuple[TaskOverlap, ...]:
        found = dict(self.whole.found)
        near = [each for each in self._long.shares() if each[1] >= OVERLAP_SHARE]
        near += [each for each in self._short.shares() if each[1] == 1]
        near += [(key, 1.0) for key in self.whole.short.found]
        for key, share in near:
            found.setdefault(key, f"{key.rpartition(_OF)[2]} {share:.0%}")
        by_task: dict[str, list[str]] = {}
        for key, example in found.items():
            by_task.setdefault(key.rpartition(_OF)[0], []).append(example)
        return tuple(
            TaskOverlap(
                task=task,
                rows=len(rows),
                found=len(examples := by_task.get(task, [])),
                examples=tuple(examples[:EXAMPLES]),
            )
            for task, rows in self._tasks.items()
        )


def _drawn(tasks: Rows, renderings: int) -> Rows:
    """Return as many rows of each task as have MAX_SHINGLES bytes together, drawn by their text:
    of these every shingle is compared."""
    total = renderings * sum(len("".join(row).encode()) for rows in tasks.values() for row in rows)
    if total <= MAX_SHINGLES:
        return tasks

    def is_drawn(row: tuple[str, str]) -> bool:
        return zlib.crc32("".join(row).encode()) <= 2**32 * MAX_SHINGLES / total

    return {
        name: [row for row in rows if is_drawn(row)] or rows[:1] for name, rows in tasks.items()
    }


def _renderings(prompt: str, answer: str, template: ChatTemplate | None) -> list[bytes]:
    """Return a row as plain text, and as a conversation without its system message."""
    texts = [f"{prompt}{answer}".encode()]
    if template is not None:
        said = (("user", prompt), ("assistant", answer.strip()))
        messages = [{"role": role, "content": text} for role, text in said]
        with contextlib.suppress(InvalidInput):  # of a template that refuses such a message
            texts.append(template.without_system(template.text_of(messages).encode()))
    return [each for each in texts if each.strip()]


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
    """The shingles of documents, and which of them were found in other text; ``own``: without those
    that two rows of a task share."""

    def __init__(
        self,
        documents: Sequence[tuple[str, bytes]],
        width: int = SHINGLE_BYTES,
        *,
        own: bool = False,
    ) -> None:
        total = sum(len(text) for _, text in documents)
        self.width, self._step = width, np.uint64(1)
        while total > MAX_SHINGLES * int(self._step):
            self._step *= np.uint64(2)
        each = [
            (key, _distinct(np.concatenate([_NONE, *map(self._sampled, self._hashes(text))])))
            for key, text in documents
        ]
        if own:
            each = _without_shared(each)
        self._every = _distinct(np.concatenate([_NONE, *(found for _, found in each)]))
        self._places = [
            (key, np.searchsorted(self._every, found).astype(np.int32)) for key, found in each
        ]
        self._found = np.zeros(len(self._every), dtype=bool)
        # A table by the hashes' upper bits: a search among millions takes 20 times as long.
        bits = min(_FILTER_BITS, len(self._every).bit_length() + 4)
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, dtype=bool)
        self._filter[self._every >> self._shift] = True

    def __len__(self) -> int:
        return len(self._every)

    def mark(self, hashes: Hashes) -> None:
        """Mark every shingle that is among ``hashes``."""
        hashes = self._sampled(hashes)
        some = hashes[self._filter[hashes >> self._shift]]
        places = np.minimum(np.searchsorted(self._every, some), len(self._every) - 1)
        self._found[places[self._every[places] == some]] = True

    def shares(self, least: int = 1) -> Iterator[tuple[str, float]]:
        """Yield each document that has ``least`` shingles, and the share of them that was found."""
        for key, places in self._places:
            if len(places) >= least:
                yield key, float(self._found[places].mean())

    def _hashes(self, text: bytes) -> Iterator[Hashes]:
        return (_shingle_hashes(block, self.width) for block in _blocks([text], end=b""))

    def _sampled(self, hashes: Hashes) -> Hashes:
        return hashes if self._step == 1 else hashes[hashes & (self._step - np.uint64(1)) == 0]


def _without_shared(each: Sequence[tuple[str, Hashes]]) -> list[tuple[str, Hashes]]:
    by_row: dict[str, list[Hashes]] = {}
    for key, found in each:
        by_row.setdefault(key, []).append(found)
    by_task: dict[str, list[Hashes]] = {}
    for key, renderings in by_row.items():
        of_row = _distinct(np.concatenate(renderings))
        by_task.setdefault(key.rpartition(_OF)[0], []).append(of_row)
    ordered = {task: np.sort(np.concatenate(found)) for task, found in by_task.items()}
    shared = {task: all_[1:][all_[1:] == all_[:-1]] for task, all_ in ordered.items()}
    return [(key, _not_in(found, shared[key.rpartition(_OF)[0]])) for key, found in each]


def _not_in(hashes: Hashes, others: Hashes) -> Hashes:
    """Return those of ``hashes`` that ``others``, which are sorted, lack."""
    if not len(others):
        return hashes
    places = np.minimum(np.searchsorted(others, hashes), len(others) - 1)
    left: Hashes = hashes[others[places] != hashes]
    return left


def _look_for(sought: Sequence[_Shingles], texts: Iterable[bytes]) -> None:
    """Mark all shingles of ``sought`` that occur in one of ``texts``, which are read once."""
    for block in _blocks(texts):
        for width in {each.width for each in sought if len(each)}:
            hashes = _shingle_hashes(block, width)
            for each in sought:
                if len(each) and each.width == width:
                    each.mark(hashes)


def _blocks(texts: Iterable[bytes], end: bytes = b"\n") -> Iterator[bytes]:
    """Yield the texts without white space, one after the other, in blocks that overlap by a
    shingle. Each ends with ``end``: no shingle of one document reaches into the next."""
    held = bytearray()
    for text in texts:
        held += text.translate(_LOWER, WHITE_SPACE) + end
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


def _powers(base: int) -> Hashes:
    powers = np.full(_BLOCK_BYTES + SHINGLE_BYTES, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_POWERS, _INVERSES = _powers(_BASE), _powers(pow(_BASE, -1, 2**64))


def _shingle_hashes(text: bytes, width: int) -> Hashes:
    """Return the hash of each run of ``width`` bytes in ``text``, of at most a block."""
    if len(text) < width:
        return _NONE
    sums = np.cumsum(_VALUES[np.frombuffer(text, dtype=np.uint8)] * _POWERS[: len(text)])
    hashes = sums[width - 1 :].copy()
    hashes[1:] -= sums[:-width]
    hashes *= _INVERSES[: len(hashes)]
    hashes ^= hashes >> np.uint64(29)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(32)
    return hashes
