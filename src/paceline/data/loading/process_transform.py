"""Transforms in processes of their own: several at once, none under this interpreter's lock.

Each process is a fresh interpreter that has imported the user's function and nothing of this one's
state; samples go to it and come back as bytes over its pipes, one at a time. It ends with its pipe:
nothing stays behind when the rank is killed. Results come in the order that they are asked for,
whoever made them, and are what the function gives on the thread that makes batches.

A sample that takes longer than the deadline, or that ends its process twice (once may have been an
accident), is bad, with that for a reason; its process is replaced. Too many of these are no longer
about samples, and raise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np

from paceline.data.child_process import FAILED, LENGTH_BYTES, Child, how_ended
from paceline.data.formats.sample import Array
from paceline.data.loading.batch import packed, unpacked
from paceline.data.loading.transform import KEY, Here, TransformFailed, Transforms, load_transform
from paceline.errors import DataRejected, InvalidInput, WorkerLost

MOST_LOST = 8  # processes of one stream that hung or died


def open_transforms(
    name: str, sources: Sequence[str], *, processes: int, deadline_s: float
) -> Transforms | None:
    """Return where the transform called ``name`` runs: in so many processes, or for 0 of them on a
    thread of this one; None where there is none. See ``load_transform``.
    """
    transform = load_transform(name, sources)
    if transform is None:
        return None
    if not processes:
        return Here(transform, deadline_s)
    return Apart(name, sources, processes=processes, deadline_s=deadline_s)


def require_runnable(name: str) -> None:
    """Raise InvalidInput where the transform called ``name`` cannot be imported, with the reason;
    it is tried in a process that ends again."""
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


class Apart:
    """A transform called ``module:function`` in so many ``processes``; close it.

    Processes start with the first sample, each kept by a thread of this one. Raises what
    ``load_transform`` does, here and now.
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
        self._children: list[Child] = []
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
        """End the processes, whatever they do; samples that wait raise WorkerLost."""
        with self._lock:
            self._closed = True
            children, self._children = self._children, []
        for each in children:
            each.kill()  # its thread sees that, and closes its pipes
        self._pool.shutdown(wait=True, cancel_futures=True)
        for each in children:
            each.end()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, key: str, arrays: bytes) -> dict[str, Array]:
        """Return one sample's result; on a thread of the pool, which has a process of its own."""
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

    def _child(self) -> Child:
        child: Child | None = getattr(self._local, "child", None)
        if child is None:
            with self._lock:
                if self._closed:
                    raise WorkerLost("a transform's processes are closed", where=self._name)
                child = _started(self._name)
                self._children.append(child)
            child.wait_until_ready()
            self._local.child = child
        return child

    def _replace(self, child: Child, key: str, what: str) -> int:
        """End a process that is of no more use; return its exit code."""
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


def _started(name: str) -> Child:
    return Child("a transform's process", "paceline.data.loading.process_transform_child", name)
