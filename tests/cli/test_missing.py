"""What is named and is not there ends each command alike: exit code 1, one line that names it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Endpoints
from tests.api.conftest import Served, make_runtime
from tests.support.command import paceline

RUN, JOB, DEPLOYMENT = "run-20260101-000000-abcdef", "tj-000000000000", "0" * 8
PATH, WHOLE = "nowhere/none", "0" * 8 + "-0000-4000-8000-" + "0" * 12
SNAPSHOT = ("--snapshot", "s3://b/data/snapshots/" + "5" * 64)
SWEEP = ("sweep", "run", "s", "m", "1", *SNAPSHOT, "--trials", "1")
# without an installation; PATH is what is not there
PATHS: tuple[tuple[str, ...], ...] = (
    ("agent", "--worker-id", "w", "--ca", PATH),
    (
        "agent",
        "--state",
        "s",
        "--worker-id",
        "w",
        "--join",
        f"@{PATH}",
        "--coordinator",
        "https://h",
    ),
    ("checkpoints", "list", PATH),
    ("checkpoints", "export", PATH, "out"),
    ("demo", "--data", PATH),
    ("distribute", PATH, "--into", "x"),
    ("estimate", PATH, "--accelerator", "H100"),
    ("generate", PATH, "hello"),
    ("keys", "show", PATH),
    ("login", PATH),
    ("publish", PATH, "s3://bucket/m/1", "--model", "m", "--version", "1"),
    ("reproduce", PATH),
    ("simulate", "--size", "1GB", "--faults", PATH),
    ("train", "--text", PATH),
    ("train", "--model", PATH),
    ("train", "--snapshot", PATH),
)
# on an installation
NAMES: tuple[tuple[str, ...], ...] = (
    ("activate", DEPLOYMENT),
    ("activate", WHOLE),
    ("approve", RUN),
    ("approve", "run-2026"),
    ("cancel", DEPLOYMENT),
    ("cancel", WHOLE),
    ("cost", RUN),
    ("deployment", "rollback", DEPLOYMENT),
    ("evaluate", "m", "--base", "1", "--trained", PATH, *SNAPSHOT),
    ("evaluate", "m", "--base", "1", "--trained", "job-00", *SNAPSHOT),
    ("evaluate", "m", "--base", "1", "--trained", "last", *SNAPSHOT),
    ("jobs", "cancel", JOB),
    ("jobs", "logs", JOB),
    ("jobs", "pause", "tj-00"),
    ("jobs", "resume", JOB),
    ("jobs", "review", JOB),
    ("jobs", "show", JOB),
    ("lifecycle", "--data", PATH),
    ("promote", "m", "--report", PATH),
    ("promote", "m", "--report", "last"),
    ("promote", "m", "--report", "tj-00"),
    ("purposes", "revoke", "0" * 16),
    ("snapshot", PATH),
    (*SWEEP, "--space", PATH),
    ("tokens", "revoke", "0" * 16),
    ("tokens", "revoke", "--worker-id", "w"),
    ("watch", WHOLE),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(make_runtime(tmp_path_factory.mktemp("missing") / "state"))
    server.runtime.state_dir.mkdir()
    server.start()
    known = Endpoints(coordinator_url=server.url, prefect_api_url="http://127.0.0.1:9/api",
                      s3_url="http://127.0.0.1:9")  # fmt: skip
    server.end()
    server.runtime = server.runtime.model_copy(update={"endpoints": known})
    server.start()
    yield server
    server.end(signal.SIGKILL)


def requires(done: Any, named: str) -> None:
    lines = [line for line in done.stderr.splitlines() if line.startswith("paceline: ")]
    assert (done.returncode, len(lines)) == (1, 1), done.stderr
    assert named in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", PATHS, ids=" ".join)
def test_a_path(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    requires(paceline(*words, **keys), PATH)


@pytest.mark.parametrize("words", NAMES, ids=" ".join)
def test_what_an_installation_does_not_have(words: tuple[str, ...], served: Served) -> None:
    named = next(each for each in reversed(words) if each not in SNAPSHOT)
    requires(paceline(*words, "--state", served.runtime.state_dir), named)
