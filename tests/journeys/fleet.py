"""A coordinator and nodes, brought up by what docs/how-to/bring-up-a-fleet.md has a user type."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.journeys.guide import block, type_on
from tests.journeys.hosts import Ended, Host, Site, until
from tests.journeys.stores import PASSWORD

KEY, SECRET = "operatorskey", "operatorssecret"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
PASSWORDS = {"PACELINE_REDIS_PASSWORD": PASSWORD, "PACELINE_POSTGRES_PASSWORD": PASSWORD}
BUCKET, MODEL = "models", "acme-7b"


@contextmanager
def rclone_s3(site: Site, logs: Path, *more: str) -> Iterator[str]:
    """Run an S3 server with a bucket ``models`` outside of the hosts; yield its URL.

    ``more``: options of rclone's; with a certificate it serves HTTPS.
    """
    (logs / "s3" / BUCKET).mkdir(parents=True)
    rclone = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
    address = "10.77.200.1:9000"
    options = ["--etag-hash", "XXH128", "--vfs-cache-mode", "off", "--dir-cache-time", "1s", *more]
    with (logs / "s3.log").open("wb") as output:
        server = site.outside(
            [rclone, "serve", "s3", str(logs / "s3"), "--addr", address, "--config", "", *options],
            env={**os.environ, "RCLONE_AUTH_KEY": f'"{KEY},{SECRET}"'},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"{'https' if '--cert' in more else 'http'}://{address}"
    finally:
        server.terminate()
        server.wait(20)


def name_of(node: Host) -> str:
    """Return a node's name in the fleet."""
    return f"node-{node.index}"


@dataclass(frozen=True)
class Fleet:
    """The host where the operator types, the nodes, and the coordinators."""

    control: Host
    nodes: tuple[Host, ...]
    logs: Path
    replicas: tuple[Host, ...] = ()

    @property
    def url(self) -> str:
        return f"https://{self.control.address}:7400"

    def log(self, name: str) -> str:
        path = self.logs / name
        return path.read_text() if path.exists() else ""

    def make_token(self, node: Host) -> None:
        """Give a node a token with which it may join."""
        name = name_of(node)
        type_on(self.control, block("Nodes", 1, NODE=name))
        node.write("token", self.control.run("cat", f"{name}.token").ok().out)

    def agent(self, node: Host, *options: str, rack: str = "r1", **env: str) -> None:
        """Have a node join, and start its agent, with ``options`` beside those of the page."""
        self.make_token(node)
        name, at = name_of(node), self.control.address
        text = block("Nodes", 2, NODE=name, RACK=rack, COORDINATOR_1=at)
        line = f"exec {text.strip()} {shlex.join(options)}"
        node.start("bash", "-c", line, log=self.logs / name, env=env)

    def publish(self, version: str, megabytes: float, env: Mapping[str, str]) -> str:
        """Publish a new model of one file ``w``; return the SHA-256 of the file."""
        script = f"mkdir -p v{version}; head -c {megabytes * 1e6:.0f} /dev/urandom > v{version}/w"
        self.control.run("sh", "-c", script).ok()
        names = {"DIRECTORY": f"v{version}", "MODEL": MODEL, "VERSION": version, "BUCKET": BUCKET}
        type_on(self.control, block("Publish", **names), env=env)
        return self.control.run("sha256sum", f"v{version}/w").ok().out.split()[0]

    def ci_token(self, ci: Host) -> str:
        """Return a token for the CI host, and give that the authority's certificate."""
        made = type_on(self.control, block("Distribute from CI", 1)).out.strip()
        trusted = self.control.run("cat", "ca.pem").ok().out
        assert "PRIVATE" not in trusted
        ci.write("ca.pem", trusted)
        return made

    def distribute(
        self, ci: Host, token: str, version: str, nodes: Sequence[Host], key: str = "release"
    ) -> Ended:
        """Start a deployment from the CI host; the first replica that answers takes it.

        ``key`` is the first word of the page's idempotency key.
        """
        values = {
            "TOKEN": token,
            "MODEL": MODEL,
            "VERSION": version,
            "BUCKET": BUCKET,
            "WORKERS": ", ".join(f'"{name_of(each)}"' for each in nodes),
        }
        for each in self.replicas or (self.control,):
            text = block("Distribute from CI", 2, COORDINATOR_1=each.address, **values)
            done = ci.run("bash", "-ec", text.replace("release-", f"{key}-"))
            if done.code == 0:
                break
        return done

    def holds(self, node: Host, version: str) -> str:
        """Return the SHA-256 of a node's copy of ``w``."""
        path = f"state/nodes/{name_of(node)}/store/models/{MODEL}/{version}/w"
        return node.run("sha256sum", path).ok().out.split()[0]

    def alive(self, token: str) -> int:
        """Return how many nodes the coordinator counts as alive."""
        return self.call(token, "/workers").out.count('"alive":true')

    def call(self, token: str, path: str, body: str = "") -> Ended:
        """Call the coordinator's REST as a program would."""
        content = ("-H", "Content-Type: application/json", "-H", "Idempotency-Key: journey")
        trusting = 'exec curl --cacert <(cat .paceline/authority/ca.*pem) "$@"'
        return self.control.run(
            *("bash", "-c", trusting, "curl", "-sS", "--fail-with-body"),
            *("-H", f"Authorization: Bearer {token}", f"{self.url}{path}"),
            *((*content, "-d", body) if body else ()),
        )

    def ended(self, ci: Host, token: str, deployment: str) -> dict[str, object] | None:
        """Return a deployment as some replica shows it to a host, None while none answers."""
        for each in self.replicas or (self.control,):
            values = {"TOKEN": token, "COORDINATOR_1": each.address, "DEPLOYMENT": deployment}
            done = ci.run("bash", "-ec", block("Distribute from CI", 3, **values))
            if done.code == 0:
                return dict(json.loads(done.out))
        return None

    def leader(self, ci: Host) -> Host | None:
        """Return the host of the replica that leads, as an answer's header names it."""
        for each in self.replicas:
            done = ci.run(
                *("curl", "-sS", "-D-", "-o", "/dev/null", "--cacert", "ca.pem"),
                *("--connect-timeout", "5", f"https://{each.address}:7400/healthz"),
            )
            for line in done.out.splitlines():
                name, _, value = line.partition(": ")
                if name.lower() == "paceline-leader":
                    (found,) = [e for e in self.replicas if f"//{e.address}:" in value]
                    return found
        return None

    def start_replica(self, host: Host, *, ready: bool = True) -> None:
        """Start one of three coordinators and wait until it is ready, unless it will not be."""
        number = self.replicas.index(host) + 1
        text = block("Three coordinators", 3, ADDRESS=host.address, REPLICA=f"r{number}")
        log, env = self.logs / f"coordinator-{number}", {**ENVIRONMENT, **PASSWORDS}
        host.start("bash", "-c", f"exec {text}", log=log, env=env)
        if ready:
            wait_ready(host)


def wait_ready(host: Host) -> None:
    """Wait until the coordinator on ``host`` is ready."""
    text = block("Is it ready?", ADDRESS=host.address)
    until(lambda: host.run("bash", "-ec", text).code == 0, f"{host.address} is ready", 60)


def start_coordinator(host: Host, logs: Path, env: Mapping[str, str]) -> None:
    """Start the only coordinator and wait until it is ready."""
    text = block("One coordinator", 2, ADDRESS=host.address)
    host.start("bash", "-c", f"exec {text}", log=logs / "coordinator", env=env)
    wait_ready(host)


def init_of_one(host: Host, s3_url: str) -> str:
    """Return the line that makes the state directory of a single coordinator on ``host``."""
    values = {"BUCKET": BUCKET, "S3_URL": s3_url, "LINK_MBIT": "200"}
    return block("One coordinator", 1, COORDINATOR_1=host.address, **values).strip()


def bring_up(site: Site, logs: Path, s3_url: str, env: Mapping[str, str], *more: str) -> Fleet:
    """Start a coordinator on the site's first host, with ``env`` and ``more`` settings; its other
    hosts are nodes."""
    control, *nodes = site.hosts
    init = init_of_one(control, s3_url)
    type_on(control, shlex.join([*shlex.split(init), *(w for m in more for w in ("--set", m))]))
    start_coordinator(control, logs, env)
    return Fleet(control, tuple(nodes), logs)


def bring_up_three(
    replicas: Sequence[Host],
    nodes: Sequence[Host],
    logs: Path,
    s3_url: str,
    link_mbit: float,
    **servers: str,
) -> Fleet:
    """Start three coordinators, whose etcd, Redis and PostgreSQL run; the first one leads.

    ``servers``: REDIS and POSTGRES of the page.
    """
    first = replicas[0]
    three = {f"COORDINATOR_{n}": each.address for n, each in enumerate(replicas, 1)}
    values = {"BUCKET": BUCKET, "S3_URL": s3_url, "LINK_MBIT": f"{link_mbit:g}", **servers}
    type_on(first, block("Three coordinators", 1, PKI="/home/user/pki", **values, **three))
    machines = {each.address: each for each in replicas}
    type_on(first, block("Three coordinators", 2, **three), machines=machines)
    fleet = Fleet(first, tuple(nodes), logs, tuple(replicas))
    for each in replicas:
        fleet.start_replica(each)
    return fleet
