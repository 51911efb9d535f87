"""An installation on disks alone, and a small disk that is filled while ranks train on it.

The small disk is a file system of its own where this user may mount one; else the last call of a
write is made to fail as on a full disk (in this process only).
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.config import DataSettings, Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.data import build_snapshot
from paceline.manifest import build_manifest, write_manifest
from paceline.models import config_for, new_model, save_model, weights_digest
from paceline.storage import DiskStore
from paceline.training.checkpoint import Generations
from tests.support.reaper import mount_small_disk
from tests.training.conftest import CONTEXT, PARAMETERS, Camp

SIZE_BYTES = 8 * 1024 * 1024
LEFT_BYTES = 256 * 1024  # of a full disk: less than a generation, more than nothing


def disk_camp(root: Path) -> Camp:
    """Return a camp below ``root`` that has no S3."""
    root.mkdir(exist_ok=True)
    store = DiskStore()
    runtime = Runtime(profile=Profile(), state_dir=root, endpoints=Endpoints(), secrets=Secrets())
    save_runtime(runtime)
    texts = root / "texts"
    texts.mkdir()
    for number in range(20):
        body = "".join(f"line {n} of file {number} is {n * number}\n" for n in range(30))
        (texts / f"{number}.txt").write_text(body)
    data = DataSettings(shard_bytes=4096, purpose="tests", held_out_share=0.2)
    snapshot = build_snapshot(str(texts), DiskStore.url_of(root / "data"), data, store)
    config = config_for(PARAMETERS, CONTEXT)
    for node in ("node-0", "node-1"):
        directory = runtime.node_dir(node) / "store" / "models" / "tiny" / "v1"
        save_model(new_model(config, 0), config, directory)
        manifest = build_manifest(directory, model_id="tiny", version="v1", link_mbit=100)
        write_manifest(directory, manifest)
    return Camp(runtime, store, snapshot, manifest.digest, weights_digest(directory))


@dataclass
class SmallDisk:
    """Room for a few generations; ``is_real`` where it is a file system of its own."""

    path: Path
    is_real: bool
    monkeypatch: pytest.MonkeyPatch = field(repr=False)

    @property
    def url(self) -> str:
        return DiskStore.url_of(self.path / "checkpoints")

    def generations(self, job_id: str) -> Generations:
        return Generations(DiskStore(), f"{self.url}/{job_id}")

    def fill(self) -> None:
        """Leave less room than a generation takes."""
        if not self.is_real:
            self.monkeypatch.setattr(os, "sendfile", _full)
            return
        with (self.path / "ballast").open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(b"x" * 4096):
                    pass
            file.truncate(max(0, file.tell() - LEFT_BYTES))

    def free(self) -> None:
        """Give the room back."""
        if not self.is_real:
            self.monkeypatch.undo()
        (self.path / "ballast").unlink(missing_ok=True)


def _full(descriptor: int, source: int, at: int, count: int) -> int:
    if at:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return os.pwrite(descriptor, os.pread(source, min(count, LEFT_BYTES), at), at)


@contextlib.contextmanager
def small_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    """Mount a small disk at ``path``, where that is allowed."""
    path.mkdir()
    real = mount_small_disk(path, str(SIZE_BYTES))
    try:
        yield SmallDisk(path, real, monkeypatch)
    finally:
        if real:
            subprocess.run(["umount", "-l", str(path)], check=True)
