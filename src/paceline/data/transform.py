"""A user's own step between a shard and a batch: ``module:function``, sample → sample.

It runs on the thread that makes batches, or in processes of its own (``apart``), never on the
thread that trains, and must be pure: the same sample gives the same result on every read, or a
resumed job would see other data. It may change anything but how many tokens there are, because
batches were planned by that. A sample whose transform raises, or gives something else, is bad: it
is named with the reason, and passed over.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from paceline.data.formats.sample import Array, clean_array
from paceline.data.samples import ShardSamples
from paceline.errors import AccessDenied, InvalidInput
from paceline.profile.allowed import module_allowed

Transform = Callable[[dict[str, Any]], Mapping[str, Any]]
TOKENS, KEY = "tokens", "key"


def require_allowed(name: str, sources: Sequence[str]) -> None:
    """Raise AccessDenied where the module of ``name`` is none of ``sources``, nor inside of one."""
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

    Raises InvalidInput where there is none, AccessDenied for a module that is not in ``sources``.

    It is given ``{"key": str, "tokens": array, NAME: array, …}`` and returns the same kind of
    mapping; the arrays it is given are read-only.
    """
    if not name:
        return None
    require_allowed(name, sources)
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(
            "no such transform", got=name, wanted="module:function", do="Correct data.transform."
        ) from error
    if not callable(found):
        raise InvalidInput("transform is not a function", got=name, wanted="module:function")
    transform: Transform = found
    return transform


class TransformFailed(Exception):
    """A sample's transform gave nothing; the message says why, for whoever looks at the sample."""


class Transforms(Protocol):
    """Where transforms run."""

    def start(self, given: dict[str, Any]) -> Callable[[], dict[str, Array]]:
        """Begin with one sample, ``given`` as a transform is; return what waits for its arrays,
        tokens among them if they were returned, and raises TransformFailed."""
        ...

    def close(self) -> None:
        """End what was begun."""
        ...


class Here:
    """Transforms on the thread that asks for their results."""

    def __init__(self, transform: Transform) -> None:
        self._transform = transform

    def start(self, given: dict[str, Any]) -> Callable[[], dict[str, Array]]:
        """Return what runs the transform."""
        return lambda: applied(self._transform, given)

    def close(self) -> None:
        """Do nothing: nothing runs."""


def applied(transform: Transform, given: dict[str, Any]) -> dict[str, Array]:
    """Return the arrays that ``transform`` makes of a sample; raises TransformFailed."""
    try:
        returned = dict(transform(given))
        return {name: clean_array(each) for name, each in returned.items() if name != KEY}
    except Exception as error:  # a user's function raises what it likes
        why = f"its transform failed: {type(error).__name__}: {error}"
        raise TransformFailed(why[:300]) from error


class TransformedSamples:
    """The samples of a shard, each as its transform gives it; ``bad(i, why)`` raises CorruptData
    and remembers the sample."""

    def __init__(
        self,
        samples: ShardSamples,
        transforms: Transforms,
        bad: Callable[[int, str], NoReturn],
        known: Mapping[int, str] | None = None,
    ) -> None:
        """``known``: samples that are bad as is known already, and why; they are not tried."""
        self._samples, self._transforms, self._bad = samples, transforms, bad
        self._failed = dict(known or {})
        self._coming: dict[int, Callable[[], dict[str, Array]]] = {}
        self._made: dict[int, tuple[Array, dict[str, Array]]] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def key(self, i: int) -> str:
        """Return what names the sample within its snapshot."""
        return self._samples.key(i)

    def tokens(self, i: int) -> Array:
        """Return the sample's tokens after its transform."""
        return self._of(i)[0]

    def features(self, i: int) -> dict[str, Array]:
        """Return the sample's arrays after its transform."""
        return self._of(i)[1]

    def text_bytes(self, i: int) -> bytes:
        """Return the sample's text, as it was before."""
        return self._samples.text_bytes(i)

    def flat(self) -> None:
        """Return nothing: samples are made one by one."""
        return

    def expect(self, samples: Sequence[int]) -> None:
        """Begin with these samples, in this order, and forget all others."""
        coming, made = self._coming, self._made
        self._made = {i: made[i] for i in samples if i in made}
        wanted = [i for i in samples if i not in made and i not in self._failed]
        self._coming = {i: coming.get(i) or self._start(i) for i in wanted}

    def close(self) -> None:
        """Let the cache have the shard's place."""
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
            try:
                self._made[i] = self._checked(i, result())
            except TransformFailed as error:
                self._failed[i] = str(error)
                self._bad(i, str(error))
        return self._made[i]

    def _checked(self, i: int, arrays: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        tokens = self._samples.tokens(i)
        found = arrays.pop(TOKENS, tokens)
        if found.shape != tokens.shape or found.dtype.kind not in "iu":
            got = f"{found.dtype.name}{list(found.shape)}"
            raise TransformFailed(f"its transform gave tokens {got} for {len(tokens)} integers")
        if len(found) and (int(found.min()) < 0 or int(found.max()) > np.iinfo(tokens.dtype).max):
            raise TransformFailed("its transform gave tokens outside the vocabulary")
        return found.astype(tokens.dtype, copy=False), arrays
