"""The origin fuse of a deployment without a coordinator, however often its process ends (I6).

What each worker reads is written down beside its store (``disk.reading``). The same call made
again (model, source, workers) is the same deployment as long as anything of it is on the disks to
go on with, and is granted what the fuse still allows; once it is complete the next one begins anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import OriginBudgetExceeded
from paceline.manifest import Manifest
from paceline.plan import origin_cap_bytes
from paceline.relay.store.origin_reads import Readings
from paceline.relay.store.staging import disk_errors
from paceline.schemas.calls import DeploymentBeat
from paceline.schemas.records import WorkerStatus

SHORT_S = 3.0  # nothing moves for so long, and somebody may not read: another plan shares it out,
RESCUES = 2  # so many times, before that is called the end


class Fuse:
    """Counts for the workers ``names`` below ``into``; ``extra_bytes`` may be read beyond the fuse.

    Make it before anything is planned; raises StorageFull or StorageFailed.
    """

    def __init__(
        self, into: Path, names: Sequence[str], manifest: Manifest, url: str, extra_bytes: int = 0
    ) -> None:
        named = "\0".join((manifest.digest, url, *sorted(names)))
        self.deployment_id = f"local-{hashlib.sha256(named.encode()).hexdigest()[:12]}"
        self._url = url
        self._cap = origin_cap_bytes(manifest.total_size) + extra_bytes
        self._extra = extra_bytes
        self._readings: dict[str, Readings] = {}
        begun = any(
            (into / name / "store" / "staging" / manifest.digest / "data").exists()
            for name in names
        )
        for name in names:
            directory = into / name / "readings"
            with disk_errors(directory):
                self._readings[name] = readings = Readings(directory)
                if not begun:  # what was read then is gone with what came of it
                    readings.drop([self.deployment_id])
        self.before_bytes = sum(self.read().values())

    def readings(self, name: str) -> Readings:
        """Return where worker ``name`` writes down what it reads."""
        return self._readings[name]

    def read(self) -> dict[str, int]:
        """Return what each worker has read by now, in this call and those that it goes on from."""
        return {
            name: readings.of(self.deployment_id).read_bytes
            for name, readings in self._readings.items()
        }

    def spent_bytes(self, read: Mapping[str, int]) -> int:
        """Return what counts as spent for a plan where ``read`` was read."""
        return sum(read.values()) - self._extra

    def drop(self) -> None:
        """Forget what was read: the deployment is over."""
        for readings in self._readings.values():
            readings.drop([self.deployment_id])

    def close(self) -> None:
        """Write down what was read, in truth."""
        for readings in self._readings.values():
            readings.close()

    def exceeded(self, short: Sequence[str]) -> OriginBudgetExceeded:
        """Return why those who are ``short`` wait for nothing."""
        return OriginBudgetExceeded(
            "only the source has the missing pieces, and its fuse is spent",
            got=f"{sum(self.read().values())} bytes read, of that {self.before_bytes} by calls "
            f"that this one goes on from; {', '.join(short)} would read more",
            wanted=f"at most {self._cap} bytes",
            where=self._url,
            do="What arrived is kept: allow more with --extra-origin, as much as is missing.",
        )


class Shortage:
    """Tells when workers that may not read what only the source has need another plan."""

    def __init__(self) -> None:
        self._held = -1
        self._since_s = 0.0
        self._plans = 0

    def needs_plan(self, beats: Mapping[str, DeploymentBeat], fuse: Fuse, now_s: float) -> bool:
        """Return whether to plan anew now; raises OriginBudgetExceeded where that did not help."""
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
