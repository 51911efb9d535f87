"""Two halves of the network: three hosts in namespaces, each with an etcd member and a replica.

Blackhole routes cut one host off from the other two; clients reach all three all the time, so that
whoever answers as a leader is caught. What any replica acknowledged goes into one history.
"""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.leaders.cluster import ask, make_model
from benchmarks.leaders.history import Final, History, Invocation, violations
from benchmarks.testbed import start, why_not
from benchmarks.testbed.watcher import NETNS
from paceline.client import CoordinatorClient
from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.errors import PacelineError, TemporaryError
from paceline.schemas import CreateDeployment, Heartbeat, RegisterWorker, WorkerStatus
from tests.coordinator.leader.fakes import until
from tests.support.servers import program

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.timeout(240),
]

CLONE_NEWNET = 0x40000000
PORT = 7400
REPLICAS = 3


def enter(namespace: str) -> None:
    """Have this thread's sockets be made in ``namespace`` from here on."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(NETNS / namespace, os.O_RDONLY)
    try:
        if libc.setns(fd, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(fd)


class Halves:
    """The hosts, what runs on them, and what cuts them apart."""

    def __init__(self, bed, state: Path) -> None:
        self.bed, self.state = bed, state
        self.addresses = [host.address for host in bed.hosts]
        self.urls = tuple(f"http://{each}:{PORT}" for each in self.addresses)
        self.token = secrets.token_hex(16)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.history = History()
        self.stopping = threading.Event()
        self.threads: list[threading.Thread] = []
        self.broken: list[str] = []

    def start(self) -> None:
        peers = ",".join(f"n{i}=http://{a}:2380" for i, a in enumerate(self.addresses))
        etcd = program("etcd")
        for host, address in enumerate(self.addresses):
            client, peer = f"http://{address}:2379", f"http://{address}:2380"
            argv = [etcd, "--name", f"n{host}", "--data-dir", str(self.state / f"etcd{host}")]
            argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
            argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            argv += ["--initial-cluster", peers, "--log-level", "warn", "--pre-vote"]
            self._popen(host, argv, f"etcd{host}.err")
        profile = Profile.model_validate(
            {
                "security": {"rest_tls": "plaintext-anywhere"},
                "control": {
                    "coordination": "etcd",
                    "etcd_endpoints": [f"http://{each}:2379" for each in self.addresses],
                    "replicas": REPLICAS,
                    "lease_s": 3.0,
                },
            }
        )
        runtime = Runtime(
            profile=profile,
            state_dir=self.state,
            endpoints=Endpoints(coordinator_url=self.urls[0], coordinator_urls=self.urls),
            secrets=Secrets(coordinator_token=self.token),
        )
        save_runtime(runtime)
        for host, address in enumerate(self.addresses):
            argv = [sys.executable, "-m", "paceline.cli.main", "coordinator"]
            argv += ["--state", str(self.state), "--host", address, "--port", str(PORT)]
            argv += ["--replica-id", f"r{host}", "--advertise", self.urls[host]]
            self._popen(host, argv, f"r{host}.err")
        until(lambda: self.agreed() is not None, "three replicas that agree", 60)

    def _popen(self, host: int, argv: list[str], log: str) -> None:
        with (self.state / log).open("ab") as errors:
            self.processes.append(self.bed.popen(host, argv, stdout=errors, stderr=errors))

    def outside(self, what):
        """Return what ``what()`` gives on the clients' side of the network."""
        found = []

        def body():
            enter(self.bed.core)
            found.append(what())

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        return found[0] if found else None

    def ask(self, host: int, method: str = "GET", path: str = "/readyz", body=None):
        url, token = self.urls[host], self.token
        return self.outside(lambda: ask(url, method, path, token=token, body=body, timeout_s=3))

    def status(self, host: int, method: str, path: str, body=None) -> int:
        """Return the status of one replica's own answer, 0 where none came in time."""
        said = self.ask(host, method, path, body)
        return said.status if said is not None else 0

    def agreed(self) -> int | None:
        """Return the host whose replica leads, if all three say so."""
        said = [self.ask(host) for host in range(REPLICAS)]
        leaders = {each.leader for each in said if each is not None and each.status == 200}
        if None in said or len(leaders) != 1 or "" in leaders:
            return None
        return self.urls.index(leaders.pop())

    def cut(self, host: int) -> None:
        """Blackhole routes between one host and the other two, on both sides."""
        self._routes("add", host)

    def heal(self, host: int) -> None:
        self._routes("del", host)

    def _routes(self, verb: str, host: int) -> None:
        for other in range(REPLICAS):
            if other != host:
                for here, there in ((host, other), (other, host)):
                    name, address = self.bed.namespace(here), self.addresses[there]
                    argv = ["ip", "-n", name, "route", verb, "blackhole", f"{address}/32"]
                    subprocess.run(argv, check=True)

    def load(self, source: str) -> None:
        """One client at each replica that follows nobody: whatever is answered is from there."""
        for host in range(REPLICAS):
            for body in (self._heartbeat_loop, self._create_on):
                thread = threading.Thread(target=self._outside_on, args=(body, host, source))
                self.threads.append(thread)
                thread.start()

    def _outside_on(self, body, host: int, source: str) -> None:
        enter(self.bed.core)
        client = CoordinatorClient(self.urls[host], self.token, 2.0)
        try:
            body(client, host, source)
        except Exception as error:  # noqa: BLE001 (told at the end of the test)
            self.broken.append(f"{type(error).__name__}: {error}")
        finally:
            client.close()

    def _note(self, kind, key, call, **more):
        began_s, outcome, answer = time.monotonic(), "unknown", None
        try:
            answer = call()
            outcome = "acknowledged"
        except TemporaryError:
            pass
        except PacelineError as error:
            outcome = "refused"
            self.broken.append(str(error))
        told = {name: read(answer) for name, read in more.items()} if answer else {}
        times = {"began_s": began_s, "ended_s": time.monotonic()}
        self.history.add(Invocation(kind=kind, key=key, outcome=outcome, **times, **told))
        return answer

    def _heartbeat_loop(self, client, host, _):
        beat = Heartbeat(worker_id=f"w{host}", status=WorkerStatus.IDLE)
        while not self.stopping.wait(0.05):
            self._note("beat", f"w{host}", lambda: client.heartbeat(beat), epoch=lambda a: a.epoch)

    def _create_on(self, client, host, source):
        number = 0
        while not self.stopping.wait(0.2):
            key = f"r{host}-{number}"
            call = CreateDeployment(
                model_id="m", version="v", source_url=source, target_workers=("none",), run_id=key
            )
            made = self._note(
                "create", key, lambda c=call, k=key: client.create(c, k),
                answer=lambda a: a.deployment_id,
            )  # fmt: skip
            number += made is not None

    def acknowledged(self, after_s: float, kind: str = "create") -> list[Invocation]:
        return [
            each
            for each in self.history.all()
            if each.kind == kind and each.outcome == "acknowledged" and each.began_s > after_s
        ]

    def close(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(30)
        for each in self.processes:
            each.send_signal(signal.SIGKILL)
            each.wait(10)


@pytest.fixture
def halves(tmp_path):
    if reason := why_not():
        if "netns" in os.environ.get("PACELINE_REQUIRE", ""):
            pytest.fail(f"required but missing: {reason}")
        pytest.skip(reason)
    with start(hosts=REPLICAS, rate_mbit=1000) as bed:
        made = Halves(bed, tmp_path)
        try:
            made.start()
            yield made
        finally:
            made.close()


def test_two_halves_have_one_effective_leader_and_heal_by_themselves(halves, tmp_path):
    halves.load(make_model(tmp_path / "sources" / "v", "v", 64 * 1024))
    until(lambda: halves.acknowledged(0.0), "writes")
    old = halves.agreed()
    register = RegisterWorker(
        worker_id="witness", hostname="h", rack="r", available_storage=1, address="127.0.0.1:9"
    )
    body = register.model_dump_json().encode()

    # The leader is in the minority.
    cut_s = time.monotonic()
    halves.cut(old)
    until(lambda: any(not each.key.startswith(f"r{old}-") for each in halves.acknowledged(cut_s)),
          "writes that the majority accepts", 60)  # fmt: skip
    led_s = time.monotonic()
    for method, path, sent in (
        ("POST", "/workers/register", body),
        ("POST", "/workers/heartbeat", b'{"worker_id": "w0", "status": "idle"}'),
        ("DELETE", "/deployments/none", None),
    ):
        assert halves.status(old, method, path, sent) == 503, "nobody is sent anywhere from here"
    until(lambda: len(halves.acknowledged(led_s)) > 5, "more writes on the majority's side")
    assert not [each for each in halves.acknowledged(led_s) if each.key.startswith(f"r{old}-")]
    halves.heal(old)
    until(lambda: halves.agreed() not in (None, old), "one leader, and it is another", 60)
    until(lambda: halves.status(old, "POST", "/workers/register", body) == 307, "it follows")

    # A standby is in the minority: it refuses, the others go on, also where etcd had to elect.
    leader = halves.agreed()
    standby = next(host for host in range(REPLICAS) if host != leader)
    halves.cut(standby)
    until(lambda: halves.status(standby, "POST", "/workers/register", body) == 503,
          "it knows no leader any more", 60)  # fmt: skip
    cut_s = time.monotonic()
    until(lambda: len(halves.acknowledged(cut_s)) > 10, "writes go on", 60)
    assert not [each for each in halves.acknowledged(cut_s) if each.key.startswith(f"r{standby}-")]
    halves.heal(standby)
    until(lambda: halves.agreed() is not None, "all three agree again", 60)
    healed_s = time.monotonic()
    until(lambda: len(halves.acknowledged(healed_s)) > 5, "writes go on", 60)

    halves.stopping.set()
    for thread in halves.threads:
        thread.join(30)
    client = CoordinatorClient(halves.urls, halves.token, patience_s=30.0)
    halves.outside(lambda: client.register(register))  # finds the leader, who knows everything
    deployments = halves.outside(client.deployments)
    final = Final(
        deployments=tuple((d.deployment_id, d.run_id, d.status.value) for d in deployments),
        incarnations={},
        ledger={},
    )
    assert halves.broken == []
    assert violations(halves.history.all(), final) == []
    epochs = {each.epoch for each in halves.acknowledged(0.0, "beat")}
    assert len(epochs) > 1, "leaders changed, and no answer of an older one came after a newer's"
