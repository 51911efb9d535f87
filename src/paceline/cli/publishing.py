"""How far `publish` and `distribute --into` are: bars on a terminal, else a line every few seconds.

On standard error only, so that what is printed at the end stands alone.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Self

from paceline.cli.progress import LINE_EVERY_S, StageBars
from paceline.manifest.account import Moved, Pace
from tasks.run import StageUpdate

RATE_OVER_S = 10.0


class PatientBars:
    """Shows stages; use it as a context manager.

    Where nobody looks on (no terminal) a stage's first line comes after LINE_EVERY_S: what is done
    sooner says so itself.
    """

    def __init__(self) -> None:
        self._bars = StageBars()
        self._stage = ""
        self._shown = False
        self._began_s = 0.0

    def __enter__(self) -> Self:
        self._bars.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.__exit__(None, None, None)

    def say(self, line: str) -> None:
        """Show one line above the bars."""
        self._bars.say(line)

    def _show(self, stage: str, share: float, said: str, now_s: float, *, is_over: bool) -> None:
        if stage != self._stage:
            self._stage, self._shown, self._began_s = stage, False, now_s
        if not self._bars.live:
            early = now_s - self._began_s < LINE_EVERY_S
            if not self._shown and (early or is_over):
                return
        self._shown = True
        self._bars(StageUpdate(stage=stage, fraction=share, message=said, done=is_over))


class PublishBars(PatientBars):
    """Shows what ``publish_model`` tells: call it."""

    def __init__(self) -> None:
        super().__init__()
        self._pace = Pace()

    def __call__(self, moved: Moved) -> None:
        """Show how far it is."""
        now_s = time.monotonic()
        said = self._pace.said(moved, now_s)
        self._show(moved.stage, moved.share, said, now_s, is_over=moved.is_over)


class RelayBars(PatientBars):
    """Shows what ``distribute`` tells of pieces on all workers: call it."""

    def __init__(self) -> None:
        super().__init__()
        self._past: deque[tuple[float, int]] = deque()  # (when, pieces held) of the last seconds

    def __call__(self, held: int, wanted: int) -> None:
        """Show how far it is, and how long it will be."""
        now_s = time.monotonic()
        self._past.append((now_s, held))
        while len(self._past) > 2 and now_s - self._past[0][0] > RATE_OVER_S:
            self._past.popleft()
        (then_s, then), left = self._past[0], wanted - held
        rate = (held - then) / (now_s - then_s) if now_s > then_s else 0.0
        eta = f", {left / rate:.0f} s left" if left > 0 and rate > 0 else ""
        said = f"{held:,} of {wanted:,} pieces on all workers{eta}"
        share = held / wanted if wanted else 0.0
        self._show("relay", share, said, now_s, is_over=0 < wanted <= held)
