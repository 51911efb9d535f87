"""A model of a hub is imported once and found on every node where Hugging Face's tools look.

What docs/how-to/import-from-a-hub.md describes: nodes without a way to the hub
and without its token.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.fleet import ENVIRONMENT, Fleet, bring_up, rclone_s3
from tests.journeys.hosts import ROOT, SOFTWARE, Host, Site, site, until

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(300)]

HUB = "http://10.77.200.1:8000"
TOKEN = "hf_of-the-operator"
BYTES = 9_000_000
_LOAD = """
import huggingface_hub
print(huggingface_hub.snapshot_download("acme/tiny", cache_dir="state/nodes/NODE/store/hub"))
"""


@pytest.fixture(scope="module")
def bed(hub_software: Path) -> Iterator[Site]:
    with site(hub_software, hosts=4) as made:
        yield made


@pytest.fixture(scope="module")
def laptop(bed: Site) -> Host:
    """Return a machine that is no node; it has the hub's token, and no setting of the fleet."""
    found = bed.hosts.pop()
    found.write(".cache/huggingface/token", TOKEN)
    return found


@pytest.fixture(scope="module")
def repository(bed: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Serve ``acme/tiny`` from a hub outside of the hosts that wants a token."""
    root = tmp_path_factory.mktemp("hub")
    place = root / "acme/tiny"
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"model_type": "tiny"}')
    (place / "model.safetensors").write_bytes(os.urandom(BYTES))
    (root / "acme/small").mkdir()
    (root / "acme/small/config.json").write_text('{"model_type": "small"}')
    words = ["-m", "tests.support.hub", str(root), "--host", "10.77.200.1", "--port", "8000"]
    server = bed.outside([sys.executable, *words, "--token", TOKEN], cwd=ROOT)
    try:
        yield place
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="module")
def fleet(
    bed: Site, laptop: Host, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    del repository
    logs = tmp_path_factory.mktemp("logs")
    bed.hosts[0].write(".cache/huggingface/token", TOKEN)
    settings = (
        f"hub.endpoint={HUB}",
        'hub.redirect_hosts=["10.77.200.1:8001"]',
        'security.source_repositories=["hf://acme/"]',
    )
    with rclone_s3(bed, logs) as url:
        yield bring_up(bed, logs, url, ENVIRONMENT, *settings)
    bed.hosts.append(laptop)


def read_from_hub(fleet: Fleet) -> int:
    return int(json.loads(fleet.control.run("curl", "-sS", f"{HUB}/stats").ok().out)["sent_bytes"])


def test_a_repository_that_is_not_allowed_is_refused_in_one_line(fleet: Fleet) -> None:
    made = fleet.control.run("paceline", "tokens", "create", "--name", "x", "--scope", "deploy")
    body = {"source_url": "hf://other/model", "target_workers": ["node-1"]}
    refused = fleet.call(made.ok().out.strip(), "/deployments", json.dumps(body))
    assert "security.source_repositories" in refused.out
    until(lambda: fleet.control.run("curl", "-sS", HUB).code == 0, "the hub answers")
    missing = fleet.control.run("paceline", "publish", "hf://acme/no-such", env=ENVIRONMENT)
    assert missing.code != 0
    assert missing.err.count("\n") == 1
    assert "the hub does not have it" in missing.err


def test_a_hub_model_is_read_once_and_found_offline_on_every_node(
    fleet: Fleet, repository: Path
) -> None:
    control = fleet.control
    made = control.run("paceline", "tokens", "create", "--name", "ci", "--scope", "deploy").ok()
    token = made.out.strip()
    for node in fleet.nodes:
        fleet.agent(node, **ENVIRONMENT)
    until(
        lambda: fleet.call(token, "/workers").out.count('"alive":true') == 2,
        "both nodes register",
    )
    body = {"source_url": "hf://acme/tiny@main", "target_workers": ["node-1", "node-2"]}
    early = fleet.call(token, "/deployments", json.dumps(body))
    assert early.code != 0
    assert "paceline publish hf://acme/tiny@" in early.out

    control.run("paceline", "publish", "hf://acme/tiny", env=ENVIRONMENT).ok()
    again = control.run("paceline", "publish", "hf://acme/tiny", "--json", env=ENVIRONMENT).ok()
    commit = json.loads(again.out)["version"]
    answer = fleet.call(token, "/deployments", json.dumps(body)).ok()
    deployment = json.loads(answer.out)["deployment_id"]
    assert "2 of 2 workers" in control.run("paceline", "watch").ok().out

    shown = json.loads(fleet.call(token, f"/deployments/{deployment}").ok().out)["deployment"]
    assert (shown["model_id"], shown["version"]) == ("acme/tiny", commit)
    assert shown["source_url"] == f"s3://models/models/acme/tiny/{commit}"
    size = sum(each.stat().st_size for each in repository.iterdir())
    assert read_from_hub(fleet) == size
    for node in fleet.nodes:
        name = f"node-{node.index}"
        load = _LOAD.replace("NODE", name)
        python = f"{SOFTWARE}/bin/python"
        found = node.run(python, "-c", load, env={"HF_HUB_OFFLINE": "1"}).ok().out.strip()
        assert found.endswith(f"models--acme--tiny/snapshots/{commit}")
        for each in repository.iterdir():
            digest = node.run("sha256sum", f"{found}/{each.name}").ok().out.split()[0]
            assert digest == hashlib.sha256(each.read_bytes()).hexdigest()
        assert node.run("grep", "-rl", TOKEN, ".").code == 1
    assert control.run("grep", "-rl", TOKEN, ".paceline").code == 1


def test_a_laptop_brings_a_hub_model_to_every_node(fleet: Fleet, laptop: Host) -> None:
    """Its login carries which hub the fleet uses; the token is the laptop's own."""
    made = fleet.control.run(
        "paceline", "tokens", "create", "--name", "a", "--scope", "deploy"
    ).ok()
    laptop.write(
        "ca.pem", fleet.control.run("sh", "-c", "cat .paceline/authority/ca.*pem").ok().out
    )
    env = {**ENVIRONMENT, "PACELINE_TOKEN": made.out.strip()}
    laptop.run("paceline", "login", fleet.url, "--ca", "ca.pem", env=env).ok()
    early = laptop.run("paceline", "distribute", "hf://acme/small", env=env)
    assert early.code != 0
    assert early.err.count("\n") == 1
    assert "paceline publish hf://acme/small" in early.err
    laptop.run("paceline", "publish", "hf://acme/small", env=env).ok()
    assert (
        "on 2 of 2 workers"
        in laptop.run("paceline", "distribute", "hf://acme/small", env=env).ok().out
    )
