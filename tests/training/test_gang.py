"""Several ranks in real processes: the same numbers, and every kind of loss survived."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from paceline.errors import Conflict, InvalidInput, InvalidSnapshot, TrainingFailed
from paceline.schemas.training import RankEvent, TrainJob, TrainResult
from paceline.training import GangMember, GangResult, GangSupervisor, LocalLauncher, run_job
from paceline.training.checkpoint import Generations
from paceline.training.launcher.driver import RANK, drive, environment
from paceline.training.launcher.gang import Deadlines
from paceline.training.launcher.local import launcher_argv
from tests.training.conftest import BUCKET, Camp


@dataclass
class Story:
    """A finished job and all that its ranks said."""

    result: TrainResult
    events: list[RankEvent] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """Losses by step; of a step that ran twice, the last."""
        found = {e.step: e.data["loss"] for e in self.events if e.event == "step" and e.rank == 0}
        return [found[step] for step in sorted(found)]


@pytest.fixture(scope="session")
def alone(camp: Camp) -> list[float]:
    return camp.run_alone(camp.job("dp1"))[1].losses


@pytest.fixture(scope="session")
def launcher() -> Iterator[LocalLauncher]:
    """Two nodes whose launchers stay warm from test to test."""
    with LocalLauncher() as kept:
        yield kept


@pytest.fixture(scope="session")
def pair(camp: Camp, launcher: LocalLauncher) -> Story:
    """Two ranks on two nodes, undisturbed."""
    events: list[RankEvent] = []
    job = camp.job("dp2", ranks=2, checkpoints={"keep": 10})
    result = run_job(job, camp.nodes, launcher, on_event=events.append)
    return Story(result, events)


@pytest.fixture(scope="session")
def stormy(camp: Camp, launcher: LocalLauncher) -> Story:
    """Two ranks; one is killed, then one gets SIGTERM, then one freezes; a checkpoint rots too."""
    events: list[RankEvent] = []
    job = camp.job("stormy", ranks=2, checkpoints={"every_steps": 2}, guard={"step_deadline_s": 8})
    generations = Generations(camp.store, f"{job.checkpoint_url}/{job.job_id}")
    blows = [(6, signal.SIGKILL), (9, signal.SIGTERM), (12, signal.SIGSTOP)]
    struck_in: list[int] = []  # attempts
    rotten: list[int] = []

    def on_event(event: RankEvent) -> None:
        events.append(event)
        if event.event == "started" and len(struck_in) == 1 and not rotten:
            rotten.append(generations.steps()[0])
            url = f"{generations.step_url(rotten[0])}/rank-00001-of-00002.safetensors"
            data = bytearray(camp.store.get_bytes(url))
            data[len(data) // 2] ^= 1
            camp.store.put_bytes(url, bytes(data))
        if (event.event, event.rank) != ("step", 0) or event.attempt in struck_in or not blows:
            return
        step, blow = blows[0]
        if event.step >= step and (struck_in or generations.steps()):
            blows.pop(0)
            struck_in.append(event.attempt)
            os.kill(launcher.pids[1], blow)

    result = run_job(job, camp.nodes, launcher, on_event=on_event)
    assert not blows
    return Story(result, events)


def test_two_ranks_learn_what_one_does(alone: list[float], pair: Story) -> None:
    assert len(pair.losses) == len(alone) == 24
    assert pair.losses == pytest.approx(alone, abs=1e-5)


def test_a_result_is_stored_and_given_again_without_a_gang(camp: Camp, pair: Story) -> None:
    class NoLauncher:
        def open_nodes(self, workers, argv, **_):
            raise AssertionError("a finished job starts nothing")

    job = camp.job("dp2", ranks=2, checkpoints={"keep": 10})
    assert run_job(job, camp.nodes, NoLauncher()) == pair.result
    with pytest.raises(Conflict, match="other settings"):
        run_job(camp.job("dp2", ranks=2, seed=9), camp.nodes, NoLauncher())
    assert pair.result.steps == 24
    assert pair.result.first_loss == pair.losses[0]
    assert pair.result.final_loss == pair.losses[-1]
    assert not pair.result.restarts
    assert pair.result.code_version


def continue_as(camp: Camp, job_id: str) -> int:
    """Give ``job_id`` the first checkpoint of the undisturbed pair, and return its step."""
    generations = Generations(camp.store, f"s3://{BUCKET}/checkpoints/dp2")
    first = generations.steps()[-1]
    source = generations.step_url(first)
    for info in camp.store.list(source):
        target = info.url.replace("/dp2/", f"/{job_id}/")
        camp.store.put_bytes(target, camp.store.get_bytes(info.url))
    return first


def test_resume_from_a_checkpoint_is_bit_identical(
    camp: Camp, pair: Story, launcher: LocalLauncher
) -> None:
    first = continue_as(camp, "resumed")
    events: list[RankEvent] = []
    job = camp.job("resumed", ranks=2)
    result = run_job(job, camp.nodes, launcher, on_event=events.append)
    assert 0 < first < 24
    assert result.resumed_from_step == first
    assert Story(result, events).losses == pair.losses[first:]
    assert result.weights_digest == pair.result.weights_digest


def test_one_rank_goes_on_where_two_stopped(camp: Camp, pair: Story, alone: list[float]) -> None:
    first = continue_as(camp, "fewer")
    _, said = camp.run_alone(camp.job("fewer", ranks=1))
    assert said.of("resumed")[0].step == first
    assert said.losses == pytest.approx(alone[first:], abs=1e-5)


def test_kills_stops_freezes_and_rot_change_no_bit_of_the_result(
    pair: Story, stormy: Story
) -> None:
    assert stormy.losses == pair.losses
    assert stormy.result.weights_digest == pair.result.weights_digest


def test_a_killed_rank_restarts_the_gang_and_is_on_record(stormy: Story) -> None:
    restart = stormy.result.restarts[0]
    assert restart.failed_rank == 1
    assert restart.worker_id == "node-1"
    assert "signal 9" in restart.reason
    assert restart.seconds > 0


def test_a_rotten_checkpoint_is_rejected_and_the_one_before_used(stormy: Story) -> None:
    rejected = {e.step for e in stormy.events if e.event == "checkpoint" and e.data.get("rejected")}
    assert len(rejected) == 1
    resumed = [e.step for e in stormy.events if e.event == "resumed" and e.attempt == 2]
    assert resumed[0] == resumed[1] < min(rejected)


def test_sigterm_on_one_rank_saves_on_all_and_loses_no_step(stormy: Story) -> None:
    restart = stormy.result.restarts[1]
    assert "exited with 143" in restart.reason
    assert restart.lost_steps == 0
    stopped = {e.step for e in stormy.events if e.event == "failed" and e.attempt == 2}
    assert stopped == {restart.resumed_step}


def test_a_frozen_rank_is_named_not_the_one_that_waits_for_it(stormy: Story) -> None:
    restart = stormy.result.restarts[2]
    assert restart.failed_rank == 1
    assert "hung" in restart.reason


class ScriptedGangs:
    """Ends each attempt as told, saying what it was told to say."""

    def __init__(self, *attempts: tuple[GangResult, list[RankEvent]]) -> None:
        self.attempts = list(attempts)
        self.workers: list[list[str]] = []
        self.jobs: list[TrainJob] = []
        self.spares: dict[str, str] = {}

    def run_gang(self, members, text, attempt, on_event):
        self.workers.append([each.worker_id for each in members])
        self.jobs.append(TrainJob.model_validate_json(text))
        outcome, events = self.attempts[attempt - 1]
        for event in events:
            on_event(event.model_copy(update={"attempt": attempt}).model_dump())
        return outcome


def lost(worker: str, rank: int, code: int | None = -9) -> GangResult:
    return GangResult(
        ok=False, exit_codes={rank: code}, failed_rank=rank, failed_worker=worker, reason="lost"
    )


def test_restarts_are_bounded_and_a_bad_node_is_left_out(camp: Camp) -> None:
    launcher = ScriptedGangs(
        (lost("node-1", 1, None), []), (lost("node-0", 0), []), (lost("node-0", 1), [])
    )
    job = camp.job("bounded", ranks=2, guard={"max_restarts": 2})
    with pytest.raises(TrainingFailed, match="used up its restarts"):
        drive(job, camp.nodes, launcher, camp.store)
    assert launcher.workers == [["node-0", "node-1"], ["node-0", "node-0"], ["node-0", "node-0"]]


def failed(code: str) -> RankEvent:
    return RankEvent(
        event="failed", rank=0, attempt=1, data={"code": code, "message": f"{code} it is"}
    )


def test_what_cannot_work_is_not_tried_again(camp: Camp) -> None:
    launcher = ScriptedGangs((lost("node-0", 0, 1), [failed("InvalidInput")]))
    with pytest.raises(TrainingFailed, match="InvalidInput it is"):
        drive(camp.job("hopeless", ranks=1), camp.nodes, launcher, camp.store)


def test_divergence_is_tried_once_more_and_then_reported(camp: Camp) -> None:
    again = (lost("node-0", 0, 1), [failed("TrainingFailed")])
    launcher = ScriptedGangs(again, again, again)
    with pytest.raises(TrainingFailed, match="cannot succeed"):
        drive(camp.job("diverging", ranks=1), camp.nodes, launcher, camp.store)
    assert len(launcher.workers) == 2


def test_the_wrong_purpose_is_refused_before_any_rank_starts(camp: Camp) -> None:
    class NoLauncher:
        def open_nodes(self, workers, argv, **_):
            raise AssertionError("nothing is to start")

    with pytest.raises(InvalidSnapshot, match="another purpose"):
        run_job(camp.job("submit", purpose="advertising"), camp.nodes, NoLauncher())
    with pytest.raises(InvalidInput, match="no workers"):
        run_job(camp.job("submit"), [], NoLauncher())


def test_a_rank_without_its_environment_says_what_is_missing(
    camp: Camp, launcher: LocalLauncher
) -> None:
    job: TrainJob = camp.job("env")
    said: list[dict] = []
    bare = {**environment(job, "node-0"), "RANK": "zero"}
    with launcher.open_nodes(
        ["node-0"], launcher_argv(RANK), wait_s=0, cancel=None, on_wait=None
    ) as nodes:
        gangs = GangSupervisor(nodes, Deadlines())
        outcome = gangs.run_gang([GangMember("node-0", 0, bare)], "{}", 1, said.append)
    assert not outcome.ok
    assert "environment" in outcome.stderr_tail
