"""Every place where a user names a source, on an S3 server that the installation does not run.

The credentials are the user's own, in AWS's variables: no file and no setting of ours has them.
One lifecycle goes through publish, relay, verify, training, evaluation, promotion and roll-out.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import Runtime, load_runtime
from tests.support.hub import Hub, serving_hub
from tests.support.rclone import RcloneS3, rclone_s3
from tests.support.stack import (
    Ended,
    await_registered,
    finish,
    installation,
    paceline,
    processes_of,
    start,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,  # a second installation
    pytest.mark.xdist_group("installation"),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module")
def s3() -> Iterator[RcloneS3]:
    with rclone_s3() as server:
        (server.root / "paceline").mkdir()
        yield server


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    place = root / "acme/tiny"
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"model_type": "tiny"}')
    (place / "model.safetensors").write_bytes(os.urandom(300_000))
    with serving_hub(root) as made:
        yield made


@pytest.fixture(scope="module")
def settings(s3: RcloneS3, hub: Hub) -> Iterator[tuple[str, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
        yield (
            f"objects.endpoint_url={s3.endpoint_url}",
            f"hub.endpoint={hub.url}",
            f'hub.redirect_hosts=["{hub.cdn_url.removeprefix("http://")}"]',
            'security.source_repositories=["hf://acme/"]',
            "cluster.link_mbit=80",
            "training.steps=10",
            "control.flow_starter=prefect",
        )


@pytest.fixture(scope="module")
def lifecycle(
    settings: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Ended]:
    """A lifecycle that `paceline demo` ran; Ctrl-C ended the demo and kept the state."""
    state = tmp_path_factory.mktemp("external") / "state"
    words = [word for each in settings for word in ("--set", each)]
    demo = start("demo", "--keep", "--json", "--profile", "ci", *words, state=state)
    assert demo.stdout is not None
    if summary := demo.stdout.readline():
        demo.send_signal(signal.SIGINT)
    ended = finish(demo, 60)
    assert ended.code == 0, ended.err
    ended.answer = json.loads(summary)
    wait_until(lambda: not processes_of(state), 20, "the demo's processes end")
    return state, ended


@pytest.fixture(scope="module")
def stack(lifecycle: tuple[Path, Ended], settings: tuple[str, ...]) -> Iterator[Runtime]:
    with installation(lifecycle[0], *settings) as runtime:
        yield runtime


def test_a_lifecycle_needs_no_server_and_no_keys_of_ours(
    lifecycle: tuple[Path, Ended], s3: RcloneS3
) -> None:
    state, ended = lifecycle
    assert ended.answer["status"] == "complete"
    assert not (state / "s3").exists()
    runtime = load_runtime(state) if (state / "runtime.json").exists() else None
    assert runtime is None or not runtime.secrets.s3_access_key
    kept = [path for path in state.rglob("*") if path.is_file() and path.stat().st_size < 10**7]
    assert not [path for path in kept if s3.secret_key.encode() in path.read_bytes()]
    for each in ("models", "data", "checkpoints", "records"):
        assert any((s3.root / "paceline" / each).rglob("*")), each


def test_a_registered_model_is_distributed_by_alias_and_by_version(
    stack: Runtime, lifecycle: tuple[Path, Ended]
) -> None:
    registered = lifecycle[1].answer["registry"]
    name, version = registered["model_id"], registered["registry_version"]
    for address in (f"models:/{name}@champion", f"models:/{name}/{version}"):
        done = paceline("distribute", address, "--json", state=stack.state_dir)
        assert done.code == 0, done.err
        assert done.answer["url"].startswith("s3://paceline/models/")
        assert "@" not in done.answer["version"]
    unknown = paceline("distribute", f"models:/{name}@nobody", state=stack.state_dir)
    assert unknown.code != 0
    assert "no such version or alias" in unknown.problem
    checked = paceline(
        "verify", done.answer["model_id"], done.answer["version"], state=stack.state_dir
    )
    assert checked.code == 0, checked.err


def test_a_deployment_over_rest_records_the_version_and_not_the_alias(
    stack: Runtime, lifecycle: tuple[Path, Ended]
) -> None:
    name = lifecycle[1].answer["registry"]["model_id"]
    await_registered(stack)

    def call(path: str, body: object = None) -> dict[str, object]:
        request = urllib.request.Request(
            stack.endpoints.coordinator_url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {stack.secrets.coordinator_token}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            found: dict[str, object] = json.load(answer)
            return found

    body = {"source_url": f"models:/{name}@champion", "target_workers": ["node-0", "node-1"]}
    made = call("/deployments", body)["deployment_id"]
    wait_until(lambda: call(f"/deployments/{made}")["status"] == "complete", 120, "complete")
    record = call(f"/deployments/{made}")["deployment"]
    assert isinstance(record, dict)
    assert record["source_url"].startswith("s3://paceline/models/")
    assert record["version"]


def test_a_hub_model_is_imported_by_the_flow_that_distributes_it(stack: Runtime, hub: Hub) -> None:
    for _ in range(2):
        done = paceline("distribute", "hf://acme/tiny", "--json", state=stack.state_dir)
        assert done.code == 0, done.err
    assert done.answer["model_id"] == "acme/tiny"
    assert done.answer["version"] == hub.commit("acme/tiny")
    assert hub.sent_bytes == sum(p.stat().st_size for p in (hub.root / "acme/tiny").iterdir())
    for node in ("node-0", "node-3"):
        cache = stack.node_dir(node) / "store/hub/models--acme--tiny"
        snapshot = cache / "snapshots" / (cache / "refs/main").read_text()
        wanted = (hub.root / "acme/tiny/model.safetensors").read_bytes()
        assert (snapshot / "model.safetensors").read_bytes() == wanted
    refused = paceline("distribute", "hf://other/model", state=stack.state_dir)
    assert "security.source_repositories" in refused.problem


def test_the_model_is_distributed_without_a_server(
    stack: Runtime, lifecycle: tuple[Path, Ended], tmp_path: Path
) -> None:
    """`distribute --into` takes the same names with the same credentials."""
    name = lifecycle[1].answer["registry"]["model_id"]
    into = tmp_path / "into"
    done = paceline(
        "distribute", f"models:/{name}@champion", "--into", str(into), "--workers", "2", "--json",
        state=stack.state_dir,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.answer["source_url"].startswith("s3://paceline/")
