"""Prefect and MLflow on PostgreSQL, Redis and S3, brought up by what the guide has people type.

The hosts: ``stores`` has PostgreSQL and Redis, ``control`` the coordinator and Dask's scheduler,
``flows`` the Prefect worker; those two run a Prefect and an MLflow server each. Then nodes, and a
laptop that has the wheel alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.journeys.fleet import ENVIRONMENT, rclone_s3
from tests.journeys.guide import commands, commands_under
from tests.journeys.hosts import Ended, Host, Site, site, until
from tests.journeys.stores import PASSWORD, Authority, start_postgres, start_redis
from tests.journeys.trainers import TYPED, Trainers, add_nodes

PAGE = commands("how-to/run-the-control-plane.md")
SECRETS = {
    "PREFECT_PASSWORD": "prefectspassword",
    "MLFLOW_PASSWORD": "mlflowspassword",
    "API_PASSWORD": "apispassword",
    "REDIS_PASSWORD": PASSWORD,
}
PREFECT_HEALTH, MLFLOW_HEALTH = "http://127.0.0.1:4200/api/health", "http://127.0.0.1:5000/health"


@dataclass(frozen=True, kw_only=True)
class ControlPlane(Trainers):
    """A fleet whose Prefect and MLflow keep everything in servers of others."""

    stores: Host
    flows: Host
    laptop: Host
    authority: Authority

    def log(self, block: str, host: Host) -> str:
        """Return what a block that goes on printed on ``host``."""
        return (self.logs / f"{block}-{host.index}").read_text()

    def start_servers(self, *hosts: Host) -> None:
        """Write the settings on each host, check them, and start Prefect and MLflow."""
        for host in hosts:
            host.run("mkdir", "-p", "etc").ok()
            self.type("settings", host)
        for host in hosts:
            self.stays("prefect", host)
            self.stays("mlflow", host)
            for url in (PREFECT_HEALTH, MLFLOW_HEALTH):
                until(lambda at=url, on=host: on.run("curl", "-sf", at).code == 0, url, 120)

    def start_coordinator(self) -> None:
        """Start the coordinator and Dask's scheduler."""
        self.stays("coordinator")
        self.stays("scheduler")
        ready = f"https://{self.control.address}:7400/readyz"
        until(lambda: self.control.run("curl", "-skf", ready).code == 0, ready, 60)

    def start_worker(self, host: Host) -> None:
        """Give ``host`` the state directory, and start a Prefect worker on it."""
        if host is not self.control:
            self.control.copy(".paceline", host)  # the page's `scp -rp`
        self.type("register", host)
        self.stays("worker-of-prefect", host)

    def log_in(self, *options: str, token: str | None = None, **env: str) -> None:
        """Log in on the laptop with a new token, as the guide says.

        ``token`` is the line that makes it (the guide's of scope ``deploy``); ``env`` is the
        laptop's.
        """
        (line,) = commands_under("how-to/use-from-a-laptop.md", "A token, and the authority")
        made = self.control.run("sh", "-c", token or line).ok()
        authority = re.search(r"--authority ([0-9a-f]{64})", made.err)
        assert authority, made.err
        url = f"https://{self.control.address}:7400"
        self.laptop.run(
            *("paceline", "login", url, "--authority", authority[1], *options),
            env={"PACELINE_TOKEN": made.out.strip(), **env},
        ).ok()

    def on_laptop(self, line: str, **env: str) -> Ended:
        """Type a line on the laptop, which knows a URL and a token."""
        return self.laptop.run("bash", "-euc", line, env={**self.env, **env})


def page_blocks() -> dict[str, str]:
    """Return the page's blocks and those of the page that it refers to, each under one name."""
    own = {"worker-of-prefect" if name == "worker" else name: each for name, each in PAGE.items()}
    return TYPED | commands("how-to/back-up-and-restore.md") | own


@contextmanager
def control_plane(
    software: Path, laptop: Path, logs: Path, *more: str, nodes: int = 2
) -> Iterator[ControlPlane]:
    """Yield a running fleet; ``more`` are options of ``paceline init``."""
    each = [*[software] * (nodes + 3), laptop]
    with site(each, hosts=len(each), rate_mbit=400) as bed, rclone_s3(bed, logs) as s3_url:
        yield bring_up(bed, logs, s3_url, more)


def bring_up(bed: Site, logs: Path, s3_url: str, more: Sequence[str]) -> ControlPlane:
    """Type the page from its first block to the last that a fleet needs."""
    stores, control, flows, *nodes, laptop = bed.hosts
    (logs / "authority").mkdir()
    authority = Authority(logs / "authority")
    for each in (stores, control, flows):
        authority.issue(each)
    admin = start_stores(stores, logs)
    env = {
        **ENVIRONMENT,
        **SECRETS,
        "CONTROL": control.address,
        "STORES": stores.address,
        "PKI": "/home/user/pki",
        "ETC": "/home/user/etc",
        "S3": s3_url,
        "BUCKET": "models",
        "POSTGRES_ADMIN": admin,
        "STATE": ".paceline",
    }
    fleet = ControlPlane(
        control=control,
        nodes=tuple(nodes),
        bed=bed,
        env=env,
        logs=logs,
        typed=page_blocks(),
        stores=stores,
        flows=flows,
        laptop=laptop,
        authority=authority,
    )
    fleet.type("databases", stores, PGPASSWORD=PASSWORD)
    fleet.start_servers(control, flows)
    fleet.type_with("init", more)
    fleet.start_coordinator()
    add_nodes(fleet)
    fleet.start_worker(flows)
    fleet.log_in()
    return fleet


def start_stores(host: Host, logs: Path) -> str:
    """Start Redis and PostgreSQL as their operator would; return a superuser's URL."""
    start_redis(host, logs)
    return start_postgres(host, logs)
