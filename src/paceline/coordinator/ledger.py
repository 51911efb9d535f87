"""Limits of the stage ledger: the size of one record, of one run's records, and in total.

When the ledger is full, records older than ``MIN_DROP_AGE_S`` are dropped, oldest first; where
there is none, the new one is refused. A dropped record only means that its stage runs again. Pure:
lines go in, lines to drop come out; the stores hold the records themselves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import Conflict, InvalidInput
from paceline.schemas import StageRecord

MAX_RECORD_BYTES = 64 * 1024  # one record as JSON; a stage's is 0.3 to 1 KB
MAX_RUN_RECORDS = 1_000  # of one run; a lifecycle has about a dozen
MAX_RUN_BYTES = 4 * 1024 * 1024
MAX_RECORDS = 100_000  # in total
MAX_BYTES = 64 * 1024 * 1024
MIN_DROP_AGE_S = 30 * 86_400.0  # a record is not dropped earlier than this after its stage finished
DROPPED_AT_ONCE = 200
LONGEST_RUN_ID = 128


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The size and age of one ledger record."""

    stage: str
    input_digest: str
    run_id: str
    finished_at: float  # seconds since the Unix epoch
    size: int  # bytes of JSON

    @classmethod
    def of(cls, record: StageRecord) -> LedgerEntry:
        size = len(record.model_dump_json().encode("utf-8", "surrogatepass"))
        at = record.finished_at
        return cls(record.stage, record.input_digest, record.run_id, at, size)

    @property
    def key(self) -> tuple[str, str]:
        return self.stage, self.input_digest


class LedgerIndex:
    """An index of every record that the store holds."""

    def __init__(self, lines: Iterable[LedgerEntry]) -> None:
        self._lines: dict[tuple[str, str], LedgerEntry] = {}
        self._by_age: list[tuple[float, tuple[str, str]]] = []  # oldest first
        self._runs: dict[str, tuple[int, int]] = {}  # records and bytes of each run
        self._bytes = 0
        for line in lines:
            self.keep(line, ())

    def admit(self, line: LedgerEntry, now: float) -> list[LedgerEntry]:
        """Return the records to drop before ``line`` is stored; raises InvalidInput for a record
        that is too large, Conflict where its run or the ledger is full.
        """
        if line.size > MAX_RECORD_BYTES or len(line.run_id) > LONGEST_RUN_ID:
            raise InvalidInput(
                "a stage's record is too large to keep",
                got=f"{line.size} bytes, a run id of {len(line.run_id)} characters",
                wanted=f"at most {MAX_RECORD_BYTES} bytes and {LONGEST_RUN_ID} characters",
                where=line.stage,
                do="Put what is large into object storage and keep its URL.",
            )
        known = self._lines.get(line.key)
        records, size = self._runs.get(line.run_id, (0, 0))
        if known is not None and known.run_id == line.run_id:
            records, size = records - 1, size - known.size
        if records >= MAX_RUN_RECORDS or size + line.size > MAX_RUN_BYTES:
            raise Conflict(
                "the run has recorded too much in the ledger",
                got=f"{records + 1} records of {size + line.size} bytes",
                wanted=f"at most {MAX_RUN_RECORDS} of {MAX_RUN_BYTES}",
                where=f"run {line.run_id}",
                do="Begin another run, or put what is large into object storage.",
            )
        return self._make_room(line, known, now)

    def _make_room(
        self, line: LedgerEntry, known: LedgerEntry | None, now: float
    ) -> list[LedgerEntry]:
        records = len(self._lines) + (known is None)
        size = self._bytes + line.size - (0 if known is None else known.size)
        dropped: list[LedgerEntry] = []
        for at, key in self._by_age:
            fits = records <= MAX_RECORDS and size <= MAX_BYTES
            if fits or at >= now - MIN_DROP_AGE_S or len(dropped) == DROPPED_AT_ONCE:
                break
            if key != line.key:
                dropped.append(self._lines[key])
                records, size = records - 1, size - dropped[-1].size
        # A ledger over the limit, written by an earlier version, may still shrink.
        if records > max(MAX_RECORDS, len(self._lines)) or size > max(MAX_BYTES, self._bytes):
            raise Conflict(
                "the ledger is full",
                got=f"{records} records of {size} bytes",
                wanted=f"at most {MAX_RECORDS} of {MAX_BYTES}",
                where="the coordinator's ledger",
                do=f"Records are dropped {MIN_DROP_AGE_S / 86_400:.0f} days after their stage "
                f"finished. "
                "Revoke the token that filled it (`paceline audit` names it), or wait.",
            )
        return dropped

    def keep(self, line: LedgerEntry, dropped: Iterable[LedgerEntry]) -> None:
        """Add ``line`` and remove ``dropped``, after the store did both."""
        for old in (*dropped, self._lines.get(line.key)):
            if old is not None:
                del self._lines[old.key]
                del self._by_age[bisect_left(self._by_age, (old.finished_at, old.key))]
                self._count(old, -1)
        self._lines[line.key] = line
        insort(self._by_age, (line.finished_at, line.key))
        self._count(line, 1)

    def _count(self, line: LedgerEntry, sign: int) -> None:
        records, size = self._runs.get(line.run_id, (0, 0))
        records, size = records + sign, size + sign * line.size
        if records:
            self._runs[line.run_id] = records, size
        else:
            self._runs.pop(line.run_id, None)
        self._bytes += sign * line.size
