"""Progress of a publish: bytes and files of its two stages, reported from its worker threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.errors import Cancelled
from paceline.units import size

DIGEST, UPLOAD, IMPORT = "digest", "upload", "import"
REPORT_INTERVAL_S = 0.2
RATE_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class PublishProgress:
    """The progress of ``stage``."""

    stage: str
    done_bytes: int
    total_bytes: int
    done_files: int
    total_files: int

    @property
    def is_over(self) -> bool:
        return self.done_files >= self.total_files

    @property
    def share(self) -> float:
        """Return the fraction of its bytes that is done, 0 to 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0


ProgressCallback = Callable[[PublishProgress], None]


def ignore_progress(_moved: PublishProgress) -> None:
    """Ignore the progress."""


class ProgressCounter:
    """Counts one stage; several threads add. ``on_progress`` is called every
    ``REPORT_INTERVAL_S`` at most, one call at a time, and at the end.
    """

    def __init__(
        self, stage: str, total_bytes: int, total_files: int, on_progress: ProgressCallback
    ) -> None:
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self._now = PublishProgress(stage, 0, total_bytes, 0, total_files)
        self._reported_s = float("-inf")

    def moved(self, count: int, files: int = 0) -> None:
        """Add bytes and complete files; bytes sent twice do not count beyond the total."""
        with self._lock:
            was = self._now
            self._now = now = replace(
                was,
                done_bytes=min(was.done_bytes + count, was.total_bytes),
                done_files=was.done_files + files,
            )
            if now.is_over or time.monotonic() - self._reported_s >= REPORT_INTERVAL_S:
                self._reported_s = time.monotonic()
                self._on_progress(now)

    def ended_file(self, count: int = 0) -> None:
        """Count a file as complete, and ``count`` bytes of it."""
        self.moved(count, 1)


class ProgressFormatter:
    """Formats the progress of a stage: bytes, files, and the rate of the last seconds (at the
    end of the stage: of the whole).
    """

    def __init__(self) -> None:
        self._stage, self._began_s = "", 0.0
        self._past: deque[tuple[float, int]] = deque()  # (when, bytes done) of the last seconds

    def said(self, moved: PublishProgress, now_s: float) -> str:
        """Return ``moved`` as one line; ``now_s`` never goes back."""
        if moved.stage != self._stage:
            self._stage, self._began_s = moved.stage, now_s
            self._past = deque([(now_s, 0)])
        self._past.append((now_s, moved.done_bytes))
        while len(self._past) > 2 and now_s - self._past[0][0] > RATE_WINDOW_S:
            self._past.popleft()
        now = moved.done_bytes
        then_s, then = (self._began_s, 0) if moved.is_over else self._past[0]
        rate = f", {size((now - then) / (now_s - then_s))}/s" if now_s > then_s else ""
        files = f"{moved.done_files} of {moved.total_files} files"
        return f"{size(moved.done_bytes)} of {size(moved.total_bytes)}{rate}, {files}"


# Threads of one publish: the first error, or setting ``stopping``, ends all of them.

T = TypeVar("T")


def results(
    pool: ThreadPoolExecutor, running: Sequence[Future[T]], stopping: threading.Event
) -> list[T]:
    """Return the result of each of ``running``, or raise the first error as soon as there is one.

    On an error ``stopping`` is set and the threads have ended before it is raised; Cancelled is
    raised only where no thread had another error.
    """
    try:
        ended, _ = wait(running, return_when=FIRST_EXCEPTION)
        errors = [error for each in ended if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda each: isinstance(each, Cancelled)):
            raise error
    except BaseException:
        stopping.set()  # otherwise Ctrl-C or a failure would wait for files of a hundred gigabytes
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    return [each.result() for each in running]
