"""Run a transform in several child processes in parallel, without this interpreter's lock.

Each process is a fresh interpreter that imports only the user's function; samples are sent and
returned as bytes over its pipes, one at a time. It exits when its pipe closes, so that nothing
remains after the rank is killed. Results are returned in the order requested and equal those of an
in-process transform.

A sample that exceeds the deadline, or that ends its process twice (once may be an accident), is
bad, with that reason, and its process is replaced. Too many lost processes raise DataRejected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np

from paceline.data.child_process import FAILED, LENGTH_BYTES, ChildProcess, how_ended
from paceline.data.formats.sample import Array
from paceline.data.loading.batch import packed, unpacked
from paceline.data.loading.transform import (
    KEY,
    InlineTransform,
    TransformFailed,
    Transforms,
    load_transform,
)
from paceline.errors import DataRejected, InvalidInput, WorkerLost

MOST_LOST = 8  # processes of one stream that hung or died, at most


def open_transforms(
    name: str, sources: Sequence[str], *, processes: int, deadline_s: float
) -> Transforms | None:
    """Return the runner of the transform called ``name``; None for ``""``. See ``load_transform``.

    It runs in ``processes`` child processes, or for 0 on a thread of this process.
    """
    transform = load_transform(name, sources)
    if transform is None:
        return None
    if not processes:
        return InlineTransform(transform, deadline_s)
    return ProcessTransform(name, sources, processes=processes, deadline_s=deadline_s)


def require_runnable(name: str) -> None:
    """Raise InvalidInput where the transform called ``name`` cannot be imported, with the reason.

    The import is tried in a child process.
    """
    if not name:
        return
    child = _started(name)
    try:
        child.wait_until_ready()
    except WorkerLost as error:
        raise InvalidInput(
            "no such transform",
            got=error.got,
            wanted="module:function, to be imported here and on every node",
            where=f"data.transform {name}",
            do="Correct data.transform, or install its module.",
        ) from error
    finally:
        child.end()


class ProcessTransform:
    """Runs the transform ``module:function`` in ``processes`` child processes; close it.

    Processes start with the first samples, one for each thread of a pool. The constructor raises
    the errors of ``load_transform``.
    """

    def __init__(
        self, name: str, sources: Sequence[str], *, processes: int, deadline_s: float
    ) -> None:
        if processes < 1 or deadline_s <= 0:
            raise InvalidInput(
                "bad processes for a transform",
                got=f"{processes} processes, {deadline_s} s",
                wanted="at least 1, and a deadline above 0",
            )
        load_transform(name, sources)
        self.lost = 0  # processes that hung or died
        self._name, self._deadline_s = name, deadline_s
        self._local = threading.local()
        self._lock = threading.Lock()
        self._children: list[ChildProcess] = []
        self._closed = False
        self._pool = ThreadPoolExecutor(processes, thread_name_prefix="transform")

    def start(self, given: dict[str, Any]) -> Callable[[], dict[str, Array]]:
        """Queue one sample; see ``transform.Transforms``. Raises WorkerLost after ``close``."""
        key = str(given[KEY])
        arrays = {name: np.asarray(each) for name, each in given.items() if name != KEY}
        try:
            future = self._pool.submit(self._run, key, packed(arrays))
        except RuntimeError as error:
            raise WorkerLost("a transform's processes are closed", where=self._name) from error

        def result() -> dict[str, Array]:
            try:
                return future.result()
            except CancelledError as error:
                raise WorkerLost("a transform's processes are closed", where=self._name) from error

        return result

    def close(self) -> None:
        """Kill the processes; pending samples raise WorkerLost."""
        with self._lock:
            self._closed = True
            children, self._children = self._children, []
        for each in children:
            each.kill()  # its thread notices, and closes its pipes
        self._pool.shutdown(wait=True, cancel_futures=True)
        for each in children:
            each.end()

    def __enter__(self) -> ProcessTransform:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, key: str, arrays: bytes) -> dict[str, Array]:
        """Return one sample's result; runs on a pool thread, which owns a child process."""
        request = b"".join([len(raw := key.encode()).to_bytes(LENGTH_BYTES, "little"), raw, arrays])
        for attempt in (1, 2):
            child = self._child()
            try:
                kind, answer = child.ask(request, self._deadline_s)
            except TimeoutError as error:
                self._replace(child, key, "hung")
                raise TransformFailed(
                    f"its transform did not end within {self._deadline_s:g} s"
                ) from error
            except (OSError, EOFError) as error:
                code = self._replace(child, key, "died")
                if attempt == 2:
                    raise TransformFailed(
                        f"its transform ended its process, twice: {how_ended(code)}"
                    ) from error
                continue
            if kind == FAILED:
                raise TransformFailed(answer.decode(errors="replace"))
            return unpacked(answer)
        raise AssertionError("unreachable")

    def _child(self) -> ChildProcess:
        child: ChildProcess | None = getattr(self._local, "child", None)
        if child is None:
            with self._lock:
                if self._closed:
                    raise WorkerLost("a transform's processes are closed", where=self._name)
                child = _started(self._name)
                self._children.append(child)
            child.wait_until_ready()
            self._local.child = child
        return child

    def _replace(self, child: ChildProcess, key: str, what: str) -> int:
        """End an unusable process; return its exit code."""
        self._local.child = None
        code = child.end()
        with self._lock:
            if self._closed:
                raise WorkerLost("a transform's processes are closed", where=self._name)
            if child in self._children:
                self._children.remove(child)
            self.lost += 1
            lost = self.lost
        if lost > MOST_LOST:
            raise DataRejected(
                "a transform loses its processes",
                got=f"{lost} hung or died, the last one {what} with sample {key!r}",
                wanted=f"at most {MOST_LOST}",
                where=self._name,
                do="Run the transform on that sample; see data.transform_deadline_s.",
            )
        return code


def _started(name: str) -> ChildProcess:
    return ChildProcess(
        "a transform's process", "paceline.data.loading.process_transform_child", name
    )
