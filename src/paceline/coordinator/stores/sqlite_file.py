"""One SQLite file, one connection: transactions that are whole or nothing, and errors said our way.

What stands in the file is its owner's matter (``sqlite``, ``sqlite_audit``).
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ServiceUnavailable
from paceline.system.files import PRIVATE_DIRECTORY, ensure_private, make_directories

BUSY_S = 5.0  # how long a transaction waits for another process's


class SqliteFile:
    """A file that is open; used by several threads, one at a time.

    ``what`` names it in errors, ``prepare`` gives it its tables. Raises ServiceUnavailable where it
    cannot be used, as every method does.
    """

    def __init__(
        self, path: Path, what: str, prepare: Callable[[sqlite3.Connection], None]
    ) -> None:
        self.path, self._what = path, what
        self._lock = threading.RLock()
        with self.translated():
            make_directories(path.parent, PRIVATE_DIRECTORY)
            ensure_private(path)  # SQLite gives the two files beside it the same mode
            for beside in (f"{path}-wal", f"{path}-shm"):
                if Path(beside).exists():
                    ensure_private(Path(beside))
            self.db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=BUSY_S
            )
            try:
                self.db.execute("PRAGMA journal_mode=WAL")
                self.db.execute("PRAGMA synchronous=FULL")
                with transaction(self.db):
                    prepare(self.db)
            except BaseException:
                self.db.close()
                raise

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Commit what is done in the block, or nothing of it."""
        with self.held(), self.translated(), transaction(self.db):
            yield self.db

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Show the file to the block as it is at one moment."""
        with self.held(), self.translated():
            self.db.execute("BEGIN")
            try:
                yield self.db
            finally:
                _roll_back(self.db)

    def one(self, query: str, values: Sequence[object] = ()) -> Any:
        """Return the first row, or None."""
        with self.held(), self.translated():
            return self.db.execute(query, values).fetchone()

    def rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Return every row."""
        with self.held(), self.translated():
            return self.db.execute(query, values).fetchall()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other threads away; may be nested."""
        with self._lock:
            yield

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Raise what SQLite and the file system raise as ServiceUnavailable."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            # Full, locked or gone: nothing was acknowledged, and the same call may work later.
            raise ServiceUnavailable(
                f"the {self._what} cannot be used",
                got=f"{type(error).__name__}: {error}",
                where=self.path,
                do="Check the disk and its space.",
            ) from error

    def close(self) -> None:
        """Let the file go."""
        with self.held():
            self.db.close()


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit what is done in the block, or nothing of it."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        _roll_back(db)
        raise


def _roll_back(db: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):  # a failed COMMIT may have ended it already
        if db.in_transaction:
            db.execute("ROLLBACK")
