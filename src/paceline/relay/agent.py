"""The node agent: one lightweight process a node that relays models for the coordinator.

It registers, sends heartbeats, executes the commands in the answers (fetch lanes, activate, cancel)
and leaves the transfers to the relay driver. While the coordinator is unreachable the data plane
continues, also across a restart of the agent, and heartbeats are retried with jitter. It imports no
orchestrator and no ML library; boto3 is imported at the first read from S3 (or at the start, with
``warm``).

Run it: ``paceline agent --state DIR --worker-id node-0 --host H --rack R``. It exits with 0 after
SIGTERM or SIGINT, else with the code of the error that it names.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

from paceline import hashing
from paceline.client import CoordinatorClient
from paceline.config import Runtime, load_runtime
from paceline.errors import (
    NotFound,
    PacelineError,
    PortInUse,
    StaleEpoch,
    TemporaryError,
    UntrustedManifest,
)
from paceline.manifest import Manifest, parse_manifest
from paceline.manifest.signing import TrustPolicy, verify_signature
from paceline.relay import process as descriptors
from paceline.relay.deployments import StoredLanes, as_error
from paceline.relay.joining import Renewal
from paceline.relay.node import RelayDriver
from paceline.relay.process import PARENT_POLL_S, AgentConfig, StopSignal, address_of, advertised
from paceline.relay.sources import Sources
from paceline.relay.store.disk_space import StorePolicy
from paceline.relay.store.origin_reads import OriginReadCounts
from paceline.relay.store.store import Store
from paceline.relay.transport.contract import Transport
from paceline.relay.transport.pacing import RateMeter
from paceline.relay.transport.transports import transport_for
from paceline.schemas.calls import (
    NEWS_S,
    Command,
    DeploymentBeat,
    EdgeTally,
    Heartbeat,
    HeartbeatAnswer,
    RegisterWorker,
)
from paceline.schemas.plan import Labels, WorkerLanes
from paceline.schemas.records import WorkerStatus
from paceline.system.files import write_durably
from paceline.text import log_to_stderr

# Heartbeats: the state of the agent's deployments, and what changed since the last acknowledged
# one.
#
# Counts of edges are cumulative, so that a lost heartbeat loses nothing; only those that changed
# are sent, because a node that served fifty peers need not list them all for the rest of the day.

ENDED = (WorkerStatus.COMPLETE, WorkerStatus.FAILED, WorkerStatus.VERIFICATION_FAILED)


class HeartbeatBuilder:
    """Builds the heartbeats of one agent; used by one thread."""

    def __init__(self, worker_id: str, driver: RelayDriver) -> None:
        self._worker_id = worker_id
        self._driver = driver
        self._meters = RateMeter(), RateMeter()
        self._number = 0
        self._told: dict[tuple[str, str, str], EdgeTally] = {}
        self._telling: dict[tuple[str, str, str], EdgeTally] = {}

    def beat(self, available_storage: int) -> Heartbeat:
        """Return the next heartbeat."""
        beats = self._driver.beats()
        receiving = next((b for b in beats if b.status is WorkerStatus.RECEIVING), None)
        newest = receiving or (beats[-1] if beats else None)
        into, out = self._meters
        self._telling = {}
        self._number += 1
        return Heartbeat(
            worker_id=self._worker_id,
            status=newest.status if newest else WorkerStatus.IDLE,
            chunks_received=newest.chunks_received if newest else (),
            bandwidth_in=into.look(self._driver.nic_in.total_bytes),
            bandwidth_out=out.look(self._driver.nic_out.total_bytes),
            incarnation=self._driver.incarnation,
            number=self._number,
            available_storage=available_storage,
            deployments=tuple(self._moved(each) for each in beats),
        )

    def was_heard(self) -> None:
        """Record that the coordinator acknowledged the last heartbeat."""
        self._told |= self._telling
        self._telling = {}

    def forget(self) -> None:
        """Report all edges again: the coordinator may be another process without the earlier
        counts.
        """
        self._told.clear()

    def _moved(self, beat: DeploymentBeat) -> DeploymentBeat:
        edges = []
        for edge in beat.edges:
            key = (beat.deployment_id, edge.source, edge.reader)
            if self._told.get(key) != edge:
                edges.append(edge)
                self._telling[key] = edge
        return beat.model_copy(update={"edges": tuple(edges)})


log = logging.getLogger(__name__)

AGENT_FILE = "agent.json"
INCARNATION_FILE = "incarnation"
PORT_FILE = "port"
RETRY_S = 0.5  # after a call that failed; doubled up to RETRY_MAX_S, jittered
RETRY_MAX_S = 2.0  # a new leader should receive all heartbeats within seconds
CALL_TIMEOUT_S = 10.0
HOLD_S = 1.0  # how long an idle agent's heartbeat waits for a command
ALONE_S = 2.0  # how long a restarted agent tries the coordinator before it resumes its transfers


def run_agent(config: AgentConfig) -> int:
    """Run an agent until SIGTERM (or SIGINT) and return the exit code; the body of ``paceline
    agent``.

    Raises InvalidProfile and InvalidInput (settings), PortInUse, StateLocked (another agent has
    this node's store), StorageFull and StorageFailed; nothing is left behind then.
    """
    runtime = load_runtime(config.state_dir)
    descriptors.allow_all()
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
        security = runtime.profile.security
        self._trust = TrustPolicy.of(
            security.trusted_publishers, required=security.require_signature
        )
        host, port = address_of(config.listen)
        self._advertised(config.listen)  # refuses a bad address before anything is created
        self._transport = transport = transport_for(runtime, host, config.worker_id)
        self._renewal = Renewal.of(runtime, on_renewed=self._go_on_as)
        self._link_mbit = config.link_mbit or runtime.profile.cluster.link_mbit
        self._sources = Sources(runtime)
        self._process = secrets.token_hex(8)
        self._news = threading.Event()
        self._interval_s = 0.0  # between heartbeats, as the coordinator's last answer set it
        self._node_dir = runtime.node_dir(config.worker_id)
        new = not self._node_dir.exists()
        self._node_dir.mkdir(parents=True, exist_ok=True)
        self._store = Store(self._node_dir / "store", StorePolicy.of(runtime.profile.store))
        try:
            self.incarnation = self._next_incarnation()
            self._readings = OriginReadCounts(self._node_dir / "readings")
            self.driver = self._make_driver(transport, host, port)
        except BaseException:
            if new:  # only we can have written there: the store is still locked by us
                shutil.rmtree(self._node_dir, ignore_errors=True)
            self._store.close()
            raise
        # Without retries of its own: this loop waits between two attempts.
        self._client = CoordinatorClient.of(runtime, CALL_TIMEOUT_S, patience_s=0.0, worker=True)
        self._report = HeartbeatBuilder(config.worker_id, self.driver)
        self._assignments = StoredLanes(self._node_dir / "assignments")
        self._manifests: dict[str, Manifest] = {}
        self._left: list[tuple[WorkerLanes, Manifest]] = []  # lanes of an earlier process
        self._broken: Exception | None = None

    def _advertised(self, listening: str) -> str:
        known = self._runtime.endpoints
        urls = known.coordinator_urls or (known.coordinator_url,)
        return advertised(listening, self._config.advertise, urls)

    def _make_driver(self, transport: Transport, host: str, port: int) -> RelayDriver:
        limit_mbit = self._config.limit_mbit
        if limit_mbit is None and self._runtime.profile.cluster.paced:
            limit_mbit = self._link_mbit

        def make(port: int) -> RelayDriver:
            return RelayDriver(
                worker_id=self._config.worker_id,
                store=self._store,
                transport=transport,
                open_source=self._sources.open,
                incarnation=self.incarnation,
                host=host,
                port=port,
                link_mbit=limit_mbit or None,
                seed=self.incarnation,
                coordinated=True,
                readings=self._readings,
                on_news=self._news.set,
            )

        if port:
            return make(port)
        # Reuse the last process's port: peers that have its address reach this process without a
        # coordinator.
        try:
            return make(int((self._node_dir / PORT_FILE).read_text()))
        except (FileNotFoundError, ValueError, PortInUse):
            return make(0)

    def start(self) -> None:
        """Listen, write agent.json, and load the lanes that an earlier process stored."""
        self.driver.start()
        address = self.address = self._advertised(self.driver.server.address)
        said = {
            "pid": os.getpid(),
            "address": address,
            "incarnation": self.incarnation,
            "worker_id": self._config.worker_id,
        }
        write_durably(self._node_dir / PORT_FILE, address.rpartition(":")[2].encode())
        write_durably(self._node_dir / AGENT_FILE, json.dumps(said).encode())
        log.info(
            "agent listens worker=%s address=%s sha256=%s",
            self._config.worker_id,
            address,
            hashing.ENGINE,
        )
        self._left = list(self._assignments.load())
        if self._renewal is not None:
            self._renewal.start()
        if self._config.warm:
            objects = self._sources.objects()
            threading.Thread(target=objects.warm_up, name="warm-up", daemon=True).start()

    def close(self) -> None:
        """Stop relaying; verified pieces become durable first."""
        if self._renewal is not None:
            self._renewal.stop()
        self.driver.stop()
        (self._node_dir / AGENT_FILE).unlink(missing_ok=True)

    def run(self, stop: StopSignal) -> None:
        """Register and send heartbeats until ``stop`` is set; a call that hangs does not delay
        that.
        """
        threading.Thread(target=self._control, name="agent-control", daemon=True).start()
        while not stop.wait(PARENT_POLL_S):
            if self._broken is not None:
                raise self._broken

    # ── the control loop ─────────────────────────────────────────────────────────────────────────

    def _control(self) -> None:
        try:
            self._beat_on()
        except Exception as error:
            log.exception("the agent's control loop broke")
            self._broken = error

    def _beat_on(self) -> None:
        failures, registered, withdrawals = 0, False, 0
        alone_s = time.monotonic() + ALONE_S
        while True:
            began_s = time.monotonic()
            if self.driver.withdrawals > withdrawals:  # holds less than reported
                withdrawals, registered = self.driver.withdrawals, False
                self._renew()
            try:
                if not registered:
                    self._register()
                    registered = True
                answer = self._beat()
                if answer.go_on:
                    for command in answer.commands:
                        self._execute(command)
                    self.driver.heard(began_s, self._interval_s)
                    self._go_on()
                    failures = 0
                    self._rest(began_s, self._interval_s)
                else:  # the coordinator expired this worker: register as a new incarnation
                    registered = False
                    self._renew()
                continue
            except StaleEpoch as error:
                log.warning("another incarnation was here: %s", error)
                registered = False
                self._renew()
            except PacelineError as error:
                level = logging.DEBUG if failures else logging.WARNING
                log.log(level, "coordinator: %s (trying again)", error)
                if not isinstance(error, TemporaryError):
                    registered = False
            failures += 1
            if time.monotonic() > alone_s:
                self._go_on()
            time.sleep(_backoff_s(failures))

    def _go_on(self) -> None:
        """Resume the deployments that an earlier process began and that were not cancelled
        meanwhile.

        The coordinator is tried first: this node must not publish what was cancelled while it was
        down. If it does not answer within ``ALONE_S``, the transfer continues without it.
        """
        left, self._left = self._left, []
        for lanes, manifest in left:
            log.info("goes on deployment=%s epoch=%d", lanes.deployment_id, lanes.epoch)
            self._manifests.setdefault(lanes.deployment_id, manifest)
            try:
                resumed = self._readings.of(lanes.deployment_id).resumed(lanes)
            except (PacelineError, OSError) as error:
                log.warning("not gone on with, its grant is not known: %s", error)
            else:
                self.driver.deploy(resumed, manifest)

    def _rest(self, began_s: float, interval_s: float) -> None:
        """Wait until the next heartbeat is due, or until there is something to report at once."""
        self._news.wait(max(0.0, began_s + interval_s - time.monotonic()))
        time.sleep(max(0.0, began_s + NEWS_S - time.monotonic()))

    def _register(self) -> None:
        config = self._config
        call = RegisterWorker(
            worker_id=config.worker_id,
            hostname=config.host or socket.gethostname(),
            rack=config.rack,
            available_storage=self._store.available_bytes(),
            labels=Labels(host=config.host, rack=config.rack, zone=config.zone),
            address=self.address,
            link_mbit=self._link_mbit,
            incarnation=self.incarnation,
            pid=os.getpid(),
            process=self._process,
        )
        self._client.register(call)
        self._report.forget()
        log.info("registered worker=%s incarnation=%d", config.worker_id, self.incarnation)

    def _beat(self) -> HeartbeatAnswer:
        self._news.clear()  # first: the next heartbeat reports every later change
        beat = self._report.beat(self._store.available_bytes())
        idle = all(each.status in ENDED for each in beat.deployments)
        answer = self._client.heartbeat(beat, wait_s=min(HOLD_S, self._interval_s) if idle else 0.0)
        self._interval_s = answer.next_beat_s
        self._transport.barred.replace(answer.barred)
        self._report.was_heard()
        self._note_heard(beat)
        ended = [each for each in beat.deployments if each.status in ENDED]
        self._assignments.drop([each.deployment_id for each in ended])
        # A failed deployment may be revived, and then continues from its count of origin reads.
        whole = [each for each in ended if each.status is WorkerStatus.COMPLETE]
        self._readings.drop([each.deployment_id for each in whole])
        return answer

    def _note_heard(self, beat: Heartbeat) -> None:
        try:
            for each in beat.deployments:
                self._readings.heard(each.deployment_id, each.origin_bytes)
        except (PacelineError, OSError) as error:  # reported again after a restart
            log.warning("what was told of the origin is not written down: %s", error)

    def _execute(self, command: Command) -> None:
        deployment_id = command.deployment_id
        match command.kind:
            case "fetch_lanes":
                self._fetch_lanes(deployment_id)
            case "activate":
                known = any(b.deployment_id == deployment_id for b in self.driver.beats())
                if not known:  # an earlier process completed it: the disk has it all
                    self._fetch_lanes(deployment_id)
                self.driver.activate(deployment_id)
            case "cancel":
                self._manifests.pop(deployment_id, None)
                begun = [e for e in self._left if e[0].deployment_id == deployment_id]
                self._left = [e for e in self._left if e[0].deployment_id != deployment_id]
                self._assignments.drop([deployment_id])
                self._readings.drop([deployment_id])
                self.driver.cancel(deployment_id)
                wanted = {manifest.digest for _, manifest in self._left}
                for digest in {manifest.digest for _, manifest in begun} - wanted:
                    self.driver.forget(digest)

    def _fetch_lanes(self, deployment_id: str) -> None:
        try:
            lanes = self._client.lanes(deployment_id, self._config.worker_id)
            manifest = self._manifest_of(deployment_id, lanes.manifest_digest)
        except NotFound as error:
            log.info("no lanes for us: %s", error)
            return
        try:
            verify_signature(manifest, self._trust, where=deployment_id)
        except UntrustedManifest as error:
            self.driver.refuse(lanes, manifest, error)
            return
        try:
            lanes_on_disk = self._readings.of(deployment_id).kept(lanes)  # with bytes read so far
        except (PacelineError, OSError) as error:
            self.driver.refuse(lanes, manifest, as_error(error))
            return
        self.driver.deploy(lanes, manifest)
        try:
            self._assignments.keep(lanes_on_disk, manifest)
        except OSError as error:
            log.warning("a restart will not go on with these lanes: %s", error)

    def _manifest_of(self, deployment_id: str, digest: str) -> Manifest:
        known = self._manifests.get(deployment_id)
        if known is not None and known.digest == digest:
            return known
        manifest = parse_manifest(self._client.manifest_bytes(deployment_id))
        self._manifests = {deployment_id: manifest}  # one is enough; the driver has its own
        return manifest

    # ── identity ─────────────────────────────────────────────────────────────────────────────────

    def _go_on_as(self, renewed: Runtime) -> None:
        """Use the renewed token and certificate for new connections."""
        self._client.use_token(renewed.secrets.for_agents)
        if not self._transport.reload():
            log.warning("restart this agent before its old certificate expires: gRPC keeps it")

    def _next_incarnation(self) -> int:
        path = self._node_dir / INCARNATION_FILE
        try:
            last = int(path.read_text())
        except (FileNotFoundError, ValueError):
            last = 0
        write_durably(path, str(last + 1).encode())
        return last + 1

    def _renew(self) -> None:
        self.incarnation = self.driver.incarnation = self._next_incarnation()


def _backoff_s(failures: int) -> float:
    return min(RETRY_MAX_S, RETRY_S * 2.0 ** min(failures - 1, 8)) * random.uniform(0.5, 1.0)


def main(arguments: list[str]) -> int:
    """Run an agent from ``key=value`` arguments: for tests and supervisors without the CLI."""
    given = dict(argument.split("=", 1) for argument in arguments)
    level = given.get("log", "INFO")
    log_to_stderr(level, "%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return run_agent(
            AgentConfig(
                state_dir=Path(given["state_dir"]),
                worker_id=given["worker_id"],
                host=given.get("host", ""),
                rack=given.get("rack", ""),
                zone=given.get("zone", ""),
                link_mbit=float(given["link_mbit"]) if "link_mbit" in given else None,
                limit_mbit=float(given["limit_mbit"]) if "limit_mbit" in given else None,
                listen=given.get("listen", "127.0.0.1:0"),
                advertise=given.get("advertise", ""),
                warm=given.get("warm") == "true",
                die_with_parent=given.get("die_with_parent") == "true",
            )
        )
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
