"""The parameter server as a job like any other: ranks fall one by one, it stops, it goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from paceline.data import ShardCache, open_stream
from paceline.errors import Cancelled, InvalidInput
from paceline.models import load_model, weights_digest
from paceline.schemas.training import RankEvent, TrainJob, TrainResult
from paceline.training import LocalLauncher, run_job
from paceline.training.checkpoint import Generations
from tests.training.conftest import Camp
from tests.training.poisoned import BAD_BATCH
from tests.training.test_recovery import reference, trusting

__all__ = ["trusting"]  # a fixture

STEPS = 120  # a worker that is replaced midway still has steps left to trace
SERVED = {"kind": "parameter-server", "max_staleness": 3}


@pytest.fixture(scope="module")
def launcher() -> Iterator[LocalLauncher]:
    with LocalLauncher() as kept:
        yield kept


def job_of(camp: Camp, name: str, **changes: object) -> TrainJob:
    wanted = {"ranks": 5, "steps": STEPS, "synchrony": SERVED, "evaluate_every_steps": 20}
    return camp.job(name, **(wanted | {"evaluate_sequences": 6} | changes))


class Story:
    """What the ranks said, and what is done to them."""

    def __init__(self, camp: Camp, launcher: LocalLauncher) -> None:
        self.camp, self.launcher = camp, launcher
        self.events: list[RankEvent] = []
        self.killed: dict[str, int] = {}  # what for → pid
        self.cancel = threading.Event()

    def run(self, job: TrainJob) -> TrainResult:
        return run_job(
            job, self.camp.nodes, self.launcher, on_event=self._heard, cancel=self.cancel
        )

    def kill(self, why: str, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        if why not in self.killed:
            self.killed[why] = self.launcher.pids[rank]
            os.kill(self.killed[why], number)

    def of(self, event: str, rank: int = 0) -> list[RankEvent]:
        return [each for each in self.events if (each.event, each.rank) == (event, rank)]

    def standbys(self) -> list[RankEvent]:
        return [e for e in self.events if e.event == "started" and e.data.get("role") == "standby"]

    def _heard(self, event: RankEvent) -> None:
        self.events.append(event)
        self.on_event(event)

    def on_event(self, event: RankEvent) -> None:
        pass


class Struck(Story):
    """A worker is killed, then the leader."""

    def on_event(self, event: RankEvent) -> None:
        if event.event != "step" or event.rank != 0:
            return
        if event.step >= 4:
            self.kill("worker", 3)
        if event.step >= 12 and self.standbys():
            self.kill("leader", 0)
        if event.step == 40:
            (self.camp.runtime.state_dir / "trace").touch()


@pytest.fixture(scope="module")
def struck(camp: Camp, launcher: LocalLauncher) -> tuple[Struck, TrainResult]:
    story = Struck(camp, launcher)
    return story, story.run(job_of(camp, "struck"))


def test_a_killed_worker_and_a_killed_server_stop_nobody_else(
    struck: tuple[Struck, TrainResult],
) -> None:
    story, result = struck
    fell = {each.failed_rank: each for each in result.restarts}
    assert set(fell) == {0, 3}
    for each in fell.values():
        assert (each.attempt, each.lost_steps) == (1, 0)
        assert "killed by signal 9" in each.reason
    assert len(story.of("resumed")) == 2, "two servers led, one after the other"
    assert [each.step for each in story.of("step")] == list(range(1, STEPS + 1))
    assert result.failures.job == 2
    again = {each.data["pid"] for each in story.of("started", 3) if "pid" in each.data}
    assert len(again) == 2 and story.killed["worker"] in again


def test_what_it_learned_is_exported_evaluated_and_saved(
    camp: Camp, struck: tuple[Struck, TrainResult]
) -> None:
    story, result = struck
    assert result.steps == STEPS and result.final_loss < result.first_loss - 1
    assert result.held_out["held_out_loss"] < result.first_loss - 1
    staleness = [each.data["staleness_most"] for each in story.of("step")]
    assert 0 < max(staleness) <= SERVED["max_staleness"]
    directory = camp.runtime.state_dir / "exported"
    directory.mkdir()
    for each in camp.store.list(result.export_url):
        camp.store.download_file(each.url, directory / each.url.rsplit("/", 1)[1])
    assert weights_digest(directory) == result.weights_digest
    assert load_model(directory)[1].context == 32
    assert result.checkpoints[-1].step == STEPS
    generations = Generations(camp.store, result.checkpoints[-1].url.rsplit("/", 1)[0])
    newest = generations.find().committed[0]
    position = generations.commit_of(newest, result.config_digest).position
    assert position["ledger"]["applied"] == {"0": STEPS, "1": STEPS, "2": STEPS}


def test_a_trace_that_is_asked_for_is_made_by_who_leads_and_by_every_worker(
    camp: Camp, struck: tuple[Struck, TrainResult]
) -> None:
    story, _ = struck
    events = story.events
    asked = next(n for n, e in enumerate(events) if (e.event, e.rank, e.step) == ("step", 0, 40))
    made = {each.rank: each for each in events[asked:] if each.event == "trace"}
    assert made[0].step >= 40, "the server that took over speaks as rank 0"
    workers = set(made) & {2, 3, 4}
    assert len(workers) >= 2, "whoever is replaced midway may have no share left to trace"
    for rank in (0, *workers):
        traced = camp.store.get_bytes(made[rank].data["url"]).decode()
        assert ("aten::mm" if rank else "Optimizer.step") in traced, "its own work"


class StruckOften(Struck):
    """A worker is frozen, too, and the standby that took over is killed once it has one itself."""

    def on_event(self, event: RankEvent) -> None:
        super().on_event(event)
        if event.event != "step" or event.rank != 0:
            return
        if event.step >= 6:
            self.kill("frozen", 4, signal.SIGSTOP)
        if "leader" in self.killed and len(self.of("resumed")) == 2 and len(self.standbys()) == 2:
            self.kill("its standby", 1)


@pytest.mark.chaos
def test_a_third_server_leads_after_the_second_and_a_frozen_worker_is_replaced(
    camp: Camp, launcher: LocalLauncher
) -> None:
    story = StruckOften(camp, launcher)
    # A server takes seconds to start: the job has to last until it follows.
    settings = {"steps": 1500, "checkpoints": {"every_steps": 50, "keep": 3}}
    result = story.run(job_of(camp, "struck-often", **settings, evaluate_every_steps=500))
    assert set(story.killed) == {"worker", "frozen", "leader", "its standby"}
    fell = {each.failed_rank: each for each in result.restarts}
    assert {rank: each.kind for rank, each in fell.items()} == {
        0: "failed", 1: "failed", 3: "failed", 4: "hung"
    }  # fmt: skip
    assert {each.attempt for each in result.restarts} == {1}, "nobody else was stopped"
    assert "it is stopped" in fell[4].reason
    assert [each.lost_steps for each in result.restarts] == [0, 0, 0, 0]
    assert len(story.of("resumed")) == 3, "three servers led, one after the other"
    assert [each.step for each in story.of("step")] == list(range(1, 1501))
    assert any("held_out_loss" in each.data for each in story.of("step"))


class Cancelling(Story):
    def on_event(self, event: RankEvent) -> None:
        if (event.event, event.rank) == ("step", 0) and event.step >= 20:
            self.cancel.set()


def test_a_cancelled_job_goes_on_where_it_was_with_other_workers(
    camp: Camp, launcher: LocalLauncher
) -> None:
    story = Cancelling(camp, launcher)
    with pytest.raises(Cancelled):
        story.run(job_of(camp, "cancelled"))
    saved = story.of("checkpoint")[-1].step
    assert saved >= 20, "the leader saved as it was asked to stop"
    rest = Story(camp, launcher)
    result = rest.run(job_of(camp, "cancelled", ranks=4))
    assert (result.steps, result.ranks) == (STEPS, 4)
    assert 0 < result.resumed_from_step <= saved, "two workers go on where the slowest of three was"
    assert [each.step for each in rest.of("step")] == list(
        range(result.resumed_from_step + 1, STEPS + 1)
    )


def test_a_job_without_a_server_a_standby_and_a_worker_is_refused(
    camp: Camp, launcher: LocalLauncher
) -> None:
    with pytest.raises(InvalidInput, match="too few ranks"):
        run_job(job_of(camp, "few", ranks=2), camp.nodes, launcher)
    with pytest.raises(InvalidInput, match="whole replicas"):
        run_job(job_of(camp, "cut", mesh={"tp": 2}), camp.nodes, launcher)
    with pytest.raises(InvalidInput, match="batch is smaller"):
        run_job(job_of(camp, "small", ranks=9), camp.nodes, launcher)


def test_positions_of_shares_mean_the_same_to_any_worker(camp: Camp) -> None:
    cache = ShardCache(camp.snapshot, camp.store, camp.runtime.state_dir / "cache-of-test")
    job = job_of(camp, "positions")
    with open_stream(
        camp.snapshot, "train", cache, job.data, context=32, global_batch=6, seed=0, rank=0,
        world_size=3,
    ) as stream:  # fmt: skip
        stream.next()
        position, after = stream.position, stream.next()
    with open_stream(
        camp.snapshot, "train", cache, job.data, context=32, global_batch=6, seed=0, rank=0,
        world_size=2, position=position,
    ) as stream:  # fmt: skip
        assert stream.next().step == after.step
    cache.close()


class BothServers(Story):
    """Server and standby are killed at the same moment, once a checkpoint is committed."""

    def on_event(self, event: RankEvent) -> None:
        if (event.event, event.rank) == ("step", 0) and event.step >= 20 and self.of("checkpoint"):
            self.kill("server", 0)
            self.kill("standby", 1)


@pytest.mark.chaos
def test_without_any_server_the_job_resumes_from_its_checkpoint(
    camp: Camp, launcher: LocalLauncher
) -> None:
    story = BothServers(camp, launcher)
    result = story.run(job_of(camp, "both", steps=300))
    saved = {each.step for each in story.of("checkpoint")}
    resumed = [each.step for each in story.of("resumed")]
    assert len(resumed) == 2 and resumed[1] in saved
    reasons = [each.reason for each in result.restarts]
    assert any("nobody is left who holds the state" in each for each in reasons), reasons
    assert result.steps == 300
    assert [each.step for each in story.of("step")][-1] == 300


class LeftOut(Story):
    def on_event(self, event: RankEvent) -> None:
        if (event.event, event.rank) == ("step", 0) and event.step >= 4:
            self.kill("worker", 3)


@pytest.mark.chaos
def test_a_worker_that_falls_too_often_is_left_out_and_its_share_done_by_another(
    camp: Camp, launcher: LocalLauncher
) -> None:
    story = LeftOut(camp, launcher)
    result = story.run(job_of(camp, "left-out", guard={"max_restarts": 0}))
    assert [each.failed_rank for each in result.restarts] == [3]
    assert [each.step for each in story.of("step")] == list(range(1, STEPS + 1))
    shares = {each.data["share"] for each in story.events if each.event == "step" and each.rank > 1}
    assert shares == {0, 1, 2}
    others = [e for e in story.events if e.event == "step" and e.data.get("share") == 1]
    assert {each.rank for each in others} > {3}, "its share went on elsewhere"


@pytest.mark.chaos
@pytest.mark.usefixtures("trusting")
def test_a_planted_nan_rolls_the_job_back_and_its_batch_is_passed_over(
    camp: Camp, launcher: LocalLauncher
) -> None:
    story = Story(camp, launcher)
    own = {"code_ref": reference(camp, "task"), "checkpoints": {"every_steps": 2}}
    result = story.run(job_of(camp, "poisoned", **own, guard={"on_bad_step": "roll-back"}))
    assert result.skipped_batches == (BAD_BATCH,)
    assert {each.kind for each in result.restarts} == {"bad-step"}
    assert result.steps == STEPS and result.failures.job == 0


class NodeLost(Story):
    """A node's launcher is killed, and its ranks with it, once there is a standby."""

    def __init__(self, camp: Camp, launcher: LocalLauncher, node: str) -> None:
        super().__init__(camp, launcher)
        self.node = node

    def on_event(self, event: RankEvent) -> None:
        reached = (event.event, event.rank) == ("step", 0) and event.step >= 12
        if reached and self.standbys() and self.node not in self.killed:
            self.killed[self.node] = self.launcher.launcher_pids[self.node]
            os.kill(self.killed[self.node], signal.SIGKILL)


def test_the_node_with_the_gangs_store_is_lost_and_the_job_goes_on_from_its_last_step(
    camp: Camp, launcher: LocalLauncher
) -> None:
    # The store is on the standby's node: with it, nobody can join or take over any more.
    story = NodeLost(camp, launcher, "node-1")
    result = story.run(job_of(camp, "store-lost", steps=40, evaluate_every_steps=0))
    assert result.steps == 40 and set(story.killed) == {"node-1"}
    (restart,) = result.restarts
    assert (restart.kind, restart.worker_id, restart.lost_steps) == ("lost", "node-1", 0)
    assert "store lay there" in restart.reason
    assert [each.step for each in story.of("resumed")] == [0, restart.resumed_step]
    assert restart.resumed_step >= 12, "who led saved before it ended"
    assert [each.step for each in story.of("step")] == list(range(1, 41))


@pytest.mark.chaos
def test_the_node_of_who_leads_is_lost_and_nobody_else_is_stopped(
    camp: Camp, launcher: LocalLauncher
) -> None:
    story = NodeLost(camp, launcher, "node-0")
    result = story.run(job_of(camp, "leader-lost", steps=400))
    assert result.steps == 400 and set(story.killed) == {"node-0"}
    assert {each.attempt for each in result.restarts} == {1}
    assert {each.failed_rank for each in result.restarts} == {0, 2, 4}, "those of that node"
    steps = [each.step for each in story.of("step")]
    assert steps == sorted(set(steps)) and steps[-1] == 400
    assert len(steps) >= 399, "its last step may have been acknowledged, but not told"
