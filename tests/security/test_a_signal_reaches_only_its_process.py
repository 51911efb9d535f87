"""A pid read from a file is no identity: a signal goes to the process that holds the lock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import cluster as fleet
from paceline.cluster import LOCK_FILE, subreaper
from paceline.relay.store.inspection import _unpublish_corrupt
from paceline.system import process_holding
from tests.cluster.conftest import small_profile

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def started(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[str]]:
    process = started("-c", "import time; time.sleep(60)")
    yield process
    end(process)


def holding(path: Path) -> subprocess.Popen[str]:
    process = started("-c", HOLD, str(path))
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def rotten_copy(node_dir: Path, pid: int) -> Path:
    copy = node_dir / "store" / "models" / "m" / "v1"
    copy.mkdir(parents=True)
    (node_dir / "store" / ".lock").touch()
    (node_dir / "agent.json").write_text(json.dumps({"pid": pid}))
    return copy


def test_a_stale_pid_in_agent_json_ends_no_other_process(
    tmp_path: Path, bystander: subprocess.Popen[str]
) -> None:
    copy = rotten_copy(tmp_path, bystander.pid)
    _unpublish_corrupt(tmp_path, "m", copy)
    assert not copy.exists()
    with pytest.raises(subprocess.TimeoutExpired):
        bystander.wait(0.3)


def test_the_agent_that_holds_the_store_ends(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    agent = holding(tmp_path / "store" / ".lock")
    try:
        _unpublish_corrupt(tmp_path, "m", rotten_copy(tmp_path, agent.pid))
        assert agent.wait(10) == -signal.SIGTERM
    finally:
        end(agent)


@pytest.mark.parametrize("pid", ["0", "-1", str(2**40), '"x"'])
def test_a_pid_that_is_none_ends_nothing(
    tmp_path: Path, pid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:  # 0 is this process's group, -1 every process
        raise AssertionError(f"os.kill{arguments}")

    monkeypatch.setattr(os, "kill", refuse)
    copy = rotten_copy(tmp_path, 0)
    (tmp_path / "agent.json").write_text(f'{{"pid": {pid}}}')
    _unpublish_corrupt(tmp_path, "m", copy)
    assert not copy.exists()


def test_down_ends_no_process_that_a_stale_lock_names(
    tmp_path: Path, bystander: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds the lock and has not written its pid yet: the old one is still there.

    The real supervisor is left alone, too: it ends for its own pid, later in the test.
    """
    fleet.start(small_profile(), tmp_path, detach=True, only=())
    lock = tmp_path / LOCK_FILE
    own = lock.read_text()
    lock.write_text(f"{bystander.pid}\n")
    monkeypatch.setattr("paceline.cluster.installation._wait_unlocked", lambda *_: True)
    fleet.stop(tmp_path)
    monkeypatch.undo()
    with pytest.raises(subprocess.TimeoutExpired):
        bystander.wait(0.3)
    lock.write_text(own)
    assert fleet.stop(tmp_path).was_running


def test_a_signal_to_a_process_that_ended_reaches_no_other(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    process = holding(lock)
    with process_holding(lock, process.pid) as found:
        assert found is not None
        end(process)  # reaped: its pid is free from here on
        assert not found.send(signal.SIGTERM)
    with process_holding(lock, process.pid) as gone:
        assert gone is None


def test_a_guard_kills_only_what_is_still_below_it(bystander: subprocess.Popen[str]) -> None:
    """The pid of a descendant is another process's by the time that the signal is sent."""
    stranger = os.getppid()
    subreaper._kill_below([stranger])
    os.kill(stranger, 0)  # it runs
    subreaper._kill_below([bystander.pid])
    assert bystander.wait(10) == -signal.SIGKILL
