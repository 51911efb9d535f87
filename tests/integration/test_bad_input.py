"""What a person gets wrong, or finds broken: one clear line, an exit code, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from paceline.config import Runtime, save_runtime
from tests.support.stack import Ended, paceline, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(300),
]


def elsewhere(stack: Runtime, tmp_path: Path, **changes: object) -> Path:
    """Return a state directory that names the same servers but for ``changes``."""
    state = tmp_path / "state"
    state.mkdir()
    runtime = stack.model_copy(update={"state_dir": state} | changes)
    save_runtime(runtime)
    return state


def assert_one_line(ended: Ended, code: str, *needles: str) -> None:
    assert ended.code != 0
    assert ended.answer["error"]["code"] == code
    for needle in needles:
        assert needle in ended.problem
    assert ended.answer["error"]["do"]
    assert "Traceback" not in ended.err


def test_a_model_that_was_never_published_is_named(stack: Runtime) -> None:
    ended = paceline("distribute", "nobody", "7", "--json", state=stack.state_dir)
    assert_one_line(ended, "SourceMissing", "nobody/7")


@pytest.mark.parametrize(
    ("model", "code", "needle"),
    [
        ("./not-here", "InvalidInput", "MODEL_ID/VERSION as published"),
        pytest.param("hf://any/m", "AccessDenied", "hf://any/m", marks=pytest.mark.nightly),
    ],
)
def test_a_base_that_is_not_there_is_named(
    stack: Runtime, model: str, code: str, needle: str
) -> None:
    ended = paceline("lifecycle", "--model", model, "--json", state=stack.state_dir)
    assert_one_line(ended, code, needle)


def test_s3_that_does_not_answer_is_named(stack: Runtime, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, not listening: refused
        endpoints = stack.endpoints.model_copy(update={"s3_url": url})
        state = elsewhere(stack, tmp_path, endpoints=endpoints)
        ended = paceline("distribute", "any", "1", "--json", state=state)
    assert_one_line(ended, "ServiceUnavailable", url)
    assert ended.code == 75


@pytest.mark.nightly
def test_an_unknown_target_is_named(stack: Runtime, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "weights.bin").write_text("x")
    words = ["--model", "lonely", "--version", "1"]
    assert paceline("publish", str(directory), *words, state=stack.state_dir).code == 0
    ended = paceline(
        "distribute", "lonely", "1", "--to", "node-99", "--json", state=stack.state_dir
    )
    assert ended.code != 0
    assert "node-99" in ended.problem


def test_a_server_that_dies_is_started_again(stack: Runtime) -> None:
    def s3() -> dict[str, object]:
        services = paceline("status", "--json", state=stack.state_dir).answer["services"]
        return next(each for each in services if each["name"] == "s3")

    before = s3()
    os.kill(int(str(before["pid"])), signal.SIGKILL)
    wait_until(lambda: s3()["state"] == "ready" and s3()["pid"] != before["pid"], 30, "S3 is back")
