"""Which of two versions is the older one, where their names tell.

Names are free text. Two names can be compared when they differ first in a number: ``v9`` is older
than ``v10``, ``2026.09.30`` than ``2026.10.01``, ``run-20261101-a`` than ``run-20261102-b``. Where
they differ first in a word, or are digests, neither is older.
"""

from __future__ import annotations

import re

PARTS = re.compile(r"\d+|\D+")
DIGEST = re.compile(r"(?=.*[a-f])(?=.*\d)[0-9a-f]{7,}")  # both letters and digits, all hexadecimal


def is_older(version: str, other: str) -> bool:
    """Return whether ``version`` is certainly older than ``other``."""
    if DIGEST.fullmatch(version) or DIGEST.fullmatch(other):
        return False
    mine, theirs = PARTS.findall(version), PARTS.findall(other)
    for ours, its in zip(mine, theirs, strict=False):
        if ours == its:
            continue
        if ours.isdigit() and its.isdigit() and int(ours) != int(its):
            return int(ours) < int(its)
        if not (ours.isdigit() and its.isdigit()):
            return False
    # ``1.2`` came before ``1.2.1``; what follows a word (``v2-rc1``) may be before or after it.
    longer = theirs[len(mine) :]
    return (
        len(mine) < len(theirs)
        and longer[0] in (".", "-", "_")
        and longer[1:2] != []
        and (longer[1].isdigit())
    )
