"""A coordinator and nodes, brought up by what docs/operations.md has an operator type."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.journeys.hosts import Ended, Host, Site, until

KEY, SECRET = "operatorskey", "operatorssecret"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


@contextmanager
def rclone_s3(site: Site, logs: Path) -> Iterator[str]:
    """Run an S3 server with a bucket ``models`` outside of the hosts; yield its URL."""
    (logs / "s3/models").mkdir(parents=True)
    rclone = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
    address = "10.77.200.1:9000"
    options = ["--etag-hash", "XXH128", "--vfs-cache-mode", "off", "--dir-cache-time", "1s"]
    with (logs / "s3.log").open("wb") as output:
        server = site.outside(
            [rclone, "serve", "s3", str(logs / "s3"), "--addr", address, "--config", "", *options],
            env={**os.environ, "RCLONE_AUTH_KEY": f'"{KEY},{SECRET}"'},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait(20)


@dataclass(frozen=True)
class Fleet:
    """A coordinator's host, two nodes, and where the coordinator is."""

    control: Host
    nodes: tuple[Host, ...]
    url: str
    logs: Path

    def log(self, name: str) -> str:
        path = self.logs / name
        return path.read_text() if path.exists() else ""

    def call(self, token: str, path: str, body: str = "") -> Ended:
        """Call the coordinator's REST as a program would."""
        content = ("-H", "Content-Type: application/json", "-H", "Idempotency-Key: journey")
        return self.control.run(
            *("curl", "-sS", "--fail-with-body", "--cacert", ".paceline/authority/ca.pem"),
            *("-H", f"Authorization: Bearer {token}", f"{self.url}{path}"),
            *((*content, "-d", body) if body else ()),
        )

    def agent(self, node: Host, *options: str, **env: str) -> None:
        """Join a node as the guide says, and start its agent."""
        name = f"node-{node.index}"
        made = self.control.run("paceline", "tokens", "join", "--worker-id", name).ok()
        node.write("token", made.out.strip())
        node.start(
            *("paceline", "agent", "--state", "state", "--worker-id", name),
            *("--listen", f"{node.address}:7700", "--coordinator", self.url, "--join", "@token"),
            *options,
            log=self.logs / name,
            env=env,
        )


def bring_up(site: Site, logs: Path, s3_url: str, env: Mapping[str, str], *more: str) -> Fleet:
    """Start a coordinator on the site's first host, with ``env`` and ``more`` settings; its other
    hosts are nodes."""
    control, *nodes = site.hosts
    url = f"https://{control.address}:7400"
    settings = [
        "security.rest_tls=installation",
        "security.peer_tls=mtls",
        "storage.bucket=models",
        "cluster.link_mbit=200",
        f"objects.endpoint_url={s3_url}",
        *more,
    ]
    control.run(
        *("paceline", "init", "--coordinator", url),
        *(word for each in settings for word in ("--set", each)),
    ).ok()
    control.start(
        *("paceline", "coordinator", "--state", ".paceline", "--host", control.address),
        *("--port", "7400", "--advertise", url),
        log=logs / "coordinator",
        env=env,
    )
    until(lambda: control.run("curl", "-sk", f"{url}/readyz").code == 0, "the coordinator listens")
    return Fleet(control, tuple(nodes), url, logs)
