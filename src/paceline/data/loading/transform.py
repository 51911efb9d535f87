"""User transforms: a ``module:function`` applied to each sample between shard and batch.

It runs on a thread beside the one that makes batches, or in child processes
(``process_transform``), never on the training thread, and must be pure: a sample must give the same
result on every read, or a resumed job would train on other data. It must keep the number of tokens,
because batches are planned by it, and the shapes of features. A sample whose transform raises or
returns something else is bad: it is recorded with the reason and skipped; too many of them stop the
stream. A transform that hangs is skipped in a process, and stops the stream on a thread, which
cannot be killed.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, Protocol

import numpy as np

from paceline.config.settings import module_allowed
from paceline.data.formats.sample import Array, clean_array
from paceline.data.loading.samples import ShardSamples
from paceline.errors import AccessDenied, DataRejected, InvalidInput

Transform = Callable[[dict[str, Any]], Mapping[str, Any]]
TOKENS, KEY = "tokens", "key"


def require_allowed(name: str, sources: Sequence[str]) -> None:
    """Raise AccessDenied unless the module of ``name`` is one of ``sources`` or inside one."""
    module = name.partition(":")[0]
    if name and not module_allowed(module, sources):
        raise AccessDenied(
            "transform is from a source that is not allowed",
            got=name,
            wanted=f"one of {', '.join(sources) or 'none'}",
            where="security.code_sources",
            do="Add the module to the profile if you trust it with what the ranks can read.",
        )


def load_transform(name: str, sources: Sequence[str]) -> Transform | None:
    """Return the function called ``module:function``, None for ``""``.

    It receives ``{"key": str, "tokens": array, NAME: array, …}`` with read-only arrays, and returns
    the same kind of mapping. Raises InvalidInput where there is none, AccessDenied for a module
    that is not in ``sources``.
    """
    if not name:
        return None
    require_allowed(name, sources)
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(
            "no such transform",
            got=f"{name}: {type(error).__name__}: {error}",
            wanted="module:function",
            do="Correct data.transform.",
        ) from error
    if not callable(found):
        raise InvalidInput("transform is not a function", got=name, wanted="module:function")
    transform: Transform = found
    return transform


DEADLINE_S = 20.0  # per sample, unless a profile sets another
ACCIDENTS = 8  # bad samples always allowed


class TransformFailed(Exception):
    """A transform returned no usable sample; the message is the reason."""


class Transforms(Protocol):
    """A runner of transforms: in this process or in child processes."""

    def start(self, given: dict[str, Any]) -> Callable[[], dict[str, Array]]:
        """Start one sample and return a function that waits for its arrays.

        ``given`` is the transform's argument. The function returns tokens only if the transform
        returned them, and raises TransformFailed.
        """
        ...

    def close(self) -> None:
        """Stop the runner."""
        ...


class InlineTransform:
    """Runs transforms in this process, one at a time, each when its result is requested.

    They run on a daemon thread, so that the caller waits at most ``deadline_s``: a late one raises
    DataRejected, and so do all later calls, because its thread is still busy.
    """

    def __init__(self, transform: Transform, deadline_s: float = DEADLINE_S) -> None:
        self._transform, self._deadline_s = transform, deadline_s
        self._asked: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[dict[str, Array] | TransformFailed] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late: DataRejected | None = None
        self._lock = threading.Lock()  # training and evaluation streams share it

    def start(self, given: dict[str, Any]) -> Callable[[], dict[str, Array]]:
        """Return the function that runs the transform."""

        def result() -> dict[str, Array]:
            with self._lock:
                return self._ask(given)

        return result

    def close(self) -> None:
        """Let the thread end once it is idle."""
        self._asked.put(None)

    def _ask(self, given: dict[str, Any]) -> dict[str, Array]:
        if self._late is not None:
            raise self._late
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="transform", daemon=True)
            self._thread.start()
        self._asked.put(given)
        try:
            answer = self._answers.get(timeout=self._deadline_s)
        except Empty:
            self._late = DataRejected(
                "a transform hangs",
                got=f"nothing for {self._deadline_s:g} s, with sample {given[KEY]!r}",
                wanted="data.transform_deadline_s",
                do="Mend it, or set data.transform_processes: then such samples are passed over.",
            )
            raise self._late from None
        if isinstance(answer, TransformFailed):
            raise answer
        return answer

    def _serve(self) -> None:
        while (given := self._asked.get()) is not None:
            try:
                answer: dict[str, Array] | TransformFailed = applied(self._transform, given)
            except TransformFailed as error:
                answer = error
            self._answers.put(answer)


def applied(transform: Transform, given: dict[str, Any]) -> dict[str, Array]:
    """Return the arrays that ``transform`` returns for a sample; raises TransformFailed."""
    try:
        returned = dict(transform(given))
        return {name: clean_array(each) for name, each in returned.items() if name != KEY}
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        why = f"its transform failed: {type(error).__name__}: {error}"
        raise TransformFailed(why[:300]) from error


class FailureTally:
    """Counts transformed and bad samples; raises once more than the fraction ``most`` is bad."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.tried = self.bad = 0
        self._lock = threading.Lock()

    def add(self, why: str | None = None) -> None:
        """Count one sample; ``why`` is the reason if it is bad. Raises DataRejected where too many
        are."""
        with self._lock:
            self.tried += 1
            if why is None:
                return
            self.bad += 1
            bad, tried = self.bad, self.tried
        if bad > max(ACCIDENTS, self.most * tried):
            raise DataRejected(
                "a transform fails on too many samples",
                got=f"{bad} of {tried}, the last one: {why}",
                wanted=f"at most {self.most:.0%}, data.max_bad_share",
                do="Run the transform on these samples.",
            )


class TransformedSamples:
    """The samples of the shard called ``name`` after a transform.

    ``bad(i, why)`` records a bad sample and raises CorruptData.
    """

    def __init__(
        self,
        samples: ShardSamples,
        transforms: Transforms,
        bad: Callable[[int, str], NoReturn],
        known: Mapping[int, str] | None = None,
        *,
        name: str = "",
        tally: FailureTally | None = None,
    ) -> None:
        """``known``: samples already recorded as bad, with the reason; they are not tried."""
        self._samples, self._transforms, self._bad = samples, transforms, bad
        self._failed = dict(known or {})
        self._name = name
        self._tally = tally or FailureTally(most=1.0)
        self._coming: dict[int, Callable[[], dict[str, Array]]] = {}
        self._made: dict[int, tuple[Array, dict[str, Array]]] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def key(self, i: int) -> str:
        """Return the sample's name within its snapshot."""
        return self._samples.key(i)

    def tokens(self, i: int) -> Array:
        """Return the sample's tokens after its transform."""
        return self._of(i)[0]

    def features(self, i: int) -> dict[str, Array]:
        """Return the sample's arrays after its transform."""
        return self._of(i)[1]

    def text_bytes(self, i: int) -> bytes:
        """Return the sample's text before the transform."""
        return self._samples.text_bytes(i)

    def flat(self) -> None:
        """Return None: samples are computed one by one."""
        return

    def expect(self, samples: Sequence[int]) -> None:
        """Start these samples, in this order, and drop all others."""
        coming, made = self._coming, self._made
        self._made = {i: made[i] for i in samples if i in made}
        wanted = [i for i in samples if i not in made and i not in self._failed]
        self._coming = {i: coming.get(i) or self._start(i) for i in wanted}

    def close(self) -> None:
        """Allow the cache to remove the shard."""
        self._samples.close()

    def __enter__(self) -> TransformedSamples:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, i: int) -> Callable[[], dict[str, Array]]:
        tokens = self._samples.tokens(i)
        return self._transforms.start(
            {KEY: self.key(i), TOKENS: tokens, **self._samples.features(i)}
        )

    def _of(self, i: int) -> tuple[Array, dict[str, Array]]:
        if i not in self._made:
            if i in self._failed:
                self._bad(i, self._failed[i])
            result = self._coming.pop(i, None) or self._start(i)
            why = None
            try:
                try:
                    self._made[i] = self._checked(i, result())
                except TransformFailed as error:
                    why = self._failed[i] = str(error)
                self._tally.add(why)
            except DataRejected as error:
                where = ", ".join(str(e) for e in (error.where, f"{self._name}#{i}") if e)
                got, wanted = error.got, error.wanted
                raise DataRejected(
                    error.what, got=got, wanted=wanted, where=where, do=error.do
                ) from error
            if why is not None:
                self._bad(i, why)
        return self._made[i]

    def _checked(self, i: int, arrays: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        tokens = self._samples.tokens(i)
        found = arrays.pop(TOKENS, tokens)
        if found.shape != tokens.shape or found.dtype.kind not in "iu":
            got = f"{found.dtype.name}{list(found.shape)}"
            raise TransformFailed(f"its transform gave tokens {got} for {len(tokens)} integers")
        if len(found) and (int(found.min()) < 0 or int(found.max()) > np.iinfo(tokens.dtype).max):
            raise TransformFailed("its transform gave tokens outside the vocabulary")
        return found.astype(tokens.dtype, copy=False), self._features(i, arrays)

    def _features(self, i: int, arrays: dict[str, Array]) -> dict[str, Array]:
        """Return the sample's features, with those that the transform replaced."""
        stored = self._samples.features(i)
        for name, before in stored.items():
            after = arrays.get(name, before)
            if after.ndim != before.ndim or after.shape[1:] != before.shape[1:]:
                got = f"{name!r} {list(after.shape)} for {list(before.shape)}"
                raise TransformFailed(f"its transform gave a feature of another shape: {got}")
            if not np.can_cast(after.dtype, before.dtype, "same_kind"):
                got = f"{name!r} {after.dtype.name} for {before.dtype.name}"
                raise TransformFailed(f"its transform gave a feature of another kind: {got}")
        return {**stored, **arrays}
