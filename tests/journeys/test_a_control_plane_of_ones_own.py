"""Prefect and MLflow on servers of others; laptops run the lifecycle and jobs; the host is lost.

Types docs/how-to/run-the-control-plane.md, run-training-jobs.md and back-up-and-restore.md. The
tests follow each other on one fleet, whose hosts share nothing: a coordinator, a host with the
Prefect worker, nodes, a laptop.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.control_plane import (
    MLFLOW_HEALTH,
    PREFECT_HEALTH,
    SECRETS,
    ControlPlane,
    control_plane,
    start_stores,
)
from tests.journeys.guide import commands, keeping
from tests.journeys.hosts import Ended, Host, until
from tests.journeys.stores import PASSWORD
from tests.journeys.trainers import SMALL, name_of

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(1800)]

JOBS_PAGE = "how-to/run-training-jobs.md"
SWEEPS_PAGE = "how-to/sweep-hyper-parameters.md"
TINY = [
    *SMALL,
    # the shipped base has 2.3 M parameters
    *("--set", "training.steps=20", "--set", "training.batch_sequences=4"),
    *("--set", 'gate.models."acme-lm".approval="four-eyes"'),
]


@pytest.fixture(scope="module")
def fleet(
    plane_software: Path, software: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    logs = tmp_path_factory.mktemp("logs")
    with control_plane(plane_software, software, logs, *TINY) as made:
        texts = logs / "s3/models/texts"  # as any S3 tool puts them there
        texts.mkdir()
        for number in range(40):
            lines = "".join(f"line {n} of text {number} says {n * number}\n" for n in range(400))
            (texts / f"{number}.txt").write_text(lines)
        yield made


def active(fleet: ControlPlane, model: str) -> list[str]:
    """Return the version that each node serves."""
    script = 'basename "$(readlink "$1")"'
    places = [f"state/nodes/{name_of(each)}/store/models/{model}/active" for each in fleet.nodes]
    return [
        each.run("sh", "-c", script, "sh", place).out.strip()
        for each, place in zip(fleet.nodes, places, strict=True)
    ]


def flow_state(fleet: ControlPlane, host: Host, flow_run: str) -> str:
    """Return a flow run's state as Prefect's server on ``host`` has it."""
    url = f"http://127.0.0.1:4200/api/flow_runs/{flow_run}"
    user = f"paceline:{SECRETS['API_PASSWORD']}"
    return str(json.loads(host.run("curl", "-sf", "-u", user, url).ok().out)["state_type"])


def flow_runs(host: Host) -> int:
    """Return how many flow runs Prefect's server on ``host`` has."""
    url, user = "http://127.0.0.1:4200/api/flow_runs/count", f"paceline:{SECRETS['API_PASSWORD']}"
    return int(host.run("curl", "-sf", "-u", user, "-X", "POST", url).ok().out)


def asked_champion(host: Host, model: str) -> Ended:
    """Ask MLflow on ``host`` for the champion; the call fails where there is none."""
    url = "http://127.0.0.1:5000/api/2.0/mlflow/registered-models/alias"
    return host.run("curl", "-sf", "-G", url, "-d", f"name={model}", "-d", "alias=champion")


def champion(host: Host, model: str) -> str:
    """Return the champion's version as MLflow on ``host`` has it."""
    return str(json.loads(asked_champion(host, model).ok().out)["model_version"]["version"])


def one_line(done: Ended, code: int, *words: str) -> None:
    last = done.err.splitlines()[-1]
    assert done.code == code, done
    assert last.startswith("paceline: ") and all(each in last for each in words), done.err


@dataclass(frozen=True)
class Lived:
    """A lifecycle that a laptop ran: its model, and what it showed meanwhile."""

    model_id: str
    version: str
    shown: str


@pytest.fixture(scope="module")
def lived(fleet: ControlPlane) -> Lived:
    """Type the page's lifecycle on the laptop, once."""
    return run_lifecycle(fleet)


def run_lifecycle(fleet: ControlPlane) -> Lived:
    done = fleet.on_laptop(fleet.typed["lifecycle"]).ok()
    answer = json.loads(fleet.laptop.run("cat", "lifecycle.json").ok().out)
    return Lived(answer["model"]["model_id"], answer["model"]["version"], done.err)


@dataclass(frozen=True)
class Researcher:
    """Someone of team nlp at the laptop, with a login of their own and the words that they type."""

    fleet: ControlPlane
    words: dict[str, str]
    blocks: dict[str, str]

    def types(self, line: str, **words: str) -> Ended:
        return self.fleet.on_laptop(line, **{**self.words, **words})

    def job(self, job_id: str) -> Any:
        return json.loads(self.types(f"paceline jobs show {job_id} --json").ok().out)["job"]

    def submits(self, options: str) -> str:
        """Submit the page's job with ``options``; return its id."""
        line = self.blocks["submit"].replace("--follow", f"{options} --json")
        return str(json.loads(self.types(line).ok().out)["job"]["job_id"])

    def sees(self, job_id: str, state: str) -> Any:
        until(lambda: self.job(job_id)["state"] == state, f"{job_id} is {state}", 120)
        return self.job(job_id)


@pytest.fixture(scope="module")
def ann(fleet: ControlPlane, lived: Lived) -> Researcher:
    blocks = commands(JOBS_PAGE)
    login = {"XDG_CONFIG_HOME": "/home/user/ann"}
    fleet.log_in(token=blocks["token"], **login)
    (snapshot,) = (fleet.logs / "s3/models/data/snapshots").iterdir()
    url = f"s3://models/data/snapshots/{snapshot.name}"
    return Researcher(
        fleet, {**login, "MODEL": lived.model_id, "VERSION": "1", "SNAPSHOT": url}, blocks
    )


OLDER_SCHEMA = """
set -a; . "$ETC/mlflow.env"; set +a
export MLFLOW_BACKEND_STORE_URI="${MLFLOW_BACKEND_STORE_URI/\\/mlflow\\?//older?}"
"""
MAKE_OLDER = """
python - <<'END_PYTHON'
import os
import alembic.command, sqlalchemy
from alembic.script import ScriptDirectory
from mlflow.store.db.utils import _get_alembic_config
from mlflow.store.tracking.dbmodels.initial_models import Base
url = os.environ["MLFLOW_BACKEND_STORE_URI"]
Base.metadata.create_all(sqlalchemy.create_engine(url))
config = _get_alembic_config(url)
before = ScriptDirectory.from_config(config).get_revision("head").down_revision
alembic.command.upgrade(config, before)
END_PYTHON
"""


def test_a_laptop_runs_the_whole_lifecycle_in_one_call(fleet: ControlPlane, lived: Lived) -> None:
    for stage in ("snapshot", "base", "train", "evaluate", "publish", "promote"):
        assert f"stage {stage} done" in lived.shown
    assert active(fleet, lived.model_id) == [lived.version] * len(fleet.nodes)
    flow_run = lived.shown.split("/flow-run/")[1].split()[0]
    for host in (fleet.control, fleet.flows):  # made at one replica, run from the other
        assert flow_state(fleet, host, flow_run) == "COMPLETED"
        assert champion(host, lived.model_id) == "1"
        page = host.run("curl", "-sfL", "http://127.0.0.1:4200/").ok().out
        assert "<title>Prefect" in page, "the software is read-only there"
        heard = host.run("ss", "-Hltn").ok().out
        assert "127.0.0.1:4200" in heard and "127.0.0.1:5000" in heard
        assert not [each for each in heard.split() if each.endswith((":4200", ":5000"))
                    and not each.startswith("127.0.0.1:")]  # fmt: skip
        shown = host.run("sh", "-c", "cat /proc/[0-9]*/cmdline", root=True).out
        assert not [each for each in SECRETS.values() if each in shown]
        assert host.run("grep", "-rlE", "|".join(SECRETS.values()), ".paceline").code == 1
    assert list((fleet.logs / "s3/models/mlflow").rglob("*evidence*")), "artefacts lie in S3"


def test_a_laptop_trains_judges_and_promotes_what_another_person_approves(
    fleet: ControlPlane, ann: Researcher
) -> None:
    """The model is a copy of the lifecycle's base, under a name whose policy wants an approval."""
    page = commands("how-to/use-from-a-laptop.md")
    words = {"SNAPSHOT": ann.words["SNAPSHOT"]}
    model = ann.words["MODEL"]
    fleet.on_laptop(
        f"paceline distribute s3://models/models/{model}/1 --into here --workers 1"
    ).ok()
    held = f"here/worker-0/store/models/{model}/1"
    publish = f"paceline publish {held} --model acme-lm --version 1"
    fleet.on_laptop(f"{publish} && paceline distribute acme-lm 1").ok()
    assert active(fleet, "acme-lm") == ["1", "1"]

    done = fleet.on_laptop(keeping(page["judge"]), **words)
    one_line(done, 5, "the promotion waits for an approval", "paceline approve")
    run = re.findall(r"paceline approve (run-[\w-]+)", done.err.splitlines()[-1])[0]
    home = {"XDG_CONFIG_HOME": "/home/user/bob"}
    one_line(fleet.on_laptop(page["approve"], RUN=run), 77, "scope approve")
    made = "paceline tokens create --name bob --scope approve"
    fleet.log_in(token=made, **home)
    shown = fleet.on_laptop(page["approve"], RUN=run, **home).ok().out
    assert f"acme-lm 2, {run}: approved" in shown and "bob (token " in shown, shown
    until(lambda: asked_champion(fleet.flows, "acme-lm").code == 0, "it is promoted", 240)
    fleet.on_laptop(page["roll-out"]).ok()
    assert active(fleet, "acme-lm") == ["2", "2"]

    shown = fleet.on_laptop(page["cost"]).ok().out
    assert "acme-lm" in shown and "succeeded" in shown, shown
    trained = json.loads(fleet.laptop.run("cat", "trained.json").ok().out)
    kept = fleet.on_laptop(f"paceline checkpoints list s3://models/checkpoints/{trained['job_id']}")
    assert "committed" in kept.ok().out, kept
    found = json.loads(fleet.on_laptop("paceline cost --by model --json").ok().out)
    assert {"acme-lm", model} <= {each["name"] for each in found["groups"]}, found


def test_a_researcher_of_a_team_runs_jobs_from_a_laptop(ann: Researcher) -> None:
    done = ann.types(ann.blocks["submit"]).ok()
    (found,) = json.loads(ann.types("paceline jobs list --team nlp --json").ok().out)["jobs"]
    job = ann.job(found["job_id"])
    assert (job["state"], job["spec"]["team"], job["report"]["step"]) == ("succeeded", "nlp", 20)
    assert "succeeded" in done.out + done.err
    assert job["report"]["report_digest"], "it was judged on the gang's hosts"
    assert 0 < job["report"]["metrics"]["evaluation_bits_per_byte"] < 16
    shown = ann.types(ann.blocks["look"], JOB=job["job_id"]).ok().out
    wanted = ("first", "team        nlp", "step 20", "bits per byte; next: paceline promote")
    assert not [each for each in wanted if each not in shown], shown

    long = ann.submits("--steps 100000 --set training.checkpoints.every_steps=20")
    gang = ann.sees(long, "running")["report"]["workers"]
    assert {each["host"] for each in gang} == {name_of(each) for each in ann.fleet.nodes}
    ann.types(ann.blocks["pause"], JOB=long).ok()
    paused = ann.sees(long, "paused")["report"]["step"]
    assert paused > 0
    ann.types(ann.blocks["resume"], JOB=long).ok()
    until(lambda: ann.job(long)["report"]["step"] > paused, "it goes on", 120)
    notes = ann.job(long)["report"]["notes"]
    assert any(f"resumed at step {paused}" in each for each in notes), notes
    ann.types(ann.blocks["cancel"], JOB=long).ok()
    ann.sees(long, "cancelled")
    program = commands(JOBS_PAGE, "python")["program"]
    said = ann.fleet.laptop.run("python", "-c", program, env={**ann.fleet.env, **ann.words})
    assert said.ok().out.startswith("succeeded 14 "), said


def test_a_researcher_sweeps_settings_from_a_laptop(ann: Researcher) -> None:
    """The laptop has the base alone; the installation's Prefect worker runs the sweep."""
    laptop, space = ann.fleet.laptop, commands(SWEEPS_PAGE, "toml")["space"]
    laptop.write("space.toml", space)
    blocks = commands(SWEEPS_PAGE)
    small = "--trials 3 --parallel 2 --steps 8 --ranks 1 --team nlp"
    line = blocks["detach"].replace("--trials 16 --parallel 4", small)
    assert small in line
    wrong = space.replace("training.learning_rate", "training.learning_rat")
    laptop.write("wrong.toml", wrong)
    one_line(ann.types(line.replace("space.toml", "wrong.toml")), 2, "training.learning_rat")
    began = ann.types(line).ok()

    def trials() -> list[Any]:
        done = ann.types("paceline sweep report lr --json")
        return json.loads(done.out)["trials"] if done.code == 0 else []

    ended = ("complete", "pruned")
    until(lambda: [each["state"] in ended for each in trials()] == [True] * 3, "3 trials", 240)
    shown = ann.types(blocks["report"]).ok().out
    sys.stdout.write(f"{began.out}{began.err}\n{shown}\n")
    best = min(each["value"] for each in trials() if each["state"] == "complete")
    assert f"{best:.6g}" in shown and "paceline jobs submit" in shown
    jobs = json.loads(ann.types("paceline jobs list --team nlp --json").ok().out)["jobs"]
    swept = {each["job_id"] for each in trials()}
    assert swept <= {each["job_id"] for each in jobs}, "jobs of the team's queue"
    assert laptop.run("cat", "lr.html").ok().out.startswith("<!")


def test_a_job_that_can_never_run_or_is_not_theirs_is_one_line(ann: Researcher) -> None:
    submit = ann.blocks["submit"].rstrip()
    one_line(ann.types(submit.replace("--ranks 2", "--ranks 64")), 2, "64", "2")
    one_line(ann.types(f"{submit} --team vision"), 77, "another team")
    one_line(ann.types(submit, SNAPSHOT="s3://models/data/snapshots/none"), 1, "no such data")
    elsewhere = submit.replace("--evaluate ", "--evaluate-on s3://models/data/snapshots/none ")
    one_line(ann.types(elsewhere), 1, "no such data")
    one_line(ann.types("paceline distribute $MODEL 1"), 77, "scope read, train", "scope deploy")
    theirs = json.loads(ann.fleet.on_laptop("paceline jobs list --json").ok().out)["jobs"]
    others = [each["job_id"] for each in theirs if each["spec"]["team"] != "nlp"]
    assert others, "the lifecycle's training is one"
    one_line(ann.types(f"paceline jobs cancel {others[0]}"), 77, "another team")
    found = ann.fleet.laptop.run("find", "ann", "-type", "f", "-printf", "%m %f\n").ok().out
    assert sorted(found.splitlines()) == ["600 last.json", "600 login.json"]


def test_each_bad_setting_is_one_line_before_a_server_starts(fleet: ControlPlane) -> None:
    def check(change: str, *words: str, code: int = 1) -> None:
        text = fleet.typed["check"].replace("paceline doctor", f"{change}\npaceline doctor")
        done = fleet.control.run("bash", "-euc", text, env=fleet.env)
        bad = [each for each in done.out.splitlines() if each.startswith("FAILED")]
        assert (done.code, len(bad)) == (code, code), done
        assert all(word in "".join(bad) for word in words), bad

    check("true", code=0)
    wrong = "password authentication failed for user"
    check("export PREFECT_SERVER_DATABASE_PASSWORD=wrong", "prefect-database", f'{wrong} "prefect"')
    check("export PGPASSWORD=wrong", "mlflow-database", f'{wrong} "mlflow"')
    away = fleet.env["S3"].replace(":9000", ":9999")
    check(f"export MLFLOW_S3_ENDPOINT_URL={away}", "mlflow-artifacts", away)
    check(
        "export PREFECT_REDIS_MESSAGING_URL=rediss://:wrong@$STORES:6379/0?ssl_ca_certs=$PKI/ca.pem",
        "prefect-redis",
        "invalid username-password",
    )

    fleet.stores.run(
        *("psql", fleet.env["POSTGRES_ADMIN"], "-qc", "CREATE DATABASE older OWNER mlflow"),
        env={"PGPASSWORD": PASSWORD},
    ).ok()
    fleet.control.run("bash", "-euc", OLDER_SCHEMA + MAKE_OLDER, env=fleet.env).ok()
    check(OLDER_SCHEMA, "mlflow-schema", "one of an older MLflow")
    upgrade = OLDER_SCHEMA + fleet.typed["upgrade"].splitlines()[-1]
    fleet.control.run("bash", "-euc", upgrade, env=fleet.env).ok()
    check(OLDER_SCHEMA, code=0)


def test_a_server_that_is_away_ends_the_lifecycle_before_its_work(fleet: ControlPlane) -> None:
    for name, host, health in (
        ("prefect", fleet.control, PREFECT_HEALTH),
        ("mlflow", fleet.flows, MLFLOW_HEALTH),
    ):
        host.run("pkill", "-f", f"{name} server").ok()
        until(lambda at=health, on=host: on.run("curl", "-s", at).code == 7, f"{name} ends")
        done = fleet.on_laptop(fleet.typed["lifecycle"])
        one_line(done, 75, {"prefect": "Prefect's server", "mlflow": "MLflow"}[name], health[:21])
        assert "stage " not in done.err
        fleet.stays(name, host)
        until(lambda at=health, on=host: on.run("curl", "-sf", at).code == 0, f"{name} is back", 60)


def test_the_control_host_is_lost_and_comes_back_from_its_backup(
    fleet: ControlPlane, lived: Lived
) -> None:
    """With the stores' host; nothing is typed on a node, and the laptop keeps its login."""
    (fleet.logs / "s3/backups").mkdir()
    fleet.type("backup")
    before = fleet.on_laptop("paceline status --json").ok().out
    tokens = [each.run("sha256sum", "token").ok().out for each in fleet.nodes]

    fleet = replace(
        fleet, control=fleet.bed.replace(fleet.control), stores=fleet.bed.replace(fleet.stores)
    )
    assert fleet.control.run("ls", "-A").out == "", "its disk is empty"
    assert active(fleet, lived.model_id) == [lived.version] * 2, "nodes serve meanwhile"
    for host in (fleet.control, fleet.stores):
        fleet.authority.issue(host)
    start_stores(fleet.stores, fleet.logs)
    fleet.type("databases", fleet.stores, PGPASSWORD=PASSWORD)
    for block in ("fetch", "restore-databases", "restore-state"):
        fleet.type(block)
    fleet.start_servers(fleet.control)
    fleet.start_coordinator()
    until(
        lambda: fleet.on_laptop("paceline workers --json").out.count('"alive":true') == 2,
        "every agent is back",
        60,
    )
    shown = fleet.on_laptop(fleet.typed["compare"]).ok().out
    known = {each["deployment_id"] for each in json.loads(before)["deployments"]}
    after = json.loads(fleet.on_laptop("paceline status --json").ok().out)["deployments"]
    assert len(known) >= 2 and {each["deployment_id"] for each in after} == known, shown
    for host in (fleet.control, fleet.flows):
        assert champion(host, lived.model_id) == "1"
        assert flow_runs(host) >= 7, "the lifecycle and its sub-flows"

    again = run_lifecycle(fleet)  # its ledger and evidence came back
    assert (again.model_id, again.version) == (lived.model_id, lived.version), again.shown
    line = "mkdir acme; head -c 4000000 /dev/urandom > acme/w; paceline publish acme --model acme"
    fleet.on_laptop(f"{line} --version 1; paceline distribute acme 1").ok()
    assert active(fleet, "acme") == ["1", "1"]
    assert [each.run("sha256sum", "token").ok().out for each in fleet.nodes] == tokens
