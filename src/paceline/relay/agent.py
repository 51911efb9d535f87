"""The agent: one lean process a node that relays models for the coordinator.

It registers, beats, does what the answers ask (fetch lanes, activate, cancel) and otherwise lets
the relay driver work; with the coordinator away the data plane goes on and beats are retried with
jitter. It imports no orchestrator and no ML library; boto3 comes in when it first reads from S3.

Run it: ``paceline agent --state DIR --worker-id node-0 --host H --rack R``.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.client import CoordinatorClient
from paceline.errors import (
    InvalidInput,
    NotFound,
    PacelineError,
    StaleEpoch,
    TemporaryError,
)
from paceline.manifest import Manifest, parse_manifest
from paceline.profile import Runtime, load_runtime
from paceline.relay.driver import RelayDriver
from paceline.relay.lifetime import StopSignal
from paceline.relay.origin import DirectoryReader, RangeReader, S3Reader
from paceline.relay.pacing import RateMeter
from paceline.relay.store import Store
from paceline.relay.tcp import TcpTransport
from paceline.wire.calls import Command, Heartbeat, HeartbeatAnswer, RegisterWorker
from paceline.wire.plan import Labels
from paceline.wire.records import WorkerStatus

log = logging.getLogger(__name__)

AGENT_FILE = "agent.json"
INCARNATION_FILE = "incarnation"
RETRY_S = 0.5  # after a call that failed; doubled up to RETRY_MAX_S, jittered
RETRY_MAX_S = 5.0
CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Who this agent is and where it works."""

    state_dir: Path
    worker_id: str
    host: str = ""  # labels: where the node stands
    rack: str = ""
    zone: str = ""
    link_mbit: float | None = None  # None: the profile's
    listen: str = "127.0.0.1:0"
    die_with_parent: bool = False


def run_agent(config: AgentConfig) -> int:
    """Work until SIGTERM (or SIGINT) and return the exit code; the body of ``paceline agent``."""
    runtime = load_runtime(config.state_dir)
    stop = StopSignal(die_with_parent=config.die_with_parent)
    agent = Agent(config, runtime)
    agent.start()
    try:
        agent.run(stop)
    finally:
        agent.close()
    return 0


class Agent:
    """The control loop around one RelayDriver."""

    def __init__(self, config: AgentConfig, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self._node_dir = runtime.node_dir(config.worker_id)
        self._node_dir.mkdir(parents=True, exist_ok=True)
        self._store = Store(self._node_dir / "store")
        self.incarnation = self._next_incarnation()
        host, port = _listen(config.listen)
        self._link_mbit = config.link_mbit or runtime.profile.cluster.link_mbit
        secrets = runtime.secrets
        self.driver = RelayDriver(
            worker_id=config.worker_id,
            store=self._store,
            transport=TcpTransport(secrets.coordinator_token),
            open_source=source_opener(runtime),
            incarnation=self.incarnation,
            host=host,
            port=port,
            link_mbit=self._link_mbit,
            seed=self.incarnation,
        )
        self._client = CoordinatorClient(
            runtime.endpoints.coordinator_url, secrets.coordinator_token, CALL_TIMEOUT_S
        )
        self._meters = RateMeter(), RateMeter()
        self._manifests: dict[str, Manifest] = {}

    def start(self) -> None:
        """Listen, and say so in agent.json."""
        self.driver.start()
        said = {
            "pid": os.getpid(),
            "address": self.driver.server.address,
            "incarnation": self.incarnation,
            "worker_id": self._config.worker_id,
        }
        _write_atomically(self._node_dir / AGENT_FILE, json.dumps(said))
        log.info("agent listens worker=%s address=%s", self._config.worker_id, said["address"])

    def close(self) -> None:
        """Stop relaying; verified pieces are made durable first."""
        self.driver.stop()
        (self._node_dir / AGENT_FILE).unlink(missing_ok=True)

    # ── the control loop ─────────────────────────────────────────────────────────────────────────

    def run(self, stop: StopSignal) -> None:
        """Register and beat until told to stop."""
        failures, registered, wait_s = 0, False, 0.0
        while not stop.wait(wait_s):
            try:
                if not registered:
                    self._register()
                    registered = True
                answer = self._beat()
                if not answer.go_on:  # lost for the coordinator: come back as a new incarnation
                    registered = False
                    self._renew()
                    wait_s = 0.0
                    continue
                for command in answer.commands:
                    self._execute(command)
                failures, wait_s = 0, answer.next_beat_s
            except StaleEpoch as error:
                log.warning("another incarnation was here: %s", error)
                registered = False
                self._renew()
                failures += 1
                wait_s = _backoff_s(failures)
            except PacelineError as error:
                failures += 1
                wait_s = _backoff_s(failures)
                level = logging.WARNING if failures == 1 else logging.DEBUG
                log.log(level, "coordinator: %s (next try in %.1f s)", error, wait_s)
                if not isinstance(error, TemporaryError):
                    registered = False

    def _register(self) -> None:
        config = self._config
        call = RegisterWorker(
            worker_id=config.worker_id,
            hostname=config.host or socket.gethostname(),
            rack=config.rack,
            available_storage=self._store.available_bytes(),
            labels=Labels(host=config.host, rack=config.rack, zone=config.zone),
            address=self.driver.server.address,
            link_mbit=self._link_mbit,
            incarnation=self.incarnation,
            pid=os.getpid(),
        )
        self._client.register(call)
        log.info("registered worker=%s incarnation=%d", config.worker_id, self.incarnation)

    def _beat(self) -> HeartbeatAnswer:
        beats = self.driver.beats()
        receiving = next((b for b in beats if b.status is WorkerStatus.RECEIVING), None)
        newest = receiving or (beats[-1] if beats else None)
        into, out = self._meters
        return self._client.heartbeat(
            Heartbeat(
                worker_id=self._config.worker_id,
                status=newest.status if newest else WorkerStatus.IDLE,
                chunks_received=newest.chunks_received if newest else (),
                bandwidth_in=into.look(self.driver.nic_in.total_bytes),
                bandwidth_out=out.look(self.driver.nic_out.total_bytes),
                incarnation=self.incarnation,
                available_storage=self._store.available_bytes(),
                deployments=tuple(beats),
            )
        )

    def _execute(self, command: Command) -> None:
        deployment_id = command.deployment_id
        match command.kind:
            case "fetch_lanes":
                self._fetch_lanes(deployment_id)
            case "activate":
                known = any(b.deployment_id == deployment_id for b in self.driver.beats())
                if not known:  # completed by an earlier process: from disk it is so at once
                    self._fetch_lanes(deployment_id)
                self.driver.activate(deployment_id)
            case "cancel":
                self._manifests.pop(deployment_id, None)
                self.driver.cancel(deployment_id)

    def _fetch_lanes(self, deployment_id: str) -> None:
        try:
            lanes = self._client.lanes(deployment_id, self._config.worker_id)
            manifest = self._manifests.get(deployment_id)
            if manifest is None or manifest.digest != lanes.manifest_digest:
                manifest = parse_manifest(self._client.manifest_bytes(deployment_id))
                self._manifests = {
                    deployment_id: manifest
                }  # one is enough; the driver keeps its own
        except NotFound as error:
            log.info("no lanes for us: %s", error)
            return
        self.driver.deploy(lanes, manifest)

    # ── identity ─────────────────────────────────────────────────────────────────────────────────

    def _next_incarnation(self) -> int:
        path = self._node_dir / INCARNATION_FILE
        try:
            last = int(path.read_text())
        except (FileNotFoundError, ValueError):
            last = 0
        _write_atomically(path, str(last + 1))
        return last + 1

    def _renew(self) -> None:
        self.incarnation = self.driver.incarnation = self._next_incarnation()


def source_opener(runtime: Runtime) -> Callable[[str], RangeReader]:
    """Return what opens an origin by URL; S3 (and boto3) only when one is asked for."""

    def open_source(url: str) -> RangeReader:
        if not url.startswith("s3://"):
            return DirectoryReader(Path(url.removeprefix("file://")))
        from paceline.objects import ObjectStore

        return S3Reader(url, ObjectStore.from_runtime(runtime))

    return open_source


def _listen(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidInput("bad listen address", got=listen, wanted="host:port")
    return host, int(port)


def _backoff_s(failures: int) -> float:
    return min(RETRY_MAX_S, RETRY_S * 2.0 ** min(failures - 1, 8)) * random.uniform(0.5, 1.0)


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main(arguments: list[str]) -> int:
    """Run an agent from ``key=value`` arguments: for tests and supervisors without the CLI."""
    given = dict(argument.split("=", 1) for argument in arguments)
    level = given.get("log", "INFO")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return run_agent(
            AgentConfig(
                state_dir=Path(given["state_dir"]),
                worker_id=given["worker_id"],
                host=given.get("host", ""),
                rack=given.get("rack", ""),
                link_mbit=float(given["link_mbit"]) if "link_mbit" in given else None,
                die_with_parent=given.get("die_with_parent") == "true",
            )
        )
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
