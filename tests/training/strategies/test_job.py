"""The parameter server as a job: it survives its leader, stops, and resumes without lost steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from paceline.errors import Cancelled, InvalidInput
from paceline.models import load_model, weights_digest
from paceline.schemas import RankEvent, TrainJob, TrainResult
from paceline.training import LocalLauncher, run_job
from paceline.training.checkpoint import Generations
from tests.training.conftest import Camp
from tests.training.poisoned import BAD_BATCH
from tests.training.test_recovery import reference, trusting

__all__ = ["trusting"]  # a fixture

pytestmark = pytest.mark.xdist_group("gangs")

STEPS, TRACED = 48, 12  # a busy machine asks for the trace late
SERVED = {"kind": "parameter-server", "max_staleness": 3}


def job_of(camp: Camp, name: str, **changes: object) -> TrainJob:
    wanted = {"ranks": 4, "steps": STEPS, "synchrony": SERVED, "evaluate_every_steps": 10}
    return camp.job(name, **(wanted | {"evaluate_sequences": 6} | changes))


class Story:
    """A job's events and result; ``on_step`` is called after each step of the leader."""

    def __init__(
        self, camp: Camp, launcher: LocalLauncher, on_step: Callable[[Story, int], None]
    ) -> None:
        self.camp, self.launcher, self.on_step = camp, launcher, on_step
        self.events: list[RankEvent] = []
        self.killed: dict[object, int] = {}  # what → pid
        self.cancel = threading.Event()

    def run(self, job: TrainJob) -> TrainResult:
        def on_event(event: RankEvent) -> None:
            self.events.append(event)
            if (event.event, event.rank) == ("step", 0):
                self.on_step(self, event.step)

        return run_job(job, self.camp.nodes, self.launcher, on_event=on_event, cancel=self.cancel)

    def kill(self, what: object, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        if what not in self.killed:
            self.killed[what] = pid
            os.kill(pid, number)

    def of(self, event: str, rank: int = 0) -> list[RankEvent]:
        return [each for each in self.events if (each.event, each.rank) == (event, rank)]

    @property
    def steps(self) -> list[int]:
        return [each.step for each in self.of("step")]

    @property
    def standbys(self) -> int:
        return sum(e.event == "started" and e.data.get("role") == "standby" for e in self.events)


def strike(story: Story, step: int) -> None:
    """Kill the leader once there is a standby, and ask for a trace later."""
    if step >= 4 and story.standbys:
        story.kill("leader", story.launcher.pids[0])
    if step == TRACED:
        (story.camp.runtime.state_dir / "trace").touch()


@pytest.fixture(scope="module")
def struck(camp: Camp, launcher: LocalLauncher) -> tuple[Story, TrainResult]:
    story = Story(camp, launcher, strike)
    return story, story.run(job_of(camp, "struck"))


def test_a_killed_leader_stops_no_other_rank(struck: tuple[Story, TrainResult]) -> None:
    story, result = struck
    assert story.killed and result.restarts == ()
    assert len(story.of("resumed")) == 2, "two servers led, one after the other"
    assert story.steps == list(range(1, STEPS + 1))
    assert result.failures.job == 0


def test_what_it_learned_is_exported_evaluated_and_saved(
    camp: Camp, struck: tuple[Story, TrainResult]
) -> None:
    story, result = struck
    assert result.steps == STEPS and result.final_loss < result.first_loss - 1
    assert result.held_out["held_out_loss"] < result.first_loss - 1
    assert any("held_out_loss" in each.data for each in story.of("step"))
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
    assert position["ledger"]["applied"] == {"0": STEPS, "1": STEPS}


def test_a_requested_trace_is_made_by_the_leader_and_by_every_worker(
    camp: Camp, struck: tuple[Story, TrainResult]
) -> None:
    events = struck[0].events
    asked = next(
        n for n, e in enumerate(events) if (e.event, e.rank, e.step) == ("step", 0, TRACED)
    )
    made = {each.rank: each for each in events[asked:] if each.event == "trace"}
    assert made[0].step >= TRACED, "the server that took over reports as rank 0"
    for rank in (0, 2, 3):
        traced = camp.store.get_bytes(made[rank].data["url"]).decode()
        assert ("aten::mm" if rank else "Optimizer.step") in traced, "its own work"


@pytest.mark.nightly
def test_a_cancelled_job_goes_on_where_it_was_with_other_workers(
    camp: Camp, launcher: LocalLauncher
) -> None:
    story = Story(camp, launcher, lambda story, step: step >= 10 and story.cancel.set())
    with pytest.raises(Cancelled):
        story.run(job_of(camp, "cancelled", ranks=5))
    saved = story.of("checkpoint")[-1].step
    assert saved >= 10, "the leader saved as it was asked to stop"
    rest = Story(camp, launcher, lambda *_: None)
    result = rest.run(job_of(camp, "cancelled", ranks=4))
    assert (result.steps, result.ranks) == (STEPS, 4)
    assert 0 < result.resumed_from_step <= saved, "two workers go on where the slowest of three was"
    assert rest.steps == list(range(result.resumed_from_step + 1, STEPS + 1))


def test_a_job_that_a_parameter_server_cannot_run_is_refused(
    camp: Camp, launcher: LocalLauncher
) -> None:
    for changes, why in (
        ({"ranks": 2}, "too few ranks"),
        ({"mesh": {"tp": 2}}, "whole replicas"),
        ({"ranks": 9}, "batch is smaller"),
    ):
        with pytest.raises(InvalidInput, match=why):
            run_job(job_of(camp, "refused", **changes), camp.nodes, launcher)


@pytest.mark.chaos
def test_without_any_server_the_job_resumes_from_its_checkpoint(
    camp: Camp, launcher: LocalLauncher
) -> None:
    def both(story: Story, step: int) -> None:
        if step >= 20 and story.of("checkpoint"):
            story.kill("server", launcher.pids[0])
            story.kill("standby", launcher.pids[1])

    story = Story(camp, launcher, both)
    result = story.run(job_of(camp, "both", steps=300))
    resumed = [each.step for each in story.of("resumed")]
    assert len(resumed) == 2 and resumed[1] in {each.step for each in story.of("checkpoint")}
    reasons = [each.reason for each in result.restarts]
    assert any("holds the state" in each for each in reasons), reasons
    assert result.steps == story.steps[-1] == 300


@pytest.mark.chaos
@pytest.mark.usefixtures("trusting")
def test_a_planted_nan_rolls_the_job_back_and_its_batch_is_skipped(
    camp: Camp, launcher: LocalLauncher
) -> None:
    own = {"code_ref": reference(camp, "task"), "checkpoints": {"every_steps": 2}}
    story = Story(camp, launcher, lambda *_: None)
    result = story.run(job_of(camp, "poisoned", **own, guard={"on_bad_step": "roll-back"}))
    assert result.skipped_batches == (BAD_BATCH,)
    assert {each.kind for each in result.restarts} == {"bad-step"}
    assert result.steps == STEPS and result.failures.job == 0


def test_a_lost_worker_costs_no_step(camp: Camp, launcher: LocalLauncher) -> None:
    def kill(story: Story, step: int) -> None:
        if step >= 12:
            story.kill("worker", story.launcher.pids[3])

    story = Story(camp, launcher, kill)
    result = story.run(job_of(camp, "worker-lost", evaluate_every_steps=0, steps=20))
    (restart,) = result.restarts
    assert (restart.kind, restart.failed_rank, restart.lost_steps) == ("failed", 3, 0)
    assert "killed by signal 9" in restart.reason
    assert restart.resumed_step >= 12, "the leader saved before it ended"
    assert story.steps == list(range(1, 21))


@pytest.mark.nightly
def test_a_job_that_loses_its_gangs_store_resumes_from_its_last_step(
    camp: Camp, launcher: LocalLauncher
) -> None:
    # The store is on the standby's node: without it, no rank can join or take over any more.
    def kill(story: Story, step: int) -> None:
        if step >= 12 and story.standbys and not story.killed:
            story.kill("node-1", story.launcher.launcher_pids["node-1"])

    story = Story(camp, launcher, kill)
    result = story.run(job_of(camp, "store-lost", evaluate_every_steps=0))
    (restart,) = result.restarts
    assert (restart.kind, restart.worker_id, restart.lost_steps) == ("lost", "node-1", 0)
    assert "store lay there" in restart.reason
    assert story.steps == list(range(1, STEPS + 1))
