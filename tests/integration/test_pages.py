"""What the pages that a newcomer reads first have them type: README, the demo, and the how-to pages
of one machine, with and without an installation. The blocks are typed as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.cli import cli
from tests.journeys.guide import ROOT, commands
from tests.support.rclone import RcloneS3
from tests.support.stack import environment, processes_of, wait_until

pytestmark = [
    pytest.mark.xdist_group("pages"),  # one installation
    pytest.mark.timeout(900),
]
nightly = pytest.mark.nightly

README, DEMO = "../README.md", "tutorials/the-demo.md"
SMALL = "--profile ci --set cluster.nodes=2 --set training.steps=20"
BRIEF = "--steps 2 --set model.parameters=20000 --set data.max_bytes=200000"


@dataclass
class Machine:
    """A user's machine: a directory to type in, a home, the environment of its shell."""

    directory: Path
    env: dict[str, str] = field(default_factory=dict)

    def shell(self, text: str, code: int = 0) -> str:
        """Type ``text``; return standard output and error. It must end with ``code``."""
        done = subprocess.run(
            ["bash", "-ec", text], cwd=self.directory, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{text}\n{done.stdout}"
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME"), str(self.directory / "home"))
        return {**environment(), "PATH": path, **homes, **self.env}


def lines_of(page: str, name: str, words: Mapping[str, str] = {}, more: str = "") -> list[str]:
    """Return the commands of a page's block without their comments.

    ``words`` replace what stands for something of the user's; ``more`` is added to each training.
    """
    text = re.sub(r"\s+#.*$", "", commands(page)[name], flags=re.MULTILINE)
    for old, new in words.items():
        text, count = re.subn(rf"(?<!\w){re.escape(old)}(?!\w)", lambda _, new=new: new, text)
        assert count, f"{page} {name}: no {old}"
    lines = text.replace("\\\n", "").splitlines()
    return [
        f"{each} {more}" if re.match("paceline train(ing start)? ", each) else each
        for each in lines
    ]


def block(page: str, name: str, words: Mapping[str, str] = {}, more: str = "") -> str:
    return "\n".join(lines_of(page, name, words, more))


@pytest.mark.parametrize("page", [README, DEMO])
def test_what_make_runs_is_a_command(page: str, tmp_path: Path) -> None:
    """tests/integration/test_demo.py runs a demo; here is that the page's words reach it."""
    for name in {README: ["demo"], DEMO: ["run", "keep", "again"]}[page]:
        for line in lines_of(page, name):
            shown = re.sub(r"/my/\w+", str(tmp_path), line)
            _, target, *_ = words = shlex.split(shown)
            done = subprocess.run(
                ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True
            )
            run = [each for each in done.stdout.splitlines() if "/paceline demo" in each]
            assert bool(run) == (target == "demo")
            for each in run:
                _, _, *given = shlex.split(each)
                command = cli.get_command(None, "demo")  # type: ignore[arg-type]
                assert command is not None
                command.make_context("demo", given)  # raises for words that it does not take


# --- without a server ----------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "home").mkdir()
    (tmp_path / "docs").symlink_to(ROOT / "docs/explanation")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/w.safetensors").write_bytes(b"weights" * 1000)
    return Machine(tmp_path)


@pytest.fixture
def bucket(machine: Machine, s3: RcloneS3) -> Machine:
    """The machine with an S3 server of its own, as boto3 finds one."""
    s3.store().ensure_bucket("bucket")
    keys = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
    machine.env |= keys | {"AWS_ENDPOINT_URL": s3.endpoint_url}
    return machine


@nightly
def test_the_readme_forecasts_relays_and_trains_without_a_server(machine: Machine) -> None:
    shown = machine.shell(block(README, "forecast", more=BRIEF))
    for each in ("tree-of-chains", "survivors", "8 of 8 workers", "bit-identical"):
        assert each in shown
    shown = machine.shell(block("explanation/performance.md", "forecast"))
    for each in ("tree-of-chains", "survivors"):
        assert each in shown


@nightly
def test_a_model_reaches_directories_without_a_server(bucket: Machine) -> None:
    page, others = "how-to/distribute-without-a-server.md", {"./nodes": "./others"}
    here, _ = lines_of(page, "into")
    _, there = lines_of(page, "into", others)
    assert "8 of 8 workers" in bucket.shell(here)
    mine = {"./my-model": "./model", "mine/1": "m/1"}
    _, publish = lines_of("how-to/publish-a-model.md", "publish", mine)
    bucket.shell(publish)
    assert "8 of 8 workers" in bucket.shell(there)


@nightly
@pytest.mark.parametrize("name", ["train", "groups", "s3"])
def test_a_training_on_this_machine(bucket: Machine, name: str) -> None:
    words = {"DIRECTORY": "docs"} | ({} if name == "groups" else {"OUT": "out"})
    if name == "s3":
        words |= {"BUCKET": "bucket", "S3_URL": bucket.env.pop("AWS_ENDPOINT_URL")}
    shown = bucket.shell(block("how-to/train-here.md", name, words, BRIEF))
    assert "done: 2 steps" in shown
    assert name != "s3" or "s3://bucket/runs" in shown


@nightly
@pytest.mark.parametrize("line", [0, 1], ids=["local-sgd", "parameter-server"])
def test_ranks_that_do_not_wait(machine: Machine, line: int) -> None:
    text = lines_of("how-to/train-without-waiting.md", "train", {"DIR": "docs"}, BRIEF)[line]
    assert "done: 2 steps" in machine.shell(text)


# --- on an installation --------------------------------------------------------------------------


@dataclass
class Installed(Machine):
    """The machine after what the README has a user type, but for the last line."""

    began: str = ""  # what `paceline up` printed
    shown: str = ""  # of `paceline status`
    model: str = ""
    snapshot: str = ""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    directory = tmp_path_factory.mktemp("pages")
    for name in ("home", "my-model"):
        (directory / name).mkdir()
    (directory / "my-model/w.safetensors").write_bytes(b"weights" * 1000)
    (directory / ".venv").symlink_to(sys.prefix)
    made = Installed(directory)
    activate, up, *lines, down = lines_of(README, "installation")
    made.began = made.shell(f"{activate}\n{up} {SMALL}")
    try:
        shown = made.shell(lines[0])
        made.shown = made.shell("\n".join(lines[1:]))
        found = re.search(r"made: +(\S+) 2 is champion", shown)
        assert found, shown
        made.model = found[1]
        yield made
    finally:
        made.shell(down)
        wait_until(lambda: not processes_of(directory / ".paceline"), 20, "everything is gone")


@nightly
@pytest.mark.slow
def test_the_readme_brings_up_an_installation_and_a_model_to_it(installed: Installed) -> None:
    lines = installed.began.splitlines()
    assert lines[0].startswith(
        "starting S3, Prefect, MLflow, Dask with 2 nodes and the coordinator"
    )
    for each in ("S3", "prefect", "mlflow", "coordinator"):
        assert re.search(rf"^ *{each}\b.* \d+", installed.began, re.MULTILINE | re.IGNORECASE), each
    assert re.search(r"^ready in \d+\.\d s; ", installed.began, re.MULTILINE)
    assert lines[-2].startswith("next:     paceline lifecycle")
    assert re.search(rf"{installed.model} 2  complete .* active", installed.shown)
    assert re.search(r"mine 1  complete .* active", installed.shown)
    up, status, where, down = lines_of("how-to/run-an-installation.md", "run")
    assert {up, down} < set(lines_of(README, "installation"))
    shown = installed.shell(f"{status}\n{where}")
    assert "coordinator" in shown
    assert "runtime.json" in shown
    assert "pid" in installed.shell(up, 1), "a second one is refused with the owner's pid"


@nightly
@pytest.mark.slow
def test_a_directory_is_published_and_published_again(installed: Installed) -> None:
    first, elsewhere = lines_of("how-to/publish-a-model.md", "publish", {"bucket": "paceline"})
    assert "mine 1 at s3://" in installed.shell(first)
    assert "s3://paceline/models/mine/1" in installed.shell(elsewhere)


@nightly
@pytest.mark.slow
def test_a_candidate_is_trained_judged_and_promoted(installed: Installed) -> None:
    (made,) = lines_of(
        "how-to/make-a-data-snapshot.md", "snapshot", {"/my/texts": str(ROOT / "docs")}
    )
    shown = installed.shell(made)
    url = re.search(r"made: +(s3://\S+)", shown)
    assert url, shown
    words = {"MODEL": installed.model, "URL": url[1]}
    page = "how-to/evaluate-and-promote.md"
    train, evaluate, promote = lines_of(page, "promote", words)
    refused = installed.shell(f"{train}\n{evaluate}\n{promote}", 3)
    exam = re.search(r"wanted \S+ \((s3://\S+)\), which judged the champion", refused)
    assert exam, refused
    words["URL"] = exam[1]  # on which the champion was trained, too, by half as many steps
    train, evaluate, promote = lines_of(page, "promote", words)
    shown = installed.shell(f"{train} --steps 40\n{evaluate}\n{promote}")
    assert f"made:     {installed.model} 3 is champion" in shown
    words["--ranks 4"] = "--ranks 2"  # of the installation's two nodes
    shown = installed.shell(block("how-to/evaluate-and-promote.md", "ranks", words))
    assert "on 2 ranks" in shown


@nightly
@pytest.mark.slow
def test_a_deployment_is_switched_to_watched_and_left(installed: Installed) -> None:
    (installed.directory / "my-model/w.safetensors").write_bytes(b"heavier" * 1000)
    installed.shell("paceline publish ./my-model --model mine --version 2")
    shown = installed.shell("paceline distribute mine 2 --stage-only")
    found = re.search(r"next: +paceline activate (\S+)", shown)
    assert found, shown
    there, back = lines_of("how-to/switch-and-roll-back.md", "switch", {"ID": found[1]})
    assert "workers run 2" in installed.shell(there)
    assert "workers run 1" in installed.shell(back)
    shown = installed.shell(block("how-to/watch-a-deployment.md", "watch", {"ID": found[1]}))
    assert found[1] in shown
    assert "node-1" in shown
    (cancel,) = lines_of("how-to/watch-a-deployment.md", "cancel", {"ID": found[1]})
    assert "complete already" in installed.shell(cancel, 1)
    token = installed.shell("paceline tokens create --name page --scope read 2>/dev/null").strip()
    url = installed.shell("paceline where --json | grep -o 'http[^\"]*/fleet'").strip()
    installed.env |= {"TOKEN": token, "URL": url.removesuffix("/fleet")}
    (stream,) = lines_of("how-to/watch-a-deployment.md", "stream", {"ID": found[1]})
    # curl, unlike paceline, sends what is for loopback to the proxy of these tests
    stream = f"no_proxy=127.0.0.1 {stream} 2>/dev/null | head -n 5"
    assert "deployment.created" in installed.shell(stream)


@nightly
@pytest.mark.slow
def test_a_node_joins_with_a_token(installed: Installed) -> None:
    url = installed.shell("paceline where --json | grep -o 'http[^\"]*/fleet'").strip()
    page = "how-to/give-and-revoke-access.md"
    here = {
        "/var/lib/paceline": "node", "/run/token": "token",
        "https://paceline.example:8443": url.removesuffix("/fleet"),
    }  # fmt: skip
    make, join = lines_of(page, "join", here)
    token = installed.shell(f"{make} 2>/dev/null")
    (installed.directory / "token").write_text(token)
    with (installed.directory / "agent.log").open("w") as log:
        agent = subprocess.Popen(
            shlex.split(join), cwd=installed.directory, env=installed.environment,
            stdout=log, stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )  # fmt: skip
    try:
        wait_until(lambda: "node-7" in installed.shell("paceline workers"), 60, "it has joined")
    finally:
        agent.send_signal(signal.SIGINT)
        agent.wait(30)
    installed.shell("paceline tokens revoke --worker-id node-7")
    installed.shell(block(page, "join-many"))
    listed = installed.shell("paceline tokens list")
    assert "10.1.0.0/16" in listed
    assert "200" in listed
