"""A model of a hub or a registry is imported once and found on every node where tools look.

Types docs/how-to/import-from-a-hub.md. Nodes have no way to hub and registry, and no login there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.fleet import ENVIRONMENT, Fleet, bring_up, rclone_s3
from tests.journeys.guide import commands
from tests.journeys.hosts import ROOT, SOFTWARE, Host, Site, site, until
from tests.support.oci import push, registry_server, write_config
from tests.support.servers import program

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

HUB = "http://10.77.200.1:8000"
TOKEN = "hf_of-the-operator"
BYTES = 9_000_000
PAGE = commands("how-to/import-from-a-hub.md")
REGISTRY, IMAGES = "registry.example:5000", "team/llama"  # the page's
USERS = "ops:$2y$05$abcdefghijklmnopqrstuu1LcdV9TEKIV9xxp0XzFjZonxqZ1YL7e\n"
DOCKER_LOGIN = base64.b64encode(b"ops:registryspassword").decode()
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
    give_logins(found)
    return found


def give_logins(host: Host) -> None:
    """Give the host's user a login at the hub and at the registry, and the registry's name."""
    host.write(".cache/huggingface/token", TOKEN)
    host.write(".docker/config.json", json.dumps({"auths": {REGISTRY: {"auth": DOCKER_LOGIN}}}))
    host.run("sh", "-c", "echo 10.77.200.1 registry.example >> /etc/hosts", root=True).ok()


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


@dataclass(frozen=True)
class Registry:
    """A registry's artefacts by tag, their digests, and what it served."""

    artefacts: dict[str, dict[str, bytes]]
    digests: dict[str, str]
    log: Path

    def served(self) -> dict[str, int]:
        """Return how many bytes of layers each address received."""
        sent: dict[str, int] = {}
        lines = r"^(\S+) .*GET /v2/\S+/blobs/\S+ HTTP/1.1\" 20[06] (\d+)"
        for address, count in re.findall(lines, self.log.read_text(), re.MULTILINE):
            sent[address] = sent.get(address, 0) + int(count)
        return sent


@pytest.fixture(scope="module")
def registry(bed: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Serve artefacts from Debian's docker-registry outside of the hosts; it wants a login."""
    root = tmp_path_factory.mktemp("registry")
    made = Registry({}, {}, root / "log")
    with registry_server(root) as here:
        for tag in ("v1", "v2"):
            files = {"config.json": b"{}", "weights/model.safetensors": os.urandom(BYTES)}
            made.artefacts[tag], made.digests[tag] = files, push(here, IMAGES, tag, files)
    config = write_config(root, "10.77.200.1:5000", USERS)
    with made.log.open("wb") as log:
        server = bed.outside(
            [program("docker-registry"), "serve", str(config)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield made
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="module")
def fleet(
    bed: Site, laptop: Host, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    del repository
    logs = tmp_path_factory.mktemp("logs")
    give_logins(bed.hosts[0])
    settings = (
        f"hub.endpoint={HUB}",
        'hub.redirect_hosts=["10.77.200.1:8001"]',
        f'oci.plain_http=["{REGISTRY}"]',
        f'security.source_repositories=["hf://acme/", "oci://{REGISTRY}/team/"]',
    )
    with rclone_s3(bed, logs) as url:
        made = bring_up(bed, logs, url, ENVIRONMENT, *settings)
        for node in made.nodes:
            made.agent(node, **ENVIRONMENT)
            for port in ("5000", "8000", "8001"):
                rule = ("ip", "rule", "add", "ipproto", "tcp", "dport", port, "prohibit")
                node.run(*rule, root=True).ok()
        until(
            lambda: (
                made.control.run("paceline", "workers", "--json").out.count('"alive":true') == 2
            ),
            "both nodes register",
        )
        yield made
    bed.hosts.append(laptop)


@pytest.fixture(scope="module")
def token(fleet: Fleet, laptop: Host) -> str:
    """Return the token with which the laptop is logged in."""
    create = ("paceline", "tokens", "create", "--name", "a", "--scope", "deploy")
    made = fleet.control.run(*create).ok().out.strip()
    trusted = fleet.control.run("sh", "-c", "cat .paceline/authority/ca.*pem").ok().out
    laptop.write("ca.pem", trusted)
    env = {**ENVIRONMENT, "PACELINE_TOKEN": made}
    laptop.run("paceline", "login", fleet.url, "--ca", "ca.pem", env=env).ok()
    return made


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
    fleet: Fleet, repository: Path, token: str
) -> None:
    control = fleet.control
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


def test_a_laptop_brings_a_hub_model_to_every_node(fleet: Fleet, laptop: Host, token: str) -> None:
    """Its login carries which hub the fleet uses; the hub's token is the laptop's own."""
    del token
    publish, distribute = PAGE["hub"].replace("acme/tiny ", "acme/small ").splitlines()
    early = laptop.run("sh", "-c", distribute, env=ENVIRONMENT)
    assert early.code != 0
    assert early.err.count("\n") == 1
    assert "paceline publish hf://acme/small" in early.err
    laptop.run("sh", "-c", publish, env=ENVIRONMENT).ok()
    assert "on 2 of 2 workers" in laptop.run("sh", "-c", distribute, env=ENVIRONMENT).ok().out


def over_rest(fleet: Fleet, laptop: Host, token: str, source: str) -> str:
    """Type the page's call where only a token and a certificate are; return the deployment."""
    env = {"TOKEN": token, "COORDINATOR": fleet.url, "SOURCE": source}
    made = laptop.run("bash", "-euc", PAGE["rest"], env=env).ok()
    return str(json.loads(made.out)["deployment_id"])


@pytest.mark.services
@pytest.mark.parametrize(("tag", "way"), [("v1", "command"), ("v2", "rest")])
def test_an_artefact_is_read_once_and_relayed(
    fleet: Fleet, laptop: Host, token: str, registry: Registry, tag: str, way: str
) -> None:
    """By a laptop or a CI host; what nodes hold has the digests of the artefact's layers."""
    publish, distribute = PAGE["registry"].replace(":v1", f":{tag}").splitlines()
    began, before = time.monotonic(), registry.served()

    def shown() -> dict[str, Any]:
        return fleet.ended(laptop, token, deployment) or {"status": ""}

    laptop.run("sh", "-c", publish, env=ENVIRONMENT).ok()
    if way == "rest":
        deployment = over_rest(fleet, laptop, token, distribute.split()[-1])
    else:
        done = laptop.run("sh", "-c", distribute).ok().out
        assert "on 2 of 2 workers, active on 2" in done
        (deployment,) = re.findall(r", deployment (\S+)", done)
    until(lambda: shown()["status"] == "complete", "the deployment completes", 60)
    seconds = time.monotonic() - began

    files, version = registry.artefacts[tag], registry.digests[tag]
    size = sum(map(len, files.values()))
    read = {each: count - before.get(each, 0) for each, count in registry.served().items()}
    assert read == {laptop.address: size}, "the registry sent each byte once, to the laptop"
    for node in fleet.nodes:
        place = f"state/nodes/node-{node.index}/store/models/team+llama/{version}"
        for path, data in files.items():
            digest = node.run("sha256sum", f"{place}/{path}").ok().out.split()[0]
            assert digest == hashlib.sha256(data).hexdigest()
        assert node.run("grep", "-rlE", f"{DOCKER_LOGIN}|registryspassword", ".").code == 1
        assert node.run("curl", "-sS", "http://10.77.200.1:5000/v2/").code == 7, "it has no way"
    seeded = shown()["deployment"]["origin_bytes"]
    sys.stdout.write(f"{way}: {size} bytes in {seconds:.1f} s; registry {size}, S3 {seeded}\n")
    assert seeded < 1.5 * size, "one reader; the other node received it from the first"
