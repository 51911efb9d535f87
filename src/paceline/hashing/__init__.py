"""SHA-256 of several messages at once, where a compiler and the CPU allow; else hashlib's.

``_lanes`` is our own C (see docs/decisions/0045): four messages side by side take 0.55 of the time
they take one after the other. It is optional. Without it, or with ``PACELINE_HASHING=hashlib`` in
the environment, everything here is hashlib; ``ENGINE`` says which it is.

Its digests are never the last word against anybody: what matches a manifest is proven by that, and
whoever finds one that does not match asks ``hashlib`` before blaming (``proven``).
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

WITHOUT = "PACELINE_HASHING"  # "hashlib": not even where there is something faster


class Hash(Protocol):
    """A SHA-256 that is fed; one thread at a time uses it."""

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
    """Return whether digests are right for messages of odd lengths that run side by side."""
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
        import paceline.hashing._lanes as _lanes  # noqa: PLR0402 (the other form blames a circle)
    except ModuleNotFoundError:
        return hashlib.sha256, _one_by_one, 1, "hashlib (the C extension was not built here)"
    except ImportError as error:  # it was built, and does not fit this CPU
        return hashlib.sha256, _one_by_one, 1, f"hashlib ({error})"
    if not _works(_lanes.Sha256, _lanes.update_each):
        log.error("paceline.hashing._lanes computes wrong digests here: hashlib does it")
        return hashlib.sha256, _one_by_one, 1, "hashlib (the C extension computes wrong digests)"
    return _lanes.Sha256, _lanes.update_each, _lanes.LANES, f"{_lanes.LANES} lanes of SHA-NI"


# sha256() returns a new Hash. update_each([(hash, data), ...]) updates each in order, side by side:
# it takes Hashes of this sha256 only, and ValueError says that another thread is using one of them.
sha256, update_each, LANES, ENGINE = _choose()


def digests(blocks: Sequence[Bytes]) -> list[str]:
    """Return the SHA-256 of each of ``blocks`` in hex."""
    hashes = [sha256() for _ in blocks]
    update_each(list(zip(hashes, blocks, strict=True)))
    return [each.hexdigest() for each in hashes]


def proven(digest: str, wanted: str, again: Callable[[], Iterable[Bytes]]) -> bool:
    """Return whether bytes whose digest ``sha256`` said was ``digest`` match ``wanted``.

    A digest that does not is computed once more by hashlib, of the bytes that ``again`` gives.
    """
    if digest == wanted:
        return True
    if LANES == 1:
        return False  # it was hashlib's
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
    """Yield ``items`` in runs of as many as are hashed at once."""
    for first in range(0, len(items), LANES):
        yield items[first : first + LANES]
