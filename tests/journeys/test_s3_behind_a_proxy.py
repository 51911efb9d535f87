"""The S3 server has a certificate of a private authority, and is reached through a proxy.

Only the operator's machine has the authority's file: joining and a login carry its text.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.journeys.fleet import ENVIRONMENT, Fleet, bring_up, rclone_s3
from tests.journeys.guide import commands_under
from tests.journeys.hosts import Host, site, until
from tests.support.certificates import self_signed

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

OUTSIDE = "10.77.200.1"
PROXY = f"http://{OUTSIDE}:8888"
CONNECTS = f"CONNECT {OUTSIDE}:9000"


@dataclass(frozen=True)
class Guarded:
    fleet: Fleet
    laptop: Host
    environment: Mapping[str, str]
    proxy_log: Path

    def connects(self) -> int:
        """Return how often the proxy was asked for the S3 server."""
        return self.proxy_log.read_text().count(CONNECTS)


@pytest.fixture(scope="module")
def guarded(software: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    if (proxy := shutil.which("tinyproxy")) is None:
        pytest.skip("tinyproxy is not installed: make setup-services")
    logs = tmp_path_factory.mktemp("logs")
    cert, key = self_signed(logs, OUTSIDE)
    (logs / "tinyproxy.conf").write_text(
        f'Port 8888\nListen {OUTSIDE}\nTimeout 60\nLogFile "{logs}/proxy.log"\nLogLevel Connect\n'
        "MaxClients 100\nConnectPort 9000\n"
    )
    with (
        site(software, hosts=4) as bed,
        rclone_s3(bed, logs, "--cert", str(cert), "--key", str(key)) as s3_url,
    ):
        server = bed.outside(
            [proxy, "-d", "-c", str(logs / "tinyproxy.conf")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert s3_url.startswith("https://")
            control, *_, laptop = bed.hosts
            env = {**ENVIRONMENT, "HTTPS_PROXY": PROXY, "NO_PROXY": control.address}
            control.write("s3.pem", cert.read_bytes())
            bed.hosts.remove(laptop)
            fleet = bring_up(bed, logs, s3_url, env, "objects.ca=s3.pem")
            for node in fleet.nodes:
                fleet.agent(node, **env)
            yield Guarded(fleet, laptop, env, logs / "proxy.log")
        finally:
            bed.hosts.append(laptop)
            server.terminate()
            server.wait(20)


def test_every_machine_reads_through_the_proxy_and_trusts_the_server(guarded: Guarded) -> None:
    fleet, laptop = guarded.fleet, guarded.laptop
    wanted = fleet.publish("1", 6.0, guarded.environment)
    token = fleet.ci_token(fleet.control)
    until(lambda: fleet.alive(token) == len(fleet.nodes), "every node registers")
    before = guarded.connects()
    assert before > 0, "publishing goes through it"
    made = fleet.distribute(fleet.control, token, "1", fleet.nodes).ok()
    deployment = json.loads(made.out)["deployment_id"]
    until(
        lambda: (fleet.ended(fleet.control, token, deployment) or {}).get("status") == "complete",
        "the deployment completes",
        timeout_s=60,
    )
    assert [fleet.holds(node, "1") for node in fleet.nodes] == [wanted] * len(fleet.nodes)
    assert guarded.connects() > before, "nodes go through it"
    for node in fleet.nodes:
        assert node.run("test", "-e", "s3.pem").code == 1

    made_token = fleet.control.run(
        "paceline", "tokens", "create", "--name", "a", "--scope", "deploy"
    ).ok()
    authority = re.search(r"--authority ([0-9a-f]{64})", made_token.err)
    assert authority, made_token.err
    page = "how-to/use-from-a-laptop.md"
    log_in = commands_under(page, "Log in", AUTHORITY=authority[1])[0]
    publish = commands_under(page, "Publish, distribute, activate, go back")[0]
    for line in (log_in, "mkdir acme; echo weights > acme/w", publish):
        there = line.replace("https://paceline.example:7400", fleet.url).replace(
            "version 1", "version 2"
        )
        env = {**guarded.environment, "PACELINE_TOKEN": made_token.out.strip()}
        laptop.run("sh", "-c", there, env=env).ok()


def test_a_file_without_a_certificate_and_a_missing_one_are_named(guarded: Guarded) -> None:
    control = guarded.fleet.control
    control.write("empty.pem", "nothing\n")
    for name, got in (("empty.pem", "0 certificates"), ("gone.pem", "No such file")):
        done = control.run(
            *("paceline", "init", "--profile", "hosts", "--state", "other"),
            *("--set", f"objects.ca={name}", "--coordinator", "https://127.0.0.1:7400"),
        )
        assert done.code == 2, done
        assert done.err.count("\n") == 1, done.err
        assert all(each in done.err for each in (got, name, "PEM file", "AWS_CA_BUNDLE"))
        assert control.run("test", "-e", "other").code == 1
