"""An operator brings up a fleet; a CI host distributes while a leader, a rack and a node fail.

Three coordinators with etcd, Redis and PostgreSQL (all with TLS), an external S3, fifteen nodes in
three racks. What is typed is in docs/operations.md ("Several replicas of the coordinator", "State
stores", "Nodes join").
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.fleet import ENVIRONMENT, Fleet, rclone_s3
from tests.journeys.hosts import Host, Site, site, until
from tests.journeys.stores import PASSWORD, Authority, start_etcd, start_postgres, start_redis

pytestmark = [
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.chaos,
    pytest.mark.timeout(600),
]

RACK = 5  # hosts; in rack 0 are three replicas, the stores and the CI's host
MODEL_BYTES = 100_000_000
RATE_MBIT = 50.0
SOURCE = "s3://models/released/acme-7b/1"


@dataclass(frozen=True)
class Grown:
    """The running fleet, with its replicas by URL."""

    fleet: Fleet
    replicas: dict[str, Host]
    ci: Host
    bed: Site

    def ask(self, path: str, token: str, body: str = "") -> tuple[dict[str, str], Any]:
        """Call REST from the CI's host, at whichever replica answers; headers and JSON."""
        for _ in range(60):
            for url in self.replicas:
                done = self.ci.run(
                    *("curl", "-sS", "-i", "--max-time", "10", "--cacert", "ca.pem"),
                    *("--location-trusted", "-H", f"Authorization: Bearer {token}", url + path),
                    *("-H", "Content-Type: application/json", "-H", "Idempotency-Key: ci-1"),
                    *(("-d", body) if body else ()),
                )
                head, _, text = done.out.replace("\r", "").rpartition("\n\n")
                status, *lines = head.rpartition("HTTP/")[2].splitlines() or [""]
                if done.code == 0 and status.split()[1:2] in (["200"], ["201"], ["202"]):
                    headers = dict(each.split(": ", 1) for each in lines if ": " in each)
                    return {k.lower(): v for k, v in headers.items()}, json.loads(text)
            time.sleep(0.5)
        raise AssertionError(f"no replica answered: {done.out} {done.err}")


@pytest.fixture(scope="module")
def grown(
    software: Path, control_software: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Grown]:
    logs = tmp_path_factory.mktemp("logs")
    installed = [control_software] * 3 + [software] * (4 * RACK - 3)
    with site(installed, hosts=4 * RACK, rate_mbit=RATE_MBIT, racks=4) as bed:
        replicas, (stores, ci), nodes = bed.hosts[:3], bed.hosts[3:5], bed.hosts[5:]
        authority = Authority(tmp_path_factory.mktemp("authority"))
        for each in (*replicas, stores):
            authority.issue(each)
        settings = {
            "security.rest_tls": "installation",
            "security.peer_tls": "mtls",
            "storage.bucket": "models",
            "cluster.link_mbit": str(RATE_MBIT),
            "relay.max_failed": "0.1",
            "control.coordination": "etcd",
            "control.etcd_endpoints": json.dumps(start_etcd(replicas, logs)),
            "control.etcd_ca": "/home/user/pki/ca.pem",
            "control.etcd_cert": "/home/user/pki/cert.pem",
            "control.etcd_key": "/home/user/pki/key.pem",
            "control.progress": "redis",
            "control.redis_url": start_redis(stores, logs),
            "control.redis_ca": "/home/user/pki/ca.pem",
            "control.audit": "postgres",
            "control.postgres_url": start_postgres(stores, logs),
        }
        with rclone_s3(bed, logs) as s3_url:
            settings["objects.endpoint_url"] = s3_url
            urls = {f"https://{each.address}:7400": each for each in replicas}
            first = replicas[0]
            first.run(
                *("paceline", "init"),
                *(word for each in urls for word in ("--coordinator", each)),
                *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")),
            ).ok()
            passwords = {
                "PACELINE_REDIS_PASSWORD": PASSWORD,
                "PACELINE_POSTGRES_PASSWORD": PASSWORD,
            }
            for number, (url, host) in enumerate(urls.items(), start=1):
                if host is not first:
                    first.copy(".paceline", host)
                host.start(
                    *("paceline", "coordinator", "--state", ".paceline", "--host", host.address),
                    *("--port", "7400", "--replica-id", f"r{number}", "--advertise", url),
                    log=logs / f"coordinator-{number}",
                    env={**ENVIRONMENT, **passwords},
                )
            for url, host in urls.items():
                until(
                    lambda at=url, on=host: on.run("curl", "-skf", f"{at}/readyz").code == 0,
                    f"{url} is ready",
                )
            ci.write("ca.pem", first.run("cat", ".paceline/authority/ca.pem").ok().out)
            fleet = Fleet(first, tuple(nodes), next(iter(urls)), logs)
            for index, node in enumerate(nodes):
                fleet.agent(node, "--rack", f"r{1 + index // RACK}", **ENVIRONMENT)
            yield Grown(fleet, urls, ci, bed)


def test_a_deployment_outlives_its_leader_a_rack_switch_and_a_node(
    grown: Grown, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, bed = grown.fleet, grown.bed
    first, nodes = fleet.control, fleet.nodes
    first.run("sh", "-c", f"mkdir acme; head -c {MODEL_BYTES} /dev/urandom > acme/w").ok()
    wanted = first.run("sha256sum", "acme/w").ok().out.split()[0]
    first.run(
        *("paceline", "publish", "acme", SOURCE, "--model", "acme-7b", "--version", "1"),
        env=ENVIRONMENT,
    ).ok()
    token = first.run("paceline", "tokens", "create", "--name", "ci", "--scope", "deploy").ok()
    secret = token.out.strip()

    def alive() -> bool:
        _, workers = grown.ask("/workers", secret)
        return json.dumps(workers).count('"alive": true') == len(nodes)

    until(alive, "every node registers", timeout_s=60)
    body = {
        "model_id": "acme-7b",
        "version": "1",
        "source_url": SOURCE,
        "target_workers": [f"node-{each.index}" for each in nodes],
    }
    sent = bed.bed.counters()["origin_out"]
    began = time.monotonic()
    _, made = grown.ask("/deployments", secret, json.dumps(body))
    path = f"/deployments/{made['deployment_id']}"

    def copied() -> float:
        return min(
            float(node.run("sh", "-c", "du -sb state/nodes/*/store | cut -f1").out or 0)
            for node in nodes
        )

    until(lambda: copied() > MODEL_BYTES / 5, "a fifth is everywhere", timeout_s=120)
    headers, _ = grown.ask(path, secret)
    leader = grown.replicas[headers["paceline-leader"]]
    rack, lost = nodes[RACK : 2 * RACK], nodes[-1]
    leader.power_off()
    lost.power_off()
    for each in rack:
        bed.bed.cut(each.index)
    time.sleep(8)
    for each in rack:
        bed.bed.mend(each.index)

    def ended() -> bool:
        return bool(grown.ask(path, secret)[1]["status"] in ("complete", "failed", "stalled"))

    until(ended, "the deployment ends", timeout_s=240)
    seconds = time.monotonic() - began
    _, found = grown.ask(path, secret)
    assert found["status"] == "complete", found
    for node in nodes[:-1]:
        copy = f"state/nodes/node-{node.index}/store/models/acme-7b/1/w"
        assert node.run("sha256sum", copy).ok().out.split()[0] == wanted
    from_source = (bed.bed.counters()["origin_out"] - sent) / MODEL_BYTES
    bound = MODEL_BYTES * 8 / (RATE_MBIT * 1e6 * 1448 / 1514)
    with capsys.disabled():
        sys.stderr.write(
            f"\n{seconds:.1f} s, {seconds / bound:.2f} x the bound; {from_source:.3f} copies "
            "from the source on the wire\n"
        )
    assert from_source < 1.2, "read about once from the source, on the wire"
