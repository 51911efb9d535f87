"""State of one deployment on one node: session, files, streams, counters and the reported status.

Owned by the owner thread of ``node``; other threads only read ``beat``, which is replaced whole.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from paceline.manifest import Manifest
from paceline.relay.protocol.events import PieceVerified
from paceline.relay.protocol.extents import Extents
from paceline.relay.protocol.session import RelaySession
from paceline.relay.sources import RangeReader
from paceline.relay.store.group_commit import Committer
from paceline.relay.store.origin_reads import OriginReadCount
from paceline.relay.store.staging import Staging
from paceline.relay.transport.contract import PullStream, TransferCounters
from paceline.schemas.calls import DeploymentBeat
from paceline.schemas.plan import Source, WorkerLanes
from paceline.schemas.records import Failure, Receipt, WorkerStatus


class VerifiedPieces:
    """Verified pieces that the session has not processed yet: byte threads add, the owner takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, int], Extents] = {}
        self._pieces = 0
        self._called = False

    def add(self, event: PieceVerified, enough: float) -> bool:
        """Add pieces; return whether to wake the owner: once, when ``enough`` pieces wait."""
        with self._lock:
            key = (event.source_key, event.stream)
            self._pieces += self._waiting.setdefault(key, Extents()).add(event.extent)
            call = self._pieces >= enough and not self._called
            self._called = self._called or call
            return call

    def take(self) -> list[PieceVerified]:
        """Return the waiting pieces, as runs."""
        if not self._waiting:
            return []
        with self._lock:
            taken, self._waiting, self._pieces = self._waiting, {}, 0
            self._called = False
        return [
            PieceVerified(key, stream, run)
            for (key, stream), extents in taken.items()
            for run in extents
        ]


@dataclass(eq=False)
class ActiveDeployment:
    """One node's part of one deployment; see the module's docstring."""

    lanes: WorkerLanes
    manifest: Manifest
    started_s: float
    sent_before: int  # bytes this node had sent when the deployment began
    session: RelaySession | None = None
    staging: Staging | None = None
    committer: Committer | None = None
    counters: TransferCounters = field(default_factory=TransferCounters)
    reading: OriginReadCount = field(default_factory=OriginReadCount)
    is_cut_off: bool = False  # without readers and without a coordinator: see ``node``
    arrivals: VerifiedPieces = field(default_factory=VerifiedPieces)
    streams: dict[str, tuple[int, PullStream]] = field(default_factory=dict)
    readers: dict[str, RangeReader] = field(default_factory=dict)
    status: WorkerStatus = WorkerStatus.RECEIVING
    failure: Failure | None = None
    receipt: Receipt | None = None
    activated: bool = False
    ended_s: float | None = None
    beat: DeploymentBeat | None = None
    refreshed_s: float = 0.0

    @property
    def deployment_id(self) -> str:
        """Return the id of the deployment."""
        return self.lanes.deployment_id

    def expected_rate(self, source: Source) -> float:
        """Return the rate that the lanes expect from ``source``, in bytes per second (0:
        unknown).
        """
        return sum(each.expected_bytes_s for each in self.lanes.lanes if each.source == source)

    def portion(self, source: Source) -> float:
        """Return the expected rate where the lanes use several sources, which share this node's
        link; 0 where ``source`` may use all of it.
        """
        several = len({each.source.key for each in self.lanes.lanes}) > 1
        return self.expected_rate(source) if several else 0.0

    @property
    def may_be_replaced(self) -> bool:
        """Return whether the coordinator may assign this node's origin reads to another node."""
        named = any(each.source.kind == "worker" or each.spares for each in self.lanes.lanes)
        seeds = bool(self.lanes.origin_lanes) and self.lanes.origin_tell_bytes > 0
        return seeds and (named or self.reading.had_readers) and self.ended_s is None

    def close_streams(self) -> None:
        """Stop pulling from every source."""
        for _, stream in self.streams.values():
            stream.close()
        self.streams.clear()

    def news(self) -> tuple[object, ...]:
        """Return the fields of ``beat`` whose change is reported without waiting for the next
        heartbeat.
        """
        beat, much = self.beat, self.lanes.origin_tell_bytes
        if beat is None:
            return ()
        read = beat.origin_bytes // much if much else 0
        return beat.status, beat.activated, beat.lost_sources, beat.failure, read

    @property
    def has_much_to_tell(self) -> bool:
        """Return whether the bytes read from the origin since ``beat`` call for an immediate
        report.
        """
        much = self.lanes.origin_tell_bytes
        told = self.beat.origin_bytes if self.beat else 0
        return 0 < much <= self.counters.origin_bytes - told

    def refresh(self, now_s: float) -> None:
        """Replace ``beat`` by the current state."""
        self.refreshed_s = now_s
        progress = self.session.progress() if self.session else None
        failure = self.failure
        if progress is not None and failure is None and self.status is WorkerStatus.RECEIVING:
            failure = progress.failure  # stalled: still receiving, and why nothing arrives
        self.beat = DeploymentBeat(
            deployment_id=self.deployment_id,
            epoch=progress.epoch if progress else self.lanes.epoch,
            status=self.status,
            pieces_held=progress.pieces_held if progress else 0,
            bytes_held=progress.bytes_held if progress else 0,
            chunks_received=progress.chunks_received if progress else (),
            origin_bytes=self.counters.origin_bytes,
            lost_sources=progress.lost_sources if progress else (),
            corrupt_sources=progress.corrupt_sources if progress else (),
            edges=self.staging.edges.tallies() if self.staging else (),
            failure=failure,
            receipt=self.receipt,
            activated=self.activated,
        )

    def completed(
        self, path: Path, now_s: float, *, worker_id: str, incarnation: int, sent_bytes: int
    ) -> None:
        """Record that the version is visible at ``path``, and create the receipt."""
        self.ended_s = now_s
        self.status = WorkerStatus.COMPLETE
        self.failure = None
        counters, staging = self.counters, self.staging
        self.receipt = Receipt(
            deployment_id=self.deployment_id,
            worker_id=worker_id,
            incarnation=incarnation,
            model_id=self.manifest.model_id,
            version=self.manifest.version,
            manifest_digest=self.manifest.digest,
            path=str(path),
            total_bytes=self.manifest.total_size,
            received_bytes=counters.received_bytes,
            origin_bytes=counters.origin_bytes,
            reused_bytes=staging.reused_bytes if staging else 0,
            reused_pieces=staging.reused_pieces if staging else 0,
            refetched_bytes=counters.refetched_bytes,
            sent_bytes=sent_bytes - self.sent_before,
            corrupt_pieces=self.session.progress().corrupt_pieces if self.session else 0,
            seconds=now_s - self.started_s,
        )
