"""Recovery of real training: spares, cancels, hangs."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.config import EmaSettings, SecuritySettings, save_runtime
from paceline.errors import Cancelled
from paceline.schemas import RankEvent
from paceline.training import LocalLauncher
from paceline.training.loop import waits_for_peers
from paceline.training.user_code import tree_digest
from tests.training.conftest import Camp, Story, run

pytestmark = pytest.mark.xdist_group("gangs")


def test_a_spare_takes_over_and_no_bit_changes(
    camp: Camp, launcher: LocalLauncher, pair: Story
) -> None:
    struck: list[int] = []

    def kill(event: RankEvent, story: Story) -> None:
        if event.event == "checkpoint" and not struck:
            struck.append(launcher.pids[1])
            os.kill(struck[0], signal.SIGKILL)

    job = camp.job("spared", ranks=2, guard={"spares": 1}, checkpoints={"every_steps": 4})
    story = run(camp, launcher, job, kill)
    assert len(story.result.restarts) == 1
    assert story.losses == pair.losses
    assert story.result.weights_digest == pair.result.weights_digest


@pytest.mark.nightly
def test_muon_and_a_moving_average_survive_a_kill_to_the_bit(
    camp: Camp, launcher: LocalLauncher
) -> None:
    struck: list[int] = []

    def kill(event: RankEvent, story: Story) -> None:
        if event.event == "checkpoint" and event.step >= 8 and not struck:
            struck.append(launcher.pids[1])
            os.kill(struck[0], signal.SIGKILL)

    how = {"optimizer": "muon", "ema": EmaSettings(decay=0.9), "evaluate_every_steps": 12}
    how |= {"ranks": 2, "checkpoints": {"every_steps": 4}}
    whole = run(camp, launcher, camp.job("averaged", **how)).result
    killed = run(camp, launcher, camp.job("averaged-killed", **how), kill).result
    assert killed.restarts
    assert killed.weights_digest == whole.weights_digest, "of the average"
    assert killed.held_out == whole.held_out
    assert killed.ema_decay == 0.9


def test_a_cancel_saves_on_all_ranks_and_the_same_job_goes_on(
    camp: Camp, launcher: LocalLauncher, pair: Story
) -> None:
    cancel, story = threading.Event(), Story()

    def ask(event: RankEvent, story: Story) -> None:
        if event.event == "step" and event.step >= 5:
            cancel.set()

    job = camp.job("called-off", ranks=2, checkpoints={"every_steps": 100})
    with pytest.raises(Cancelled):
        run(camp, launcher, job, ask, cancel, story)
    assert not [pid for pid in launcher.pids.values() if psutil.pid_exists(pid)]
    stopped = {e.step for e in story.events if e.event == "failed"}
    assert len(stopped) == 1
    more = run(camp, launcher, job)
    assert more.result.resumed_from_step == stopped.pop() < 24
    assert story.losses | more.losses == pair.losses
    assert more.result.weights_digest == pair.result.weights_digest
    assert more.result.first_loss == pair.losses[1]


def reference(camp: Camp, function: str) -> str:
    code = camp.runtime.state_dir / "tasks"
    code.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("poisoned.py"), code)
    return f"file://{code}@sha256:{tree_digest(code)}#poisoned:{function}"


@pytest.fixture
def trusting(camp: Camp) -> Iterator[None]:
    security = SecuritySettings(code_sources=(str(camp.runtime.state_dir / "tasks"),))
    model = camp.runtime.profile.model.model_copy(update={"context": 32})
    changes = {"security": security, "model": model}
    profile = camp.runtime.profile.model_copy(update=changes)
    save_runtime(camp.runtime.model_copy(update={"profile": profile}))
    yield
    save_runtime(camp.runtime)


@pytest.mark.usefixtures("trusting")
def test_who_never_joins_and_who_hangs_or_dies_in_an_evaluation_is_named(
    camp: Camp, launcher: LocalLauncher, troubles: Path
) -> None:
    for each in ("hang-loading", "hang-evaluating", "die-evaluating"):
        (troubles / each).touch()
    job = camp.job(
        "troubles",
        ranks=2,
        steps=3,
        code_ref=reference(camp, "troubled"),
        evaluate_every_steps=2,
        guard={
            "max_restarts": 9,
            "failures_per_host": 9,
            "start_deadline_s": 5.0,
            "checkpoint_deadline_s": 4.0,
        },
    )
    story = run(camp, launcher, job)
    joining, evaluating, died = story.result.restarts
    assert [each.failed_rank for each in story.result.restarts] == [1, 1, 1]
    assert [each.kind for each in story.result.restarts] == ["hung", "hung", "failed"]
    assert "rank 1 on node-1 hung in phase 'loading' at step 0: nothing for 5." in joining.reason
    assert "hung in phase 'evaluating' at step 1: nothing for 4." in evaluating.reason
    assert "was killed by signal 9" in died.reason
    stack = camp.store.get_bytes(f"{joining.stacks_url}/rank-0.txt").decode()
    assert waits_for_peers(stack), "it was joining, or about to"
    assert (
        waits_for_peers(camp.store.get_bytes(f"{evaluating.stacks_url}/rank-1.txt").decode())
        is False
    )
    assert story.result.held_out, "the fourth attempt had no trouble"
