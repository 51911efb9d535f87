"""Parquet reading in a separate process with limited memory: the parent's side.

An Order opens a file, an empty request returns its next samples; each answer holds a few of them.
Does not import pyarrow; the child process runs ``parquet``.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.child_process import FAILED, ChildProcess, how_ended
from paceline.data.formats.sample import Array, Sample, UnusableSample
from paceline.errors import InvalidInput, NotReady, WorkerLost

DEADLINE_S = 300.0  # per answer
ANSWER_BYTES = 1024 * 1024  # or one sample
ANSWER_SAMPLES = 256
LENGTH_BYTES = 4
# Both defaults reserve far more address space than they use, and the limit is on address space.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class ReadRequest:
    """The file to read, its name in errors, and its columns of text and keys."""

    path: str
    name: str
    text: str
    key: str
    features: bool = False  # every column but the key is a feature

    @staticmethod
    def parse(request: bytes) -> ReadRequest:
        """Return the order encoded in ``request``."""
        return ReadRequest(**json.loads(request))


class ParquetProcess:
    """Reads one file after another in a child process; a context manager, for one thread.

    The process starts with the first file.
    """

    def __init__(self) -> None:
        self._child: ChildProcess | None = None

    def __enter__(self) -> ParquetProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.end()
            self._child = None

    def samples(self, path: Path, name: str, fields: Any) -> Iterator[Sample | UnusableSample]:
        """Yield the file's samples; ``fields``: see ``formats.Fields``.

        Raises InvalidInput for a file that cannot be read within the process's memory limit.
        """
        yield from self._read(ReadRequest(str(path), name, fields.text, fields.key))

    def features(self, path: Path, key_field: str) -> Iterator[tuple[str, dict[str, Array]]]:
        """Yield the key and the arrays of each row.

        Raises InvalidInput for a row without them, and the errors of ``samples``.
        """
        for each in self._read(ReadRequest(str(path), path.name, "", key_field, features=True)):
            assert isinstance(each, Sample)
            yield each.key, dict(each.features)

    def _read(self, order: ReadRequest) -> Iterator[Sample | UnusableSample]:
        self._send(json.dumps(asdict(order)).encode())
        while found := unpacked_samples(self._receive(order.name)):
            self._send(b"")  # the child decodes the next ones meanwhile
            yield from found

    def _send(self, request: bytes) -> None:
        if self._child is None:
            self._child = ChildProcess(
                "the Parquet reader", "paceline.data.formats.parquet", env=_ENVIRONMENT
            )
            self._child.wait_until_ready()
        with contextlib.suppress(OSError):  # it has ended; ``_receive`` reports how
            self._child.send(request, time.monotonic() + DEADLINE_S)

    def _receive(self, name: str) -> bytes:
        assert self._child is not None
        try:
            kind, answer = self._child.receive(time.monotonic() + DEADLINE_S)
        except TimeoutError as error:
            self._stop()
            raise NotReady(
                "the Parquet reader does not answer", wanted=f"within {DEADLINE_S:g} s", where=name
            ) from error
        except (OSError, EOFError) as error:
            code = self._child.end()
            self._child = None
            if code >= 0:  # not one of pyarrow's: its traceback is in the log
                raise WorkerLost(
                    "the Parquet reader ended", got=how_ended(code), where=name
                ) from error
            raise InvalidInput(
                "Parquet file cannot be read",
                got=f"its reader ended by {how_ended(code)}",
                where=name,
                do="Write it again.",
            ) from error
        if kind == FAILED:
            raise InvalidInput(**json.loads(answer))
        return answer


def packed_error(error: InvalidInput) -> bytes:
    """Return ``error`` as JSON."""
    fields = ("what", "got", "wanted", "where", "do")
    said = {each: getattr(error, each) for each in fields}
    return json.dumps({k: None if v is None else str(v) for k, v in said.items()}).encode()


def packed_samples(found: Iterator[Sample | UnusableSample]) -> bytes:
    """Return the next few samples as bytes."""
    said: list[list[Any]] = []
    parts: list[bytes] = []
    held = 0
    for each in islice(found, ANSWER_SAMPLES):
        if isinstance(each, UnusableSample):
            said.append([each.key, each.reason])
            continue
        text = None if each.text is None else len(each.text)
        arrays = dict(each.features) if each.tokens is None else {"": each.tokens, **each.features}
        about = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
        said.append([each.key, None, text, each.tokens is not None, about])
        parts += [each.text or b"", *(array.tobytes() for array in arrays.values())]
        held += each.payload_bytes
        if held >= ANSWER_BYTES:
            break
    head = json.dumps(said).encode()
    return b"".join([len(head).to_bytes(LENGTH_BYTES, "little"), head, *parts])


def unpacked_samples(raw: bytes) -> list[Sample | UnusableSample]:
    """Return the samples encoded by ``packed_samples``; each array owns its memory."""
    at = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
    found: list[Sample | UnusableSample] = []
    for key, reason, *content in json.loads(raw[LENGTH_BYTES:at]):
        if reason is not None:
            found.append(UnusableSample(key, reason))
            continue
        size, has_tokens, about = content
        text = None if size is None else raw[at : at + size]
        at += size or 0
        arrays: list[tuple[str, Array]] = []
        for name, dtype, shape in about:
            array = np.frombuffer(raw, dtype, math.prod(shape), at).reshape(shape).copy()
            arrays.append((name, array))
            at += array.nbytes
        tokens = arrays.pop(0)[1] if has_tokens else None
        found.append(Sample(key, text, tokens, dict(arrays)))
    return found
