"""What a rank says of its steps: a line each to its launcher, a page to Prometheus.

Rank 0 tells every step; the others enough to show how they do.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from paceline.training.voice import Voice

if TYPE_CHECKING:
    from paceline.data import PlannedStream
    from paceline.training.checkpoint import Checkpointer
    from paceline.training.loop import Progress, StepReport
    from paceline.training.numbers import Exporter

FOLLOWER_BEAT_S = 0.5  # ranks other than 0 tell their steps this often


class News:
    """What came into quarantine and was not told yet: each shard and sample is told once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def any_in(self, quarantined: Collection[str]) -> bool:
        """Return whether there is something to tell."""
        return len(quarantined) > len(self._told)

    def of(self, quarantined: Collection[str]) -> dict[str, Any]:
        """Return what an event says of it, with the reasons that a mapping gives."""
        why = dict(quarantined) if isinstance(quarantined, Mapping) else {}  # threads add to it
        new = sorted(set(why or quarantined) - self._told)
        if not new:
            return {}
        self._told.update(new)
        return {
            "quarantined_shards": new,
            "quarantined_why": {each: why[each] for each in new if each in why},
        }


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
        self._news = News()

    def __call__(self, report: StepReport) -> None:
        self._voice.enter("step", report.step)
        self._exporter.take(report, len(self._stream.quarantined), self._saver.expected_s)
        now = time.monotonic()
        rare = bool(report.alerts) or self._news.any_in(self._stream.quarantined)
        if self._rank != 0 and now - self._said_at < FOLLOWER_BEAT_S and not rare:
            return
        self._said_at = now
        data = report.data() | {
            "waited_s": self._progress.data_wait_s,
            "stalled_s": self._progress.stall_s,
            "checkpoints_put_off": self._saver.put_off,
        }
        data |= self._news.of(self._stream.quarantined)
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
