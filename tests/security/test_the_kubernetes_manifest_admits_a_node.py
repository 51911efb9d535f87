"""A coordinator with the manifest's mounts admits nodes; a file that fails is no fault inside."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.api import ROUTES, create_app
from paceline.client import AccessClient
from paceline.config import load_runtime
from paceline.errors import StorageFailed
from paceline.relay import join
from paceline.relay.transport import ensure_authority, issue_server, make_authority, new_request
from paceline.schemas import CreateJoinToken, JoinWorker
from tests.api.conftest import BASE, Served, TestClient, app_client, make_runtime
from tests.security.kit import RECORDS

MANIFEST = Path(__file__).resolve().parents[2] / "deployments/kubernetes/coordinator.yaml"
# Each path is bound to itself, read-only, where nothing outside of the command sees it.
NAMESPACE = """
for path in {paths}; do
  mount --bind "$path" "$path" && mount -o remount,bind,ro "$path" || exit 90
  if touch "$path/written" 2>/dev/null || [ -f "$path" -a -w "$path" ]; then exit 91; fi
done
exec "$@"
"""


def read_only_mounts() -> list[str]:
    """What the manifest mounts read-only below the state directory, relative to it."""
    (found,) = (
        each for each in yaml.safe_load_all(MANIFEST.read_text()) if each["kind"] == "StatefulSet"
    )
    (container,) = found["spec"]["template"]["spec"]["containers"]
    (state,) = (a.removeprefix("--state=") for a in container["args"] if a.startswith("--state="))
    return [
        each["mountPath"].removeprefix(f"{state}/")
        for each in container["volumeMounts"]
        if each.get("readOnly") and each["mountPath"].startswith(f"{state}/")
    ]


def read_only(paths: list[Path]) -> tuple[str, ...]:
    """Return a command line under which ``paths`` cannot be written: by mounts, else by modes."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-r", "--mount"]
    script = NAMESPACE.format(paths=" ".join(f"'{each}'" for each in paths))
    under = (*unshare, "sh", "-c", script, "sh")
    if shutil.which("unshare"):
        tried = subprocess.run([*under, "true"], capture_output=True, check=False)
        if tried.returncode == 0:
            return under
    for each in paths:
        each.chmod(0o500 if each.is_dir() else 0o400)
        if os.access(each, os.W_OK):
            pytest.skip("needs a mount namespace: modes do not hold back this user")
    return ()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A coordinator with the files and the mounts of the manifest."""
    runtime = make_runtime(tmp_path / "state")
    given = {"rest_tls": "files", "rest_cert": "tls/tls.crt", "rest_key": "tls/tls.key"}
    security = runtime.profile.security.model_copy(update=given)
    profile = runtime.profile.model_copy(update={"security": security})
    runtime = runtime.model_copy(update={"profile": profile})
    state = runtime.state_dir
    make_authority(state / "authority")
    port_authority = make_authority(tmp_path / "port")
    cert, key = issue_server(port_authority, ["127.0.0.1"], tmp_path / "made", valid_days=1)
    (state / "tls").mkdir()
    shutil.copy(cert, state / "tls" / "tls.crt")
    shutil.copy(key, state / "tls" / "tls.key")
    (state / "runtime.json").touch()  # what is mounted has to be there
    server = Served(runtime)
    paths = [state / each for each in read_only_mounts() if (state / each).exists()]
    assert state / "authority" in paths
    server.under = read_only(paths)
    server.start()
    yield server
    server.end()
    for each in paths:
        each.chmod(0o700)


def test_a_coordinator_with_the_mounts_of_the_manifest_admits_a_node(
    served: Served, tmp_path: Path
) -> None:
    state, ca = served.runtime.state_dir, tmp_path / "port" / "ca.pem"
    before = sorted((state / "authority").iterdir())
    admin = AccessClient(served.url, served.runtime.secrets.coordinator_token, ca=ca)
    assert admin.ca_pem() == (state / "authority" / "ca.pem").read_bytes()
    token = admin.create_join_token(CreateJoinToken(worker_id="node-1")).token
    node = tmp_path / "node"
    assert join(node, "node-1", served.url, token, ca=ca)
    client = AccessClient(served.url, load_runtime(node).secrets.agents_token, ca=ca)
    csr = new_request("node-1")[1].decode()
    assert client.renew(JoinWorker(worker_id="node-1", csr=csr)).worker_id == "node-1"
    assert sorted((state / "authority").iterdir()) == before, "nothing was to be written there"


def test_a_known_authority_is_read_without_a_lock(tmp_path: Path) -> None:
    made = make_authority(tmp_path / "ca")
    assert ensure_authority(tmp_path / "ca") == made
    assert not (tmp_path / "ca" / "lock").exists()


def test_where_no_authority_can_be_made_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed) as caught:
        ensure_authority(tmp_path / "file" / "ca")
    assert caught.value.where == tmp_path / "file" / "ca"
    assert caught.value.do


def test_an_authority_that_cannot_be_read_spends_no_token(tmp_path: Path) -> None:
    """503 with Retry-After: the caller is right, and may be so again once the files are there."""
    runtime = make_runtime(tmp_path / "state")
    authority = runtime.state_dir / "authority"
    with app_client(runtime) as client:
        owner = {"Authorization": f"Bearer {runtime.secrets.coordinator_token}"}
        body = {"worker_id": "node-1"}
        token = client.post("/tokens/join", json=body, headers=owner).json()["token"]
        authority.rename(tmp_path / "away")
        authority.touch()  # a directory that cannot be made, for whichever user
        csr = new_request("node-1")[1].decode()
        join_headers = {"Authorization": f"Bearer {token}"}
        for answer in (
            client.get("/ca.pem"),
            client.post("/tokens/join", json=body, headers=owner),
            client.post("/workers/join", json=body | {"csr": csr}, headers=join_headers),
        ):
            assert answer.status_code == 503, answer.text
            assert answer.headers["Retry-After"]
            assert answer.json()["code"] == "ServiceUnavailable"
            assert "authority" in answer.json()["detail"]
            assert str(tmp_path) not in answer.text, "no path of this machine for any caller"
        (known,) = client.get("/tokens", headers=owner).json()["tokens"]
        assert known["used_at"] is None
        authority.unlink()
        (tmp_path / "away").rename(authority)
        answer = client.post("/workers/join", json=body | {"csr": csr}, headers=join_headers)
        assert answer.status_code == 200, answer.text


def test_no_route_makes_an_internal_error_of_an_operating_systems_refusal(
    tmp_path: Path,
) -> None:
    number = errno.ENOSPC
    runtime = make_runtime(tmp_path / "state")
    app = create_app(runtime)
    coordinator = app.state.coordinator

    def refuse(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number), "a file")

    with TestClient(app, BASE, raise_server_exceptions=False) as client:
        client.headers["Authorization"] = f"Bearer {runtime.secrets.coordinator_token}"
        asked = ("read", "handle", "try_decide", "stage", "save_stage", "history", "create")
        kept = {name: getattr(coordinator, name) for name in (*asked, "check_ready", "cancel")}
        for name in kept:
            setattr(coordinator, name, refuse)
        refused = set()
        for method, path in ROUTES:
            if path in ("/events/stream", "/workers/join", "/workers/renew"):
                continue
            filled = path.replace("{input_digest}", "0" * 64)
            filled = re.sub(r"\{\w+\}", "none", filled)
            query = {"worker_id": "w"} if path.endswith("/lanes") else {}
            answer = client.request(method, filled, json=RECORDS.get(path), params=query)
            assert answer.status_code != 500, (method, path, answer.text)
            if answer.status_code == 503:
                refused.add((method, path))
                assert answer.headers["Retry-After"]
                assert answer.json()["code"] == "ServiceUnavailable"
                assert answer.json()["got"] == errno.errorcode[number]
                assert answer.json()["do"]
        for name, each in kept.items():
            setattr(coordinator, name, each)
    untouched = {path for key in set(ROUTES) - refused for path in key[1:]}
    assert len(refused) >= 18, untouched
