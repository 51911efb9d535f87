"""Flows from a machine that has a login alone: Prefect's worker runs them, the command follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Runtime
from paceline.storage import ObjectStore
from tests.project.test_python_page import PROGRAMS
from tests.support.command import require_schema
from tests.support.stack import PACELINE, Ended, await_registered, environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(600),
]


class Laptop:
    """A home without an installation; the S3 credentials are its user's own."""

    def __init__(self, home: Path, stack: Runtime) -> None:
        self.home = home
        self.env = {
            **environment(),
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / "config"),
            "AWS_ACCESS_KEY_ID": stack.secrets.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": stack.secrets.s3_secret_key,
        }

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PACELINE, *words], cwd=self.home, env=self.env | env,
            capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip

    def answer(self, *words: str) -> dict[str, Any]:
        done = self(*words, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture(scope="module")
def laptop(stack: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Laptop:
    await_registered(stack)
    made = Laptop(tmp_path_factory.mktemp("home"), stack)
    token = made(
        *("tokens", "create", "--name", "ann", "--scope", "deploy"),
        *("--state", str(stack.state_dir)),
    ).stdout.strip()
    done = made("login", stack.endpoints.coordinator_url, PACELINE_TOKEN=token)
    assert done.returncode == 0, done.stderr
    return made


def test_every_flow_of_a_person_runs_over_the_login(
    laptop: Laptop, stack: Runtime, lifecycle: Ended
) -> None:
    model = lifecycle.answer["model"]["model_id"]
    snapshot = f"{stack.data_url}/snapshots/{lifecycle.answer['data']['digest']}"
    assert laptop.answer("verify", model, "1")["verified"] == stack.profile.cluster.nodes
    trained = laptop.answer("training", "start", model, "1", "--snapshot", snapshot)
    assert laptop.answer("lifecycle")["already_done"]
    own = ("--steps", "4", "--set", "training.learning_rate=0.002")
    other = laptop.answer("training", "start", model, "1", "--snapshot", snapshot, *own)
    assert other["steps"] == 4
    assert other["job_id"] != trained["job_id"]
    said = laptop("generate", f"{stack.models_url}/{model}/1", "def ", "--max-tokens", "5")
    assert said.returncode == 0, said.stderr
    assert len(said.stdout) > 4


def test_a_program_trains_evaluates_and_promotes_over_the_login(
    laptop: Laptop, stack: Runtime, lifecycle: Ended
) -> None:
    store = ObjectStore.from_runtime(stack)
    source = laptop.home / "texts"
    source.mkdir()
    for number in range(60):
        text = "".join(f"def f_{number}_{n}(x):\n    return x + {n}\n" for n in range(60))
        (source / f"{number}.py").write_text(text)
        store.upload_file(
            source / f"{number}.py", f"s3://{stack.profile.storage.bucket}/texts/{number}.py"
        )
    model = lifecycle.answer["model"]["model_id"]
    # docs/how-to/use-from-python.md
    program = PROGRAMS["flows"].replace('"acme-7b"', f'"{model}"')
    program = program.replace("s3://bucket/texts", f"s3://{stack.profile.storage.bucket}/texts")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=laptop.home, env=laptop.env,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page, *log = done.stdout.splitlines()
    assert "/runs/flow-run/" in page
    assert any("train" in line for line in log)
    assert len(log) > 4  # the flow's lines, and what the gate said or nothing


def test_a_directory_of_the_caller_is_not_read_on_the_flows_machine(laptop: Laptop) -> None:
    (laptop.home / "base").mkdir()
    done = laptop("lifecycle", "--model", "base")
    assert done.returncode == 2, done.stderr
    assert "a client names a model by its id or URL" in done.stderr
    assert "Publish the directory first" in done.stderr


def test_a_refusal_by_the_gate_has_its_own_exit_code(laptop: Laptop, lifecycle: Ended) -> None:
    model = lifecycle.answer["model"]["model_id"]
    done = laptop("promote", model, "--report", "0" * 64)
    assert done.returncode == 3, done.stderr
    assert "paceline: " in done.stderr.splitlines()[-1]


def test_a_model_is_published_and_distributed_from_there(laptop: Laptop, stack: Runtime) -> None:
    directory = laptop.home / "mine"
    directory.mkdir()
    (directory / "w").write_bytes(os.urandom(300_000))
    published = laptop.answer("publish", "mine", "--model", "mine", "--version", "1")
    assert published["url"] == f"{stack.models_url}/mine/1"
    brought = laptop.answer("distribute", "mine", "1", "--to", "node-0,node-1")
    assert sorted(brought["targets"]) == ["node-0", "node-1"]  # in the order they registered
    for name in brought["targets"]:
        copy = stack.node_dir(name) / "store/models/mine/active/w"
        assert copy.read_bytes() == (directory / "w").read_bytes()
    rack = laptop(
        "distribute", "mine", "1", "--to", "rack=rack-1", "--json", "--state", str(stack.state_dir)
    )
    assert sorted(json.loads(rack.stdout)["targets"]) == ["node-2", "node-3"], rack.stderr
    assert json.loads(rack.stdout).keys() == brought.keys(), "one record for both"
    require_schema("distribute", rack.stdout)
    checked = laptop("verify", "mine", "1", "--state", str(stack.state_dir))
    assert "made:     " in checked.stdout, checked.stderr
    assert "/runs/flow-run/" in checked.stdout, "the run's own page"
    for there in ((), ("--state", str(stack.state_dir))):  # as a deployment, and as a flow
        other = laptop("distribute", "mine", "1", "--digest", "0" * 64, *there)
        assert (other.returncode, "another model" in other.stderr) == (1, True), other.stderr
