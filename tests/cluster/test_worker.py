"""A scheduler of Dask's own, and nodes whose workers are started with `paceline worker`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.cluster import Fleet, make_dask_tls, reserve_port
from paceline.config import (
    ClusterSettings,
    Endpoints,
    HostSettings,
    Profile,
    Runtime,
    Secrets,
    save_runtime,
)
from paceline.system import usable_cores
from tests.cluster.conftest import eventually, processes_of
from tests.support.command import paceline


def free_port() -> int:
    with reserve_port("127.0.0.1") as reservation:
        return int(reservation.getsockname()[1])


def prepared(state: Path, profile: Profile, address: str = "") -> Runtime:
    state.mkdir()
    made = Runtime(
        profile=profile,
        state_dir=state,
        endpoints=Endpoints(scheduler_address=address, coordinator_url="https://127.0.0.1:1"),
        secrets=Secrets(),
    )
    save_runtime(made)
    return made


@dataclass
class Site:
    """A driver's directory and one for each node; they have only the TLS files in common."""

    root: Path
    driver: Runtime
    address: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, log: str, *argv: str) -> subprocess.Popen[bytes]:
        with (self.root / log).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *argv], stdout=output, stderr=output, cwd=self.root
            )
        self.started.append(process)
        return process

    def scheduler(self) -> subprocess.Popen[bytes]:
        files = self.driver.state_dir / "dask-tls"
        return self.start(
            "scheduler.log",
            *("dask", "scheduler", "--host", "127.0.0.1", "--port", self.address.split(":")[-1]),
            *("--protocol", "tls", "--no-dashboard", "--tls-ca-file", str(files / "ca.pem")),
            *("--tls-cert", str(files / "server.pem"), "--tls-key", str(files / "server-key.pem")),
        )

    def state(self, name: str) -> Path:
        return self.root / "home-of" / name

    def worker(self, name: str, *labels: str, at: str = "") -> subprocess.Popen[bytes]:
        state = self.state(at or name)
        if not state.exists():
            state.parent.mkdir(exist_ok=True)
            prepared(state, Profile())
            (state / "dask-tls").symlink_to(self.driver.state_dir / "dask-tls")
        return self.start(
            f"{at or name}.log",
            *("paceline.cli.main", "worker", "--state", str(state), "--worker-id", name),
            *("--scheduler", self.address, *labels),
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("fleet")
    address = f"tls://127.0.0.1:{free_port()}"
    driver = prepared(root / "driver", Profile(), address)
    make_dask_tls(driver.state_dir)
    made = Site(root, driver, address)
    made.scheduler()
    try:
        yield made
    finally:
        for each in reversed(made.started):
            each.terminate()
        for each in made.started:
            each.wait(30)
        eventually(lambda: processes_of(root) == [])


@pytest.fixture(scope="module")
def nodes(site: Site) -> Iterator[Fleet]:
    site.worker("left", "--rack", "r1", "--zone", "z")
    site.worker("right", "--host", "other", "--rack", "r2")
    with Fleet.connect(site.driver, timeout_s=60) as connection:
        eventually(lambda: len(connection.nodes()) == 2)
        yield connection


def test_workers_report_their_machine_and_labels(nodes: Fleet) -> None:
    left, right = nodes.nodes()
    assert (left.worker_id, right.worker_id) == ("left", "right")
    assert (left.labels.rack, left.labels.zone) == ("r1", "z")
    assert left.labels.host == os.uname().nodename
    assert (right.labels.host, right.labels.rack) == ("other", "r2")
    assert left.machine.cores == usable_cores()
    assert 2**28 < left.machine.memory_bytes <= psutil.virtual_memory().total
    assert left.machine.shared_memory_bytes > 0


def test_a_process_works_in_its_nodes_own_directory(site: Site, nodes: Fleet) -> None:
    received: list[dict[str, Any]] = []
    code = (
        "import json, os, sys; print(json.dumps({k: v for k, v in os.environ.items()"
        " if k.startswith('PACELINE_')} | {'cwd': os.getcwd(), 'python': sys.executable}))"
    )
    for name in ("left", "right"):
        ended = nodes.run_process(
            name, argv=["python", "-c", code], on_event=received.append, deadline_s=30
        )
        assert ended.exit_code == 0, ended.stderr_tail
    for name, each in zip(("left", "right"), received, strict=True):
        home = site.state(name)
        assert each["cwd"] == str(home / "nodes" / name / "work")
        assert each["PACELINE_STATE"] == str(home)
        assert each["PACELINE_WORKER_ID"] == name
        assert each["python"] == sys.executable
    assert not (site.driver.state_dir / "nodes").exists()


def test_workers_come_back_when_the_scheduler_was_restarted(site: Site, nodes: Fleet) -> None:
    scheduler = site.started[0]
    scheduler.terminate()
    scheduler.wait(30)
    site.scheduler()
    with Fleet.connect(site.driver, timeout_s=60) as connection:
        eventually(lambda: [each.worker_id for each in connection.nodes()] == ["left", "right"])


def test_two_workers_of_one_name_are_named(site: Site) -> None:
    """Dask refuses the second; it ends, or waits, and the first one stays."""
    second = site.worker("left", at="impostor")
    with Fleet.connect(site.driver, timeout_s=60) as connection:
        eventually(lambda: second.poll() is not None)
        assert [each.worker_id for each in connection.nodes()] == ["left", "right"]
    assert "left" in (site.root / "impostor.log").read_text()


FAKE_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
cd "$(dirname "$0")/$2" && exec sh -c "$3"
"""


def test_a_worker_over_ssh_is_started_again_and_ends_with_its_connection(tmp_path: Path) -> None:
    """``ssh`` is a program that runs the command in the host's directory; sshd is in a journey."""
    ssh = tmp_path / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(0o755)
    address = f"tls://127.0.0.1:{free_port()}"
    host = HostSettings(ssh="there", worker_id="far", rack="r7", program="./paceline")
    cluster = ClusterSettings(kind="ssh", scheduler=address, hosts=(host,))
    driver = prepared(tmp_path / "driver", Profile(cluster=cluster), address)
    make_dask_tls(driver.state_dir)
    (tmp_path / "there").mkdir()
    program = tmp_path / "there" / "paceline"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m paceline.cli.main "$@"\n')
    program.chmod(0o755)
    prepared(tmp_path / "there" / host.state, Profile())
    identity = tmp_path / "there" / host.state / "identity"
    identity.mkdir()
    (identity / "identity.json").write_text('{"worker_id": "far"}')  # it joined before
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", "cluster", "--state", driver.state_dir],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            stdout=log,
            stderr=log,
        )
    try:
        with Fleet.connect(driver, timeout_s=60) as connection:
            eventually(lambda: [each.labels.rack for each in connection.nodes()] == ["r7"])
            (first,) = connection.nodes()
            (worker,) = (
                each
                for each in psutil.Process(running.pid).children(recursive=True)
                if "--until-eof" in each.cmdline()
            )
            worker.kill()
            eventually(lambda: [e.address for e in connection.nodes()] not in ([], [first.address]))
        files = (tmp_path / "there" / host.state / "dask-tls").iterdir()
        assert {each.stat().st_mode & 0o777 for each in files} == {0o600}
    finally:
        running.terminate()
        assert running.wait(30) == 0, (tmp_path / "log").read_text()
    eventually(lambda: processes_of(tmp_path) == [])


def test_what_a_worker_lacks_is_one_line(tmp_path: Path) -> None:
    state = tmp_path / "state"
    prepared(state, Profile())

    worker = ("worker", "--state", str(state))
    unnamed = paceline(*worker)
    assert unnamed.returncode == 2
    assert "names no scheduler" in unnamed.stderr
    where = (*worker, "--scheduler", f"tls://127.0.0.1:{free_port()}", "--worker-id", "a")
    keyless = paceline(*where)
    assert keyless.returncode == 75
    assert "TLS files are not here" in keyless.stderr
    make_dask_tls(state)
    command = [sys.executable, "-m", "paceline.cli.main", *where]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert alone.returncode == 75
    assert "cannot register with Dask's scheduler" in alone.stderr
    for each in (unnamed, keyless, alone):
        assert each.stderr.rstrip().count("\n") == 0, each.stderr
