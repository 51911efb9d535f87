"""Making a snapshot: gather, split by file, cut into shards, upload what is not there yet.

Idempotent by content: shards are named by their digest, and the record is written last, so that a
snapshot is either whole or not there.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.data.snapshot import (
    SNAPSHOT_FILE,
    Shard,
    Snapshot,
    SnapshotRecord,
    Split,
    load_snapshot,
    snapshot_url,
)
from paceline.data.source import SourceText, gather
from paceline.errors import SourceMissing
from paceline.objects import ObjectStore, join_url
from paceline.profile import DataSettings
from paceline.wire.base import canonical_json, digest_of

log = logging.getLogger(__name__)

SKIPPED_LISTED = 100


def build_snapshot(
    source: str,
    url: str,
    settings: DataSettings,
    store: ObjectStore,
    *,
    work_dir: Path | None = None,
) -> Snapshot:
    """Return the snapshot of ``source`` (``"stdlib"`` or a directory) below the data URL ``url``.

    Nothing is uploaded twice. Raises SourceMissing or InvalidInput for a source without text.
    """
    gathered = gather(settings, source)
    held_out = assign_splits(
        [each.path for each in gathered.texts], settings.held_out_share, settings.seed
    )
    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="snapshot-", dir=work_dir) as scratch:
        shards: list[Shard] = []
        splits: tuple[Split, ...] = ("train", "held-out")
        for split in splits:
            texts = [
                each for each in gathered.texts if (each.path in held_out) == (split == "held-out")
            ]
            shards += _write_shards(texts, split, settings.shard_bytes, Path(scratch))
        record = SnapshotRecord(
            purpose=settings.purpose,
            project=settings.project,
            source=gathered.source,
            seed=settings.seed,
            held_out_share=settings.held_out_share,
            shards=tuple(shards),
            documents=len(gathered.texts),
            total_bytes=sum(len(each.text) for each in gathered.texts),
            duplicates=gathered.duplicates,
            skipped=len(gathered.skipped),
            skipped_examples=tuple(islice(sorted(gathered.skipped), SKIPPED_LISTED)),
        )
        digest = digest_of(record)
        where = snapshot_url(url, digest)
        uploaded = _upload(record, where, url, Path(scratch), store)
    log.info(
        "snapshot built digest=%s documents=%d bytes=%d shards=%d uploaded=%d skipped=%d",
        digest[:12],
        record.documents,
        record.total_bytes,
        len(shards),
        uploaded,
        record.skipped,
    )
    return load_snapshot(where, store)


def in_held_out(path: str, share: float, seed: int) -> bool:
    """Return whether a file belongs to the held-out split: a function of its path and the seed."""
    return _draw(path, seed) < share


def assign_splits(paths: Sequence[str], share: float, seed: int) -> set[str]:
    """Return the held-out paths; of few files, at least one falls on each side."""
    held_out = {path for path in paths if in_held_out(path, share, seed)}
    by_draw = sorted(paths, key=lambda path: (_draw(path, seed), path))
    if not held_out:
        held_out = {by_draw[0]}
    elif len(held_out) == len(paths):
        held_out.remove(by_draw[-1])
    return held_out


def _draw(path: str, seed: int) -> float:
    digest = hashlib.sha256(f"split:{seed}:{path}".encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64


def document_line(document: SourceText) -> bytes:
    """Return one document as its line of a shard."""
    return canonical_json(
        {
            "path": document.path,
            "sha256": document.sha256,
            "n_bytes": len(document.text),
            "text": document.text.decode("utf-8"),
        }
    )


def _write_shards(
    texts: Iterable[SourceText], split: Split, shard_bytes: int, directory: Path
) -> list[Shard]:
    shards: list[Shard] = []
    lines: list[bytes] = []
    size = text_bytes = 0
    for each in texts:
        line = document_line(each) + b"\n"
        if lines and size + len(line) > shard_bytes:
            shards.append(_write_shard(lines, split, text_bytes, directory))
            lines, size, text_bytes = [], 0, 0
        lines.append(line)
        size += len(line)
        text_bytes += len(each.text)
    shards.append(_write_shard(lines, split, text_bytes, directory))
    return shards


def _write_shard(lines: list[bytes], split: Split, text_bytes: int, directory: Path) -> Shard:
    data = b"".join(lines)
    shard = Shard(
        split=split,
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
        documents=len(lines),
        text_bytes=text_bytes,
    )
    (directory / shard.name).write_bytes(data)
    return shard


def _upload(record: SnapshotRecord, where: str, url: str, scratch: Path, store: ObjectStore) -> int:
    """Upload the shards that are missing, then the record; return how many objects were written."""
    target = join_url(where, SNAPSHOT_FILE)
    raw = canonical_json(record)
    held = {info.url: info.size for info in store.list(join_url(url, "shards"))}
    uploaded = 0
    for shard in record.shards:
        shard_url = join_url(url, "shards", shard.name)
        if held.get(shard_url) != shard.bytes:
            store.upload_file(scratch / shard.name, shard_url)
            uploaded += 1
    try:
        present = store.get_bytes(target)
    except SourceMissing:
        present = b""
    if present != raw:
        store.put_bytes(target, raw)
        uploaded += 1
    return uploaded


def parse_line(line: bytes) -> dict[str, object]:
    """Return the fields of a shard's line; raises ValueError where it is not one."""
    fields = json.loads(line)
    if not isinstance(fields, dict) or set(fields) != {"path", "sha256", "n_bytes", "text"}:
        raise ValueError("not a document")
    return fields
