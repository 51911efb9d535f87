"""`paceline login` and what follows: the commands of a client that has a URL and a token alone."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import stat
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import paceline as python
from paceline.client import AccessClient
from paceline.config import Endpoints, Runtime, save_runtime, with_overrides
from paceline.errors import CorruptData, InvalidInput, NotFound, PacelineError
from paceline.manifest import fetch_manifest
from paceline.relay.transport import issue_server, make_authority
from paceline.schemas import (
    FLOW_RESULT,
    CreateDeployment,
    CreateToken,
    Event,
    Labels,
    RegisterWorker,
    StageRecord,
    digest_of,
    flow_result_key,
    schema_text,
)
from paceline.storage import ObjectStore
from tests.api.conftest import FakeAgent, Served, make_model, make_runtime
from tests.registry.test_finding import RESULT
from tests.support.command import Ended, paceline
from tests.support.rclone import RcloneS3
from tests.support.web import Call, Web, serving

RUN = "0192f0c1-0000-7000-8000-000000000001"
SUB_RUN = "0192f0c1-0000-7000-8000-000000000002"
NODES = {"node-1": ("r1", "a100"), "node-2": ("r1", "h100"), "node-3": ("r2", "h100")}


class Prefect:
    """A Prefect server with one deployment a flow; its only flow run ends as the test says."""

    def __init__(self) -> None:
        self.state, self.message, self.tags = "COMPLETED", "", ["paceline", "train-model"]
        self.started: list[dict[str, object]] = []

    def __call__(self, call: Call) -> tuple[int, bytes]:
        answer: object
        if call.path.endswith("/create_flow_run"):
            self.started.append(json.loads(call.body))
            answer = self.run() | {"state_type": "SCHEDULED"}
        elif call.path == "/api/logs/filter":
            asked = json.loads(call.body)
            lines = ["Beginning flow run", "Finished"]
            lines[1:1] = ["Of the sub-flow"] * (SUB_RUN in asked["logs"]["flow_run_id"]["any_"])
            answer = [{"message": each} for each in lines[asked["offset"] :]]
        elif call.path == "/api/flow_runs/filter":
            parents = json.loads(call.body)["flow_runs"]["parent_flow_run_id"]["any_"]
            answer = [{"id": SUB_RUN}] if parents == [RUN] else []
        elif call.path == f"/api/flow_runs/{RUN}":
            answer = self.run()
        elif call.path.startswith("/api/deployments/name/"):
            answer = {"id": "abc"}
        else:
            return 404, b"{}"
        return 200, json.dumps(answer).encode()

    def run(self) -> dict[str, object]:
        state = {"message": self.message}
        return {"id": RUN, "state_type": self.state, "state": state, "tags": self.tags}


@pytest.fixture(scope="module")
def prefect() -> Prefect:
    return Prefect()


@pytest.fixture(scope="module")
def prefect_server(prefect: Prefect) -> Iterator[Web]:
    with serving(prefect) as web:
        yield web


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: Web, s3: RcloneS3
) -> Iterator[Served]:
    runtime = make_runtime(tmp_path_factory.mktemp("login") / "state", beat_s=20)
    profile = with_overrides(runtime.profile, {"objects.endpoint_url": s3.endpoint_url})
    runtime = runtime.model_copy(update={"profile": profile})
    known = Endpoints(prefect_api_url=f"{prefect_server.url}/api", prefect_ui_url="http://prefect")
    server = Served(runtime.model_copy(update={"endpoints": known}))
    server.runtime.state_dir.mkdir()
    server.start()
    known = known.model_copy(update={"coordinator_url": server.url})
    save_runtime(server.runtime.model_copy(update={"endpoints": known}))
    yield server
    code, output = server.end(signal.SIGKILL)
    assert code == -signal.SIGKILL, output.decode()  # it ended before: it says why


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's machine: a home, and no installation."""
    monkeypatch.chdir(tmp_path)
    for name in ("PACELINE_STATE", "PACELINE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture(scope="module")
def admin(served: Served) -> AccessClient:
    return AccessClient(served.url, served.runtime.secrets.coordinator_token)


def token(admin: AccessClient, *scopes: str, ttl: float | None = None) -> str:
    call = CreateToken.model_validate({"name": "ann", "scopes": scopes, "ttl_seconds": ttl})
    return admin.create_token(call).token


@pytest.fixture
def person(served: Served, admin: AccessClient) -> Served:
    """The coordinator, with the laptop logged in to it."""
    done = paceline("login", served.url, PACELINE_TOKEN=token(admin, "deploy"))
    assert done.returncode == 0, done.stderr
    return served


@pytest.fixture(scope="module")
def fleet(served: Served, admin: AccessClient) -> list[FakeAgent]:
    agents = AccessClient(served.url, served.runtime.secrets.agents_token)
    for number, (name, (rack, pool)) in enumerate(NODES.items()):
        agents.register(
            RegisterWorker(
                worker_id=name,
                hostname="h",
                rack=rack,
                labels=Labels(others={"pool": pool}),
                available_storage=10**9,
                address=f"127.0.0.1:{20000 + number}",
                findings=("disk: slow",) if name == "node-1" else (),
            )
        )
    return [FakeAgent(agents, name) for name in NODES]


def one_line(done: Ended, code: int, *words: str) -> None:
    assert done.returncode == code, done
    assert done.stderr.count("\n") == 1, done.stderr
    for each in words:
        assert each in done.stderr, done.stderr


def said(done: Ended, schema: str) -> dict:
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, json.loads(schema_text(schema)))
    return answer


# --- the login itself -----------------------------------------------------------------------------


def test_a_login_is_kept_for_its_owner_alone_and_logout_deletes_it(
    served: Served, admin: AccessClient, laptop: Path
) -> None:
    secret = token(admin, "deploy", ttl=3600)
    answer = said(paceline("login", served.url, "--json", PACELINE_TOKEN=secret), "login")
    kept = Path(answer["path"])
    assert kept == laptop / "config/paceline/login.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert (answer["token_name"], answer["scopes"]) == ("ann", ["deploy", "read"])
    assert secret not in json.dumps(answer)
    assert paceline("status").returncode == 0
    assert paceline("logout").returncode == 0
    assert not kept.exists()
    one_line(paceline("tokens", "list"), 75, "there is no login", "paceline login URL")


def test_the_token_comes_from_standard_input_too(
    served: Served, admin: AccessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.write(writer, f"{token(admin, 'read')}\n".encode())
    os.close(writer)
    with os.fdopen(reader) as given:
        monkeypatch.setattr("sys.stdin", given)
        assert paceline("login", served.url).returncode == 0


def test_a_named_state_directory_comes_before_the_login(person: Served, laptop: Path) -> None:
    one_line(paceline("tokens", "list", "--state", laptop / "none"), 75, "nothing runs here")
    one_line(paceline("tokens", "list", PACELINE_STATE=str(laptop / "none")), 75, "nothing runs")
    mine = paceline("tokens", "list", "--state", person.runtime.state_dir)
    assert "ann" in mine.stdout
    one_line(paceline("tokens", "list"), 77, "scope deploy", "wanted scope admin")


def test_what_init_writes_is_enough_to_log_in(
    served: Served, admin: AccessClient, laptop: Path
) -> None:
    done = paceline("init", "--state", "new", "--coordinator", served.url, "--json")
    answer = said(done, "init")
    client = Path(answer["client"])
    assert json.loads(client.read_text())["coordinators"] == [served.url]
    secret = json.loads((laptop / "new/runtime.json").read_text())["secrets"]["coordinator_token"]
    assert secret not in client.read_text()
    assert answer["prefect_worker"] == ""
    assert paceline("login", client, PACELINE_TOKEN=token(admin, "read")).returncode == 0


def test_init_names_what_a_prefect_worker_needs(laptop: Path) -> None:
    words = ("--coordinator", "http://127.0.0.1:7400", "--prefect", "http://prefect:4200/api")
    answer = said(paceline("init", "--state", "new", *words, "--json"), "init")
    lines = Path(answer["prefect_worker"]).read_text().splitlines()
    assert f"PACELINE_STATE={laptop / 'new'}" in lines
    assert "PREFECT_API_URL=http://prefect:4200/api" in lines


# --- bad input ------------------------------------------------------------------------------------


def test_a_token_that_opens_nothing_is_refused_with_the_reason(
    served: Served, admin: AccessClient, laptop: Path
) -> None:
    ended = token(admin, "deploy", ttl=0.01)
    time.sleep(0.05)
    revoked = token(admin, "deploy")
    admin.revoke_token(revoked.split("_")[1])
    for given, words in {
        ended: ("the token has expired",),
        revoked: ("the token was revoked",),
        "pl_0000000000000000_none": ("the token is not accepted",),
        token(admin, "worker"): ("scope worker", "wanted scope read"),
        "two words": ("not a token",),
    }.items():
        done = paceline("login", served.url, PACELINE_TOKEN=given)
        one_line(done, 2 if given == "two words" else 77, *words)
        assert given not in done.stderr
    assert not (laptop / "config/paceline/login.json").exists()


def test_a_url_that_is_no_coordinator_is_named(laptop: Path) -> None:
    given = {"PACELINE_TOKEN": "pl_x"}
    one_line(paceline("login", "coordinator:7400", **given), 1, "neither a URL nor a file")
    one_line(paceline("login", "ftp://host", **given), 2, "not a server's URL")
    one_line(paceline("login", "http://192.0.2.1:7400", **given), 2, "in the clear")
    one_line(
        paceline("login", "http://127.0.0.1:9", **given), 75, "the coordinator does not answer"
    )
    with serving(lambda _: (200, b"<html>a page</html>")) as web:
        done = paceline("login", web.url, **given)
        one_line(done, 75, "cannot be read", "Check that this URL is a Paceline coordinator")


def test_a_certificate_that_is_not_the_authoritys_is_named(laptop: Path) -> None:
    ours, theirs = (make_authority(laptop / each) for each in ("ours", "theirs"))
    given = {"PACELINE_TOKEN": "pl_x"}

    def refused(hosts: list[str], *options: str | Path) -> Ended:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*issue_server(ours, hosts, laptop / "server", valid_days=1))
        with serving(lambda _: (200, b"{}"), context) as web:
            return paceline("login", web.url, *options, **given)

    here = ["127.0.0.1"]
    words = ("certificate is not trusted here", "--authority SHA256")
    one_line(refused(here), 77, *words)
    one_line(refused(here, "--ca", theirs.cert), 77, *words)
    one_line(refused(["other.example"], "--ca", ours.cert), 77, "mismatch", "rest_hosts")
    with serving(lambda _: (404, b"{}")) as web:
        secure = web.url.replace("http:", "https:")
        one_line(paceline("login", secure, **given), 75, "does not answer", "SSL")
        one_line(paceline("login", web.url, **given), 1, "answers no logins", "older version")


def test_a_file_of_a_newer_version_is_refused(person: Served, laptop: Path) -> None:
    kept = laptop / "config/paceline/login.json"
    newer = json.loads(kept.read_text()) | {"version": 2, "more": True}
    kept.write_text(json.dumps(newer))
    one_line(paceline("workers"), 2, "newer version of Paceline", "version 2", str(kept))
    kept.write_text("{")
    one_line(paceline("workers"), 2, "cannot be read as a login", "paceline login URL")


def test_commands_that_need_the_state_directory_say_so(person: Served) -> None:
    run = "run-20260101-000000-abcdef"
    refused = paceline("reproduce", run)
    one_line(refused, 77, "needs the installation's state directory", "--state DIR")
    one_line(paceline("where", run), 1, run)
    assert "/fleet" in paceline("where").stdout


# --- workers by label -----------------------------------------------------------------------------


def test_workers_are_listed_with_their_labels_and_chosen_by_them(
    person: Served, fleet: list[FakeAgent]
) -> None:
    def chosen(*to: str) -> list[str]:
        words = [word for each in to for word in ("--to", each)]
        answer = said(paceline("workers", *words, "--json"), "workers")
        return [each["worker_id"] for each in answer["workers"]]

    assert chosen() == list(NODES)
    assert chosen("rack=r1") == ["node-1", "node-2"]
    assert chosen("rack=r1,pool=h100") == ["node-2"]
    assert chosen("pool=a100", "node-3") == ["node-1", "node-3"]
    assert chosen("node-3,node-1") == ["node-1", "node-3"]
    assert "pool=a100" in paceline("workers").stdout
    one_line(paceline("workers", "--to", "rak=r1"), 2, "unknown label", "one of host, pool, rack")
    one_line(paceline("workers", "--to", "rack=r9"), 2, "got rack=r9", "wanted rack=r1, r2")
    one_line(paceline("workers", "--to", "node-9"), 1, "no such worker", "node-1, node-2, node-3")
    one_line(paceline("workers", "--to", "node-1,rack=r1"), 2, "names and labels in one selector")


def test_a_plan_is_for_the_registered_workers(person: Served, fleet: list[FakeAgent]) -> None:
    table = said(paceline("plan", "--size", "500GB", "--json"), "plan")
    assert (table["workers"], table["racks"]) == (3, 2)
    table = said(paceline("plan", "--size", "500GB", "--to", "pool=a100", "--json"), "plan")
    assert (table["workers"], table["racks"]) == (1, 1)
    described = ("plan", "--size", "1GB", "--workers", "2", "--to", "rack=r1")
    one_line(paceline(*described), 2, "--to and --workers")
    paceline("logout")
    one_line(paceline("plan", "--size", "1GB"), 2, "--workers N --link SPEED", "paceline login URL")
    one_line(paceline("plan", "--size", "1GB", "--workers", "2"), 2, "--link")


def test_a_deployment_goes_to_the_workers_that_a_selector_names(
    person: Served, fleet: list[FakeAgent], tmp_path: Path
) -> None:
    state = person.runtime.state_dir
    url, manifest = make_model(state, f"v{time.monotonic_ns()}")
    client = person.client()
    made = {"model_id": "m", "version": manifest.version, "source_url": url}
    call = CreateDeployment.model_validate(made | {"selector": "pool=h100"})
    chosen = client.create(call, "one").deployment_id
    assert client.deployment(chosen).deployment.target_workers == ("node-2", "node-3")
    assert client.create(call, "one").deployment_id == chosen
    every = client.create(CreateDeployment.model_validate(made | {"selector": ""}), "two")
    targets = client.deployment(every.deployment_id).deployment.target_workers
    assert targets == tuple(NODES)
    with pytest.raises(InvalidInput, match="unknown label"):
        client.create(CreateDeployment.model_validate(made | {"selector": "pol=x"}), "three")


def test_distribute_refuses_another_manifest_than_the_one_named(
    person: Served, fleet: list[FakeAgent]
) -> None:
    url, manifest = make_model(person.runtime.state_dir, f"v{time.monotonic_ns()}")
    with pytest.raises(CorruptData, match=f"another model: got {manifest.digest}, wanted 0000"):
        python.Client().distribute(url, to="node-3", digest="0" * 64)
    made = {"source_url": url, "selector": "", "manifest_digest": manifest.digest}
    call = CreateDeployment.model_validate(made)
    assert person.client().create(call, "named").status == "init"
    assert "manifest_digest" not in call.model_copy(update={"manifest_digest": None}).model_dump()


# --- flows ----------------------------------------------------------------------------------------

TRAIN = ("training", "start", "m", "1", "--snapshot", "s3://paceline/data/x")


def test_a_flow_is_started_there_and_followed_to_its_result(
    person: Served, prefect: Prefect, admin: AccessClient
) -> None:
    prefect.state, prefect.started = "COMPLETED", []
    result = RESULT.model_dump(mode="json") | {"training_digest": "d" * 64}
    output = {"result": result, "notes": ["a rank restarted"]}
    admin.ledger_put(
        StageRecord(
            stage=FLOW_RESULT,
            input_digest=flow_result_key(RUN),
            output=output,
            output_digest=digest_of(output),
            run_id="run-20260101-000000-abcdef",
            seconds=1.0,
            finished_at=1.0,
        )
    )
    done = paceline(*TRAIN, "--json", "--run-id", "run-20260101-000000-abcdef")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["training_digest"] == "d" * 64
    assert answer["notes"] == ["a rank restarted"]
    assert "Beginning flow run" in done.stderr
    assert "Of the sub-flow" in done.stderr
    (started,) = prefect.started
    assert started["parameters"] == {
        "model_id": "m",
        "version": "1",
        "snapshot_url": "s3://paceline/data/x",
        "labels": "true",
        "run_id": "run-20260101-000000-abcdef",
        "team": "default",
    }
    end_s = time.monotonic() + 20  # rows reach the audit store in time
    while not any(row.data["on"].get("flow") == "train-model" for row in accepted(admin)):
        assert time.monotonic() < end_s, accepted(admin)
        time.sleep(0.05)


def accepted(admin: AccessClient) -> list[Event]:
    return admin.audit(names=["change.accepted"], newest_first=True, limit=20)


@pytest.mark.parametrize(
    ("state", "message", "code", "words"),
    [
        ("FAILED", "Flow run encountered an exception: GateRefused: too weak", 3, ("too weak",)),
        ("CRASHED", "the worker's host died", 1, ("CRASHED", "the worker's host died")),
        ("CANCELLED", "", 130, ("was cancelled",)),
    ],
)
def test_a_flow_that_ends_badly_ends_the_command_with_its_own_code(
    person: Served, prefect: Prefect, state: str, message: str, code: int, words: tuple[str, ...]
) -> None:
    prefect.state, prefect.message = state, message
    done = paceline(*TRAIN)
    assert done.returncode == code, done
    last = done.stderr.splitlines()[-1]
    assert all(each in last for each in words), done.stderr


def test_what_a_client_may_not_have_a_flow_read_is_refused(
    person: Served, prefect: Prefect, laptop: Path
) -> None:
    prefect.started = []
    (laptop / "texts").mkdir()
    one_line(paceline("lifecycle", "--data", "texts"), 2, "names its data by URL")
    one_line(paceline("snapshot", "texts"), 2, "names its data by URL", "wanted s3://bucket/prefix")
    other = ("training", "start", "m", "1", "--snapshot", "s3://elsewhere/x")
    one_line(paceline(*other), 77, "not a source", "s3://elsewhere/x")
    judged = (*TRAIN, "--evaluate-on", "s3://elsewhere/y")
    one_line(paceline(*judged), 77, "not a source", "s3://elsewhere/y")
    for words, said in REFUSED_SETTINGS.items():
        one_line(paceline(*TRAIN, "--set", words), 2, *said)
    assert prefect.started == []


REFUSED_SETTINGS = {
    "training.code_ref=evil:make": ("not a setting of one training", "training.code_ref"),
    "data.transform=evil:make": ("not a setting of one training", "data.transform"),
    "gate.must_beat=[]": ("not a setting of one training", "gate.must_beat"),
    "training.learning_rate=-1": ("training.learning_rate = -1", "greater than 0"),
    "training.learning=1": ("unknown key", "training.learning"),
}


def test_a_training_has_settings_of_its_own(person: Served, prefect: Prefect) -> None:
    prefect.state, prefect.started = "COMPLETED", []
    own = ("training.lora.r=8", "training.learning_rate=3e-4", "data.batching=packed")
    given_words = ("--ranks", "4", "--purpose", "speech", "--evaluate")
    done = paceline(*TRAIN, *given_words, *(word for each in own for word in ("--set", each)))
    assert done.returncode == 0, done.stderr
    given = prefect.started[0]["parameters"]
    assert isinstance(given, dict)
    assert (given["ranks"], given["purpose"]) == (4, "speech")
    wanted = {"training.lora.r": 8, "training.learning_rate": 3e-4, "data.batching": "packed"}
    assert given["settings"] == wanted
    assert given["evaluate_on"] == given["snapshot_url"] == "s3://paceline/data/x"
    done = paceline(*TRAIN, "--evaluate-on", "s3://paceline/data/y")
    assert prefect.started[1]["parameters"]["evaluate_on"] == "s3://paceline/data/y", done.stderr
    for words in ((), ("--no-evaluate",)):
        assert paceline(*TRAIN, *words).returncode == 0
    assert "evaluate_on" not in prefect.started[2]["parameters"], "as the profile has it"
    assert prefect.started[3]["parameters"]["evaluate_on"] == ""
    done = paceline(*TRAIN, "--no-evaluate", "--evaluate-on", "s3://paceline/data/y")
    assert (done.returncode, len(prefect.started)) == (2, 4), done.stderr


def test_a_flow_run_that_is_not_ours_is_not_shown(
    person: Served, prefect: Prefect, admin: AccessClient
) -> None:
    prefect.tags = ["another"]
    try:
        with pytest.raises(NotFound):
            admin.flow_run(RUN)
        with pytest.raises(NotFound):
            admin.cancel_flow(RUN)
    finally:
        prefect.tags = ["paceline", "train-model"]


# --- doctor ---------------------------------------------------------------------------------------


def checks_of(*words: str | Path) -> dict[str, dict[str, str]]:
    done = paceline("doctor", "--json", *words)
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, json.loads(schema_text("doctor")))
    return {each["name"]: each for each in answer["checks"]}


def test_a_laptop_without_a_login_is_told_what_to_do() -> None:
    found = checks_of()
    assert found["versions"]["status"] == "ok"
    assert "paceline login URL" in found["installation"]["do"]


def test_doctor_checks_what_a_client_reaches(
    person: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    found = checks_of()
    assert {found[each]["status"] for each in ("coordinator", "clock", "token")} == {"ok"}
    assert found["s3"]["status"] == "failed"
    assert found["s3"]["do"]


def test_doctor_finds_a_clock_that_is_ten_minutes_off(
    person: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    monkeypatch.setattr("paceline.cli.doctor.checks.time.time", lambda: real() + 600)
    found = checks_of()
    assert found["clock"]["status"] == "failed"
    assert re.match(r"60[01] s ahead of", found["clock"]["found"])


# --- the installation's object store, with the user's own credentials -----------------------------


@pytest.fixture
def bucket(s3: RcloneS3, laptop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A bucket of the installation's server; a model ``acme`` and credentials on the laptop."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    (laptop / "acme").mkdir()
    (laptop / "acme/w").write_bytes(os.urandom(200_000))
    store = s3.store()
    store.ensure_bucket("login-publish")
    yield store
    store.delete_prefix("s3://login-publish/acme")


PLACE = ("acme", "s3://login-publish/acme/1")
NOWHERE = "http://127.0.0.1:9"


def test_a_program_of_a_laptop_uses_the_installations_object_store(
    person: Served, bucket: ObjectStore
) -> None:
    named: Any = {"model_id": "acme", "version": "1"}
    with pytest.raises(PacelineError, match=re.escape(NOWHERE)):
        python.publish(*PLACE, settings={"objects.endpoint_url": NOWHERE}, **named)
    python.publish(*PLACE, **named, settings={"security.fips": True})
    assert fetch_manifest(PLACE[1], bucket).piece_hash == "sha256"
    done = python.distribute(PLACE[1], "here", workers=1, link="400Mbit")
    assert done.workers_complete == 1
    with pytest.raises(PacelineError, match=re.escape(NOWHERE)):
        python.distribute(PLACE[1], "h", settings={"objects.endpoint_url": NOWHERE})


def test_a_command_of_a_laptop_keeps_to_what_was_typed(
    person: Served, bucket: ObjectStore, laptop: Path
) -> None:
    publish = ("publish", *PLACE, "--model", "acme", "--version", "1")
    (laptop / "mine.toml").write_text(f'[objects]\nendpoint_url = "{NOWHERE}"\n')
    one_line(paceline(*publish, "--profile", "mine.toml"), 75, NOWHERE)
    one_line(paceline(*publish, "--set", f"objects.endpoint_url={NOWHERE}"), 75, NOWHERE)
    done = paceline(*publish, "--set", "security.fips=true")
    assert done.returncode == 0, done.stderr
    assert fetch_manifest(PLACE[1], bucket).piece_hash == "sha256"
    one_line(paceline(*publish, "--set", "security.fibs=true"), 2, "fips")
    inside = ("publish", "acme", "--model", "acme", "--version", "2")
    one_line(paceline(*inside, "--profile", "mine.toml"), 2, "the installation's bucket")
    one_line(paceline(*inside, "--set", "objects.region=eu"), 2, "the installation's bucket")


def test_doctor_checks_a_control_host(person: Served) -> None:
    found = checks_of("--state", person.runtime.state_dir)
    assert found["store-sqlite"]["status"] == "ok"
    assert found["disk"]["found"]
    assert found["prefect"]["status"] == "failed"  # the stand-in has no such route
    assert "HTTP 404" in found["prefect"]["found"]


def test_a_support_bundle_holds_no_secret(
    person: Served, admin: AccessClient, laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every secret of the installation lies where a careless bundle would take it."""
    secrets = planted(person.runtime, monkeypatch)
    issued = token(admin, "admin")
    log = person.runtime.state_dir / "logs/server.log"
    log.parent.mkdir(exist_ok=True)
    private = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----"
    lines = [*secrets, f"Bearer {issued}", private, "http://ann:opensesame@proxy/x", "a plain line"]
    shaped = (f"hf_{'a1' * 17}", f"ghp_{'b2' * 18}", f"AKIA{'C3' * 8}")
    lines += [
        f"GET https://{shaped[0]}@hub/x",
        *shaped,
        "https://host/x?X-Goog-Signature=d4e5f6a7b8",
    ]
    log.write_text("\n".join(lines))
    done = paceline("doctor", "--state", person.runtime.state_dir, "--bundle", "support.tar.gz")
    assert stat.S_IMODE((laptop / "support.tar.gz").stat().st_mode) == 0o600
    assert "support.tar.gz" in done.stdout
    with tarfile.open(laptop / "support.tar.gz") as bundle:
        texts = {each.name: bundle.extractfile(each).read().decode() for each in bundle}
    everything = "\n".join(texts.values())
    for each in (*secrets, issued, *shaped, "MIGHAgEAMBMGByqGSM49", "opensesame", "d4e5f6a7"):
        assert each not in everything, each
    assert "a plain line" in texts["paceline-support/logs/logs/server.log"]
    assert json.loads(texts["paceline-support/settings.json"])["profile"]["storage"]


def planted(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return every secret value of ``runtime``, and of the process's environment."""
    monkeypatch.setenv("PACELINE_REDIS_PASSWORD", "redis-password-of-ours")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secretkeyfromtheenvironment")
    kept = {"prefect_auth": "admin:prefect-pass", "s3_secret_key": "s3-secret-of-the-server"}
    (runtime.state_dir / "secrets.json").write_text(json.dumps(kept))
    secret = runtime.secrets
    return [
        secret.coordinator_token,
        secret.agents_token,
        secret.peers_token,
        secret.records_key,
        "prefect-pass",
        "s3-secret-of-the-server",
        "redis-password-of-ours",
        "secretkeyfromtheenvironment",
    ]
