"""A disk that fills up while a rank trains: by name, nothing half, and on from what was kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import NotSaved
from paceline.schemas import TrainJob
from paceline.training.checkpoint import Generations
from paceline.training.loop import RankIdentity, StopFlag, run_rank
from tests.training.conftest import Camp, Listener
from tests.training.small_disk import SmallDisk, disk_camp, small_disk

STEPS, FILL_AT = 24, 4
EVERY_TWO = {"every_steps": 2, "keep": 2, "max_stall_share": 0.99}


@pytest.fixture(scope="module")
def camp(tmp_path_factory: pytest.TempPathFactory) -> Camp:
    return disk_camp(tmp_path_factory.mktemp("disks"))


@pytest.fixture(scope="module")
def calm(camp: Camp) -> Listener:
    """The same training on a disk with room."""
    url = f"file://{camp.runtime.state_dir}/checkpoints"
    code, said = camp.run_alone(camp.job("calm", checkpoint_url=url, checkpoints=EVERY_TWO))
    assert code == 0
    return said


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "small", monkeypatch) as made:
        yield made


class Filling(Listener):
    """Fills the disk once a checkpoint is there; looks, frees it or asks to stop later."""

    def __init__(self, disk: SmallDisk, generations: Generations) -> None:
        super().__init__()
        self.disk, self.generations, self.stop = disk, generations, StopFlag()
        self.free_after = self.stop_after = self.full_from = self.freed_at = 0
        self.found_full: list[Any] = []

    def emit(self, event, step=0, **data):
        super().emit(event, step, **data)
        if event == "checkpoint" and step >= FILL_AT and not self.full_from:
            self.full_from = step
            self.disk.fill()
        since = step - self.full_from if event == "step" and self.full_from else 0
        if since and since == self.free_after:
            self.freed_at = step
            for each in threading.enumerate():
                if each.name == "checkpoint-writer":
                    each.join()
            self.found_full.append(self.generations.find())
            self.disk.free()
        if since and since == self.stop_after:
            self.stop._asked = True  # as SIGTERM would have

    def run(self, job: TrainJob) -> int:
        return run_rank(job, RankIdentity(0, 1, "127.0.0.1", 0, 1, "node-0"), self, self.stop)


def names_all(message: str, disk: SmallDisk) -> None:
    for part in ("disk is full", "No space left on device", "room for", disk.url, "Free space"):
        assert part in message


def test_a_full_disk_costs_saves_and_training_goes_on(
    camp: Camp, calm: Listener, disk: SmallDisk, tmp_path: Path
) -> None:
    generations = disk.generations("goes-on")
    said = Filling(disk, generations)
    said.free_after = 12
    assert said.run(camp.job("goes-on", checkpoint_url=disk.url, checkpoints=EVERY_TWO)) == 0
    assert said.losses == calm.losses, "no step waited or was made otherwise"
    alerts = [a for e in said.of("step") for a in e.data.get("checkpoint_alerts", ())]
    failed = [each for each in alerts if "was not saved" in each]
    assert len(failed) >= 2, "each save that failed"
    names_all(failed[0], disk)
    (full,) = said.found_full
    assert full.unfinished == (), "half a generation would be in the next one's way"
    newest = full.committed[0]
    assert said.full_from <= newest.step <= said.full_from + 2, "one was under way"
    saved = [each.step for each in said.of("checkpoint")]
    assert not [step for step in saved if newest.step < step < said.freed_at]
    assert saved[-1] == STEPS, "once there is room it saves again"
    found = generations.find()
    assert found.committed[0].step == STEPS
    assert found.unfinished == ()
    generations.verify(found.committed[0], tmp_path)


def test_an_emergency_save_without_room_fails_and_the_last_one_is_resumed(
    camp: Camp, calm: Listener, disk: SmallDisk, tmp_path: Path
) -> None:
    generations = disk.generations("leaves")
    job = camp.job("leaves", checkpoint_url=disk.url, checkpoints=EVERY_TWO)
    said = Filling(disk, generations)
    said.stop_after = 5
    code = said.run(job)
    assert code == NotSaved.exit_code, "143 would say that the state is saved"
    (failed,) = said.of("failed")
    assert (failed.data["code"], failed.data["stopped"]) == ("NotSaved", True)
    names_all(str(failed.data["message"]), disk)
    found = generations.find()
    assert found.unfinished == ()
    assert found.committed[0].step >= said.full_from
    generations.verify(found.committed[0], tmp_path)
    disk.free()
    code, again = camp.run_alone(job)
    assert code == 0
    assert again.of("resumed")[0].step == found.committed[0].step < failed.step
    digests = {each.of("result")[0].data["weights_digest"] for each in (again, calm)}
    assert len(digests) == 1, "bit for bit"
