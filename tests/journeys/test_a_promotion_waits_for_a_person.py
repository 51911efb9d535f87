"""A promotion waits for a person with a token of their own, as a suspended flow run in Prefect.

An embedded installation, and three people with a home each, who type what
docs/how-to/decide-what-may-be-promoted.md shows; beside the command line only REST of coordinator,
Prefect and MLflow.
"""

from __future__ import annotations

import base64
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.guide import commands_under
from tests.support.stack import (
    PACELINE,
    await_registered,
    environment,
    installation,
    paceline,
    processes_of,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.xdist_group("another home"),
    pytest.mark.timeout(1800),
]

PAGE = "how-to/decide-what-may-be-promoted.md"
SETTINGS = ("cluster.link_mbit=50", "training.steps=40", 'gate.approval="four-eyes"')
FIRST, SECOND = "run-20261123-100000-aaaaaa", "run-20261123-110000-bbbbbb"


@dataclass(frozen=True)
class Person:
    """Somebody with a home and a token, at the installation in ``state``."""

    home: Path
    state: Path

    def types(self, line: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Type a line of the page."""
        words = line.split("  #", maxsplit=1)[0].strip()
        assert words.startswith("paceline ")
        command = " ".join([*PACELINE, words.removeprefix("paceline ")])
        made = {**environment(), "HOME": str(self.home), "XDG_CONFIG_HOME": str(self.home), **env}
        return subprocess.run(
            command, shell=True, cwd=self.home, env=made,
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    @property
    def runtime(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state / "runtime.json").read_bytes())
        return found

    def rest(self, method: str, path: str, body: Any = None, token: str = "") -> tuple[int, Any]:
        """Call a server by REST: ``coordinator:/…``, ``prefect:/…`` or ``mlflow:/…``."""
        name, _, path = path.partition(":")
        urls, secrets = self.runtime["endpoints"], self.runtime["secrets"]
        key = {"coordinator": "coordinator_url", "prefect": "prefect_api_url"}.get(
            name, "mlflow_url"
        )
        basic = secrets.get(f"{name}_auth", "").encode()
        how = f"Bearer {token}" if token else f"Basic {base64.b64encode(basic).decode()}"
        call = urllib.request.Request(
            urls[key] + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": how, "Content-Type": "application/json"},
        )
        for pause_s in (0.5, 2, 5, 10, None):
            try:
                with urllib.request.urlopen(call, timeout=30) as answer:
                    return answer.status, json.loads(answer.read() or b"null")
            except urllib.error.HTTPError as error:
                if error.code != 503 or pause_s is None:
                    return error.code, json.loads(error.read() or b"null")
                time.sleep(pause_s)  # Prefect's answer while SQLite is locked; its clients retry
        raise AssertionError("every turn returns or continues")

    def waiting(self, run_id: str) -> dict[str, Any]:
        """Return Prefect's newest flow run that waits, or waited, for this run's approval."""
        asked = {
            "flow_runs": {"tags": {"all_": [run_id, "approve-promotion"]}},
            "sort": "EXPECTED_START_TIME_DESC",
        }
        found: dict[str, Any] = self.rest("POST", "prefect:/flow_runs/filter", asked)[1][0]
        return found

    def form(self, run_id: str, part: str) -> Any:
        """Return the "schema" or "description" of the form that the waiting flow run shows."""
        found = self.waiting(run_id)
        key = json.loads(self.keyset(run_id))[part]
        return self.rest("GET", f"prefect:/flow_runs/{found['id']}/input/{key}")[1]

    def keyset(self, run_id: str) -> str:
        """Return the names of the form's parts, as JSON; null where the flow run does not wait."""
        details = self.waiting(run_id)["state"]["state_details"]
        return json.dumps(details["run_input_keyset"])

    def champion(self, model: str) -> dict[str, str] | None:
        """Return the tags of the champion in MLflow."""
        path = f"mlflow:/api/2.0/mlflow/registered-models/alias?name={model}&alias=champion"
        status, answer = self.rest("GET", path)
        if status != 200:
            return None
        return {each["key"]: each["value"] for each in answer["model_version"]["tags"]}


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    state = tmp_path_factory.mktemp("approval") / "state"
    with installation(state, *SETTINGS) as runtime:
        await_registered(runtime)
        yield Person(tmp_path_factory.mktemp("operator"), state)


def logged_in(operator: Person, name: str, line: str) -> tuple[Person, str]:
    """Return a person with the token that ``line`` made, and the token."""
    made = operator.types(line, PACELINE_STATE=str(operator.state))
    assert made.returncode == 0, made.stderr
    person = Person(operator.home / name, operator.state)
    person.home.mkdir()
    url = operator.runtime["endpoints"]["coordinator_url"]
    done = person.types(f"paceline login {url}", PACELINE_TOKEN=made.stdout.strip())
    assert done.returncode == 0, done.stderr
    return person, made.stdout.strip()


def test_a_promotion_waits_is_rejected_and_the_next_is_approved(operator: Person) -> None:
    for_ann, for_bob = commands_under(PAGE, "Have a person approve")
    ann, anns_token = logged_in(operator, "ann", for_ann)
    bob, _ = logged_in(operator, "bob", for_bob)
    both = for_ann.replace("--scope deploy", "--scope deploy --scope approve")
    cyd, cyds_token = logged_in(operator, "cyd", both.replace("ann", "cyd"))

    # ── ann submits: it goes as far as the gate, and waits
    (submit,) = commands_under(PAGE, "Submit", RUN=FIRST)
    done = ann.types(f"{submit} --json")
    assert done.returncode == 5, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "AwaitingApproval"
    assert f"paceline approve {FIRST}" in error["message"]
    show, _ = commands_under(PAGE, "Approve", RUN=FIRST, EVIDENCE="")
    shown = json.loads(bob.types(f"{show} --json").stdout)
    assert shown["status"] == "waiting"
    model, evidence = shown["request"]["model_id"], shown["request"]["evidence_digest"]
    wait_until(lambda: ann.waiting(FIRST)["state_name"] == "Suspended", 60, "it waits in Prefect")
    # Prefect makes the form after it has set the state, the description last.
    wait_until(lambda: evidence in ann.form(FIRST, "description"), 30, "it stands beside the form")
    assert set(ann.form(FIRST, "schema")["properties"]) >= {"decision", "reason"}
    assert operator.champion(model) is None

    # ── nobody takes bob's place
    approve = f"paceline approve {FIRST}"
    for words, code, why in (("", 77, "scope approve"), (" --approver bob", 2, "no such option")):
        refused = ann.types(approve + words)
        assert (refused.returncode, refused.stderr.count("\n")) == (code, 1), refused.stderr
        assert why in refused.stderr.lower()
    named = ann.types(f"{submit} --approver bob")
    assert named.returncode == 2, named.stderr
    assert "not a name" in named.stderr
    forged = {
        "stage": "approval", "input_digest": "a" * 64, "output": {"approver": "bob"},
        "output_digest": "b" * 64, "run_id": FIRST, "seconds": 0, "finished_at": 0,
    }  # fmt: skip
    for token in (anns_token, cyds_token, operator.runtime["secrets"]["coordinator_token"]):
        path = f"coordinator:/ledger/approval/{'a' * 64}"
        assert operator.rest("PUT", path, forged, token)[0] == 403
    assert operator.champion(model) is None

    # ── bob rejects
    (reject,) = commands_under(PAGE, "Reject", RUN=FIRST)
    done = bob.types(reject)
    assert done.returncode == 0, done.stderr
    assert "rejected" in done.stdout
    wait_until(lambda: ann.waiting(FIRST)["state_type"] == "FAILED", 120, "it ends rejected")
    assert "wrong licence" in ann.waiting(FIRST)["state"]["message"]
    done = ann.types(submit)
    assert done.returncode == 3, done.stderr
    assert "bob rejected the promotion" in done.stderr
    assert operator.champion(model) is None

    # ── another run of the same candidate; cyd submits it too, and everything starts anew meanwhile
    (submit,) = commands_under(PAGE, "Submit", RUN=SECOND)
    for person in (ann, cyd):
        assert person.types(submit).returncode == 5
    refused = cyd.types(f"paceline approve {SECOND}")
    assert refused.returncode == 77, refused.stderr
    assert "who submitted a promotion cannot approve it" in refused.stderr
    wait_until(lambda: ann.waiting(SECOND)["state_name"] == "Suspended", 60, "it waits again")
    flow_run = ann.waiting(SECOND)["id"]
    assert paceline("down", state=operator.state).code == 0
    wait_until(lambda: not processes_of(operator.state), 20, "everything is gone")
    sets = [word for each in SETTINGS for word in ("--set", each)]
    assert paceline("up", "--profile", "ci", *sets, state=operator.state).code == 0
    (ann, _), (bob, bobs_token) = (
        logged_in(operator, name, for_bob.replace("bob", name)) for name in ("ann-2", "bob-2")
    )
    assert bob.waiting(SECOND)["state_name"] == "Suspended"

    # ── the form alone, without a token, approves nothing
    answer = {"run_input": {"decision": "approve", "reason": "me"}}
    status, resumed = ann.rest("POST", f"prefect:/flow_runs/{flow_run}/resume", answer)
    assert resumed.get("status") == "ACCEPT", (status, resumed)
    wait_until(lambda: "approval-1" in bob.keyset(SECOND), 120, "it asks again")
    assert operator.champion(model) is None

    # ── bob approves what he has seen; it is promoted and rolled out
    show, approve = commands_under(PAGE, "Approve", RUN=SECOND, EVIDENCE="0" * 64)
    other = bob.types(approve)
    assert other.returncode == 1, other.stderr
    assert "other evidence" in other.stderr
    evidence = json.loads(bob.types(f"{show} --json").stdout)["request"]["evidence_digest"]
    done = bob.types(approve.replace("0" * 64, evidence))
    assert done.returncode == 0, done.stderr
    wait_until(lambda: bob.waiting(SECOND)["state_type"] == "COMPLETED", 240, "it goes on")
    champion = operator.champion(model)
    assert champion is not None
    assert champion["paceline.approver"] == "bob-2"
    assert champion["paceline.approver_token_id"] == bobs_token.split("_")[1]
    assert champion["paceline.approved_at"]
    assert champion["paceline.policy_digest"]
    text = bob.types(show).stdout
    assert "approved" in text
    assert "bob-2 (token " in text
    assert "figures hold up" in text
    assert evidence[:12] in text
    assert "bits per byte" in text, "bob has the figures without Prefect's and MLflow's pages"
    audit = operator.types("paceline audit", PACELINE_STATE=str(operator.state)).stdout
    assert "POST /approvals/" in audit
    done = operator.types(f"{submit} --json", PACELINE_STATE=str(operator.state))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["already_done"], "what is champion needs no second approval"
