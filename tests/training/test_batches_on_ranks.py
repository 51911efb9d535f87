"""Packed and bucketed streams on real ranks, as a job: the losses of one process, whoever dies.

One process learns first; then two ranks with uneven shares do, until one of them is killed, and
three go on in the middle of an epoch. Packed, the kill comes while a checkpoint is being written to
a store that does not answer (faults 18 and 21).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from paceline.config import DataSettings, SecuritySettings, save_runtime
from paceline.data import Snapshot, build_snapshot
from paceline.errors import TrainingFailed
from paceline.schemas import RankEvent
from paceline.storage import DiskStore
from paceline.training import LocalLauncher
from paceline.training.checkpoint import Generations
from paceline.training.user_code import tree_digest
from tests.support.holdup import HoldUp
from tests.training.conftest import BUCKET, Camp, Story, run

STEPS, ROWS, CONTEXT = 40, 7, 32
EVERY = 4  # steps between checkpoints
KINDS = ("packed", pytest.param("bucketed", marks=pytest.mark.nightly))

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("gangs")]


@dataclass
class Told(Story):
    """What the ranks of one job sent and noted."""

    notes: list[dict[str, Any]] = field(default_factory=list)

    def samples(self, first: int, stop: int) -> list[str]:
        """Return the samples of batches ``first`` to ``stop``, in the stream's order."""
        notes = [each for each in self.notes if first <= each["step"] < stop]
        notes.sort(key=lambda each: (each["step"], each["rows"]))
        for step in range(first, stop):
            rows = [each["rows"] for each in notes if each["step"] == step]
            edges = [0, *(last for _, last in rows)]
            assert rows == [list(each) for each in itertools.pairwise(edges)]
            assert edges[-1] == ROWS, "the ranks' shares make the whole batch"
        return [sample for each in notes for sample in each["samples"]]


@dataclass
class Stories:
    """One kind of batches."""

    alone: Told = field(default_factory=Told)
    two: Told = field(default_factory=Told)
    three: Told = field(default_factory=Told)
    kept: list[int] = field(default_factory=list)  # checkpoints after the kill


class Place:
    """A state directory, a snapshot of small samples, and a launcher for one node."""

    def __init__(self, camp: Camp, root: Path, launcher: LocalLauncher, notes: Path) -> None:
        self.launcher = launcher
        self.proxy = HoldUp(urlsplit(camp.runtime.endpoints.s3_url).port or 0)
        self.notes = notes
        code = root / "tasks"
        code.mkdir()
        shutil.copy(Path(__file__).with_name("noting.py"), code)
        self._code = f"file://{code}@sha256:{tree_digest(code)}#noting:task"
        profile = camp.runtime.profile
        profile = profile.model_copy(
            update={
                "security": SecuritySettings(code_sources=(str(code),)),
                "model": profile.model.model_copy(update={"context": CONTEXT}),
            }
        )
        endpoints = camp.runtime.endpoints.model_copy(
            update={"s3_url": f"http://127.0.0.1:{self.proxy.port}"}
        )
        runtime = camp.runtime.model_copy(
            update={"profile": profile, "endpoints": endpoints, "state_dir": root / "state"}
        )
        runtime.state_dir.mkdir()
        save_runtime(runtime)
        self.store = camp.store  # not through the proxy
        self.snapshot = snapshot_of_small_samples(root)
        self._camp = replace(camp, runtime=runtime, snapshot=self.snapshot, nodes=("node-0",))

    def run(
        self, kind: str, ranks: int, name: str, told: Told, hook: Any = lambda *_: None
    ) -> None:
        """Run a job to its end and keep what it says and notes, however it ends."""
        before = {each.name for each in self.notes.iterdir()}

        job = self._camp.job(
            name,
            ranks=ranks,
            steps=STEPS,
            batch_sequences=ROWS,
            precision="float64",
            code_ref=self._code,
            checkpoints={"every_steps": EVERY},
            guard={"max_restarts": 0},
            data={"batching": kind},
        )
        try:
            run(self._camp, self.launcher, job, hook, story=told)
        finally:
            for path in self.notes.glob("*.jsonl"):
                if path.name not in before:
                    told.notes += map(json.loads, path.read_text().splitlines())

    def kept(self, name: str) -> list[int]:
        return Generations(self.store, f"s3://{BUCKET}/checkpoints/{name}").steps()


def snapshot_of_small_samples(root: Path) -> Snapshot:
    """Samples of 5 to 30 bytes, no two alike, in several shards."""
    texts = [f"<{number:03d}>" + "abcdefghij"[number % 10] * (number % 26) for number in range(300)]
    (root / "texts").mkdir()
    lines = "".join(json.dumps({"text": each}) + "\n" for each in texts)
    (root / "texts" / "all.jsonl").write_text(lines)
    settings = DataSettings(
        format="jsonl", shard_bytes=1024, purpose="tests", held_out_share=0.2, seed=1
    )
    where = DiskStore.url_of(root / "data")
    return build_snapshot(str(root / "texts"), where, settings, DiskStore())


@pytest.fixture(scope="module")
def place(
    camp: Camp,
    launcher: LocalLauncher,
    troubles: Path,
    user_code_tried_once: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    found = Place(camp, tmp_path_factory.mktemp("batches"), launcher, troubles)
    yield found
    found.proxy.close()


@pytest.fixture(scope="module", params=KINDS)
def story(request: pytest.FixtureRequest, place: Place) -> Stories:
    kind, told = request.param, Stories()
    postponed: list[int] = []  # saves, before answers were held back and at each step since
    killed: list[int] = []

    def strike(event: RankEvent, _: Story) -> None:
        if killed or event.rank != 0:
            return
        if event.event == "checkpoint" and kind == "packed" and not postponed:
            steps = [each for each in told.two.events if each.event == "step" and each.rank == 0]
            postponed.append(steps[-1].data["checkpoints_put_off"])
            place.proxy.hold_answers()
        elif event.event == "step" and postponed:
            postponed.append(event.data["checkpoints_put_off"])
        if (event.event == "checkpoint" and kind == "bucketed") or (
            postponed and postponed[-1] > postponed[0]
        ):
            killed.append(event.step)
            os.kill(place.launcher.pids[1], signal.SIGKILL)
            place.proxy.free()

    place.run(kind, 1, f"{kind}-alone", told.alone)
    for name in ("slow", "stay"):
        (place.notes / name).touch()
    with pytest.raises(TrainingFailed, match="signal 9"):
        place.run(kind, 2, f"{kind}-ranks", told.two, strike)
    for name in ("slow", "stay"):
        (place.notes / name).unlink()
    told.kept = place.kept(f"{kind}-ranks")
    place.run(kind, 3, f"{kind}-ranks", told.three)
    return told


def test_two_ranks_with_uneven_shares_lose_what_one_process_loses(story: Stories) -> None:
    losses = story.two.losses
    assert len(losses) > EVERY
    assert list(losses.values()) == pytest.approx(
        [story.alone.losses[step] for step in losses], rel=1e-10
    )
    weights = {(each["rows"][0], each["weight"]) for each in story.two.notes}
    assert len(weights) > 3, "shares weigh differently"


def test_three_ranks_go_on_in_the_middle_of_an_epoch(story: Stories) -> None:
    assert story.three.result is not None
    resumed = story.three.result.resumed_from_step
    assert resumed == story.kept[0] >= EVERY
    assert {each["rows"][1] - each["rows"][0] for each in story.three.notes} == {2, 3}
    assert sorted(story.three.losses) == list(range(resumed + 1, STEPS + 1))
    assert list(story.three.losses.values()) == pytest.approx(
        [story.alone.losses[step] for step in story.three.losses], rel=1e-9
    )


def test_each_sample_is_learned_from_once_an_epoch(story: Stories, place: Place) -> None:
    resumed = story.kept[0]
    seen = story.two.samples(0, resumed) + story.three.samples(resumed, STEPS)
    assert seen == story.alone.samples(0, STEPS), "the same samples at the same steps"
    train = sum(each.documents for each in place.snapshot.of_split("train"))
    assert len(seen) > train > len(story.two.samples(0, resumed)), "killed within the first epoch"
    epoch = Counter(seen[:train])
    assert len(epoch) == train
    assert set(epoch.values()) == {1}
    assert max(Counter(seen[: 2 * train]).values()) == min(2, -(-len(seen) // train))


def test_document_masks_are_there_where_samples_share_a_row(story: Stories) -> None:
    kinds = {each["masked"] for each in story.two.notes + story.three.notes}
    most = max(
        len(each["samples"]) / (each["rows"][1] - each["rows"][0]) for each in story.two.notes
    )
    assert kinds == {most > 1}


@pytest.mark.parametrize("story", ["packed"], indirect=True)
def test_a_silent_store_delays_saves_and_a_kill_meanwhile_spoils_none(
    story: Stories, place: Place
) -> None:
    said = [each.data for each in story.two.events if each.event == "step" and each.rank == 0]
    alerts = [alert for each in said for alert in each.get("checkpoint_alerts", [])]
    assert any("it was put off" in each for each in alerts)
    last = max(story.two.losses)
    committed = [each.step for each in story.two.events if each.event == "checkpoint"]
    assert last >= story.kept[0] + 2 * EVERY, "training went on past two saves that were due"
    assert story.kept[0] == max(committed), "what was being written when the rank died is nothing"
    assert place.kept("packed-ranks")[0] == STEPS, "and later saves are in nobody's way"
