"""`paceline demo`: killed while ranks train it leaves no process; the next one goes on from there,
absorbs the death of a training rank, and ends at Ctrl-C with all that it started."""

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


def test_a_killed_demo_of_ones_own_text_goes_on_and_stops_at_ctrl_c(tmp_path: Path) -> None:
    state, texts = tmp_path / "state", tmp_path / "texts"
    texts.mkdir()
    for index in range(90):
        lines = (f"line {number} of letter {index}: the quick brown fox\n" for number in range(40))
        (texts / f"letter-{index}.txt").write_text("".join(lines))
    words = (
        *("demo", "--profile", "ci", "--keep", "--data", str(texts)),
        *("--set", "training.steps=240"),
    )
    first = start(*words, state=state)
    wait_until((state / "nodes/node-3/agent.json").exists, 240, "the agents run")
    wait_until(lambda: ranks_of(state), 180, "the ranks run")
    first.kill()
    first.communicate(timeout=30)
    wait_until(lambda: not processes_of(state), 30, "every process gone after the demo was killed")
    marker = json.loads((state / "demo.json").read_text())
    assert not marker["finished"]

    second = start(*words, state=state)
    checkpoints = state / "s3" / "paceline" / "checkpoints"
    wait_until(
        lambda: [each for each in checkpoints.rglob("commit.json") if ranks_of(state)],
        180,
        "a checkpoint was committed while ranks run",
    )
    victim = ranks_of(state)[-1]
    os.kill(victim.pid, signal.SIGKILL)
    assert second.stdout is not None
    shown = ""
    while "--data DIRECTORY" not in shown:
        line = second.stdout.readline()
        assert line, (shown, second.stderr.read() if second.stderr else "")
        shown += line
    second.send_signal(signal.SIGINT)
    ended = finish(second, 60)
    assert ended.code == 0, ended.err
    assert not processes_of(state)
    read = " ".join(shown.split())
    assert marker["run_id"] in read
    for stage in ("snapshot", "base", "relay"):
        assert re.search(rf"\b{stage} +[0-9.]+ +already done", read), shown
    assert "The fleet page asks for" in shown
    assert "lifecycle --model DIRECTORY --data DIRECTORY --state" in read
    assert "gang restarted" in read
    assert "champion" in read
    end = shown.split("  total ")[1].split("Next, ")[0].splitlines()
    assert re.fullmatch(r" *\d+ s", end[0])
    pages = ["prefect", "mlflow", "fleet", "state", "model", "Prefect", "MLflow", "The"]
    assert [line.split()[0] for line in end[1:]] == pages, end
    assert re.search(r"xz\s", read)
    assert "the policy excepts ngram, gzip, xz" in read


def test_the_demo_beats_every_simple_baseline(tmp_path: Path) -> None:
    ended = finish(start("demo", "--json", state=tmp_path / "state"), 500)
    assert ended.code == 0, ended.err
    summary = RunSummary.model_validate(ended.answer)
    assert summary.gate.passed
    names = {each.name for each in summary.gate.checks if "excepts it" not in each.wanted}
    assert {f"better than {name}" for name in ("base", "ngram", "gzip", "xz")} <= names
    assert not [each for each in ended.answer["notes"] if "except_baselines" in each]
    assert all(each.high < 0 for each in summary.evaluation.difference_to.values())
