"""A profiler trace of the steps that were asked for, as a Chrome trace (Perfetto reads it).

One file a step and rank; the caller says where it goes. Steps are asked for beforehand, or while
training runs by touching a file. Profiling slows the step it looks at and no other: the profiler
exists only then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from paceline.errors import TemporaryError
from paceline.objects import ObjectStore, join_url

log = logging.getLogger(__name__)


class Tracer:
    """Profiles the steps in ``steps`` (the first is 1, as steps are told).

    Whenever ``request``, a file that need not be there, is touched, the next step is profiled too.
    ``on_trace`` gets the number of the step and the path of a file in ``directory``; it may move
    or delete it.
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
        self._seen = self._touched()  # before this rank began
        self._steps = frozenset(steps)
        self._directory = directory
        self._rank = rank
        self._on_trace = on_trace
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        self._running: profile | None = None

    def begin(self, step: int) -> None:
        """Start profiling where ``step`` was asked for."""
        if step in self._steps or self._asked():
            self._running = profile(activities=self._activities, record_shapes=True)
            self._running.start()

    def end(self, step: int) -> None:
        """Write the trace of ``step``, where there is one, and hand it over."""
        if self._running is None:
            return
        running, self._running = self._running, None
        running.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"trace-step-{step}-rank-{self._rank}.json"
        running.export_chrome_trace(str(path))
        self._on_trace(step, path)

    def _asked(self) -> bool:
        touched = self._touched()
        if touched in (0, self._seen):
            return False
        self._seen = touched
        return True

    def _touched(self) -> int:
        """Return when the request was made, in ns; 0: never. A step pays 2 µs for asking."""
        if self._request is None:
            return 0
        try:
            return self._request.stat().st_mtime_ns
        except OSError:
            return 0

    def close(self) -> None:
        """Drop a trace of a step that did not end."""
        if self._running is not None:
            self._running.stop()
            self._running = None


@dataclass(frozen=True)
class Uploaded:
    """Where traces go: below ``url``, beside the job's checkpoints; the local file goes away.

    ``told`` hears of each: its step, and where it is.
    """

    store: ObjectStore
    url: str
    told: Callable[[int, str], None] = lambda *_: None

    def __call__(self, step: int, path: Path) -> None:
        """Upload the trace of ``step``; where storage is away it stays on this node's disk."""
        where = join_url(self.url, path.name)
        try:
            self.store.upload_file(path, where)
        except TemporaryError as error:
            log.warning("trace of step %d stays at %s: %s", step, path, error)
            return
        path.unlink()
        self.told(step, where)
