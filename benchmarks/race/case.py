"""One race: a model at the origin that every host should have, what goes wrong, who takes part."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.race.faults import Fault
from benchmarks.race.usage import Usage
from benchmarks.testbed import Testbed
from benchmarks.testbed.watcher import SCRATCH, prefix_of_this_process
from paceline.manifest import Manifest, build_manifest, verify_directory, write_manifest

BUCKET = "bench"
MODEL_ID, VERSION = "m", "v1"
FILES = 3  # of a model: pieces never cross a file's edge, so there should be some edges
_BLOCK = 1 << 24
_numbers = itertools.count()


@dataclass(frozen=True)
class Model:
    """A model of random bytes as the origin's bucket holds it."""

    root: Path  # what the S3 server serves
    manifest: Manifest

    @property
    def directory(self) -> Path:
        """Return where its files are."""
        return self.root / BUCKET / "models" / MODEL_ID / VERSION

    @property
    def url(self) -> str:
        """Return its URL on the origin."""
        return f"s3://{BUCKET}/models/{MODEL_ID}/{VERSION}"

    @property
    def size(self) -> int:
        """Return its bytes."""
        return self.manifest.total_size

    def remove(self) -> None:
        """Delete it."""
        shutil.rmtree(self.root, ignore_errors=True)


def make_model(size: int, link_mbit: float, *, piece_kib: int = 0) -> Model:
    """Return a new model of ``size`` bytes, in memory; the next testbed reaps it if we die."""
    number = 1_000_000 + next(_numbers)
    root = SCRATCH[0] / prefix_of_this_process(number)
    directory = root / BUCKET / "models" / MODEL_ID / VERSION
    shutil.rmtree(root, ignore_errors=True)
    directory.mkdir(parents=True)
    cuts = [size * number // FILES for number in range(FILES + 1)]
    for number in range(FILES):
        left = cuts[number + 1] - cuts[number]
        with (directory / f"weights-{number}.bin").open("wb") as file:
            while left > 0:
                file.write(os.urandom(min(_BLOCK, left)))
                left -= _BLOCK
    manifest = build_manifest(
        directory,
        model_id=MODEL_ID,
        version=VERSION,
        link_mbit=link_mbit,
        piece_bytes=piece_kib * 1024,
    )
    write_manifest(directory, manifest)
    return Model(root, manifest)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a contestant is given."""

    bed: Testbed
    model: Model
    scratch: Path  # on the same filesystem as everything that arrives
    faults: tuple[Fault, ...] = ()
    timeout_s: float = 600.0
    settings: dict[str, Any] = field(default_factory=dict)  # the contestant's own

    def expected(self) -> list[int]:
        """Return the hosts whose finish counts: neither killed nor slowed."""
        spared = {each.host for each in self.faults if each.kind in ("kill", "rate")}
        return [host.index for host in self.bed.hosts if host.index not in spared]


@dataclass(kw_only=True)
class Outcome:
    """What a contestant achieved; times in seconds from the start that it defines."""

    finished_s: dict[str, float]  # by host, of those whose finish counts
    startup_s: float
    usage: Usage
    faults: list[dict[str, Any]] = field(default_factory=list)  # as they were observed
    origin_bytes: int = 0  # at the origin's port
    cross_rack_bytes: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return when the last one finished."""
        return max(self.finished_s.values())


class Contestant(Protocol):
    """Brings the model to every host of the case's bed and verifies it there."""

    def __call__(self, case: Case) -> Outcome: ...


def verify_copies(model: Model, copies: dict[str, Path]) -> None:
    """Raise CorruptData unless every directory of ``copies`` holds the model, by SHA-256."""
    for directory in copies.values():
        verify_directory(directory, model.manifest, allow_extra=True)


Progress = Callable[[str], None]
