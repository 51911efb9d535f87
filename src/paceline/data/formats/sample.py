"""One sample as a source gives it, before it is tokenised; and what one cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MAX_DOCUMENT_BYTES = 8 * 1024 * 1024  # of one text
TOO_LARGE = f"too large: a text has at most {MAX_DOCUMENT_BYTES >> 20} MiB, cut it up (JSONL)"
MAX_SAMPLE_BYTES = 64 * 1024 * 1024  # of one sample with all its arrays
MAX_AXES = 8


@dataclass(frozen=True)
class Sample:
    """A key, and a text, or tokens, or arrays, or several of them."""

    key: str
    text: bytes | None = None  # UTF-8
    tokens: Array | None = None  # 1-D integers: the source was tokenised before
    features: Mapping[str, Array] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        """Return how much the source gave."""
        tokens = 0 if self.tokens is None else self.tokens.nbytes
        arrays = sum(each.nbytes for each in self.features.values())
        return len(self.text or b"") + tokens + arrays

    def with_features(self, more: Mapping[str, Array]) -> Sample:
        """Return the sample with ``more`` beside what it has."""
        return replace(self, features={**self.features, **more})


@dataclass(frozen=True)
class Unusable:
    """Something in a source that is no sample, and why."""

    key: str
    reason: str


def checked(sample: Sample) -> Sample | Unusable:
    """Return ``sample``, or why nobody could learn from it."""
    reason = None
    try:
        sample.key.encode("utf-8")
    except UnicodeEncodeError:
        return Unusable(sample.key.encode(errors="backslashreplace").decode(), "name is not UTF-8")
    if sample.text is not None:
        reason = why_no_text(sample.text)
    elif sample.tokens is not None and not len(sample.tokens):
        reason = "empty"
    elif sample.tokens is None and not sample.features:
        reason = "neither text nor numbers"
    if sample.payload_bytes > MAX_SAMPLE_BYTES:
        reason = "too large"
    return sample if reason is None else Unusable(sample.key, reason)


def why_no_text(text: bytes) -> str | None:
    """Return why ``text`` is no document, or None where it is one."""
    if len(text) > MAX_DOCUMENT_BYTES:
        return TOO_LARGE
    if b"\0" in text:
        return "binary"
    if not text.strip():
        return "empty"
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def clean_array(value: Any) -> Array:
    """Return ``value`` as a contiguous little-endian array of numbers; raises ValueError where it
    is none (objects, strings, complex numbers, too many axes)."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"dtype {array.dtype} holds no numbers of ours")
    if array.ndim > MAX_AXES:
        raise ValueError(f"{array.ndim} axes")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return little if little.ndim == 0 else np.ascontiguousarray(little)


def json_array(value: object) -> Array | None:
    """Return numbers out of JSON, or None for what holds none (a name, a comment, a tag).

    JSON does not say what kind of number it means, so that all become float32; a source whose types
    matter is Parquet or npy. Raises ValueError for lists of differing lengths.
    """
    if isinstance(value, bool):
        return np.array(value)
    if not isinstance(value, int | float | list):
        return None
    array = np.asarray(value)  # ragged: ValueError
    if array.dtype.kind == "b":
        return array
    return clean_array(array.astype(np.float32)) if array.dtype.kind in "iuf" else None
