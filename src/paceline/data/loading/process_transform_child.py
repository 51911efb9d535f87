"""The child process that runs a transform, started by ``process_transform``.

Run as ``python -m paceline.data.loading.process_transform_child module:function``. Reads a sample
from standard input and writes the transform's result to standard output until its input ends. What
the transform prints goes to standard error.
"""

from __future__ import annotations

import sys

import numpy as np

from paceline.data.child_process import DONE, FAILED, LENGTH_BYTES, RequestServer
from paceline.data.loading.batch import packed, unpacked
from paceline.data.loading.transform import KEY, Transform, TransformFailed, applied, load_transform
from paceline.errors import InvalidInput


def main() -> None:
    """Serve one transform until standard input ends."""
    answers = RequestServer()
    name = sys.argv[1]
    try:
        transform = load_transform(name, [name.partition(":")[0]])
    except InvalidInput as error:
        answers.send(FAILED, str(error.got).encode())
        return
    except Exception as error:  # noqa: BLE001 - reported to the parent
        answers.send(FAILED, f"{type(error).__name__}: {error}".encode())
        return
    assert transform is not None

    def answer(request: bytes) -> tuple[bytes, bytes]:
        try:
            return DONE, _made(transform, request)
        except TransformFailed as error:
            return FAILED, str(error).encode()

    answers.serve(answer)


def _made(transform: Transform, request: bytes) -> bytes:
    size = int.from_bytes(request[:LENGTH_BYTES], "little")
    key = request[LENGTH_BYTES : LENGTH_BYTES + size].decode()
    arrays = unpacked(request[LENGTH_BYTES + size :])
    # as in the parent: an array without axes becomes a scalar
    given = {name: each if each.ndim else each[()] for name, each in arrays.items()}
    result = applied(transform, {KEY: key, **given})
    return packed({name: np.asarray(each) for name, each in result.items()})


if __name__ == "__main__":
    main()
