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
import threading
import time

from paceline import __version__
from paceline.client import CoordinatorClient
from paceline.config import Runtime, load_runtime
from paceline.errors import PacelineError, PortInUse
from paceline.manifest import TrustPolicy
from paceline.relay import process as descriptors
from paceline.relay.control import ControlLoop, StoredLanes
from paceline.relay.joining import Renewal
from paceline.relay.node import RelayDriver
from paceline.relay.process import (
    PARENT_POLL_S,
    AgentConfig,
    StopSignal,
    address_of,
    advertised_address,
)
from paceline.relay.sources import Sources
from paceline.relay.store import OriginReadCounts, Store, StorePolicy
from paceline.relay.transport import Transport, transport_for
from paceline.schemas import MIN_BEAT_INTERVAL_S, Labels, RegisterWorker, SignRead
from paceline.storage import Signed
from paceline.system import write_durably

log = logging.getLogger(__name__)

AGENT_FILE = "agent.json"
INCARNATION_FILE = "incarnation"
PORT_FILE = "port"
RETRY_S = 0.5  # after a call that failed; doubled up to RETRY_MAX_S, jittered
RETRY_MAX_S = 2.0  # a new leader should receive all heartbeats within seconds
CALL_TIMEOUT_S = 10.0
# How long a restarted agent tries the coordinator before it resumes its transfers.
RESUME_DELAY_S = 2.0


def run_agent(config: AgentConfig) -> int:
    """Run an agent until SIGTERM (or SIGINT) and return the exit code; the body of ``paceline
    agent``.

    Raises InvalidProfile and InvalidInput (settings), PortInUse, StateLocked (another agent has
    this node's store), StorageFull and StorageFailed; nothing is left behind then.
    """
    runtime = load_runtime(config.state_dir)
    descriptors.raise_file_limit()
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
        host, port = address_of(config.listen)
        self._advertised(config.listen)  # refuses a bad address before anything is created
        self._transport = transport = transport_for(runtime, host, config.worker_id)
        self._renewal = Renewal.of(runtime, on_renewed=self._use_renewed_identity)
        self._link_mbit = config.link_mbit or runtime.profile.cluster.link_mbit
        self._sources = Sources(runtime, self._signed)
        self._changed = threading.Event()
        self._node_dir = runtime.node_dir(config.worker_id)
        new = not self._node_dir.exists()
        self._node_dir.mkdir(parents=True, exist_ok=True)
        self._store = Store(self._node_dir / "store", StorePolicy.of(runtime.profile))
        try:
            self.driver = self._make_driver(transport, host, port)
        except BaseException:
            if new:  # only we can have written there: the store is still locked by us
                shutil.rmtree(self._node_dir, ignore_errors=True)
            self._store.close()
            raise
        # Without retries of its own: this loop waits between two attempts.
        self._client = CoordinatorClient.of(runtime, CALL_TIMEOUT_S, patience_s=0.0, worker=True)
        self._stored = StoredLanes(self._node_dir / "assignments", self.driver.origin_reads)
        self._broken: Exception | None = None

    def _signed(self, method: str, url: str, version_id: str) -> Signed:
        """Have the coordinator sign one read of this node."""
        wanted = {"method": method, "url": url, "version_id": version_id}
        worker_id = self._config.worker_id
        made = self._client.sign_read(SignRead.model_validate(wanted | {"worker_id": worker_id}))
        return Signed(made.url, made.valid_s)

    def _advertised(self, listening: str) -> str:
        known = self._runtime.endpoints
        urls = known.coordinator_urls or (known.coordinator_url,)
        return advertised_address(listening, self._config.advertise, urls)

    def _make_driver(self, transport: Transport, host: str, port: int) -> RelayDriver:
        limit_mbit = self._config.limit_mbit
        if limit_mbit is None and self._runtime.profile.cluster.paced:
            limit_mbit = self._link_mbit

        incarnation = self._next_incarnation()
        origin_reads = OriginReadCounts(self._node_dir / "readings")

        def make(port: int) -> RelayDriver:
            return RelayDriver(
                worker_id=self._config.worker_id,
                store=self._store,
                transport=transport,
                open_source=self._sources.open,
                incarnation=incarnation,
                host=host,
                port=port,
                link_mbit=limit_mbit or None,
                seed=incarnation,
                coordinated=True,
                origin_reads=origin_reads,
                on_change=self._changed.set,
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
            "incarnation": self.driver.incarnation,
            "worker_id": self._config.worker_id,
        }
        write_durably(self._node_dir / PORT_FILE, address.rpartition(":")[2].encode())
        write_durably(self._node_dir / AGENT_FILE, json.dumps(said).encode())
        log.info("agent listens worker=%s address=%s", self._config.worker_id, address)
        self._stored.load()
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
        """Register and send heartbeats until ``stop`` is set; no hanging call delays that."""
        threading.Thread(target=self._control, name="agent-control", daemon=True).start()
        while not stop.wait(PARENT_POLL_S):
            if self._broken is not None:
                raise self._broken

    # ── the control loop ─────────────────────────────────────────────────────────────────────────

    def _control(self) -> None:
        try:
            self._heartbeat_loop(self._make_control())
        except Exception as error:
            log.exception("the agent's control loop broke")
            self._broken = error

    def _make_control(self) -> ControlLoop:
        config = self._config
        return ControlLoop(
            self._client,
            self.driver,
            RegisterWorker(
                worker_id=config.worker_id,
                hostname=config.host or socket.gethostname(),
                rack=config.rack,
                available_storage=0,
                labels=Labels(
                    host=config.host,
                    rack=config.rack,
                    zone=config.zone,
                    others=config.other_labels,
                ),
                address=self.address,
                link_mbit=self._link_mbit,
                pid=os.getpid(),
                process=secrets.token_hex(8),
                findings=config.findings,
                inventory=config.inventory,
                version=__version__,
            ),
            self._next_incarnation,
            trust=TrustPolicy.of(self._runtime.profile.security),
            stored=self._stored,
            on_barred=self._transport.barred.replace,
            on_outdated=self._renewal.hasten if self._renewal else lambda: None,
        )

    def _heartbeat_loop(self, control: ControlLoop) -> None:
        """Exchange heartbeats and resume the deployments that an earlier process began and that
        were not cancelled meanwhile.

        The coordinator is tried first: this node must not publish what was cancelled while it was
        down. If it does not answer within ``RESUME_DELAY_S``, the transfer continues without it.
        """
        failures = 0
        alone_s = time.monotonic() + RESUME_DELAY_S
        while True:
            began_s = time.monotonic()
            self._changed.clear()  # first: the next heartbeat reports every later change
            try:
                if control.exchange():
                    control.resume()
                    failures = 0
                    self._changed.wait(max(0.0, began_s + control.interval_s - time.monotonic()))
                    time.sleep(max(0.0, began_s + MIN_BEAT_INTERVAL_S - time.monotonic()))
            except PacelineError as error:
                level = logging.DEBUG if failures else logging.WARNING
                took_s = time.monotonic() - began_s
                log.log(level, "coordinator: %s (trying again) after_s=%.1f", error, took_s)
                failures += 1
                if time.monotonic() > alone_s:
                    control.resume()
                backoff_s = min(RETRY_MAX_S, RETRY_S * 2.0 ** min(failures - 1, 8))
                time.sleep(backoff_s * random.uniform(0.5, 1.0))

    # ── identity ─────────────────────────────────────────────────────────────────────────────────

    def _use_renewed_identity(self, renewed: Runtime) -> None:
        """Use the renewed token and certificate for new connections."""
        self._client.use(renewed.secrets.agents_token, renewed.coordinator_ca)
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
