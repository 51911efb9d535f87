"""What building a snapshot must remember of everything it has seen, in a scratch file.

Names of files in order, keys and contents met, features waiting for their sample: a source may have
more of these than fit in memory. SQLite without durability: the file is gone with the build.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.data.arrays import packed, unpacked
from paceline.data.formats.sample import Array
from paceline.errors import InvalidInput

PAGE = 1000  # names in memory at once
CACHE_KIB = 32 * 1024  # of pages in memory


class Catalog:
    """A context manager; of one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._base = sqlite3.connect(path, isolation_level=None)
        self._base.executescript(
            f"""
            PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{CACHE_KIB};
            CREATE TABLE files(rank BLOB, name TEXT, size INTEGER, PRIMARY KEY(rank, name))
                WITHOUT ROWID;
            CREATE TABLE seen(what BLOB PRIMARY KEY) WITHOUT ROWID;
            CREATE TABLE features(key TEXT PRIMARY KEY, arrays BLOB);
            BEGIN;
            """
        )

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()
        self._path.unlink(missing_ok=True)

    def add_file(self, rank: bytes, name: str, size: int) -> None:
        """Remember a file of the source, to be read in the order of its rank."""
        self._base.execute("INSERT INTO files VALUES (?, ?, ?)", (rank, name, size))

    def files(self) -> Iterator[tuple[str, int]]:
        """Yield each file's name and size, in order."""
        last: tuple[bytes, str] = (b"", "")
        page = "SELECT rank, name, size FROM files WHERE (rank, name) > (?, ?) ORDER BY 1, 2"
        while rows := self._base.execute(f"{page} LIMIT {PAGE}", last).fetchall():
            for _, name, size in rows:
                yield name, size
            last = rows[-1][:2]

    def is_new(self, what: bytes) -> bool:
        """Return whether ``what`` (a key, a digest) was not met before, and remember it."""
        cursor = self._base.execute("INSERT OR IGNORE INTO seen VALUES (?)", (what,))
        return cursor.rowcount == 1

    def forget_seen(self) -> None:
        """Forget what was met, for another pass."""
        self._base.execute("DELETE FROM seen")

    def put_features(self, key: str, arrays: Mapping[str, Array]) -> None:
        """Keep the features of the sample called ``key``; more of one sample may follow, from
        another file. Raises InvalidInput where one of them is there already."""
        held = self._base.execute("SELECT arrays FROM features WHERE key = ?", (key,)).fetchone()
        before = unpacked(held[0]) if held else {}
        if twice := sorted(set(before) & set(arrays)):
            raise InvalidInput(
                "features of a sample are given twice",
                got=f"{twice[0]!r} of {key!r}",
                wanted="one row a key",
                do="Remove the duplicate rows from the feature files.",
            )
        self._base.execute(
            "INSERT INTO features(key, arrays) VALUES (?, ?) "
            "ON CONFLICT(key) DO UPDATE SET arrays = excluded.arrays",
            (key, packed({**before, **arrays})),
        )

    def features(self, key: str) -> dict[str, Array] | None:
        """Return the features kept for ``key``, or None."""
        held = self._base.execute("SELECT arrays FROM features WHERE key = ?", (key,)).fetchone()
        return unpacked(held[0]) if held else None
