"""Where a model is weak: figures by document size, by directory, and its worst documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.evaluation.heldout import HeldOutDocument

Reals = NDArray[np.float64]

MOST_DIRECTORIES = 8
WORST_DOCUMENTS = 5
WATCHED = "candidate"


def slice_rows(
    bits: Mapping[str, Reals], documents: Sequence[HeldOutDocument]
) -> tuple[dict[str, object], ...]:
    """Return rows {slice, name, documents, bytes, bits_per_byte: {model: figure}}."""
    rows = [
        _row("size", name, members, bits, documents) for name, members in _by_size(documents)
    ] + [
        _row("directory", name, members, bits, documents)
        for name, members in _by_directory(documents)
    ]
    if WATCHED in bits:
        sizes = np.array([len(each.text) for each in documents])
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


def _by_directory(documents: Sequence[HeldOutDocument]) -> Iterable[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for number, each in enumerate(documents):
        top, separator, _ = each.path.lstrip("/").partition("/")
        groups[top if separator else "."].append(number)
    ranked = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    yield from ranked[:MOST_DIRECTORIES]
    if rest := [each for _, members in ranked[MOST_DIRECTORIES:] for each in members]:
        yield "(others)", sorted(rest)
