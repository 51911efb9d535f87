"""The origin read budget of a deployment without a coordinator, kept across restarts (I6).

What each worker reads is recorded beside its store (``store.origin_reads``). A repeated call with
the same model, source and workers is the same deployment while any of its data is on the disks, and
is granted what the budget still allows; once it is complete, the next call begins anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import OriginBudgetExceeded
from paceline.manifest import Manifest
from paceline.plan import origin_cap_bytes
from paceline.relay.store.origin_reads import OriginReadCounts
from paceline.relay.store.staging import disk_errors
from paceline.schemas.calls import DeploymentBeat
from paceline.schemas.records import WorkerStatus

SHORT_S = 3.0  # without progress for so long while a worker lacks budget: make a new plan,
RESCUES = 2  # so many times, then fail


class OriginReadBudget:
    """The budget of the workers ``names`` below ``into``, with ``extra_bytes`` beyond the usual
    cap.

    Create it before the first plan; raises StorageFull or StorageFailed.
    """

    def __init__(
        self, into: Path, names: Sequence[str], manifest: Manifest, url: str, extra_bytes: int = 0
    ) -> None:
        named = "\0".join((manifest.digest, url, *sorted(names)))
        self.deployment_id = f"local-{hashlib.sha256(named.encode()).hexdigest()[:12]}"
        self._url = url
        self._cap = origin_cap_bytes(manifest.total_size) + extra_bytes
        self._extra = extra_bytes
        self._readings: dict[str, OriginReadCounts] = {}
        begun = any(
            (into / name / "store" / "staging" / manifest.digest / "data").exists()
            for name in names
        )
        for name in names:
            directory = into / name / "readings"
            with disk_errors(directory):
                self._readings[name] = readings = OriginReadCounts(directory)
                if not begun:  # the data of those reads is gone, so they no longer count
                    readings.drop([self.deployment_id])
        self.before_bytes = sum(self.read().values())

    def readings(self, name: str) -> OriginReadCounts:
        """Return the counters of worker ``name``."""
        return self._readings[name]

    def read(self) -> dict[str, int]:
        """Return the bytes that each worker has read, in this call and in the calls that it
        resumes.
        """
        return {
            name: readings.of(self.deployment_id).read_bytes
            for name, readings in self._readings.items()
        }

    def spent_bytes(self, read: Mapping[str, int]) -> int:
        """Return the bytes to count as spent in a plan, given what was ``read``."""
        return sum(read.values()) - self._extra

    def drop(self) -> None:
        """Delete the counters: the deployment is over."""
        for readings in self._readings.values():
            readings.drop([self.deployment_id])

    def close(self) -> None:
        """Write the exact counts to disk."""
        for readings in self._readings.values():
            readings.close()

    def exceeded(self, short: Sequence[str]) -> OriginBudgetExceeded:
        """Return the error for workers that are ``short`` of budget."""
        return OriginBudgetExceeded(
            "only the source has the missing pieces, and its fuse is spent",
            got=f"{sum(self.read().values())} bytes read, of that {self.before_bytes} by calls "
            f"that this one goes on from; {', '.join(short)} would read more",
            wanted=f"at most {self._cap} bytes",
            where=self._url,
            do="What arrived is kept: allow more with --extra-origin, as much as is missing.",
        )


class BudgetStallDetector:
    """Detects when workers need another plan because their budget for the origin is spent."""

    def __init__(self) -> None:
        self._held = -1
        self._since_s = 0.0
        self._plans = 0

    def needs_plan(
        self, beats: Mapping[str, DeploymentBeat], fuse: OriginReadBudget, now_s: float
    ) -> bool:
        """Return whether to make a new plan now; raises OriginBudgetExceeded where several new
        plans did not help.
        """
        held = sum(beat.pieces_held for beat in beats.values())
        short = sorted(
            name
            for name, beat in beats.items()
            if beat.status is WorkerStatus.RECEIVING
            and beat.failure is not None
            and beat.failure.code == OriginBudgetExceeded.__name__
        )
        if held != self._held or not short:
            self._held, self._since_s, self._plans = held, now_s, 0
            return False
        if now_s - self._since_s < SHORT_S:
            return False
        if self._plans == RESCUES:
            raise fuse.exceeded(short)
        self._plans, self._since_s = self._plans + 1, now_s
        return True
