"""Watches the bytes that agents take in while nobody may be leading.

What an agent wrote to its files and passed on to its peers (``wchar`` of /proc/PID/io: pwrite and
sendfile, not the sockets of the control plane) only grows, needs no coordinator to be told, and
grows by what arrived. A gap is the time between two steps of it within one deployment; what comes
after the last step (verify, publish) is none.
"""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

STEP_BYTES = 16 * 1024  # smaller growth is log lines
LOOK_S = 0.02


class WireWatch:
    """Samples a few processes until it is stopped."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="wire-watch", daemon=True)
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, int]] = {}
        self._looking = False
        self.gaps: list[tuple[float, float, str]] = []  # how long, until when, of whom
        self.moved_bytes = 0
        self.broken: list[str] = []  # deployments that did not complete
        self.steps: list[float] = []  # when anybody's count grew

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stopping.set()
        self._thread.join(10)

    def pause(self) -> None:
        """Look away: between two deployments nothing need move."""
        with self._lock:
            self._looking, self._last = False, {}

    def resume(self) -> None:
        """Look again."""
        with self._lock:
            self._looking = True

    def longest_within(self, begin_s: float, end_s: float) -> float:
        """Return the longest time in [begin, end] in which no agent's count grew."""
        with self._lock:
            times = [begin_s, *(t for t in self.steps if begin_s <= t <= end_s), end_s]
        return max(b - a for a, b in itertools.pairwise(times))

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_S):
            now_s = time.monotonic()
            for name, pid in self._pids.items():
                count = _written(pid)
                if count is None:
                    continue
                with self._lock:
                    if not self._looking:
                        continue
                    since_s, seen = self._last.get(name, (0.0, -1))
                    if seen < 0:
                        self._last[name] = (0.0, count)
                        continue
                    if count - seen < STEP_BYTES:
                        continue
                    self.moved_bytes += count - seen
                    self.steps.append(now_s)
                    if since_s:
                        self.gaps.append((now_s - since_s, now_s, name))
                    self._last[name] = (now_s, count)


def _written(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))
