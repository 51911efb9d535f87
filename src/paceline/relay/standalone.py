"""A whole deployment from one call, on one machine, without any server: ``distribute``.

The planner, drivers, sockets and disks are those of a fleet; only the control plane is this loop.
Workers are drivers on threads of this process: they share one interpreter, so many of them on a
fast link are slower than as many machines would be. A call repeated after a crash resumes from the
disks, under the origin budget of the first one.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import errors
from paceline.errors import Conflict, CorruptData, DeploymentFailed, NotReady, PermanentError
from paceline.manifest import Manifest, TrustPolicy, version_key
from paceline.plan import PlanWorker, Standing, make_plan, next_order
from paceline.relay import process as descriptors
from paceline.relay.node import RelayDriver
from paceline.relay.origin_budget import BudgetStallDetector, OriginReadBudget
from paceline.relay.protocol.limits import SessionLimits
from paceline.relay.sources import RangeReader
from paceline.relay.standalone_request import (
    UNLIMITED_MBIT,
    DistributeRequest,
    check_room,
    clear,
    is_s3,
    manifest_of,
    names_of,
    opener_of,
    outcome,
)
from paceline.relay.store.disk_space import StorePolicy
from paceline.relay.store.store import Store
from paceline.relay.transport.tcp_server import TcpTransport
from paceline.schemas.calls import DeploymentBeat
from paceline.schemas.command_results import Distribution
from paceline.schemas.plan import Labels, Plan, Topology
from paceline.schemas.records import Failure, WorkerStatus

if TYPE_CHECKING:
    from paceline.storage import ObjectStore

LOOK_S = 0.25
STALL_S = 120.0  # without a verified piece on any worker for so long: something hangs
MOST_NOTICES = 100
ENDED = (WorkerStatus.COMPLETE, WorkerStatus.FAILED, WorkerStatus.VERIFICATION_FAILED)


def distribute(
    source: Path | str,
    into: Path | str,
    workers: int | Sequence[str] = 4,
    *,
    targets: Sequence[str] | None = None,
    topology: Topology | str = Topology.AUTO,
    racks: int = 1,
    link_mbit: float | None = None,
    objects: ObjectStore | None = None,
    digest: str = "",
    model_id: str = "",
    version: str = "",
    trust: TrustPolicy | None = None,
    allow_older: bool = False,
    activate: bool = False,
    max_failed: float = 0.05,
    first_port: int = 0,
    extra_origin_bytes: int = 0,
    policy: StorePolicy | None = None,
    limits: SessionLimits | None = None,
    on_progress: Callable[[int, int], None] = lambda _held, _all: None,
    on_notice: Callable[[str], None] = lambda _said: None,
) -> Distribution:
    """Bring the model at ``source`` (a directory or ``s3://bucket/prefix``) to ``workers`` below
    ``into`` and return their receipts and measurements.

    ``workers`` is their number or their names; ``targets`` picks some of them. A directory without
    a manifest gets one (``model_id`` and ``version`` name it); where there is one they, and
    ``digest``, must agree with it. ``link_mbit`` limits each worker, both ways. ``on_progress``
    receives pieces held and wanted, over all workers; ``on_notice`` receives, from threads,
    messages about servers that stopped answering (the result has them as ``notices``). Everything
    is checked before a byte moves; a call that cannot succeed leaves nothing behind. A call that
    was killed and is repeated resumes from the disks, and what both read from the source stays
    under one budget, unless ``extra_origin_bytes`` allow more. Raises InvalidInput, InvalidPlan,
    SourceMissing, ServiceUnavailable, UntrustedManifest, CorruptData (another digest), Conflict (a
    newer version is there), StorageFull, PortInUse, StateLocked, OriginBudgetExceeded (what arrived
    is kept), and DeploymentFailed, or the workers' own error where all failed with the same one.
    """
    names = names_of(workers, targets)
    request = DistributeRequest(
        into=Path(into).absolute(),  # receipts contain the paths of the copies
        names=names,
        racks=racks,
        topology=Topology(topology) if topology in list(Topology) else str(topology),
        link_mbit=link_mbit,
        activate=activate,
        max_failed=max_failed,
        first_port=first_port,
        extra_origin_bytes=extra_origin_bytes,
        policy=policy or StorePolicy(),
        limits=limits,
        on_progress=on_progress,
        on_notice=on_notice,
    )
    notices: dict[str, None] = {}  # each once: several workers read the same server

    def notice(said: str) -> None:
        if said not in notices and len(notices) < MOST_NOTICES:
            notices[said] = None
            request.on_notice(said)

    manifest = manifest_of(source, objects, model_id, version, trust, notice)
    if digest and manifest.digest != digest:
        raise CorruptData(
            "the source holds another model",
            got=manifest.digest,
            wanted=digest,
            where=source,
            do="Check the URL and the digest; a published version never changes.",
        )
    open_source = opener_of(objects, notice)
    url = str(source) if is_s3(source) else str(Path(source).resolve())
    new = [name for name in names if not (request.into / name).exists()]
    whole = not request.into.exists()
    try:
        check_room(request, manifest)
        descriptors.require(manifest, len(names))
        with _Crew(request, manifest, url, open_source) as crew:
            if not allow_older:
                crew.refuse_older()
            return crew.work().model_copy(update={"notices": tuple(notices)})
    except BaseException as error:
        goes_on = KeyboardInterrupt | errors.TemporaryError | errors.OriginBudgetExceeded
        if not isinstance(error, goes_on):
            clear(request.into, new, whole=whole)
        raise


class _Crew:
    """The drivers of one standalone deployment, and the loop that plans for them."""

    def __init__(
        self,
        request: DistributeRequest,
        manifest: Manifest,
        url: str,
        open_source: Callable[[str], RangeReader],
    ) -> None:
        self._request = request
        self._manifest = manifest
        self._url = url
        self._open_source = open_source
        self._fuse: OriginReadBudget
        self._news = threading.Event()
        self._stores: dict[str, Store] = {}
        self._drivers: dict[str, RelayDriver] = {}
        self._stack = ExitStack()
        self._failed: dict[str, Failure] = {}
        self._again: dict[str, int] = {}  # workers that are retried, and the epoch of their retry
        self._order: Sequence[str] = ()
        self._plan: Plan | None = None

    def __enter__(self) -> _Crew:
        token = secrets.token_hex(16)
        request = self._request
        with ExitStack() as stack:
            stack.callback(self._close_idle)
            for name in request.names:
                self._stores[name] = Store(request.into / name / "store", request.policy)
            self._fuse = (
                OriginReadBudget(  # no other process counts there: we hold the stores' locks
                    request.into,
                    request.names,
                    self._manifest,
                    self._url,
                    request.extra_origin_bytes,
                )
            )
            stack.callback(self._fuse.close)
            for number, name in enumerate(request.names):
                driver = RelayDriver(
                    worker_id=name,
                    store=self._stores[name],
                    transport=TcpTransport(token),
                    open_source=self._open_source,
                    port=request.first_port + number if request.first_port else 0,
                    link_mbit=request.link_mbit,
                    limits=request.limits,
                    seed=number,
                    readings=self._fuse.readings(name),
                    on_news=self._news.set,
                )
                driver.start()
                stack.callback(driver.stop)
                self._drivers[name] = driver
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _close_idle(self) -> None:
        for name, store in self._stores.items():
            if name not in self._drivers:  # otherwise its driver closed it
                store.close()

    def refuse_older(self) -> None:
        """Raise Conflict where a worker already holds a newer version of the model."""
        there = [
            (version_key(stored.version), stored, name)
            for name, driver in self._drivers.items()
            for stored in driver.store.versions(self._manifest.model_id)
        ]
        if not there:
            return
        newest, stored, name = max(there, key=lambda each: each[0])
        if newest > version_key(self._manifest.version):
            raise Conflict(
                "a newer version is there already",
                got=self._manifest.version,
                wanted=f"{stored.version} or later",
                where=f"{name}: {stored.path}",
                do="Distribute a later version, or ask for the older one (--allow-older).",
            )

    def work(self) -> Distribution:
        """Plan, relay, plan again where a worker fails, and return the result."""
        began = time.monotonic()
        self._deploy()
        moved_at, held_before, withdrawn = began, -1, 0
        shortage = BudgetStallDetector()
        while True:
            self._news.wait(LOOK_S)
            self._news.clear()
            beats, rotted = self._beats(), self._withdrawn()
            if self._note_failures(beats) or rotted > withdrawn:
                withdrawn = rotted  # a worker withdrew a corrupt copy and begins again
                self._deploy()
            elif shortage.needs_plan(beats, self._fuse, time.monotonic()):
                self._deploy()
            held = sum(beat.pieces_held for beat in beats.values())
            self._request.on_progress(
                held, self._manifest.piece_count * (len(beats) - len(self._failed))
            )
            if held != held_before:
                moved_at, held_before = time.monotonic(), held
            ended = [beat for beat in beats.values() if beat.status in ENDED]
            if len(ended) == len(self._drivers) and self._withdrawn() == withdrawn:
                if not self._ask_again(beats):
                    break
                moved_at = time.monotonic()
            if time.monotonic() - moved_at > STALL_S:
                raise self._stalled(held, beats)
        self._judge()
        seconds = time.monotonic() - began
        if self._request.activate:
            self._activate()
        done = self._report(self._beats(), seconds)
        self._fuse.drop()
        return done

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _beats(self) -> dict[str, DeploymentBeat]:
        return {
            name: beat
            for name, driver in self._drivers.items()
            for beat in driver.beats()
            if beat.deployment_id == self._fuse.deployment_id
            and beat.epoch >= self._again.get(name, 0)  # otherwise from before the retry
        }

    def _withdrawn(self) -> int:
        return sum(driver.withdrawals for driver in self._drivers.values())

    def _stalled(self, held: int, beats: Mapping[str, DeploymentBeat]) -> NotReady:
        why = {beat.failure.message: name for name, beat in beats.items() if beat.failure}
        reasons = "".join(f"; {name}: {message}" for message, name in why.items())
        return NotReady(
            "nothing moves any more",
            got=f"{held} pieces{reasons}"[:2000],
            wanted=f"{self._manifest.piece_count} on each of {len(self._drivers)} workers",
            where=self._request.into,
            do="Run it again: it goes on from the disks.",
        )

    def _note_failures(self, beats: Mapping[str, DeploymentBeat]) -> bool:
        """Record new failures; return whether the other workers need a new plan."""
        fresh = {
            name: beat.failure or Failure(code="DeploymentFailed", message="no reason given")
            for name, beat in beats.items()
            if beat.status in ENDED
            and beat.status is not WorkerStatus.COMPLETE
            and name not in self._failed
        }
        self._failed |= fresh
        return bool(fresh) and any(beat.status not in ENDED for beat in beats.values())

    def _ask_again(self, beats: Mapping[str, DeploymentBeat]) -> bool:
        """Retry workers once that failed of a cause which may have passed, where others are
        complete by now and can feed them; return whether any is retried.
        """
        again = [
            name
            for name, failure in self._failed.items()
            if name not in self._again and not self._is_permanent(failure)
        ]
        complete = any(beat.status is WorkerStatus.COMPLETE for beat in beats.values())
        if self._plan is None or not again or not complete:
            return False
        for name in again:
            del self._failed[name]
            self._again[name] = self._plan.epoch + 1
        self._deploy()
        return True

    def _deploy(self) -> None:
        """Make the plan of the next epoch and pass it to the workers that still need it.

        The budget counts what was read until now, also for copies that failed or became corrupt
        since, and each grant continues from that count, whenever its worker receives it (I6).
        """
        beats, request = self._beats(), self._request
        read = self._fuse.read()
        link = request.link_mbit or UNLIMITED_MBIT
        workers = []
        for number, name in enumerate(request.names):
            beat = beats.get(name)
            done = beat is not None and beat.status is WorkerStatus.COMPLETE
            workers.append(
                PlanWorker(
                    worker_id=name,
                    labels=Labels(host=name, rack=self._rack(number)),
                    address=self._drivers[name].server.address,
                    link_mbit=link,
                    complete=done or (beat is None and self._holds(name)),
                    held_pieces=beat.pieces_held if beat else 0,
                    standing=Standing.GONE if name in self._failed else Standing.LINE,
                )
            )
        plan = make_plan(
            self._plan.topology if self._plan else request.topology,
            deployment_id=self._fuse.deployment_id,
            epoch=self._plan.epoch + 1 if self._plan else 1,
            manifest=self._manifest,
            workers=workers,
            source_url=self._url,
            origin_spent_bytes=self._fuse.spent_bytes(read),
            order=self._order,
        )
        self._order, self._plan = next_order(self._order, plan), plan
        for lanes in plan.workers:
            status = beats[lanes.worker_id].status if lanes.worker_id in beats else None
            if status not in ENDED:
                granted = lanes.model_copy(update={"origin_counted_bytes": read[lanes.worker_id]})
                self._drivers[lanes.worker_id].deploy(granted, self._manifest)

    def _holds(self, name: str) -> bool:
        found = self._drivers[name].store.versions(self._manifest.model_id)
        return any(each.digest == self._manifest.digest for each in found)

    def _rack(self, number: int) -> str:
        racks = self._request.racks
        return f"rack-{number * racks // len(self._request.names)}"

    def _judge(self) -> None:
        """Raise where more workers failed than ``max_failed`` allows."""
        if len(self._failed) <= self._request.max_failed * len(self._drivers):
            return
        if all(self._is_permanent(each) for each in self._failed.values()):
            for driver in self._drivers.values():  # cannot succeed: nothing is kept
                driver.cancel(self._fuse.deployment_id)
                driver.wait(
                    lambda beats: all(b.deployment_id != self._fuse.deployment_id for b in beats),
                    5.0,
                )
            self._fuse.drop()
        kinds = {failure.code for failure in self._failed.values()}
        first = next(iter(self._failed.values()))
        kind = getattr(errors, first.code, DeploymentFailed)
        if len(self._failed) == len(self._drivers) and len(kinds) == 1:
            everywhere = f"on every one of {len(self._drivers)} workers: "
            raise kind(first.message if len(self._drivers) == 1 else everywhere + first.message)
        raise DeploymentFailed(
            "workers failed",
            got="; ".join(f"{name}: {each.message}" for name, each in self._failed.items())[:2000],
            wanted=f"at most {self._request.max_failed:.0%} of {len(self._drivers)}",
            where=self._request.into,
            do="Mend the cause and run it again; what arrived is kept.",
        )

    def _is_permanent(self, failure: Failure) -> bool:
        kind = getattr(errors, failure.code, None)
        return isinstance(kind, type) and issubclass(kind, PermanentError)

    def _activate(self) -> None:
        for name, driver in self._drivers.items():
            if name not in self._failed:
                driver.store.activate(self._manifest.model_id, self._manifest.version)

    def _report(self, beats: Mapping[str, DeploymentBeat], seconds: float) -> Distribution:
        assert self._plan is not None
        return outcome(
            self._request,
            self._manifest,
            self._url,
            self._plan,
            beats,
            racks={name: self._rack(number) for number, name in enumerate(self._request.names)},
            failed=self._failed,
            fuse=self._fuse,
            seconds=seconds,
        )
