"""How far `paceline publish` is, while it works: bars on a terminal, a line every few seconds else.

On standard error only, so that what is printed at the end stands alone.
"""

from __future__ import annotations

import time

from paceline.cli.progress import LINE_EVERY_S, StageBars
from paceline.manifest.account import Moved, Pace
from tasks.run import StageUpdate


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
        self._pace = Pace()

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
        said = self._pace.said(moved, now_s)
        if not self._bars.live:
            early = now_s - self._began_s < LINE_EVERY_S
            if not self._shown and (early or moved.is_over):
                return
        self._shown = True
        self._bars(
            StageUpdate(stage=moved.stage, fraction=moved.share, message=said, done=moved.is_over)
        )
