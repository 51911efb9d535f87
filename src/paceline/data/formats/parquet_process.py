"""Parquet reading in a separate process with limited memory: the parent's side.

A request with a path opens a file, an empty one returns its next samples, a few at a time. Does not
import pyarrow; the child process runs ``parquet``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from paceline.data.child_process import FAILED, LENGTH_BYTES, ChildProcess, how_ended
from paceline.data.formats.sample import (
    Fields,
    Sample,
    UnusableSample,
    pack_sample,
    unpack_sample,
)
from paceline.errors import InvalidInput, NotReady, WorkerLost

DEADLINE_S = 300.0  # per answer
ANSWER_BYTES = 1024 * 1024  # or one sample
ANSWER_SAMPLES = 256
# Both defaults reserve far more address space than they use, and the limit is on address space.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}


class ParquetProcess:
    """Reads one file after another in a child process; a context manager, for one thread."""

    def __init__(self) -> None:
        module = "paceline.data.formats.parquet"
        self._child = ChildProcess("the Parquet reader", module, env=_ENVIRONMENT)
        self._child.wait_until_ready()

    def __enter__(self) -> ParquetProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end()

    def samples(
        self, path: Path, name: str, fields: Fields, *, features: bool = False
    ) -> Iterator[Sample | UnusableSample]:
        """Yield the file's samples.

        ``features``: each row must have a key, and numbers in every other column. Raises
        InvalidInput for a file that cannot be read within the process's memory limit.
        """
        request = [
            str(path),
            name,
            [fields.text, fields.key, fields.slice, [*fields.slices]],
            features,
        ]
        self._send(json.dumps(request).encode())
        while answer := self._receive(name):
            self._send(b"")  # the child decodes the next ones meanwhile
            yield from unpack_samples(answer)

    def _send(self, request: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended; ``_receive`` reports how
            self._child.send(request, DEADLINE_S)

    def _receive(self, name: str) -> bytes:
        try:
            kind, answer = self._child.receive(DEADLINE_S)
        except TimeoutError as error:
            self._child.end()
            raise NotReady(
                "the Parquet reader does not answer", wanted=f"within {DEADLINE_S:g} s", where=name
            ) from error
        except (OSError, EOFError) as error:
            code = self._child.end()
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


def pack_samples(found: Iterator[Sample | UnusableSample]) -> bytes:
    """Return the next few samples as bytes; empty at the end."""
    parts: list[bytes] = []
    held = 0
    for each in islice(found, ANSWER_SAMPLES):
        if isinstance(each, UnusableSample):
            packed = b"u" + json.dumps([each.key, each.reason]).encode()
        else:
            packed = b"s" + pack_sample(each)
        parts += [len(packed).to_bytes(LENGTH_BYTES, "little"), packed]
        held += len(packed)
        if held >= ANSWER_BYTES:
            break
    return b"".join(parts)


def unpack_samples(raw: bytes) -> Iterator[Sample | UnusableSample]:
    at = 0
    while at < len(raw):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(raw[at:start], "little")
        body = raw[start + 1 : at]
        is_sample = raw[start : start + 1] == b"s"
        yield unpack_sample(body) if is_sample else UnusableSample(*json.loads(body))
