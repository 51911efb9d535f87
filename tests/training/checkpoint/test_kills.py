"""SIGKILL at the system calls of saving: what has a marker is whole, and the one before stays (I8).

A few in `make test`, more in `make test-nightly`, all in `make chaos`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.storage import DiskStore
from paceline.training.checkpoint import Generations
from tests.support import kills
from tests.support.kills import Point
from tests.training.checkpoint.commit_work import FILES, KEEP, LAST, content, newest_healthy, work

PROGRAM = Path(__file__).with_name("commit_work.py")
SEED = 5
CALLS = f"{kills.DISK_CALLS},sendfile"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    kills.require_strace()
    scratch = tmp_path_factory.mktemp("trace")
    return kills.points([PROGRAM, scratch / "root"], CALLS, scratch / "trace")


def healthy(root: Path) -> list[int]:
    """Return the steps that are whole; fails where a marker lies about anything but the rot."""
    generations = Generations(DiskStore(), DiskStore.url_of(root / "job"))
    whole = []
    for generation in generations.find().committed:
        directory = DiskStore.path_of(generations.url_of(generation))
        rotted = (root / "rotted").exists() and generation.step == 3
        if rotted and (directory / FILES[1]).read_bytes()[:1] == b"S":
            continue
        generations.verify(generation, root)
        for file in FILES:
            assert (directory / file).read_bytes() == content(generation.step, file)
        whole.append(generation.step)
    return whole


def check_kill(point: Point, root: Path) -> bool:
    """Kill, look, go on, look; return whether it died at all."""
    died = kills.kill([PROGRAM, root], point)
    before = healthy(root)
    if died and (root / "rotted").exists():
        assert before, "a save that died, or a rejection, never costs the generation before"
    newest = newest_healthy(Generations(DiskStore(), DiskStore.url_of(root / "job")), root)
    assert newest == max(before, default=0), "resuming finds the newest that is whole"
    work(root)
    assert healthy(root)[0] == LAST
    assert len(healthy(root)) <= KEEP + 1
    work(root)  # a second run has nothing to do
    work(root, LAST + 1)  # the next save collects whatever a dead one left
    left = Generations(DiskStore(), DiskStore.url_of(root / "job")).find()
    assert not left.unfinished
    assert [each.step for each in left.committed] == [LAST + 1, LAST]
    shutil.rmtree(root)
    return died


def test_the_work_itself_leaves_the_newest_and_one_rejected(tmp_path: Path) -> None:
    work(tmp_path)
    found = Generations(DiskStore(), DiskStore.url_of(tmp_path / "job")).find()
    assert [each.step for each in found.committed] == [LAST, LAST - 1]
    assert [each.step for each in found.rejected] == [3]
    assert not found.unfinished


@kills.SAMPLED
def test_a_kill_at_sampled_calls_of_saving_damages_no_generation(
    found: list[Point], tmp_path: Path, count: int
) -> None:
    died = 0
    for point in kills.sample(found, count, SEED):
        try:
            died += check_kill(point, tmp_path / "root")
        except BaseException as error:
            error.add_note(f"killed at {point}")
            raise
    assert died > count / 2


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_kill_at_every_call_of_saving_damages_no_generation(
    found: list[Point], tmp_path: Path
) -> None:
    for point in found:
        try:
            check_kill(point, tmp_path / "root")
        except BaseException as error:
            error.add_note(f"killed at {point}")
            raise
    assert len(found) > 50
