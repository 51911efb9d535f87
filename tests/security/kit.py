"""What the tests of security share: an app with its calls, and one valid body of each route."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.api import create_app
from paceline.relay.transport import new_request
from tests.api.conftest import BASE, TestClient, make_runtime

DIGEST = "0" * 64
PEM = new_request("w")[1].decode()
JOB = {
    "model_id": "m",
    "version": "v",
    "dataSnapshot": "s3://paceline/x",
    "resources": {"ranks": 2, "within": "rack"},
    "checkpointPolicy": {"every_steps": 5},
    "parameters": {"training.steps": 5},
}
RECORDS: dict[str, dict[str, Any]] = {
    "/deployments": {
        "model_id": "m",
        "version": "v",
        "source_url": "/none",
        "target_workers": ["w"],
    },
    "/deployments/{deployment_id}/budget": {"extra_bytes": 1},
    "/workers/register": {"worker_id": "w", "hostname": "h", "rack": "r", "available_storage": 1},
    "/workers/heartbeat": {
        "worker_id": "w",
        "status": "idle",
        "deployments": [
            {
                "deployment_id": "d",
                "epoch": 1,
                "status": "receiving",
                "pieces_held": 1,
                "bytes_held": 1,
                "edges": [{"source": "s", "reader": "w"}],
            }
        ],
    },
    "/workers/signed-reads": {"worker_id": "w", "method": "GET", "url": "s3://paceline/m/w"},
    "/workers/join": {"worker_id": "w", "csr": PEM},
    "/workers/renew": {"worker_id": "w", "csr": PEM},
    "/flows": {
        "flow": "build-snapshot",
        "run_id": "run-20260101-000000-abcdef",
        "parameters": {"data": "s3://paceline/x", "reading": {"features": ["s3://paceline/y"]}},
    },
    "/v1/training-jobs": JOB,
    "/v1/training-jobs/adopt": {"spec": JOB, "run_id": "run-20260101-000000-abcdef"},
    "/v1/training-jobs/{job_id}/resume": {"budget": 1.0},
    "/v1/training-jobs/{job_id}/review": {"accepted": True},
    "/v1/training-jobs/{job_id}/report": {
        "at": 1.0,
        "checkpoints": [{"step": 1, "object_ref": "s3://paceline/c", "created_at": 1.0}],
        "workers": [{"rank": 0, "host": "w", "state": "running", "last_heartbeat": 1.0}],
    },
    "/v1/data-purposes": {"purpose": "p", "data": ["s3://paceline/x"], "teams": ["t"]},
    "/approvals/{run_id}": {"evidence_digest": DIGEST, "approved": True},
    "/tokens": {"name": "n", "scopes": ["read"]},
    "/tokens/join": {"worker_id": "w"},
    "/ledger/{stage}/{input_digest}": {
        "stage": "s",
        "input_digest": DIGEST,
        "output": {},
        "output_digest": DIGEST,
        "run_id": "r",
        "seconds": 1.0,
        "finished_at": 1.0,
    },
}


class Rest:
    """An app of one state directory; ``restart`` begins again from what the store kept."""

    def __init__(self, state: Path, **changes: object) -> None:
        self.runtime = make_runtime(state).model_copy(update=changes)
        self.owner = self.runtime.secrets.coordinator_token
        self.client = self._begin()

    def _begin(self) -> TestClient:
        client = TestClient(create_app(self.runtime), BASE, raise_server_exceptions=False)
        return client.__enter__()

    def restart(self) -> None:
        self.close()
        self.client = self._begin()

    def close(self) -> None:
        self.client.__exit__(None, None, None)

    def call(self, method: str, path: str, token: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        return self.client.request(method, path, headers=headers, json=body)

    def person(self, name: str, *scopes: str, **bound: str) -> str:
        body = {"name": name, "scopes": scopes, **bound}
        return str(self.call("POST", "/tokens", self.owner, body).json()["token"])

    def join_token(self, worker_id: str, **more: object) -> str:
        answer = self.call("POST", "/tokens/join", self.owner, {"worker_id": worker_id, **more})
        return str(answer.json()["token"])

    def ask(self, door: str, worker_id: str, token: str, key: bytes | None = None) -> Any:
        """Join or renew; the answer has the private key of the request as ``key``."""
        made, csr = new_request(worker_id, key)
        body = {"worker_id": worker_id, "csr": csr.decode()}
        answer = self.call("POST", f"/workers/{door}", token, body)
        answer.key = made
        return answer

    def joined(self, worker_id: str) -> str:
        return str(self.ask("join", worker_id, self.join_token(worker_id)).json()["token"])

    def renewed(self, worker_id: str, token: str) -> str:
        answer = self.ask("renew", worker_id, token)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["token"])

    def beat(self, worker_id: str, token: str) -> int:
        body = {"worker_id": worker_id, "status": "idle"}
        return int(self.call("POST", "/workers/heartbeat", token, body).status_code)

    def barred(self) -> tuple[str, ...]:
        return self.client.app.state.coordinator.tokens.barred()  # type: ignore[attr-defined]

    def revoke(self, token: str) -> int:
        token_id = token.split("_")[1]
        return int(self.call("DELETE", f"/tokens/{token_id}", self.owner).status_code)


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[Rest]:
    made = Rest(tmp_path / "state")
    yield made
    made.close()
