"""The control loop of a node: registers, sends heartbeats, executes the commands in the answers.

``agent`` runs it over the coordinator's REST and across restarts; ``paceline.standalone`` calls a
coordinator in the same process. The transfers are the relay driver's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from paceline.errors import NotFound, PacelineError, StaleEpoch, TemporaryError, UntrustedManifest
from paceline.manifest import Manifest, TrustPolicy, parse_manifest
from paceline.relay.node import RelayDriver
from paceline.relay.store import OriginReadCounts
from paceline.relay.transport import RateMeter
from paceline.schemas import (
    Command,
    DeploymentBeat,
    EdgeTally,
    Heartbeat,
    HeartbeatAnswer,
    Registered,
    RegisterWorker,
    WorkerLanes,
    WorkerStatus,
)
from paceline.system import write_durably

log = logging.getLogger(__name__)

MAX_STORED_DEPLOYMENTS = 8  # deployments at once; a node takes part in one or two
_LANES, _MANIFEST = ".lanes.json", ".manifest.json"
COMMAND_WAIT_S = 1.0  # how long an idle agent's heartbeat waits for a command


class CoordinatorCalls(Protocol):
    """The calls of a node; ``client.CoordinatorClient`` makes them over REST."""

    def register(self, call: RegisterWorker) -> Registered: ...
    def heartbeat(self, beat: Heartbeat, wait_s: float = 0.0) -> HeartbeatAnswer: ...
    def lanes(self, deployment_id: str, worker_id: str) -> WorkerLanes: ...
    def manifest_bytes(self, deployment_id: str) -> bytes: ...


class StoredLanes:
    """Lanes stored below ``directory``; used by one thread, after ``load``.

    A restarted agent resumes from them while the coordinator is away, because other nodes may wait
    for what it forwards. Lanes are stored with their manifest until their deployment has ended,
    beside the counts of what their grants have read from the origin. Stored lanes may be out of
    date; newer lanes replace them as always.
    """

    def __init__(self, directory: Path, origin_reads: OriginReadCounts) -> None:
        self._directory = directory
        self._readings = origin_reads
        self._epochs: dict[str, int] = {}  # of the lanes that this process stored
        self._earlier: list[tuple[WorkerLanes, Manifest]] = []  # of an earlier process
        directory.mkdir(parents=True, exist_ok=True)

    def load(self) -> None:
        """Read the lanes of an earlier process, newest first; remove unreadable files."""
        paths = sorted(
            self._directory.glob(f"*{_LANES}"), key=lambda path: path.stat().st_mtime, reverse=True
        )
        for number, path in enumerate(paths):
            try:
                if number >= MAX_STORED_DEPLOYMENTS:
                    raise ValueError("too many deployments")
                lanes = WorkerLanes.model_validate_json(path.read_bytes())
                kept = self._directory / f"{lanes.manifest_digest}{_MANIFEST}"
                self._earlier.append((lanes, parse_manifest(kept.read_bytes())))
            except (OSError, ValueError, ValidationError, PacelineError) as error:
                log.warning("lanes forgotten: %s: %s", path.name, error)
                path.unlink(missing_ok=True)
        self._drop_manifests()

    def take(self) -> Iterator[tuple[WorkerLanes, Manifest]]:
        """Yield the lanes of an earlier process once, each with the rest of its grant."""
        earlier, self._earlier = self._earlier, []
        for lanes, manifest in earlier:
            try:
                yield self._readings.of(lanes.deployment_id).resumed(lanes), manifest
            except (PacelineError, OSError) as error:
                log.warning("not gone on with, its grant is not known: %s", error)

    def keep(self, lanes: WorkerLanes, manifest: Manifest) -> None:
        """Store ``lanes`` in place of the deployment's older ones; lanes of the same epoch are not
        stored again. A disk that refuses costs only the resumption.
        """
        if self._epochs.get(lanes.deployment_id) == lanes.epoch:
            return
        try:
            counted = self._readings.of(lanes.deployment_id).kept(lanes)
            manifest_path = self._directory / f"{manifest.digest}{_MANIFEST}"
            if not manifest_path.exists():
                write_durably(manifest_path, manifest.to_bytes())
            path = self._directory / f"{lanes.deployment_id}{_LANES}"
            write_durably(path, counted.model_dump_json().encode())
        except (PacelineError, OSError) as error:
            log.warning("a restart will not go on with these lanes: %s", error)
        else:
            self._epochs[lanes.deployment_id] = lanes.epoch

    def reported(self, beats: Sequence[DeploymentBeat]) -> None:
        """Record what the coordinator has received; drop the lanes of ended deployments."""
        try:
            for each in beats:
                self._readings.acknowledge(each.deployment_id, each.origin_bytes)
        except (PacelineError, OSError) as error:  # reported again after a restart
            log.warning("the acknowledged count of origin bytes is not stored: %s", error)
        self._drop([each.deployment_id for each in beats if each.status.is_final])
        # A failed deployment may be revived, and then continues from its count of origin reads.
        whole = [each.deployment_id for each in beats if each.status is WorkerStatus.COMPLETE]
        self._readings.drop(whole)

    def cancel(self, deployment_id: str) -> set[str]:
        """Drop a cancelled deployment; return the digests that only its lanes, which were not
        resumed yet, named.
        """
        begun = {m.digest for lanes, m in self._earlier if lanes.deployment_id == deployment_id}
        self._earlier = [e for e in self._earlier if e[0].deployment_id != deployment_id]
        self._drop([deployment_id])
        self._readings.drop([deployment_id])
        return begun - {manifest.digest for _, manifest in self._earlier}

    def _drop(self, deployment_ids: Collection[str]) -> None:
        paths = []
        for each in deployment_ids:
            self._epochs.pop(each, None)
            path = self._directory / f"{each}{_LANES}"
            if path.exists():
                path.unlink()
                paths.append(path)
        if paths:
            self._drop_manifests()

    def _drop_manifests(self) -> None:
        lanes = [path.read_bytes() for path in self._directory.glob(f"*{_LANES}")]
        for path in self._directory.glob(f"*{_MANIFEST}"):
            digest = path.name.removesuffix(_MANIFEST).encode()
            if not any(digest in each for each in lanes):
                path.unlink()


class HeartbeatBuilder:
    """Builds the heartbeats of one node: the state of its deployments, and what changed since the
    last acknowledged one.

    Counts of edges are cumulative, so that a lost heartbeat loses nothing; only those that changed
    are sent, because a node that served fifty peers need not list them all for the rest of the day.
    """

    def __init__(self, worker_id: str, driver: RelayDriver) -> None:
        self._worker_id = worker_id
        self._driver = driver
        self._meters = RateMeter(), RateMeter()
        self._number = 0
        self._acknowledged: dict[tuple[str, str, str], EdgeTally] = {}
        self._unacknowledged: dict[tuple[str, str, str], EdgeTally] = {}

    def beat(self, available_storage: int) -> Heartbeat:
        beats = self._driver.beats()
        receiving = next((b for b in beats if b.status is WorkerStatus.RECEIVING), None)
        newest = receiving or (beats[-1] if beats else None)
        into, out = self._meters
        self._unacknowledged = {}
        self._number += 1
        return Heartbeat(
            worker_id=self._worker_id,
            status=newest.status if newest else WorkerStatus.IDLE,
            chunks_received=newest.chunks_received if newest else (),
            bandwidth_in=into.look(self._driver.received_bytes),
            bandwidth_out=out.look(self._driver.nic_out.total_bytes),
            incarnation=self._driver.incarnation,
            number=self._number,
            available_storage=available_storage,
            deployments=tuple(self._moved(each) for each in beats),
        )

    def mark_acknowledged(self) -> None:
        self._acknowledged |= self._unacknowledged
        self._unacknowledged = {}

    def forget(self) -> None:
        """Report all edges again: the coordinator may be another process without the counts."""
        self._acknowledged.clear()

    def _moved(self, beat: DeploymentBeat) -> DeploymentBeat:
        edges = []
        for edge in beat.edges:
            key = (beat.deployment_id, edge.source, edge.reader)
            if self._acknowledged.get(key) != edge:
                edges.append(edge)
                self._unacknowledged[key] = edge
        return beat.model_copy(update={"edges": tuple(edges)})


class ControlLoop:
    """The exchanges of one node with its coordinator; used by one thread.

    ``registration`` is what the node registers with, at the driver's present incarnation;
    ``next_incarnation()`` returns a higher one. ``stored`` are the lanes of earlier processes,
    None for a node without a memory of them. ``manifest`` is one that is known already.
    """

    def __init__(
        self,
        calls: CoordinatorCalls,
        driver: RelayDriver,
        registration: RegisterWorker,
        next_incarnation: Callable[[], int],
        *,
        trust: TrustPolicy | None = None,
        stored: StoredLanes | None = None,
        manifest: Manifest | None = None,
        on_barred: Callable[[Iterable[str]], None] = lambda _names: None,
        on_outdated: Callable[[], object] = lambda: None,
    ) -> None:
        self._calls = calls
        self._driver = driver
        self._registration = registration
        self._next_incarnation = next_incarnation
        self._trust = trust or TrustPolicy()
        self._stored = stored
        self._manifest = manifest  # of the newest lanes; the driver has its own
        self._on_barred, self._on_outdated = on_barred, on_outdated
        self._report = HeartbeatBuilder(registration.worker_id, driver)
        self._registered = False
        self._withdrawals = 0
        self.interval_s = 0.0  # between heartbeats, as the coordinator's last answer set it

    def exchange(self) -> bool:
        """Register where needed, send a heartbeat and execute the commands in its answer.

        Returns False where the coordinator expired this worker: the next exchange registers a new
        incarnation. Raises the coordinator's error.
        """
        began_s = time.monotonic()
        if self._driver.withdrawals > self._withdrawals:  # it holds less than it reported
            self._withdrawals = self._driver.withdrawals
            self._expire()
        try:
            if not self._registered:
                self._register()
            answer = self._beat()
            if not answer.go_on:
                self._expire()
                return False
            for command in answer.commands:
                self._execute(command)
        except StaleEpoch as error:
            log.warning("another incarnation was here: %s", error)
            self._expire()
            raise
        except PacelineError as error:
            self._registered = self._registered and isinstance(error, TemporaryError)
            raise
        self._driver.coordinator_answered(began_s, self.interval_s)
        return True

    def resume(self) -> None:
        """Resume the deployments that an earlier process began; only the first call has any."""
        for lanes, manifest in self._stored.take() if self._stored else ():
            log.info("goes on deployment=%s epoch=%d", lanes.deployment_id, lanes.epoch)
            self._manifest = manifest
            self._driver.deploy(lanes, manifest)

    def _expire(self) -> None:
        self._registered = False
        self._driver.incarnation = self._next_incarnation()

    def _register(self) -> None:
        update = {
            "incarnation": self._driver.incarnation,
            "available_storage": self._driver.store.available_bytes(),
        }
        self._calls.register(self._registration.model_copy(update=update))
        self._registered = True
        self._report.forget()
        name = self._registration.worker_id
        log.info("registered worker=%s incarnation=%d", name, self._driver.incarnation)

    def _beat(self) -> HeartbeatAnswer:
        beat = self._report.beat(self._driver.store.available_bytes())
        idle = all(each.status.is_final for each in beat.deployments)
        answer = self._calls.heartbeat(
            beat, wait_s=min(COMMAND_WAIT_S, self.interval_s) if idle else 0.0
        )
        self.interval_s = answer.next_beat_s
        self._on_barred(answer.barred)
        if answer.renew:
            self._on_outdated()
        self._report.mark_acknowledged()
        if self._stored is not None:
            self._stored.reported(beat.deployments)
        return answer

    def _execute(self, command: Command) -> None:
        deployment_id = command.deployment_id
        match command.kind:
            case "fetch_lanes":
                self._fetch_lanes(deployment_id)
            case "activate":
                known = any(b.deployment_id == deployment_id for b in self._driver.beats())
                if not known:  # an earlier process completed it: the disk has it all
                    self._fetch_lanes(deployment_id)
                self._driver.activate(deployment_id)
            case "cancel":
                left = self._stored.cancel(deployment_id) if self._stored else ()
                self._driver.cancel(deployment_id)
                for digest in left:
                    self._driver.forget(digest)

    def _fetch_lanes(self, deployment_id: str) -> None:
        try:
            lanes = self._calls.lanes(deployment_id, self._registration.worker_id)
            manifest = self._manifest
            if manifest is None or manifest.digest != lanes.manifest_digest:
                manifest = parse_manifest(self._calls.manifest_bytes(deployment_id))
                self._manifest = manifest
        except NotFound as error:
            log.info("no lanes for us: %s", error)
            return
        try:
            self._trust.check(manifest, where=deployment_id)
        except UntrustedManifest as error:
            self._driver.refuse(lanes, manifest, error)
            return
        if self._stored is not None:
            self._stored.keep(lanes, manifest)
        self._driver.deploy(lanes, manifest)
