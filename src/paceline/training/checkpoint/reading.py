"""Files of a generation, each checked byte by byte before it is opened, then read box by box."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CorruptData
from paceline.objects import DiskStore
from paceline.training.checkpoint.generations import Generation, Generations
from paceline.training.checkpoint.records import Commit


class Files:
    """Files of one generation, one open at a time; use it in a ``with``.

    What comes from S3 lies below ``work_dir`` until another file is asked for.
    """

    def __init__(
        self,
        generations: Generations,
        generation: Generation,
        commit: Commit,
        work_dir: Path | None = None,
    ) -> None:
        self._generations, self._generation, self._commit = generations, generation, commit
        here = isinstance(generations.store, DiskStore)
        self._scratch = None if here else Path(tempfile.mkdtemp("-checkpoint", dir=work_dir))
        self._name = ""
        self._opened: Any = None
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def opened(self, name: str) -> Any:
        """Return the file ``name`` for ``box_in``; raises CorruptData unless it is as committed."""
        if name != self._name:
            self._closing.close()
            self._name = ""
            path = self._generations.fetch(
                self._generation, name, self._commit.files[name], self._scratch or Path()
            )
            if self._scratch is not None:
                self._closing.callback(path.unlink, missing_ok=True)
            self._opened = self._closing.enter_context(open_tensors(path))
            self._name = name
        return self._opened


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file for ``box_in``; raises CorruptData where it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CorruptData("checkpoint file cannot be read", got=error, where=path) from error


def box_in(file: Any, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return a box of the tensor ``key`` of an open file; both () for a scalar."""
    if not lengths:
        whole: Tensor = file.get_tensor(key)
        return whole
    box = tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))
    found: Tensor = file.get_slice(key)[box]
    return found
