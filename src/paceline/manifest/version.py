"""Which of two versions is the later one. Knows names only, no manifests."""

from __future__ import annotations

import re

# What a node's link to its active version is called, beside the versions: no version may be.
ACTIVE = "active"

_PARTS = re.compile(r"\d+|[^\d._-]+")


def version_key(version: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts versions as people read them: ``v2 < v10``, ``1.9 < 1.10``.

    Digits compare as numbers and after letters at the same place; ``.``, ``_`` and ``-`` only
    separate, so ``1.0`` and ``1-0`` are equal.
    """
    return tuple(
        (1, int(part), "") if part.isdecimal() else (0, 0, part.casefold())
        for part in _PARTS.findall(version)
    )
