"""SHA-256 of several messages at once, where a compiler and the CPU allow it; else hashlib's.

``_lanes`` is our own C (see docs/decisions/0045): four messages in parallel take 0.55 of the time
that they take one after the other. It is optional: without it, or with ``PACELINE_HASHING=hashlib``
in the environment, everything here is hashlib; ``ENGINE`` reports which is used.

A mismatch found by ``_lanes`` is never final: callers verify it with ``hashlib`` before they blame
a peer or a file (``proven``). A match with a manifest needs no second check.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias, TypeVar

Bytes: TypeAlias = bytes | bytearray | memoryview
Item = TypeVar("Item")

log = logging.getLogger(__name__)

WITHOUT = "PACELINE_HASHING"  # "hashlib" disables the C extension


class Hash(Protocol):
    """An incremental SHA-256; use it from one thread at a time."""

    def update(self, data: Bytes, /) -> None:
        """Hash more bytes."""
        ...

    def digest(self) -> bytes:
        """Return the digest so far: 32 bytes."""
        ...

    def hexdigest(self) -> str:
        """Return the digest so far in hex."""
        ...


def _one_by_one(work: Iterable[tuple[Hash, Bytes]]) -> None:
    for each, data in work:
        each.update(data)


def _works(new: Callable[[], Hash], update: Callable[[Sequence[tuple[Hash, Bytes]]], None]) -> bool:
    """Return whether digests are correct for messages of odd lengths hashed in parallel."""
    data = bytes(range(251)) * 3
    lengths = (0, 55, 64, 119, 200, 753)
    hashes = [new() for _ in lengths]
    update([(each, data[:length]) for each, length in zip(hashes, lengths, strict=True)])
    update([(each, data[:7]) for each in hashes])
    return [each.digest() for each in hashes] == [
        hashlib.sha256(data[:length] + data[:7]).digest() for length in lengths
    ]


def _choose() -> tuple[
    Callable[[], Hash], Callable[[Sequence[tuple[Hash, Bytes]]], None], int, str
]:
    if os.environ.get(WITHOUT) == "hashlib":
        return hashlib.sha256, _one_by_one, 1, f"hashlib ({WITHOUT} says so)"
    try:
        import paceline.hashing._lanes as _lanes  # noqa: PLR0402 (the other form is circular)
    except ModuleNotFoundError:
        return hashlib.sha256, _one_by_one, 1, "hashlib (the C extension was not built here)"
    except ImportError as error:  # it was built but does not run on this CPU
        return hashlib.sha256, _one_by_one, 1, f"hashlib ({error})"
    if not _works(_lanes.Sha256, _lanes.update_each):
        log.error("paceline.hashing._lanes computes wrong digests here: hashlib does it")
        return hashlib.sha256, _one_by_one, 1, "hashlib (the C extension computes wrong digests)"
    return _lanes.Sha256, _lanes.update_each, _lanes.LANES, f"{_lanes.LANES} lanes of SHA-NI"


# sha256() returns a new Hash. update_each([(hash, data), ...]) updates each in order, in parallel:
# it takes Hashes of this sha256 only, and raises ValueError if another thread is using one of them.
sha256, update_each, LANES, ENGINE = _choose()


def digests(blocks: Sequence[Bytes]) -> list[str]:
    """Return the SHA-256 of each of ``blocks`` in hex."""
    hashes = [sha256() for _ in blocks]
    update_each(list(zip(hashes, blocks, strict=True)))
    return [each.hexdigest() for each in hashes]


def proven(digest: str, wanted: str, again: Callable[[], Iterable[Bytes]]) -> bool:
    """Return whether bytes with the computed digest ``digest`` match ``wanted``.

    A mismatch is checked once more with hashlib, over the bytes that ``again`` returns.
    """
    if digest == wanted:
        return True
    if LANES == 1:
        return False  # hashlib computed it
    judge = hashlib.sha256()
    for block in again():
        judge.update(block)
    if judge.hexdigest() != wanted:
        return False
    log.error(
        "a wrong digest from %s, found by hashlib: PACELINE_HASHING=hashlib avoids it", ENGINE
    )
    return True


def groups(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield ``items`` in runs of ``LANES``, the number hashed in parallel."""
    for first in range(0, len(items), LANES):
        yield items[first : first + LANES]
