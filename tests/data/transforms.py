"""Transforms that processes of their own import: good ones, and ones that hang, die or talk."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

BAD = "file-03.txt"


def shout(sample: dict[str, Any]) -> dict[str, Any]:
    """Upper case; talks on standard output, and fails on two of them."""
    print("a transform that talks", sample["key"])  # noqa: T201 - not among the answers
    sys.stdout.flush()
    if sample["key"] == BAD:
        raise KeyError("nothing to shout about")
    if sample["key"] == "file-05.txt":
        return {"tokens": sample["tokens"][:-1]}
    tokens = sample["tokens"]
    small = (tokens >= ord("a")) & (tokens <= ord("z"))
    return {"tokens": tokens - 32 * small.astype(np.uint8), "count": np.int64(small.sum())}


def described(sample: dict[str, Any]) -> dict[str, Any]:
    """What a transform is given, as far as it can tell."""
    assert not sample["tokens"].flags.writeable
    scalar = sample.get("score", np.float32(0))
    assert isinstance(scalar, np.generic), type(scalar)
    return {**sample, "score": scalar * 2, "where": np.arange(6, dtype=np.int16).reshape(2, 3)}


def hang(sample: dict[str, Any]) -> dict[str, Any]:
    """One sample takes for ever."""
    while sample["key"] == BAD:
        time.sleep(0.01)
    return sample


def die(sample: dict[str, Any]) -> dict[str, Any]:
    """One sample ends the process."""
    if sample["key"] == BAD:
        os._exit(3)
    return sample


def accident(sample: dict[str, Any]) -> dict[str, Any]:
    """The first process that meets one sample is killed."""
    if sample["key"] == BAD:
        met = Path(os.environ["ACCIDENT"])
        if not met.exists():
            met.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return sample


def rubbish(sample: dict[str, Any]) -> Any:
    """What is given back for some samples is none: not a sample, not numbers, of another shape."""
    kinds: dict[str, Any] = {
        "file-00.txt": 7,
        "file-01.txt": {"tokens": ["a", "b"]},
        "file-02.txt": {"tokens": sample["tokens"].astype(np.float32)},
        "file-04.txt": {"tokens": sample["tokens"].astype(np.int64) + 1000},
    }
    if sample["key"] == BAD:
        sys.exit("enough")
    return kinds.get(sample["key"], sample)


def broken(sample: dict[str, Any]) -> dict[str, Any]:
    """Every sample fails."""
    raise ValueError(f"no luck with {sample['key']}")


def mixed(sample: dict[str, Any]) -> Any:
    """One sample hangs, one raises, one kills its process, one gives rubbish."""
    key = sample["key"]
    if key == "0.txt":
        time.sleep(600)
    if key == "1.txt":
        raise KeyError("nothing there")
    if key == "6.txt":
        os._exit(3)
    return "rubbish" if key == "3.txt" else sample
