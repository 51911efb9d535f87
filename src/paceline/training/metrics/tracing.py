"""Profiler traces of requested steps, as Chrome traces (for Perfetto), and their upload.

One file per step and rank; the caller decides where it goes. Steps are requested beforehand, or
during training by touching a file. Profiling slows only the profiled step: the profiler exists only
then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from paceline.errors import PacelineError
from paceline.storage import ObjectStore, join_url

log = logging.getLogger(__name__)

CLOSE_S = 10.0  # for an upload that is under way when training ends


class Tracer:
    """Profiles the steps in ``steps``, counted from 1.

    When the file ``request`` is touched (it need not exist), the next step is profiled too.
    ``on_trace`` receives the number of the step and the path of a file in ``directory``; it may
    move or delete it. A step that begins twice (a stale push, another update of the step) is
    profiled once; if the profiler fails, only its trace is lost. Call begin and end on one thread.
    """

    def __init__(
        self,
        steps: Collection[int],
        directory: Path,
        rank: int,
        on_trace: Callable[[int, Path], None],
        *,
        cuda: bool = False,
        request: Path | None = None,
    ) -> None:
        self._request = request
        self._seen = self._touched()  # ignores a request from before this rank began
        self._steps = frozenset(steps)
        self._directory = directory
        self._rank = rank
        self._on_trace = on_trace
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        self._running: profile | None = None
        self._traced = 0  # the last step that was profiled

    def begin(self, step: int) -> None:
        """Start profiling if ``step`` was requested."""
        if self._running is not None or step == self._traced:
            return
        if step in self._steps or self._asked():
            running = profile(activities=self._activities, record_shapes=True)
            try:
                running.start()
            except RuntimeError as error:  # another profiler is active in this process
                log.warning("no trace of step %d: %s", step, error)
                return
            self._running, self._traced = running, step

    def end(self, step: int) -> None:
        """Write the trace of ``step``, if there is one, and pass it to ``on_trace``."""
        if self._running is None:
            return
        running, self._running = self._running, None
        path = self._directory / f"trace-step-{step}-rank-{self._rank}.json"
        try:
            running.stop()
            self._directory.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # a full disk is no reason to stop training
            log.warning("no trace of step %d at %s: %s", step, path, error)
            return
        self._on_trace(step, path)

    def _asked(self) -> bool:
        touched = self._touched()
        if touched in (0, self._seen):
            return False
        self._seen = touched
        return True

    def _touched(self) -> int:
        """Return the time of the last request in ns, 0 for none; costs 2 µs a step."""
        if self._request is None:
            return 0
        try:
            return self._request.stat().st_mtime_ns
        except OSError:
            return 0

    def close(self) -> None:
        """Drop the trace of a step that did not end."""
        if self._running is not None:
            self._running.stop()
            self._running = None


@dataclass(frozen=True)
class TraceUploader:
    """Uploads traces below ``url``, beside the job's checkpoints, and deletes the local files.

    ``on_uploaded`` is called with the step and the URL of each.
    """

    store: ObjectStore
    url: str
    on_uploaded: Callable[[int, str], None] = lambda *_: None

    def __call__(self, step: int, path: Path) -> None:
        """Upload the trace of ``step``; if storage fails, it stays on this node's disk."""
        where = join_url(self.url, path.name)
        try:
            self.store.upload_file(path, where)
        except PacelineError as error:  # a lost trace must not fail a step
            log.warning("trace of step %d stays at %s: %s", step, path, error)
            return
        path.unlink()
        self.on_uploaded(step, where)


class BackgroundUpload:
    """Runs ``taker`` on a thread, one trace at a time, because the caller may hold a lock."""

    def __init__(self, taker: Callable[[int, Path], None]) -> None:
        self._taker = taker
        self._thread: threading.Thread | None = None

    def __call__(self, step: int, path: Path) -> None:
        """Pass the trace to ``taker``; while the one before is in progress, leave it on disk."""
        if self._thread is not None and self._thread.is_alive():
            log.warning("trace of step %d stays at %s: one is still uploaded", step, path)
            return
        arguments = (step, path)
        self._thread = threading.Thread(
            target=self._taker, args=arguments, name="trace", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> BackgroundUpload:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait up to ``CLOSE_S`` for the last one."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)
