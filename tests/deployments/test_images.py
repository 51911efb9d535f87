"""Images are built from the Containerfile, and run as the Kubernetes manifests run them.

The base image is Debian's minimal system, because no registry is reached. Each container is a
process with the image's files, the manifest's user and mounts, and the host's network.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.test_material import workload
from tests.project.test_wheel import build_wheel
from tests.support.command import paceline
from tests.support.etcd import EtcdCluster, etcd_cluster
from tests.support.servers import free_port, program

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.netns,  # root: buildah's chroots and mounts
    pytest.mark.services,
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).resolve().parents[2]
STATE = "/var/lib/paceline"
USER = 10001


class Builder:
    """Builds images and runs containers, all below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        store = ["--storage-driver", "vfs", "--root", directory / "s", "--runroot", directory / "r"]
        self._command = [program("buildah"), *map(str, store)]
        pip = directory / "pip.conf"  # how a site's index or CA reaches the build
        pip.write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
        self._site = ["-v", "/etc/ssl/certs:/etc/ssl/certs:ro", "-v", f"{pip}:/etc/pip.conf:ro"]

    def __call__(self, *words: str | Path) -> str:
        done = subprocess.run(
            [*self._command, *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr[-3000:]}"
        return done.stdout.strip()

    def build(self, locks: str, tag: str) -> str:
        """Build the Containerfile with the extras of ``locks``."""
        file = ROOT / "deployments" / "Containerfile"
        arguments = ["--build-arg", "BASE=localhost/base", "--build-arg", f"LOCKS={locks}"]
        context = self.directory / "context"
        self(
            "build",
            "--isolation",
            "chroot",
            *arguments,
            *self._site,
            "-f",
            file,
            "-t",
            tag,
            context,
        )
        return self("from", tag)

    def argv(self, container: str, mounts: dict[str, tuple[Path, bool]], *words: str) -> list[str]:
        """Return the command line of ``words`` in ``container``; a mount may be read-only."""
        volumes = [
            word
            for at, (path, read_only) in mounts.items()
            for word in ("-v", f"{path}:{at}{':ro' if read_only else ''}")
        ]
        return [*self._command, "run", "--isolation", "chroot", *volumes, container, "--", *words]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    directory = tmp_path_factory.mktemp("images")
    system = directory / "debian.tar"
    variant = ("--variant=minbase", "--include=python3,python3-venv,ca-certificates")
    subprocess.run(
        [program("mmdebstrap"), "--quiet", *variant, "bookworm", str(system)], check=True
    )
    made = Builder(directory)
    empty = made("from", "scratch")
    made("add", empty, system, "/")
    made("commit", "--quiet", empty, "localhost/base")
    system.unlink()
    shutil.copytree(ROOT / "requirements", directory / "context" / "requirements")
    build_wheel(directory / "context" / "dist")
    yield made
    made("rm", "--all")
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def agent_image(builder: Builder) -> str:
    return builder.build("base", "paceline:test")


@pytest.fixture(scope="module")
def coordinator_image(builder: Builder) -> str:
    return builder.build("base stores", "paceline-coordinator:test")


def test_a_nodes_image_holds_the_base_and_runs_as_its_user(
    builder: Builder, agent_image: str
) -> None:
    def run(*words: str) -> str:
        done = subprocess.run(
            builder.argv(agent_image, {}, *words), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("paceline", "--version").startswith("paceline, version")
    assert run("id", "-u").strip() == str(USER)
    mebibytes = int(run("du", "-sm", "/opt/paceline").split()[0])
    assert mebibytes < 200, "no torch, no Prefect (bytecode included)"
    assert set(run("ls", "/opt/paceline/bin").split()).isdisjoint({"pip", "uv"})


def until(check: Callable[[], Any], what: str, log: Path) -> Any:
    end_s = time.monotonic() + 90
    while not (found := check()):
        assert time.monotonic() < end_s, f"timed out waiting until {what}: {log.read_text()}"
        time.sleep(0.2)
    return found


@contextmanager
def running(argv: list[str], log: Path) -> Iterator[None]:
    """Run a container; its processes end with this block."""
    with (
        log.open("w") as output,
        subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *argv],
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def one_etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path / "etcd", members=1) as cluster:
        yield cluster


def new_token(made: Path) -> str | None:
    """Return a join token for node-1, or None while no replica leads."""
    done = paceline("tokens", "join", "--worker-id", "node-1", "--state", made)
    return done.stdout if done.returncode == 0 else None


def owned(path: Path, mode: int) -> Path:
    """Give ``path`` to the containers' group, as a volume of a Secret has it."""
    os.chown(path, 0, USER)
    path.chmod(mode)
    return path


def test_the_coordinators_manifest_admits_a_node_of_the_agents(
    builder: Builder,
    agent_image: str,
    coordinator_image: str,
    one_etcd: EtcdCluster,
    tmp_path: Path,
) -> None:
    port = free_port()
    url = f"https://localhost:{port}"
    made = tmp_path / "init"
    settings = {
        "security.rest_tls": "installation",
        "control.coordination": "etcd",
        "control.etcd_endpoints": json.dumps(list(one_etcd.access.endpoints)),
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = paceline("init", "--profile", "ci", *words, "--coordinator", url, "--state", made)
    assert done.returncode == 0, done.stderr

    (container,) = workload("coordinator")["spec"]["template"]["spec"]["containers"]
    secrets = tmp_path / "secret"
    (secrets / "authority").mkdir(parents=True)
    for name in ("runtime.json", "authority/ca.pem", "authority/ca-key.pem"):
        shutil.copy(made / name, secrets / name)
        owned(secrets / name, 0o440)
    sources = {"secrets": secrets / "runtime.json", "authority": secrets / "authority"}
    for each in container["volumeMounts"]:
        if each["name"] not in sources:
            directory = tmp_path / "volumes" / each["name"]
            directory.mkdir(parents=True)
            sources[each["name"]] = owned(directory, 0o2770)
    mounts = {
        each["mountPath"]: (sources[each["name"]], each.get("readOnly", False))
        for each in container["volumeMounts"]
    }
    arguments = [
        *container["command"], "--state=" + STATE, "--host=127.0.0.1", f"--port={port}",
        "--replica-id=paceline-coordinator-0", f"--advertise={url}",
    ]  # fmt: skip
    with ExitStack() as stack:
        log = tmp_path / "coordinator.log"
        stack.enter_context(running(builder.argv(coordinator_image, mounts, *arguments), log))

        def workers() -> list[str] | None:
            asked = paceline("status", "--json", "--state", made)
            if asked.returncode != 0:
                return None
            return [each["worker_id"] for each in json.loads(asked.stdout)["workers"]]

        until(lambda: workers() is not None, "the coordinator answers", log)
        token = until(lambda: new_token(made), "it leads", log)
        node = tmp_path / "node"
        node.mkdir(mode=0o700)
        (node / "join-token").write_text(token)
        (node / "join-token").chmod(0o600)
        for each in (node, node / "join-token"):
            os.chown(each, USER, USER)
        (agent,) = workload("agent")["spec"]["template"]["spec"]["containers"]
        words = [
            *agent["command"], f"--state={STATE}", "--worker-id", "node-1", "--host=node-1",
            f"--listen=127.0.0.1:{free_port()}", f"--coordinator={url}",
            f"--join=@{STATE}/join-token",
        ]  # fmt: skip
        log = tmp_path / "agent.log"
        stack.enter_context(running(builder.argv(agent_image, {STATE: (node, False)}, *words), log))
        until(lambda: workers() == ["node-1"], "the node is in the fleet", log)
