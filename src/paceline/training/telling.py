"""What a rank says of its steps: a line each to its launcher, a page to Prometheus.

Rank 0 tells every step; the others enough to show how they do.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.training.voice import Voice

if TYPE_CHECKING:
    from paceline.data import PlannedStream
    from paceline.training.checkpoint import Checkpointer
    from paceline.training.loop import Progress, StepReport
    from paceline.training.numbers import Exporter

FOLLOWER_BEAT_S = 0.5  # ranks other than 0 tell their steps this often


class Teller:
    """Says each step of rank 0, and enough of the others' to show how they do."""

    def __init__(
        self,
        voice: Voice,
        saver: Checkpointer,
        progress: Progress,
        rank: int,
        stream: PlannedStream,
        exporter: Exporter,
    ) -> None:
        self._exporter = exporter
        self._voice = voice
        self._saver = saver
        self._progress = progress
        self._rank = rank
        self._stream = stream
        self._said_at = 0.0
        self._alerts = 0
        self._told: set[str] = set()  # of what is in quarantine

    def __call__(self, report: StepReport) -> None:
        self._voice.enter("step", report.step)
        self._exporter.take(report, len(self._stream.quarantined), self._saver.expected_s)
        now = time.monotonic()
        bad = dict(self._stream.quarantined)  # its threads add to it
        rare = bool(report.alerts) or len(bad) > len(self._told)
        if self._rank != 0 and now - self._said_at < FOLLOWER_BEAT_S and not rare:
            return
        self._said_at = now
        data = report.data() | {
            "waited_s": self._progress.data_wait_s,
            "stalled_s": self._progress.stall_s,
            "checkpoints_put_off": self._saver.put_off,
        }
        if new := sorted(bad.keys() - self._told):
            self._told.update(new)
            data["quarantined_shards"] = new
            data["quarantined_why"] = {each: bad[each] for each in new}
        if raised := self._saver.alerts[self._alerts :]:
            self._alerts += len(raised)
            data["checkpoint_alerts"] = [each.message for each in raised]
        self._voice.say("step", report.step, **data)
        self.tell_saved()

    def tell_saved(self) -> None:
        """Say which checkpoints are committed by now (rank 0 does)."""
        for ref in self._saver.report() if self._rank == 0 else ():
            self._exporter.saved()
            self._voice.say("checkpoint", ref.step, url=ref.url, digest=ref.digest, bytes=ref.bytes)
