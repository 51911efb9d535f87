"""How far `paceline publish` is, while it works: bars on a terminal, a line every few seconds else.

On standard error only, so that what is printed at the end stands alone.
"""

from __future__ import annotations

import time
from collections import deque

from paceline.cli.progress import LINE_EVERY_S, StageBars
from paceline.manifest.account import Moved
from tasks.run import StageUpdate

RATE_OVER_S = 5.0


class PublishBars:
    """Shows what ``publish_model`` tells; use it as a context manager, and call it.

    Where nobody looks on (no terminal) the first line comes after LINE_EVERY_S: what is done sooner
    says so itself.
    """

    def __init__(self) -> None:
        self._bars = StageBars()
        self._stage = ""
        self._shown = False
        self._began_s = 0.0
        self._past: deque[tuple[float, int]] = deque()  # (when, bytes done) of the last seconds

    def __enter__(self) -> PublishBars:
        self._bars.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.__exit__(None, None, None)

    def __call__(self, moved: Moved) -> None:
        """Show how far it is."""
        now_s = time.monotonic()
        if moved.stage != self._stage:
            self._stage, self._shown, self._began_s = moved.stage, False, now_s
            self._past = deque([(now_s, 0)])
        self._past.append((now_s, moved.done_bytes))
        while len(self._past) > 2 and now_s - self._past[0][0] > RATE_OVER_S:
            self._past.popleft()
        if not self._bars.live:
            early = now_s - self._began_s < LINE_EVERY_S
            if not self._shown and (early or moved.is_over):
                return
        self._shown = True
        share = moved.done_bytes / moved.total_bytes if moved.total_bytes else 1.0
        self._bars(
            StageUpdate(
                stage=moved.stage, fraction=share, message=self._said(moved), done=moved.is_over
            )
        )

    def _said(self, moved: Moved) -> str:
        (then_s, then), (now_s, now) = self._past[0], self._past[-1]
        rate = f", {_size((now - then) / (now_s - then_s))}/s" if now_s > then_s else ""
        files = f"{moved.done_files} of {moved.total_files} files"
        return f"{_size(moved.done_bytes)} of {_size(moved.total_bytes)}{rate}, {files}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
