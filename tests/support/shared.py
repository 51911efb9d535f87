"""One installation and one lifecycle for all slow tests: real servers, four nodes, 8 Mbit/s each.

`paceline demo` creates both, and Ctrl-C ends it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Runtime, load_runtime
from paceline.data import documents, load_snapshot
from paceline.storage import ObjectStore
from tests.support.reaper import mount_small_disk
from tests.support.stack import Ended, finish, paceline, processes_of, start

SMALL_DISK = "24m"  # node-3's, where a mount is allowed: enough for the models of the demo only
SETTINGS = ("cluster.link_mbit=8", "training.steps=40", "control.flow_starter=prefect")


@pytest.fixture(scope="session")
def small_disk() -> bool:
    """Whether node-3 has a disk of its own with a real size limit (needs root)."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


@pytest.fixture(scope="session")
def demonstrated(
    tmp_path_factory: pytest.TempPathFactory, small_disk: bool
) -> Iterator[tuple[Path, Ended]]:
    """Yield the state directory of a demo that stays up, and what it printed so far; Ctrl-C ends
    it with all that it started."""
    state: Path = tmp_path_factory.mktemp("stack") / "state"
    disk, log = state / "nodes" / "node-3" / "store", state.with_name("demo.log")
    if small_disk:
        disk.mkdir(parents=True)
        small_disk = mount_small_disk(disk, SMALL_DISK)
    words = [word for each in SETTINGS for word in ("--set", each)]
    words += ["--keep", "--json", "--profile", "ci"]
    try:
        for _ in range(2):  # a busy machine may lose a node: the demo says to run it again
            with log.open("w") as err:
                demo = start("demo", *words, state=state, stderr=err)
            assert demo.stdout is not None
            if (summary := demo.stdout.readline()) or "Run it again" not in log.read_text():
                break
        assert summary, log.read_text()
        try:
            yield state, Ended(0, summary, log.read_text(), json.loads(summary))
        finally:
            demo.send_signal(signal.SIGINT)
            ended = finish(demo, 60)
        assert ended.code == 0, log.read_text()
        assert not processes_of(state)
    finally:
        if small_disk:
            subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="session")
def lifecycle(demonstrated: tuple[Path, Ended]) -> Ended:
    """The demo's lifecycle, complete."""
    return demonstrated[1]


@pytest.fixture(scope="session")
def stack(demonstrated: tuple[Path, Ended]) -> Runtime:
    """The running installation that integration tests share."""
    return load_runtime(demonstrated[0])


@dataclass(frozen=True)
class Rejected:
    """A candidate that learned shuffled labels from copies of the held-out files."""

    model: str
    snapshot: dict[str, Any]  # that it learned from
    judged_on: str  # URL of the lifecycle's snapshot
    held_out: tuple[str, ...]  # paths of the files that it saw
    job: dict[str, Any]
    report: dict[str, Any]


@pytest.fixture(scope="session")
def rejected(
    stack: Runtime, lifecycle: Ended, tmp_path_factory: pytest.TempPathFactory
) -> Rejected:
    """Train and judge a candidate that no gate may let pass."""
    model = lifecycle.answer["model"]["model_id"]
    real = f"{stack.data_url}/snapshots/{lifecycle.answer['data']['digest']}"
    bucket, directory = ObjectStore.from_runtime(stack), tmp_path_factory.mktemp("rejected")
    read = documents(load_snapshot(real, bucket), "held-out", bucket, directory / "cache")
    held_out = {each.path: each.text for each in read}
    texts = directory / "texts"
    texts.mkdir()
    for number, text in enumerate(held_out.values()):
        for copy in range(12):
            mark = f"# {copy}\n".encode() if copy else b""
            (texts / f"copy-{number}-{copy}.txt").write_bytes(mark + text)

    def run(*words: str) -> dict[str, Any]:
        ended = paceline(*words, "--json", state=stack.state_dir, timeout_s=400)
        assert ended.code == 0, ended.err
        return ended.answer

    built = run("snapshot", str(texts))
    job = run("training", "start", model, "1", "--snapshot", built["url"], "--labels", "shuffled")
    path = directory / "job.json"
    path.write_text(json.dumps(job))
    report = run("evaluate", model, "--base", "1", "--trained", str(path), "--snapshot", real)
    return Rejected(model, built, real, tuple(held_out), job, report)
