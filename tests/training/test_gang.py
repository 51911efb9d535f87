"""Several ranks in real processes: the same numbers, and every kind of loss survived."""

from __future__ import annotations

import os
import signal

import pytest

from paceline.errors import Conflict, InvalidInput, InvalidSnapshot
from paceline.schemas import RankEvent
from paceline.training import Deadlines, GangMember, GangSupervisor, LocalLauncher, run_job
from paceline.training.checkpoint import Generations
from paceline.training.launcher import RANK, launcher_argv, rank_environment
from tests.training.conftest import BUCKET, Camp, Story, run

pytestmark = pytest.mark.xdist_group("gangs")


class NoLauncher:
    def open_nodes(self, workers, argv, **_):
        raise AssertionError("no launcher is to start")


@pytest.fixture(scope="session")
def alone(camp: Camp) -> dict[int, float]:
    return dict(enumerate(camp.run_alone(camp.job("dp1"))[1].losses, 1))


def test_two_ranks_learn_what_one_does(alone: dict[int, float], pair: Story) -> None:
    assert len(pair.losses) == len(alone) == 24
    assert pair.losses == pytest.approx(alone, abs=1e-5)


def test_a_result_is_stored_and_given_again_without_a_gang(camp: Camp, pair: Story) -> None:
    job = camp.job("dp2", ranks=2, checkpoints={"keep": 10})
    assert run_job(job, camp.nodes, NoLauncher()) == pair.result
    with pytest.raises(Conflict, match="other settings"):
        run_job(camp.job("dp2", ranks=2, seed=9), camp.nodes, NoLauncher())
    assert pair.result.steps == 24
    assert pair.result.first_loss == pair.losses[1]
    assert pair.result.final_loss == pair.losses[24]
    assert not pair.result.restarts
    assert pair.result.code_version
    card = camp.store.get_bytes(f"{pair.result.export_url}/README.md").decode()
    assert "# tiny, trained from version v1" in card
    assert "Not judged." in card
    assert "\npaceline reproduce dp2\n" in card


def continue_as(camp: Camp, job_id: str) -> int:
    """Give ``job_id`` the first checkpoint of the undisturbed pair, and return its step."""
    generations = Generations(camp.store, f"s3://{BUCKET}/checkpoints/dp2")
    oldest = generations.find().committed[-1]
    source = generations.url_of(oldest)
    for info in camp.store.list(source):
        target = info.url.replace("/dp2/", f"/{job_id}/")
        camp.store.put_bytes(target, camp.store.get_bytes(info.url))
    return oldest.step


def test_resume_from_a_checkpoint_is_bit_identical(
    camp: Camp, pair: Story, launcher: LocalLauncher
) -> None:
    first = continue_as(camp, "resumed")
    again = run(camp, launcher, camp.job("resumed", ranks=2))
    assert 0 < first < 24
    assert again.result.resumed_from_step == first
    assert again.losses == {step: pair.losses[step] for step in range(first + 1, 25)}
    assert again.result.weights_digest == pair.result.weights_digest


def test_one_rank_goes_on_where_two_stopped(
    camp: Camp, pair: Story, alone: dict[int, float]
) -> None:
    first = continue_as(camp, "fewer")
    _, said = camp.run_alone(camp.job("fewer", ranks=1))
    assert said.of("resumed")[0].step == first
    assert said.losses == pytest.approx([*alone.values()][first:], abs=1e-5)


def test_kills_stops_freezes_and_rot_change_no_bit_and_are_on_record(
    camp: Camp, launcher: LocalLauncher, pair: Story
) -> None:
    job = camp.job("stormy", ranks=2, checkpoints={"every_steps": 2}, guard={"step_deadline_s": 8})
    generations = Generations(camp.store, f"{job.checkpoint_url}/{job.job_id}")
    blows = [(6, signal.SIGKILL), (9, signal.SIGTERM), (12, signal.SIGSTOP)]
    struck_in: list[int] = []  # attempts
    rotten: list[int] = []

    def strike(event: RankEvent, story: Story) -> None:
        if event.event == "started" and len(struck_in) == 1 and not rotten:
            newest = generations.find().committed[0]
            rotten.append(newest.step)
            url = f"{generations.url_of(newest)}/rank-00001-of-00002.safetensors"
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

    stormy = run(camp, launcher, job, strike)
    assert not blows
    assert stormy.losses == pair.losses
    assert stormy.result.weights_digest == pair.result.weights_digest
    killed, stopped, frozen = stormy.result.restarts
    assert (killed.failed_rank, killed.worker_id) == (1, "node-1")
    assert "signal 9" in killed.reason and killed.seconds > 0

    rejected = {e.step for e in stormy.events if e.event == "checkpoint" and e.data.get("rejected")}
    assert len(rejected) == 1
    resumed = [e.step for e in stormy.events if e.event == "resumed" and e.attempt == 2]
    assert resumed[0] == resumed[1] < min(rejected), "the checkpoint before the rotten one"

    assert "exited with 143" in stopped.reason
    assert stopped.lost_steps == 0, "SIGTERM on one rank saves on all"
    saved = {e.step for e in stormy.events if e.event == "failed" and e.attempt == 2}
    assert saved == {stopped.resumed_step}

    assert (frozen.failed_rank, frozen.kind) == (1, "hung"), "not the rank that waits for it"
    assert "it is stopped" in frozen.reason
    ledger = stormy.result.ledger
    accounts = ledger.model_dump(exclude={"wall_s", "goodput"})
    assert sum(accounts.values()) == pytest.approx(ledger.wall_s, abs=1e-6)
    assert ledger.wall_s == pytest.approx(stormy.result.seconds, abs=1e-6)


def test_the_wrong_purpose_is_refused_before_any_rank_starts(camp: Camp) -> None:
    with pytest.raises(InvalidSnapshot, match="another purpose"):
        run_job(camp.job("submit", purpose="advertising"), camp.nodes, NoLauncher())
    with pytest.raises(InvalidInput, match="no workers"):
        run_job(camp.job("submit"), [], NoLauncher())


def test_a_rank_without_its_environment_says_what_is_missing(
    camp: Camp, launcher: LocalLauncher
) -> None:
    job = camp.job("env")
    said: list[dict] = []
    bare = {**rank_environment(job, "node-0"), "RANK": "zero"}
    with launcher.open_nodes(
        ["node-0"], launcher_argv(RANK), wait_s=0, cancel=None, on_wait=None
    ) as nodes:
        gangs = GangSupervisor(nodes, Deadlines())
        outcome = gangs.run_gang([GangMember("node-0", 0, bare)], "{}", 1, said.append)
    assert not outcome.ok
    assert "environment" in outcome.stderr[0]
