"""Counts what a node has read from the origin for each deployment, across its processes (I6).

A deployment has one origin budget, and a process may end at any moment: so the count is stored
beside the lanes whose grant it uses. A process counts from what its predecessors had read and not
reported, so that the coordinator receives it; stored lanes resume with the rest of their grant.
Counts are written ahead: a kill may cost a grant some bytes that were never read, and never returns
any. After a restart of the machine the last writes may be lost: such a grant counts as spent.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Collection
from pathlib import Path

from paceline.relay.store.staging import disk_errors
from paceline.schemas import WorkerLanes

MAX_COUNTS = 64  # deployments; the oldest are forgotten
_SUFFIX = ".read"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RECORD = struct.Struct(">40sQQ?")  # boot id, bytes read, bytes reported, had readers
_READ = struct.Struct(">Q")
_READ_AT = 40
_ACKNOWLEDGED_AT = _READ_AT + _READ.size
_OTHERS_AT = _ACKNOWLEDGED_AT + _READ.size


class OriginReadCount:
    """The bytes read for one deployment. ``read`` counts from ``begun_bytes``, as this process
    reports it; byte threads call ``cover``, the agent the rest.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Resume from the file ``path``; without one the count ends with the process."""
        self._lock = threading.Lock()
        self._path = path
        self._descriptor = -1
        self.before_bytes = 0  # what earlier processes had reported
        self.begun_bytes = 0  # what they had read beyond that
        self.is_known = True  # the machine has not rebooted since, so no write can be lost
        self.has_served_peers = False  # peers have read from this node
        if path is not None:
            with disk_errors(path):
                self._open(path)
        self.read_bytes = self._covered = self.begun_bytes

    def _open(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        raw = os.pread(self._descriptor, _RECORD.size, 0)
        if len(raw) == _RECORD.size:
            boot, read, acknowledged, self.has_served_peers = _RECORD.unpack(raw)
            self.before_bytes, self.begun_bytes = acknowledged, max(0, read - acknowledged)
            self.is_known = boot == _boot()  # else it stays unknown: no boot id is rewritten
            return
        self.is_known = not raw  # torn: the machine failed while it was written
        boot = _boot() if self.is_known else b"?" * _READ_AT
        os.pwrite(self._descriptor, _RECORD.pack(boot, 0, 0, False), 0)
        os.fsync(self._descriptor)

    def cover(self, read: int, ahead: int) -> None:
        """Record that ``read`` bytes were read in this process's count, and write the count plus
        ``ahead`` before the written count is exceeded; raises StorageFull or StorageFailed.
        """
        with self._lock:
            self.read_bytes = read
            if self._descriptor < 0 or read + ahead // 2 <= self._covered:
                return
            self._covered = read + ahead
            self._write(_READ_AT, self._covered)

    def acknowledge(self, acknowledged: int) -> None:
        """Record that the coordinator has received ``acknowledged`` bytes of this process."""
        with self._lock:
            if self._descriptor >= 0:
                self._write(_ACKNOWLEDGED_AT, acknowledged)

    def served(self) -> None:
        """Record that a peer reads from this node."""
        with self._lock:
            if not self.has_served_peers and self._descriptor >= 0:
                with disk_errors(self._path):
                    os.pwrite(self._descriptor, b"\1", _OTHERS_AT)
            self.has_served_peers = True

    @property
    def is_closed(self) -> bool:
        """Return whether the count is no longer written."""
        return self._descriptor < 0

    def close(self) -> None:
        """Write the exact count, and nothing afterwards."""
        with self._lock:
            if self._descriptor < 0:
                return
            self._write(_READ_AT, self.read_bytes)
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, at: int, count: int) -> None:
        with disk_errors(self._path):
            os.pwrite(self._descriptor, _READ.pack(self.before_bytes + count), at)

    # ── grants ───────────────────────────────────────────────────────────────────────────────────

    def kept(self, lanes: WorkerLanes) -> WorkerLanes:
        """Return ``lanes`` as stored on disk: their starting count covers all processes."""
        counted = lanes.origin_counted_bytes
        counted = self.read_bytes if counted is None else counted
        return lanes.model_copy(update={"origin_counted_bytes": self.before_bytes + counted})

    def resumed(self, lanes: WorkerLanes) -> WorkerLanes:
        """Return ``lanes`` that an earlier process stored, in this process's count."""
        counted = lanes.origin_counted_bytes
        if counted is None:
            return lanes  # stored by a version without these counts
        budget = lanes.origin_budget_bytes - max(0, self.before_bytes - counted)
        update = {
            "origin_counted_bytes": max(0, counted - self.before_bytes),
            "origin_budget_bytes": max(0, budget) if self.is_known else 0,
        }
        return lanes.model_copy(update=update)


class OriginReadCounts:
    """The counts of one node, by deployment; in files below ``directory``, or in memory only."""

    def __init__(self, directory: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._directory = directory
        self._open: dict[str, OriginReadCount] = {}
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            known = sorted(directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
            for path in known[:-MAX_COUNTS]:
                path.unlink()

    def of(self, deployment_id: str) -> OriginReadCount:
        """Return a deployment's count; raises StorageFull, StorageFailed or OSError."""
        with self._lock:
            found = self._open.get(deployment_id)
            if found is None:
                path = self._path(deployment_id)
                found = self._open[deployment_id] = OriginReadCount(path)
                while len(self._open) > MAX_COUNTS:  # those of ended deployments first
                    over = (name for name, each in self._open.items() if each.is_closed)
                    self._open.pop(next(over, next(iter(self._open)))).close()
            return found

    def acknowledge(self, deployment_id: str, acknowledged: int) -> None:
        """Record that the coordinator has received ``acknowledged`` bytes of this process."""
        with self._lock:
            if (found := self._open.get(deployment_id)) is not None:
                found.acknowledge(acknowledged)

    def drop(self, deployment_ids: Collection[str]) -> None:
        """Delete the stored counts of ended deployments; this process keeps counting."""
        with self._lock:
            for each in deployment_ids:
                if (found := self._open.get(each)) is not None:
                    found.close()
                if (path := self._path(each)) is not None:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Write every exact count."""
        with self._lock:
            for reading in self._open.values():
                reading.close()
            self._open.clear()

    def _path(self, deployment_id: str) -> Path | None:
        return self._directory and self._directory / f"{deployment_id}{_SUFFIX}"


def _boot() -> bytes:
    try:
        return _BOOT_ID.read_bytes().strip()[:40].ljust(40, b"\0")
    except OSError:
        return bytes(40)
