"""How far a publish is, for a terminal, Prefect's page and its log, while threads do the work.

They leave what they say in one place; a thread of ours looks there once a second. So a page that is
slow to answer holds nobody up, and a cancel in Prefect ends a publish in its middle.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.manifest.progress import DIGEST, ProgressFormatter, PublishProgress
from paceline.tasks import artifacts
from paceline.tasks.cancelling import noticed, stop_if_cancelled
from paceline.tasks.run import Run

logger = logging.getLogger(__name__)

LOOK_S = 1.0
LOG_S = 10.0
STAGES = 2  # digest, upload


@contextmanager
def told(run: Run, name: str) -> Iterator[dict[str, Any]]:
    """Give what ``publish_model`` takes to tell how far it is and to be stopped, as its keywords.

    Raises Cancelled where the flow run was cancelled in Prefect, before or meanwhile.
    """
    stop_if_cancelled()
    teller = _Teller(run, name)
    over = threading.Event()
    context = contextvars.copy_context()  # Prefect's: the page and the log are the task's

    def look() -> None:
        while not over.wait(LOOK_S):
            teller.look()

    thread = threading.Thread(target=context.run, args=(look,), name="publish-told", daemon=True)
    thread.start()
    try:
        with noticed() as stopping:
            yield {"tell": teller, "stopping": stopping}
    finally:
        over.set()
        thread.join(10.0)
    teller.look(is_over=True)


class _Teller:
    """Hears of every step from threads; ``look`` shows the last one."""

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self._page = artifacts.Progress(f"publish {name}", f"publish {name}")
        self._pace = ProgressFormatter()
        self._last: PublishProgress | None = None
        self._ended: PublishProgress | None = None  # the stage before
        self._done: PublishProgress | None = None  # of which the last was said
        self._logged_s = time.monotonic()

    def __call__(self, moved: PublishProgress) -> None:
        last = self._last
        if last is not None and last.stage != moved.stage:
            self._ended = last
        self._last = moved

    def look(self, *, is_over: bool = False) -> None:
        """Show how far it is by now."""
        ended, moved = self._ended, self._last
        if ended is not None:
            self._ended = None
            if ended is not self._done:
                self._run.tell(ended.stage, 1.0, self._said(ended), done=True)
        if moved is None or moved is self._done:
            return
        self._done = moved if is_over or moved.is_over else None
        said = self._said(moved)
        self._run.tell(moved.stage, moved.share, said, done=is_over or moved.is_over)
        before = 0 if moved.stage == DIGEST else 1
        self._page.show(
            1.0 if is_over else (before + moved.share) / STAGES, f"{moved.stage}: {said}"
        )
        if not is_over and time.monotonic() - self._logged_s >= LOG_S:
            self._logged_s = time.monotonic()
            logger.info("%s: %s", moved.stage, said)

    def _said(self, moved: PublishProgress) -> str:
        return self._pace.said(moved, time.monotonic())
