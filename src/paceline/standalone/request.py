"""The arguments of one ``distribute`` call, and their checks.

Everything is checked before a byte moves, and each refusal is a named error; nothing here opens a
store or starts a thread.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import InvalidInput, SourceMissing, StorageFull
from paceline.manifest import (
    MANIFEST_FILE,
    Manifest,
    TrustPolicy,
    build_manifest,
    fetch_manifest,
)
from paceline.relay import LINK_MBIT_RANGE, MAX_PORT, DirectoryReader, RangeReader, S3Reader
from paceline.relay.store import StorePolicy, missing_bytes, reclaimable_bytes
from paceline.schemas import NAME, Topology
from paceline.storage import join_url

if TYPE_CHECKING:
    from paceline.storage import ObjectStore


MAX_WORKERS = 1000  # each has threads, sockets and files in this one process
UNLIMITED_MBIT = 10_000.0  # what a plan assumes where no limit is set


@dataclass(frozen=True, kw_only=True)
class DistributeRequest:
    """The arguments of ``distribute`` beside the source; see there. Raises InvalidInput."""

    into: Path
    names: tuple[str, ...]
    racks: int = 1
    topology: Topology = Topology.AUTO
    link_mbit: float | None = None
    activate: bool = False
    max_failed: float = 0.05
    first_port: int = 0
    extra_origin_bytes: int = 0
    policy: StorePolicy = field(default_factory=StorePolicy)
    on_progress: Callable[[int, int], None] = lambda _held, _all: None
    on_notice: Callable[[str], None] = lambda _said: None

    def __post_init__(self) -> None:
        least, most = LINK_MBIT_RANGE
        last_port = self.first_port + len(self.names) - 1 if self.first_port else 0
        for wrong, what, got, wanted in (
            (self.racks < 1, "no racks", self.racks, "at least 1"),
            (
                self.link_mbit is not None and not least <= self.link_mbit <= most,
                "not a link's rate",
                self.link_mbit,
                f"{least:g} to {most:g} Mbit/s",
            ),
            (
                not 0 <= self.max_failed <= 1,
                "bad share of workers that may fail",
                self.max_failed,
                "0 to 1",
            ),
            (
                self.first_port < 0 or last_port > MAX_PORT,
                "no such ports",
                f"{self.first_port} to {last_port}",
                f"1 to {MAX_PORT}",
            ),
            (
                self.extra_origin_bytes < 0,
                "bad count of bytes that may be read beyond the origin budget",
                self.extra_origin_bytes,
                "0 or more",
            ),
        ):
            if wrong:
                raise InvalidInput(what, got=got, wanted=wanted)

    def rack(self, number: int) -> str:
        """Return the rack of a worker; racks are as even as they can be."""
        return f"rack-{number * self.racks // len(self.names)}"


def worker_names(workers: int | Sequence[str], targets: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the workers, limited to ``targets``; raises InvalidInput."""
    count = workers if isinstance(workers, int) else len(workers)
    if count > MAX_WORKERS:
        raise InvalidInput(
            "too many workers for one process",
            got=count,
            wanted=f"at most {MAX_WORKERS}",
            do="Start agents on their machines, or `paceline simulate` to see how it would go.",
        )
    if isinstance(workers, int):
        if workers < 1:
            raise InvalidInput("no workers", got=workers, wanted="at least 1 worker")
        names = tuple(f"worker-{number}" for number in range(workers))
    else:
        names = tuple(workers)
    for name in names:
        if not re.fullmatch(NAME, name):
            raise InvalidInput("not a worker's name", got=repr(name)[:200], wanted=NAME)
    if len(set(names)) != len(names):
        raise InvalidInput("a worker is named twice", got=", ".join(names), wanted="each once")
    if targets is not None:
        unknown = [name for name in targets if name not in names]
        if unknown:
            raise InvalidInput(
                "unknown worker",
                got=", ".join(unknown),
                wanted=f"some of {names[0]} … {names[-1]}" if names else "a known worker",
                do="Name workers that exist, or ask for more of them.",
            )
        names = tuple(name for name in names if name in set(targets))
    if not names:
        raise InvalidInput("no workers", got="an empty list", wanted="at least 1 worker")
    return names


def resolve_manifest(
    source: Path | str,
    objects: ObjectStore | None,
    model_id: str,
    version: str,
    trust: TrustPolicy | None,
    tell: Callable[[str], None],
) -> Manifest:
    """Return the manifest of ``source``, built where a local directory has none.

    Raises SourceMissing, InvalidInput (another model or version), UntrustedManifest and the errors
    of ``build_manifest`` and ``fetch_manifest``.
    """
    trust = trust or TrustPolicy()
    here = None if is_s3(source) else Path(source)
    if here is not None and not here.is_dir():
        raise SourceMissing(
            "source does not exist",
            got=here,
            wanted="a directory with a model, or s3://bucket/prefix",
            do="Check the path.",
        )
    if here is not None and not (here / MANIFEST_FILE).exists():
        name = model_id or re.sub(r"[^A-Za-z0-9._-]+", "-", here.resolve().name).strip("-._")
        built = build_manifest(
            here,
            model_id=name or "model",
            version=version or "1",
            link_mbit=UNLIMITED_MBIT,  # the manifest must not depend on the link
            piece_hash="sha256" if trust.fips else None,
        )
        trust.check(built, where=str(here))
        return built
    if here is None and objects is not None:
        # Nothing moves yet: report a server that does not answer within seconds, and do not wait
        # long.
        objects.require_answer(
            join_url(str(source), MANIFEST_FILE),
            lambda error, s: tell(f"{error.where} gave nothing for {s:.0f} s: asked again"),
        )
    manifest = fetch_manifest(str(source), objects, trust)
    for what, got, wanted in (
        ("model", manifest.model_id, model_id),
        ("version", manifest.version, version),
    ):
        if wanted and got != wanted:
            raise InvalidInput(
                f"the source holds another {what}", got=got, wanted=wanted, where=source
            )
    return manifest


def source_opener(
    objects: ObjectStore | None, tell: Callable[[str], None]
) -> Callable[[str], RangeReader]:
    """Return the function that opens a reader for a source URL."""

    def open_source(url: str) -> RangeReader:
        if not is_s3(url):
            return DirectoryReader(Path(url))
        if objects is None:
            raise InvalidInput("no object store for this URL", got=url, wanted="a store")
        return S3Reader(url, objects, tell)

    return open_source


def is_s3(source: Path | str) -> bool:
    """Return whether ``source`` is an S3 URL."""
    return str(source).startswith("s3://")


def check_disk_space(request: DistributeRequest, manifest: Manifest) -> None:
    """Raise StorageFull where all workers together lack disk space: they may share one disk."""
    disks: dict[int, tuple[Path, int, int]] = {}
    for name in request.names:
        place = request.into / name / "store"
        existing = place
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            wanted_there = "a directory that may be written to"
            raise InvalidInput("not a place for workers", got=existing, wanted=wanted_there)
        device = existing.stat().st_dev
        _, wanted, free = disks.get(device, (place, 0, shutil.disk_usage(existing).free))
        wanted += missing_bytes(place, manifest.digest, manifest.files)
        if request.policy.make_room:
            free += reclaimable_bytes(place, manifest.digest)
        disks[device] = (existing, wanted, free)
    for where, wanted, free in disks.values():
        if wanted > free:
            raise StorageFull(
                "the model does not fit on this disk for all workers",
                got=f"{free} bytes free, or to be freed",
                wanted=f"{wanted} bytes for {len(request.names)} workers",
                where=where,
                do="Free space, choose another place, or ask for fewer workers.",
            )


def remove_new_directories(into: Path, new: Sequence[str], *, whole: bool) -> None:
    """Remove the directories of workers that did not exist before, unless a version is there."""
    for name in new:
        directory = into / name
        if directory.exists() and not any(directory.glob(f"store/models/*/*/{MANIFEST_FILE}")):
            shutil.rmtree(directory, ignore_errors=True)
    if whole and into.is_dir() and not any(into.iterdir()):
        into.rmdir()
