"""`paceline demo`: killed at its worst moment it leaves no process; the next one goes on from
there, absorbs the death of a training rank, and cleans up after itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from paceline.schemas import RunSummary
from tests.support.stack import finish, processes_of, start, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,  # tests/support/shared.py runs a demo for every default run
    pytest.mark.xdist_group("demo"),
    pytest.mark.timeout(600),
]

WORDS = ("demo", "--json", "--profile", "ci", "--set", "training.steps=240")


def ranks_of(state: Path) -> list[psutil.Process]:
    """Return the training ranks that run now: what a node's launcher forked and what has threads
    (the keepers of its store and keys have none)."""
    forked = []
    for each in processes_of(state):
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = each.parent()
            if (
                "paceline.training.loop.rank:main" in each.cmdline()
                and each.num_threads() > 1
                and parent is not None
                and parent.cmdline() == each.cmdline()
            ):
                forked.append(each)
    return forked


def test_a_killed_demo_leaves_nothing_and_the_next_one_goes_on(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = start(*WORDS, state=state)
    wait_until((state / "nodes/node-3/agent.json").exists, 240, "the agents run")
    wait_until(lambda: ranks_of(state), 180, "the ranks run")
    first.kill()
    first.communicate(timeout=30)
    wait_until(lambda: not processes_of(state), 30, "every process gone after the demo was killed")
    marker = json.loads((state / "demo.json").read_text())
    assert not marker["finished"]

    second = start(*WORDS, state=state)
    checkpoints = state / "s3" / "paceline" / "checkpoints"
    wait_until(
        lambda: [each for each in checkpoints.rglob("commit.json") if ranks_of(state)],
        180,
        "a checkpoint was committed while ranks run",
    )
    victim = ranks_of(state)[-1]
    os.kill(victim.pid, signal.SIGKILL)
    ended = finish(second, 300)
    assert ended.code == 0, ended.err
    summary = RunSummary.model_validate(ended.answer)
    assert summary.run_id == marker["run_id"]
    done = {each.stage: each.already_done for each in summary.stages}
    assert done["snapshot"]
    assert done["base"]
    assert done["relay"]
    assert summary.training.restarts >= 1
    assert any("gang restarted" in note for note in summary.notes), summary.notes
    assert summary.gate.passed
    assert not processes_of(state)


def test_the_demo_reads_a_persons_own_text_and_stops_at_ctrl_c(tmp_path: Path) -> None:
    state, texts = tmp_path / "state", tmp_path / "texts"
    texts.mkdir()
    for index in range(90):
        lines = (f"line {number} of letter {index}: the quick brown fox\n" for number in range(40))
        (texts / f"letter-{index}.txt").write_text("".join(lines))
    demo = start(
        "demo", "--profile", "ci", "--keep", "--set", "training.steps=20",
        "--set", "model.base_steps=2", "--data", str(texts), state=state,
    )  # fmt: skip
    assert demo.stdout is not None
    shown = ""
    while "The fleet page asks for" not in shown:
        line = demo.stdout.readline()
        assert line, (shown, demo.stderr.read() if demo.stderr else "")
        shown += line
    assert re.search(r"xz\s", shown)
    assert "champion" in shown
    assert "the policy excepts ngram, gzip, xz" in shown
    demo.send_signal(signal.SIGINT)
    ended = finish(demo, 60)
    assert ended.code == 0, ended.err
    assert not processes_of(state)


def test_the_demo_beats_every_simple_baseline(tmp_path: Path) -> None:
    ended = finish(start("demo", "--json", state=tmp_path / "state"), 500)
    assert ended.code == 0, ended.err
    summary = RunSummary.model_validate(ended.answer)
    assert summary.gate.passed
    names = {each.name for each in summary.gate.checks if "excepts it" not in each.wanted}
    assert {f"better than {name}" for name in ("base", "ngram", "gzip", "xz")} <= names
    assert not [each for each in ended.answer["notes"] if "except_baselines" in each]
    assert all(each.high < 0 for each in summary.evaluation.difference_to.values())
