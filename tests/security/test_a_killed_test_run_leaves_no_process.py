"""A test run that is killed leaves no process and no mount."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.stack import processes_of, wait_until

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.support import reaper

def pytest_configure():
    reaper.start()
"""
SLOW = """
import os, time
from pathlib import Path

from paceline import cluster as fleet
from tests.cluster.conftest import small_profile
from tests.cluster.test_supervisor import service
from tests.support.reaper import mount_small_disk

def test_slow():
    state = Path({state!r})
    state.mkdir()
    fleet.start(small_profile(), state, detach=True, only=(),
                extra_services=[service(state, "deaf", "--deaf"), service(state, "fine")])
    if (child := os.fork()) == 0:  # it holds every descriptor of this process, and runs no program
        os.setsid()
        time.sleep(600)
    (disk := Path({disk!r})).mkdir()
    mount_small_disk(disk, "1m")
    Path({ready!r}).write_text(f"{{child}}")
    time.sleep(600)
"""


def test_servers_end_with_the_run(tmp_path: Path) -> None:
    state, ready = tmp_path / "state", tmp_path / "ready"
    (tmp_path / "conftest.py").write_text(CONFTEST)
    program = SLOW.format(state=str(state), ready=str(ready), disk=str(tmp_path / "disk"))
    (tmp_path / "test_slow.py").write_text(program)
    words = ["-q", "-p", "no:cacheprovider", "-n", "1", "--rootdir", str(ROOT)]
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words, "-c", str(ROOT / "pyproject.toml"), str(tmp_path)],
        cwd=ROOT,
        env={key: each for key, each in os.environ.items() if not key.startswith("PYTEST_")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(
            lambda: (ready.exists() and ready.read_text()) or run.poll() is not None,
            60,
            "the installation started",
        )
        assert run.poll() is None
        assert len(processes_of(state)) >= 6  # a supervisor, two guards, services with children
        run.send_signal(signal.SIGTERM)
        run.wait(30)
        forked = Path("/proc", ready.read_text())
        wait_until(lambda: not forked.exists(), 30, "the forked child gone")
        wait_until(lambda: not processes_of(tmp_path), 30, "every process of the run gone")
        mounts = Path("/proc/self/mounts")
        wait_until(lambda: str(tmp_path) not in mounts.read_text(), 30, "its disk unmounted")
    finally:
        run.kill()
        run.wait()
