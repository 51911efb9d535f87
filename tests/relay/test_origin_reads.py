"""What was read from the origin outlives the process that read it, and grants go on from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.relay.protocol import OriginBudget
from paceline.relay.store import OriginReadCount, OriginReadCounts, origin_reads as reading
from paceline.schemas import WorkerLanes
from tests.relay.kit import ORIGIN, lanes, paper_manifest

GRANT, AHEAD = 1000, 100


def granted(counted: int | None = 0) -> WorkerLanes:
    made = lanes("node-0", paper_manifest(4), ORIGIN, budget=GRANT)
    return made.model_copy(update={"origin_counted_bytes": counted})


def left(given: WorkerLanes, read: int) -> int:
    """Return what a session may still read under ``given`` that read ``read`` in its count."""
    counted = given.origin_counted_bytes
    unreported = 0 if counted is None else max(0, read - counted)
    return OriginBudget(given.origin_budget_bytes, unreported).left_bytes


def test_a_killed_process_gives_nothing_back_and_costs_a_part_at_most(tmp_path: Path) -> None:
    first = OriginReadCounts(tmp_path).of("d-1")
    kept = first.kept(granted())
    for read in range(10, 410, 10):
        first.cover(read, AHEAD)
    second = OriginReadCounts(tmp_path).of("d-1")  # the first is gone without a word
    assert 400 <= second.begun_bytes <= 400 + AHEAD
    assert GRANT - 400 - AHEAD <= left(second.resumed(kept), second.begun_bytes) <= GRANT - 400


def test_grants_go_on_over_any_number_of_processes_whatever_was_told(tmp_path: Path) -> None:
    total = 0
    for number in range(6):
        origin_reads = OriginReadCounts(tmp_path)
        mine = origin_reads.of("d-1")
        if number == 0:
            kept = mine.kept(granted())
        resumed, read = mine.resumed(kept), mine.begun_bytes
        assert left(resumed, read) == GRANT - total
        mine.cover(read + 70, AHEAD)
        total += 70
        if number % 2:
            origin_reads.acknowledge("d-1", read + 30)
        origin_reads.close()  # an orderly end: what is written is what was read


def test_a_new_process_tells_what_its_predecessor_had_not(tmp_path: Path) -> None:
    before = OriginReadCounts(tmp_path)
    before.of("d-1").cover(300, 0)
    before.acknowledge("d-1", 200)
    assert OriginReadCounts(tmp_path).of("d-1").begun_bytes == 100


def test_after_a_restart_of_the_machine_a_grant_counts_as_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = OriginReadCounts(tmp_path).of("d-1").kept(granted())
    monkeypatch.setattr(reading, "_boot", lambda: b"another".ljust(40))
    for _ in range(2):  # and for whoever starts after that, too
        after = OriginReadCounts(tmp_path).of("d-1")
        assert left(after.resumed(kept), after.begun_bytes) == 0
    assert after.kept(granted()).origin_budget_bytes == GRANT, "what is granted now is good"


def test_a_torn_record_counts_as_spent(tmp_path: Path) -> None:
    kept = OriginReadCounts(tmp_path).of("d-1").kept(granted())
    (tmp_path / "d-1.read").write_bytes(b"torn")
    after = OriginReadCounts(tmp_path).of("d-1")
    assert left(after.resumed(kept), after.begun_bytes) == 0


def test_what_is_over_is_removed_and_still_counted_by_its_process(tmp_path: Path) -> None:
    origin_reads = OriginReadCounts(tmp_path)
    origin_reads.of("d-1").cover(300, AHEAD)
    origin_reads.drop(["d-1", "d-2"])
    assert not list(tmp_path.iterdir())
    assert origin_reads.of("d-1").read_bytes == 300


def test_readings_are_bounded(tmp_path: Path) -> None:
    origin_reads = OriginReadCounts(tmp_path)
    long_one = origin_reads.of("d-0")
    for number in range(1, reading.MAX_COUNTS + 10):
        origin_reads.of(f"d-{number}")
        if number < 20:
            origin_reads.drop([f"d-{number}"])
    assert origin_reads.of("d-0") is long_one, "those that are over make room first"
    for number in range(20, 40):
        origin_reads.of(f"e-{number}")
    origin_reads.close()
    OriginReadCounts(tmp_path)
    assert len(list(tmp_path.iterdir())) == reading.MAX_COUNTS


def test_without_a_disk_a_reading_counts_for_its_process() -> None:
    mine = OriginReadCount()
    mine.cover(50, AHEAD)
    mine.acknowledge(20)
    assert (mine.read_bytes, mine.begun_bytes, mine.before_bytes) == (50, 0, 0)
