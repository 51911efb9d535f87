"""A token of scope train starts and cancels sweeps of its team and project, and no other flow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Endpoints
from tests.security.kit import Rest
from tests.support.web import Answer, Call, serving

RUN = "run-20261120-153600-9f3a1c"
FLOW_RUN = "0192f0c1-0000-7000-8000-000000000001"
RATE = {"kind": "float", "low": 1e-5, "high": 1e-2, "log": True}
SWEEP: dict[str, Any] = {
    "name": "lr", "model_id": "m", "version": "1", "snapshot_url": "s3://paceline/data/d",
    "search": {"space": {"training.learning_rate": RATE}},
}  # fmt: skip


class Prefect:
    """A Prefect server; its one flow run is the last one that was started."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.cancels = 0

    def __call__(self, call: Call) -> Answer:
        if call.path.endswith("/create_flow_run"):
            self.started.append(json.loads(call.body))
        elif call.path.endswith("/set_state"):
            self.cancels += 1
        elif call.path.endswith("/filter"):
            return 200, b"[]"
        elif "/deployments/name/" in call.path:
            return 200, b'{"id": "abc"}'
        last = self.started[-1]
        run = {"id": FLOW_RUN, "state_type": "RUNNING"}
        return 200, json.dumps(run | {k: last[k] for k in ("tags", "parameters")}).encode()


@pytest.fixture
def prefect() -> Prefect:
    return Prefect()


@pytest.fixture
def rest(tmp_path: Path, prefect: Prefect) -> Iterator[Rest]:
    with serving(prefect) as web:
        made = Rest(tmp_path / "state", endpoints=Endpoints(prefect_api_url=f"{web.url}/api"))
        yield made
        made.close()


def token(rest: Rest, of: str | None, *scopes: str, bound: str = "team") -> str:
    body = {"name": "ann", "scopes": scopes or ["train"], bound: of}
    return str(rest.call("POST", "/tokens", rest.owner, body).json()["token"])


def start(rest: Rest, token: str, flow: str = "sweep", run_id: str = RUN, **changes: Any) -> Any:
    parameters = SWEEP | changes if flow == "sweep" else changes
    body = {"flow": flow, "run_id": run_id, "parameters": parameters}
    return rest.call("POST", "/flows", token, body)


def test_it_starts_and_cancels_a_sweep_of_its_team(rest: Rest, prefect: Prefect) -> None:
    path = f"/flows/{FLOW_RUN}"
    for number, bound in enumerate(("team", "project"), 1):
        ann, run_id = token(rest, "nlp", bound=bound), f"{RUN[:-1]}{number}"
        assert start(rest, ann, run_id=run_id).status_code == 201
        assert prefect.started[-1]["parameters"][bound] == "nlp"
        assert start(rest, ann, run_id=run_id, **{bound: "vision"}).status_code == 403
        assert len(prefect.started) == number
        assert rest.call("DELETE", path, token(rest, "vision", bound=bound)).status_code == 403
        assert rest.call("DELETE", path, ann).status_code == 200
        assert prefect.cancels == number


def test_it_starts_and_cancels_no_other_flow(rest: Rest, prefect: Prefect) -> None:
    trains, deploys = token(rest, None), token(rest, None, "deploy")
    trained = {"model_id": "m", "version": "1", "snapshot_url": "s3://paceline/d"}
    for number, (flow, given) in enumerate(
        {"lifecycle": {}, "promote-model": {"model_id": "m"}, "train-model": trained}.items()
    ):
        assert start(rest, trains, flow, **given).status_code == 403
        assert len(prefect.started) == number
        assert start(rest, deploys, flow, **given).status_code == 201
        assert rest.call("DELETE", f"/flows/{FLOW_RUN}", trains).status_code == 403
        assert rest.call("DELETE", f"/flows/{FLOW_RUN}", deploys).status_code == 200


def test_a_deploy_token_of_a_team_trains_for_it_and_cancels_other_flows(
    rest: Rest, prefect: Prefect
) -> None:
    both = token(rest, "nlp", "train", "deploy")
    assert start(rest, both, "lifecycle", team="vision").status_code == 403
    assert start(rest, both, "lifecycle").status_code == 201
    assert prefect.started[0]["parameters"]["team"] == "nlp"
    for bound, other in (("team", "vision"), ("project", "ocr")):
        others = token(rest, other, "train", "deploy", bound=bound)
        assert rest.call("DELETE", f"/flows/{FLOW_RUN}", others).status_code == 403
    assert rest.call("DELETE", f"/flows/{FLOW_RUN}", both).status_code == 200


BAD_SWEEPS: list[tuple[dict[str, Any], str]] = [
    ({"name": "../lr"}, "name"),
    ({"search": {"space": {}}}, "space"),
    ({"search": {"space": {"training.lerning_rate": RATE}}}, "lerning_rate"),
    ({"search": {"space": {"security.code_sources": RATE}}}, "security.code_sources"),
    ({"search": {"space": {"training.learning_rate": RATE}, "trials": 0}}, "trials"),
    ({"search": 3}, "search"),
    ({"settings": {"gate.max_parameters": 9}}, "gate.max_parameters"),
    ({"snapshot_url": "/etc"}, "/etc"),
    ({"resources": {"ranks": "all"}}, "ranks"),
    ({"storage": "s3://x"}, "storage"),
    ({"team": "a team"}, "team"),
    ({"code_ref": "task:make"}, "task"),
    ({"budget": -1}, "budget"),
    ({"budget": 20}, "prices"),
]


def test_a_bad_sweep_is_refused_before_it_starts(rest: Rest, prefect: Prefect) -> None:
    trains = token(rest, None)
    for changes, named in BAD_SWEEPS:
        answer = start(rest, trains, **changes)
        assert answer.status_code in (400, 422), (changes, answer.text)
        assert named in answer.text
        assert not prefect.started
