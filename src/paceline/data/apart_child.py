"""A process that runs a transform: ``python -m paceline.data.apart_child module:function``.

It reads a sample from standard input, writes what the transform made of it to standard output, and
so on until its input ends; see ``apart``. What the transform prints goes to standard error.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from queue import SimpleQueue
from typing import IO

import numpy as np

from paceline.data.apart import DONE, FAILED, LENGTH_BYTES, READY
from paceline.data.arrays import packed, unpacked
from paceline.data.transform import KEY, Transform, TransformFailed, applied, load_transform
from paceline.errors import InvalidInput


def main() -> None:
    """Serve one transform until standard input ends."""
    # Signals are for the rank: while it saves, its batches must not change.
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    name = sys.argv[1]
    try:
        transform = load_transform(name, [name.partition(":")[0]])
    except InvalidInput as error:
        _answer(answers, FAILED, str(error.got).encode())
        return
    except Exception as error:  # noqa: BLE001 - told to whoever asked
        _answer(answers, FAILED, f"{type(error).__name__}: {error}".encode())
        return
    assert transform is not None
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_take, args=(asked, requests), daemon=True).start()
    _answer(answers, READY, b"")
    while True:
        try:
            made = _made(transform, requests.get())
        except TransformFailed as error:
            _answer(answers, FAILED, str(error).encode())
        else:
            _answer(answers, DONE, made)


def _made(transform: Transform, request: bytes) -> bytes:
    size = int.from_bytes(request[:LENGTH_BYTES], "little")
    key = request[LENGTH_BYTES : LENGTH_BYTES + size].decode()
    arrays = unpacked(request[LENGTH_BYTES + size :])
    # as they are where they come from: a number without axes is no array
    given = {name: each if each.ndim else each[()] for name, each in arrays.items()}
    result = applied(transform, {KEY: key, **given})
    return packed({name: np.asarray(each) for name, each in result.items()})


def _take(asked: IO[bytes], requests: SimpleQueue[bytes]) -> None:
    """Queue requests; end the process, busy or not, when no more can come."""
    while size := asked.read(LENGTH_BYTES):
        requests.put(asked.read(int.from_bytes(size, "little")))
    os._exit(0)


def _answer(answers: IO[bytes], kind: bytes, data: bytes) -> None:
    answers.write((1 + len(data)).to_bytes(LENGTH_BYTES, "little"))
    answers.write(kind)
    answers.write(data)
    answers.flush()


if __name__ == "__main__":
    main()
