"""User transforms: a ``module:function`` applied to each sample between shard and batch.

It runs in child processes, never in the training process, and must be pure: a sample must give the
same result on every read, or a resumed job would train on other data. It must keep the number of
tokens, because batches are planned by it, and the shapes of features.

A sample is bad if its transform raises, returns something else, exceeds the deadline, or ends its
process twice (once may be an accident). It is recorded with the reason and skipped; too many bad
samples or lost processes stop the stream. ``python -m`` this module is the child.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from paceline.config import module_allowed
from paceline.data.child_process import DONE, FAILED, ChildProcess, how_ended, serve
from paceline.data.formats import (
    Array,
    Sample,
    ShardSamples,
    clean_array,
    pack_sample,
    unpack_sample,
)
from paceline.errors import AccessDenied, CorruptData, DataRejected, InvalidInput, WorkerLost

TOKENS, KEY = "tokens", "key"
MOST_LOST = 8  # processes of one stream that hung or died, at most


class TransformFailed(Exception):
    """A transform returned no usable sample; the message is the reason."""


def require_allowed(name: str, sources: Sequence[str]) -> None:
    """Raise AccessDenied unless the module of ``name`` is one of ``sources`` or inside one."""
    if name and not module_allowed(name.partition(":")[0], sources):
        raise AccessDenied(
            "transform is from a source that is not allowed",
            got=name,
            wanted=f"one of {', '.join(sources) or 'none'}",
            where="security.code_sources",
            do="Add the module to the profile if you trust it with what the ranks can read.",
        )


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


def open_transforms(
    name: str, sources: Sequence[str], *, processes: int, deadline_s: float
) -> ProcessTransform | None:
    """Return the runner of the transform called ``name``; None for ``""``.

    Raises AccessDenied for a module that is not in ``sources``.
    """
    require_allowed(name, sources)
    # 0: what earlier versions ran on a thread of the rank.
    return ProcessTransform(name, max(1, processes), deadline_s) if name else None


class ProcessTransform:
    """Runs the transform ``module:function`` in ``processes`` child processes; close it.

    Processes start with the first samples, one for each thread of a pool. Results are returned in
    the order requested.
    """

    def __init__(self, name: str, processes: int, deadline_s: float) -> None:
        self.lost = 0  # processes that hung or died
        self._name, self._deadline_s = name, deadline_s
        self._local = threading.local()
        self._lock = threading.Lock()
        self._children: list[ChildProcess] = []
        self._closed = False
        self._pool = ThreadPoolExecutor(processes, thread_name_prefix="transform")

    def start(self, sample: Sample) -> Future[Sample]:
        """Queue one sample; its result has tokens only if the transform returned them.

        The future raises TransformFailed, DataRejected, and WorkerLost after ``close``.
        """
        return self._pool.submit(self._run, sample)

    def close(self) -> None:
        """Kill the processes; pending samples raise WorkerLost."""
        with self._lock:
            self._closed = True
            children, self._children = self._children, []
        for each in children:
            each.kill()  # its thread notices, and closes its socket
        self._pool.shutdown(wait=True, cancel_futures=True)
        for each in children:
            each.end()

    def __enter__(self) -> ProcessTransform:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, sample: Sample) -> Sample:
        """Return one sample's result; runs on a pool thread, which owns a child process."""
        for attempt in (1, 2):
            child = self._child()
            try:
                child.send(pack_sample(sample), self._deadline_s)
                kind, answer = child.receive(self._deadline_s)
            except TimeoutError as error:
                self._replace(child, sample.key, "hung")
                raise TransformFailed(
                    f"its transform did not end within {self._deadline_s:g} s"
                ) from error
            except (OSError, EOFError) as error:
                code = self._replace(child, sample.key, "died")
                if attempt == 2:
                    raise TransformFailed(
                        f"its transform ended its process, twice: {how_ended(code)}"
                    ) from error
                continue
            if kind == FAILED:
                raise TransformFailed(answer.decode(errors="replace"))
            return unpack_sample(answer)
        raise AssertionError("unreachable")

    def _child(self) -> ChildProcess:
        child: ChildProcess | None = getattr(self._local, "child", None)
        if child is None:
            with self._lock:
                self._require_open()
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
            self._require_open()
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

    def _require_open(self) -> None:
        if self._closed:
            raise WorkerLost("a transform's processes are closed", where=self._name)


def _started(name: str) -> ChildProcess:
    return ChildProcess("a transform's process", "paceline.data.loading.transform", name)


class TransformedSamples(ShardSamples):
    """The samples of the shard called ``name`` after a transform.

    ``report(sample, reason or None)`` is called with each result; samples in ``known`` are bad and
    are not tried again. A bad sample raises CorruptData.
    """

    def __init__(
        self,
        name: str,
        transforms: ProcessTransform,
        known: Mapping[str, str],
        report: Callable[[str, str | None], None],
        *stored: Any,
    ) -> None:
        super().__init__(*stored)
        self._name, self._transforms = name, transforms
        self._known, self._report = known, report
        self._coming: dict[int, Future[Sample]] = {}
        self._made: dict[int, tuple[Array, dict[str, Array]]] = {}

    def tokens(self, i: int) -> Array:
        return self._of(i)[0]

    def features(self, i: int) -> dict[str, Array]:
        return self._of(i)[1]

    def flat(self) -> None:
        """Return None: samples are computed one by one."""

    def expect(self, samples: Sequence[int]) -> None:
        """Start these samples, in this order, and drop all others."""
        coming, made = self._coming, self._made
        self._made = {i: made[i] for i in samples if i in made}
        wanted = [i for i in samples if i not in made and f"{self._name}#{i}" not in self._known]
        self._coming = {i: coming.get(i) or self._start(i) for i in wanted}

    def _start(self, i: int) -> Future[Sample]:
        try:
            return self._transforms.start(
                Sample(self.key(i), None, super().tokens(i), super().features(i))
            )
        except RuntimeError as error:  # its pool is shut down
            raise WorkerLost("a transform's processes are closed") from error

    def _of(self, i: int) -> tuple[Array, dict[str, Array]]:
        if i not in self._made:
            name = f"{self._name}#{i}"
            why = self._known.get(name)
            if why is None:
                running = self._coming.pop(i, None) or self._start(i)
                try:
                    self._made[i] = self._checked(i, running.result())
                except TransformFailed as error:
                    why = str(error)
                except CancelledError as error:
                    raise WorkerLost("a transform's processes are closed") from error
                self._report(name, why)
            if why is not None:
                raise CorruptData("data sample is bad", got=why, where=f"shard {name}")
        return self._made[i]

    def _checked(self, i: int, got: Sample) -> tuple[Array, dict[str, Array]]:
        """Return the result for sample ``i``, with what was stored where it has nothing."""
        tokens, stored = super().tokens(i), super().features(i)
        found = tokens if got.tokens is None else got.tokens
        if found.shape != tokens.shape or found.dtype.kind not in "iu":
            said = f"{found.dtype.name}{list(found.shape)}"
            raise TransformFailed(f"its transform gave tokens {said} for {len(tokens)} integers")
        if len(found) and (int(found.min()) < 0 or int(found.max()) > np.iinfo(tokens.dtype).max):
            raise TransformFailed("its transform gave tokens outside the vocabulary")
        for name, before in stored.items():
            after = got.features.get(name, before)
            if after.ndim != before.ndim or after.shape[1:] != before.shape[1:]:
                said = f"{name!r} {list(after.shape)} for {list(before.shape)}"
                raise TransformFailed(f"its transform gave a feature of another shape: {said}")
            if not np.can_cast(after.dtype, before.dtype, "same_kind"):
                said = f"{name!r} {after.dtype.name} for {before.dtype.name}"
                raise TransformFailed(f"its transform gave a feature of another kind: {said}")
        return found.astype(tokens.dtype, copy=False), {**stored, **got.features}


# The child process.


def run_transform(name: str) -> Callable[[bytes], tuple[bytes, bytes]]:
    """Return the function that applies the transform called ``name`` to a packed sample."""
    module, _, function = name.partition(":")
    transform = getattr(importlib.import_module(module), function)
    if not callable(transform):
        raise TypeError(f"{function} is not a function")

    def answer(request: bytes) -> tuple[bytes, bytes]:
        sample = unpack_sample(request)
        assert sample.tokens is not None
        arrays = {TOKENS: sample.tokens, **sample.features}
        for each in arrays.values():
            each.flags.writeable = False
        # an array without axes is given as a scalar
        given = {name: each if each.ndim else each[()] for name, each in arrays.items()}
        try:
            returned = dict(transform({KEY: sample.key, **given}))
            found = {each: clean_array(returned[each]) for each in returned if each != KEY}
            result = Sample(sample.key, None, found.pop(TOKENS, None), found)
            return DONE, pack_sample(result)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function
            why = f"its transform failed: {type(error).__name__}: {error}"
            return FAILED, why[:300].encode(errors="replace")

    return answer


if __name__ == "__main__":
    serve(run_transform)
