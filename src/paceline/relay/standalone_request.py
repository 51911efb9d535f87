"""The arguments of one ``distribute`` call, their checks, and its result record.

Everything is checked before a byte moves, and each refusal is a named error; nothing here opens a
store or starts a thread.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    verify_signature,
)
from paceline.relay.origin_budget import OriginReadBudget
from paceline.relay.process import LINK_MBIT, MOST_PORT
from paceline.relay.protocol.limits import SessionLimits
from paceline.relay.sources import DirectoryReader, RangeReader, S3Reader
from paceline.relay.store.disk_space import DiskSpace, StorePolicy, reclaimable, room_lacking
from paceline.schemas.base import NAME
from paceline.schemas.calls import DeploymentBeat
from paceline.schemas.command_results import Distribution
from paceline.schemas.plan import Plan, Topology
from paceline.schemas.records import Failure
from paceline.storage import join_url

if TYPE_CHECKING:
    from paceline.storage import ObjectStore


MOST_WORKERS = 1000  # each has threads, sockets and files in this one process
UNLIMITED_MBIT = 10_000.0  # what a plan assumes where no limit is set


@dataclass(frozen=True, kw_only=True)
class DistributeRequest:
    """The arguments of ``distribute`` beside the source; see there. Raises InvalidInput."""

    into: Path
    names: tuple[str, ...]
    racks: int = 1
    topology: str = Topology.AUTO
    link_mbit: float | None = None
    activate: bool = False
    max_failed: float = 0.05
    first_port: int = 0
    extra_origin_bytes: int = 0
    policy: StorePolicy = field(default_factory=StorePolicy)
    limits: SessionLimits | None = None
    on_progress: Callable[[int, int], None] = lambda _held, _all: None
    on_notice: Callable[[str], None] = lambda _said: None

    def __post_init__(self) -> None:
        least, most = LINK_MBIT
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
                self.first_port < 0 or last_port > MOST_PORT,
                "no such ports",
                f"{self.first_port} to {last_port}",
                f"1 to {MOST_PORT}",
            ),
            (
                self.extra_origin_bytes < 0,
                "bad count of bytes that may be read beyond the fuse",
                self.extra_origin_bytes,
                "0 or more",
            ),
        ):
            if wrong:
                raise InvalidInput(what, got=got, wanted=wanted)


def names_of(workers: int | Sequence[str], targets: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the workers, limited to ``targets``; raises InvalidInput."""
    count = workers if isinstance(workers, int) else len(workers)
    if count > MOST_WORKERS:
        raise InvalidInput(
            "too many workers for one process",
            got=count,
            wanted=f"at most {MOST_WORKERS}",
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


def manifest_of(
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
        )
        verify_signature(built, trust, where=str(here))
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


def opener_of(
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


def check_room(request: DistributeRequest, manifest: Manifest) -> None:
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
        _, wanted, free = disks.get(device, (place, 0, DiskSpace.at(existing).free))
        wanted += room_lacking(place, manifest)
        if request.policy.make_room:
            free += reclaimable(place, manifest.digest)
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


def clear(into: Path, new: Sequence[str], *, whole: bool) -> None:
    """Remove the directories of workers that did not exist before, unless a version is there."""
    for name in new:
        directory = into / name
        if directory.exists() and not any(directory.glob(f"store/models/*/*/{MANIFEST_FILE}")):
            shutil.rmtree(directory, ignore_errors=True)
    if whole and into.is_dir() and not any(into.iterdir()):
        into.rmdir()


def outcome(
    request: DistributeRequest,
    manifest: Manifest,
    url: str,
    plan: Plan,
    beats: Mapping[str, DeploymentBeat],
    *,
    racks: Mapping[str, str],
    failed: Mapping[str, Failure],
    fuse: OriginReadBudget,
    seconds: float,
) -> Distribution:
    """Return the record of a deployment whose workers have all ended; ``plan`` is its last one."""
    total = manifest.total_size
    receipts = tuple(beat.receipt for beat in beats.values() if beat.receipt)
    crossing = {
        (edge.source, edge.reader): edge.bytes
        for beat in beats.values()
        for edge in beat.edges
        if edge.source in racks
        and edge.reader in racks
        and racks[edge.source] != racks[edge.reader]
        and edge.bytes
    }
    corrupt: Counter[str] = Counter()
    for beat in beats.values():
        for edge in beat.edges:
            corrupt[edge.source] += edge.corrupt
    bound = total / (request.link_mbit * 1e6 / 8) if request.link_mbit else None
    origin = sum(fuse.read().values())  # failed workers included
    return Distribution(
        deployment_id=fuse.deployment_id,
        model_id=manifest.model_id,
        version=manifest.version,
        manifest_digest=manifest.digest,
        source_url=url,
        topology=plan.topology,
        epochs=plan.epoch,
        workers=len(racks),
        workers_complete=len(receipts),
        workers_failed=dict(failed),
        racks=len(set(racks.values())),
        total_bytes=total,
        seconds=seconds,
        predicted_seconds=plan.predicted_seconds if bound else None,
        bound_seconds=bound,
        ratio=seconds / bound if bound else None,
        origin_bytes=origin,
        origin_before_bytes=fuse.before_bytes,
        origin_ratio=origin / total,
        received_bytes=sum(receipt.received_bytes for receipt in receipts),
        reused_bytes=sum(receipt.reused_bytes for receipt in receipts),
        refetched_bytes=sum(receipt.refetched_bytes for receipt in receipts),
        corrupt_from=dict(+corrupt),
        cross_rack_bytes=sum(crossing.values()),
        activated=request.activate,
        receipts=receipts,
    )
