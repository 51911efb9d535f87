"""Models, plans and sources that the relay's tests share."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from paceline.manifest import Chunk, FileEntry, Manifest, build_manifest, write_manifest
from paceline.plan import PlanWorker, make_plan
from paceline.schemas import Labels, Lane, PieceHash, Plan, Source, WorkerLanes

DEPLOYMENT = "d-1"


def paper_manifest(pieces: int, piece_bytes: int = 1024, chunk_pieces: int = 4) -> Manifest:
    """Return a manifest of one file whose bytes exist nowhere: sessions need no bytes."""
    digests = tuple(hashlib.sha256(b"%d" % piece).hexdigest() for piece in range(pieces))
    size = pieces * piece_bytes
    chunk_bytes = chunk_pieces * piece_bytes
    chunks = tuple(
        Chunk(number, at, min(chunk_bytes, size - at), digests[number])
        for number, at in enumerate(range(0, size, chunk_bytes))
    )
    return Manifest(
        model_id="m",
        version="v1",
        piece_bytes=piece_bytes,
        chunk_bytes=chunk_bytes,
        files=(FileEntry("weights.bin", size, "0" * 64, digests),),
        chunks=chunks,
    )


def until(what: Callable[[], object], why: str = "it", timeout_s: float = 40.0) -> None:
    """Wait for ``what``; the time is a bound, never a measure."""
    end_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end_s, f"never came: {why}"
        time.sleep(0.01)


def write_versions(models: Path, size: int) -> Path:
    """Write three versions: the second changes a piece and a file, the third one file more."""
    shutil.copytree(write_model(models / "v1", size), models / "v2")
    damage(models / "v2/shards/a.bin", 40_000, b"fine-tuned")
    (models / "v2/config.json").write_text("2")
    shutil.copytree(models / "v2", models / "v3")
    (models / "v3/config.json").write_text("3")
    for version in ("v1", "v2", "v3"):
        write_manifest(models / version, manifest_of(models / version, version=version))
    return models


def write_model(directory: Path, size: int, seed: int = 0) -> Path:
    """Write a model of two shards, a config and an empty file."""
    directory.mkdir(parents=True)
    data = Random(seed).randbytes(size)
    (directory / "shards").mkdir()
    (directory / "shards/a.bin").write_bytes(data[: size * 2 // 3])
    (directory / "shards/b.bin").write_bytes(data[size * 2 // 3 :])
    (directory / "config.json").write_text('{"layers": 2}')
    (directory / "empty").write_bytes(b"")
    return directory


def damage(path: Path, offset: int, data: bytes) -> None:
    """Write ``data`` into a file, published ones (read-only) too."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def manifest_of(
    directory: Path,
    version: str = "v1",
    piece_bytes: int = 16_384,
    chunk_bytes: int = 65_536,
    piece_hash: PieceHash = "blake3",
) -> Manifest:
    """Return the manifest of ``directory`` with pieces small enough to have many."""
    return build_manifest(
        directory,
        model_id="m",
        version=version,
        link_mbit=1000,
        piece_bytes=piece_bytes,
        chunk_bytes=chunk_bytes,
        piece_hash=piece_hash,
    )


def worker(name: str, address: str = "") -> Source:
    return Source(kind="worker", worker_id=name, address=address or f"{name}:1")


ORIGIN = Source(kind="origin", url="/origin")


def lanes(
    name: str,
    manifest: Manifest,
    *sources: Source,
    epoch: int = 1,
    budget: int | None = None,
    deadline_s: float = 1.0,
    deployment_id: str = DEPLOYMENT,
) -> WorkerLanes:
    """Return one lane over the whole model from the first source, the others as spares."""
    whole = Lane(
        source=sources[0], spares=sources[1:], first_chunk=0, last_chunk=len(manifest.chunks) - 1
    )
    return WorkerLanes(
        deployment_id=deployment_id,
        epoch=epoch,
        manifest_digest=manifest.digest,
        worker_id=name,
        lanes=(whole,),
        origin_budget_bytes=manifest.total_size * 2 if budget is None else budget,
        piece_deadline_s=deadline_s,
    )


def plan(
    manifest: Manifest,
    addresses: dict[str, str],
    *,
    topology: str = "chain",
    epoch: int = 1,
    source_url: str = "/origin",
    link_mbit: float = 1000,
    seed: int = 0,
    deployment_id: str = DEPLOYMENT,
    origin_spent_bytes: int = 0,
) -> Plan:
    """Return the planner's own plan for workers at ``addresses``."""
    workers = [
        PlanWorker(worker_id=name, labels=Labels(), address=address, link_mbit=link_mbit)
        for name, address in addresses.items()
    ]
    return make_plan(
        topology,
        deployment_id=deployment_id,
        epoch=epoch,
        manifest=manifest,
        workers=workers,
        source_url=source_url,
        seed=seed,
        origin_spent_bytes=origin_spent_bytes,
    )
