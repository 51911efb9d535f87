"""Held-out bytes: prefixes of many held-out documents, the same for all models; and figures by
slice.

Many short prefixes rather than a few whole documents, because intervals come from resampling
documents. Of conversations, whole ones: what is scored of them is what assistants say.
Deterministic in the documents and the budget alone; does not depend on models.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config import EvaluationSettings
from paceline.data import Conversation, Document, Snapshot, Tokenizer, documents
from paceline.errors import InvalidSnapshot
from paceline.schemas import Interval, RecordedScore
from paceline.storage import ObjectStore

MAX_CHARACTER = 3  # continuation bytes of UTF-8
# Documents that are batched together: their figures are then the same, to the bit, whatever other
# groups are scored beside them, as on several nodes.
GROUP = 256
# Below this, fewer documents are taken instead of shorter prefixes: in bytes, and for longer rows
# (evaluation.context) in bytes a token, so that some of the prefixes fill a row.
SHORTEST_PREFIX_BYTES = 1024
BYTES_PER_TOKEN = 6
SHORT_ROW = 1024  # tokens
READ_FACTOR = 64  # times the budget: maximum text read to cut prefixes from


@dataclass(frozen=True)
class HeldOutDocument:
    """The scored prefix of one document, and the size of the whole document."""

    path: str
    text: bytes
    size: int
    conversation: Conversation | None = None  # ``text`` is what assistants say in it
    rejected: Conversation | None = None  # beside it, of a pair of answers


def read_held_out(
    snapshot: Snapshot,
    tokenizer: Tokenizer,
    store: ObjectStore,
    cache_dir: Path,
    settings: EvaluationSettings,
) -> tuple[list[HeldOutDocument], list[tuple[str, bytes]], dict[str, bytes] | None]:
    """Return the documents to score, what was read (path, text), and of conversations what
    assistants say in each."""
    masked, budget = snapshot.is_masked, settings.held_out_bytes
    most, text_of = READ_FACTOR * budget, tokenizer.text if masked else None
    found = list(documents(snapshot, "held-out", store, cache_dir, most, text_of=text_of))
    read = [
        (each.path, tokenizer.text(each.conversation.tokens) if each.conversation else each.text)
        for each in found
    ]
    if masked:
        answers = {each.path: each.text for each in found}
        return choose_conversations(found, budget), read, answers
    return choose_prefixes(read, budget, settings.context), read, None


def choose_prefixes(
    documents: Iterable[tuple[str, bytes]], budget_bytes: int, context: int = 0
) -> list[HeldOutDocument]:
    """Return prefixes of as many documents as sensible, at most ``budget_bytes`` together: of fewer
    and longer ones for rows of a ``context`` over SHORT_ROW.

    Raises InvalidSnapshot where no document has any bytes.
    """
    whole = sorted((path, text) for path, text in documents if text)
    if not whole:
        raise InvalidSnapshot("nothing is held out", got="no bytes", wanted="a held-out split")
    shortest = BYTES_PER_TOKEN * context if context > SHORT_ROW else SHORTEST_PREFIX_BYTES
    most = max(1, budget_bytes // shortest)
    if len(whole) > most:
        whole = sorted(sorted(whole, key=_draw)[:most])
    cap = _water_level([len(text) for _, text in whole], budget_bytes)
    return [HeldOutDocument(path, prefix(text, cap), len(text)) for path, text in whole]


def choose_conversations(documents: Iterable[Document], budget_bytes: int) -> list[HeldOutDocument]:
    """Return as many whole conversations as fit into ``budget_bytes`` of assistants' text; at least
    one. Raises InvalidSnapshot where there is none."""
    drawn = sorted(
        (each for each in documents if each.text), key=lambda each: _draw((each.path, b""))
    )
    ends = np.cumsum([len(each.text) for each in drawn])
    chosen = drawn[: max(1, int(np.searchsorted(ends, budget_bytes, side="right")))]
    if not chosen:
        raise InvalidSnapshot("nothing is held out", got="no text", wanted="a held-out split")
    return [
        HeldOutDocument(each.path, each.text, len(each.text), each.conversation, each.rejected)
        for each in sorted(chosen, key=lambda each: each.path)
    ]


def share_of(documents: Sequence[HeldOutDocument], part: int, parts: int) -> list[HeldOutDocument]:
    """Return part number ``part`` of the documents, in groups that are scored together."""
    return [each for at, each in enumerate(documents) if at // GROUP % parts == part]


def joined(parts: Sequence[RecordedScore]) -> RecordedScore:
    """Return the score of all documents from those of every part, in order."""
    rest = [list(each.bits) for each in parts]
    bits: list[float] = []
    for group in count():
        if not (own := rest[group % len(parts)]):
            break
        bits += own[:GROUP]
        del own[:GROUP]
    assert not any(rest), "each part has its groups in turn"
    tokens = sum(int(str(each.facts["tokens"])) for each in parts)
    of_parts = np.array([each.facts["calibration"] for each in parts], dtype=np.int64)
    longest = max(int(str(each.facts["judged_context"])) for each in parts)
    facts = parts[0].facts | {
        "tokens": tokens,
        "calibration": of_parts.sum(0).tolist(),
        "judged_context": longest,
    }
    return parts[0].model_copy(update={"bits": tuple(bits), "facts": facts})


def prefix(text: bytes, size: int) -> bytes:
    """Return the first ``size`` bytes of ``text``, without a character of UTF-8 that they cut."""
    end = size
    while 0 < end < len(text) and text[end] & 0xC0 == 0x80:  # within a character
        end -= 1
    return text[:end] if size - end <= MAX_CHARACTER and end else text[:size]


def _draw(document: tuple[str, bytes]) -> bytes:
    return hashlib.sha256(document[0].encode()).digest()  # a uniform draw without a seed


def _water_level(sizes: Sequence[int], budget: int) -> int:
    """Return the maximum prefix length with which the documents add up to at most ``budget``."""
    remaining = budget
    for taken, size in enumerate(ordered := sorted(sizes)):
        share = remaining // (len(ordered) - taken)
        if size > share:
            return max(1, share)
        remaining -= size
    return max(ordered)


# Slices of the report: figures by document size, by directory or column, and for the candidate's
# worst documents.

Reals = NDArray[np.float64]

WORST_DOCUMENTS = 5
WATCHED = "candidate"
COMPARED = ("champion", "base")


def slice_rows(
    bits: Mapping[str, Reals],
    documents: Sequence[HeldOutDocument],
    resampled: Callable[[Reals, Reals], Interval],
    most_values: int = 8,
) -> tuple[dict[str, object], ...]:
    """Return rows {slice, name, documents, bytes, bits_per_byte: {model: figure}, difference_to:
    {champion, base: interval of the candidate's difference}}.

    Slices of each column, or of directories, are the ``most_values`` most frequent ones, and the
    others. ``resampled`` returns Σ bits / Σ bytes, of bits and sizes by document.
    """
    sizes = np.array([len(each.text) for each in documents], dtype=np.float64)
    rows: list[dict[str, object]] = []
    for kind, name, members in slices_of(documents, most_values):
        row = _row(kind, name, members, bits, documents)
        row["difference_to"] = {
            other: resampled((bits[WATCHED] - bits[other])[members], sizes[members]).model_dump()
            for other in COMPARED
            if WATCHED in bits and other in bits
        }
        rows.append(row)
    if WATCHED in bits:
        worst = np.argsort(-bits[WATCHED] / sizes, kind="stable")[:WORST_DOCUMENTS]
        rows += [
            _row("worst document", documents[each].path, [int(each)], bits, documents)
            for each in worst
        ]
    return tuple(rows)


def _row(
    slice_name: str,
    name: str,
    members: Sequence[int],
    bits: Mapping[str, Reals],
    documents: Sequence[HeldOutDocument],
) -> dict[str, object]:
    scored_bytes = sum(len(documents[each].text) for each in members)
    chosen = list(members)
    return {
        "slice": slice_name,
        "name": name,
        "documents": len(chosen),
        "bytes": scored_bytes,
        "bits_per_byte": {
            model: float(bits_D[chosen].sum() / scored_bytes) for model, bits_D in bits.items()
        },
    }


def _by_size(documents: Sequence[HeldOutDocument]) -> Iterable[tuple[str, list[int]]]:
    order = sorted(range(len(documents)), key=lambda each: documents[each].size)
    for members in (quarter.tolist() for quarter in np.array_split(np.array(order), 4)):
        if members:
            first, last = documents[members[0]].size, documents[members[-1]].size
            yield f"{first} to {last} bytes", members


def slices_of(
    documents: Sequence[HeldOutDocument], most: int
) -> Iterable[tuple[str, str, list[int]]]:
    """Yield each slice's kind, name and documents: by size, and by the directories of their names:
    those named COLUMN=VALUE by column, else by the first."""
    for name, members in _by_size(documents):
        yield "size", name, members
    kinds: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, each in enumerate(documents):
        *directories, _ = each.path.lstrip("/").split("/")
        columns: dict[str, str] = {}
        for one in directories:
            column, _, value = one.partition("=")
            if not (column and value):
                break
            columns[column] = value
        for kind, name in columns.items() or [("directory", (directories or ["."])[0])]:
            kinds[kind][name].append(number)
    for kind, groups in kinds.items():
        ranked = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
        yield from ((kind, name, members) for name, members in ranked[:most])
        if rest := [each for _, members in ranked[most:] for each in members]:
            yield kind, "(others)", sorted(rest)
