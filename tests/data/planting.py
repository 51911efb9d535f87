"""Snapshots that are not what a builder makes: of version 1, and with planted faults."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data import Shard, ShardCache, Snapshot, SnapshotRecord, load_snapshot, snapshot_url
from paceline.data.formats import ColumnWriter
from paceline.schemas import canonical_json, digest_of
from paceline.storage import ObjectStore

Rows = dict[str, list[dict[str, Any]]]  # of the first train and the first held-out shard


def put_record(record: SnapshotRecord, url: str, store: ObjectStore) -> Snapshot:
    where = snapshot_url(url, digest_of(record))
    store.put_bytes(f"{where}/snapshot.json", canonical_json(record))
    return load_snapshot(where, store)


def replant(
    snapshot: Snapshot,
    url: str,
    store: ObjectStore,
    scratch: Path,
    change: Callable[[Rows], None],
    **fields: Any,
) -> Snapshot:
    """A consistent snapshot (right digests, right sums) whose samples were changed."""
    chosen = {split: snapshot.of_split(split)[0] for split in ("train", "held-out")}
    rows: Rows = {}
    with ShardCache(snapshot, store, scratch / "replant") as cache:
        for split, shard in chosen.items():
            with cache.samples(shard) as samples:
                rows[split] = [
                    {
                        "key": samples.key(i),
                        "tokens": samples.tokens(i),
                        "features": samples.features(i),
                    }
                    for i in range(len(samples))
                ]
    change(rows)
    fresh: dict[str, Shard] = {}
    for split, shard in chosen.items():
        dtype = str(rows[split][0]["tokens"].dtype)
        writer = ColumnWriter(snapshot.columns, dtype)
        for row in rows[split]:
            text_bytes = len(row["tokens"]) if snapshot.vocabulary.kind == "bytes" else 0
            writer.add(row["key"], row["tokens"], row["features"], None, text_bytes=text_bytes)
        path = scratch / f"replanted-{split}"
        writer.write(path)
        data = path.read_bytes()
        lengths = rows[split][0].get("lengths_file") or writer.lengths()
        made = Shard(
            split=shard.split,
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
            documents=len(writer),
            text_bytes=writer.text_bytes,
            token_count=writer.tokens,
            lengths_sha256=hashlib.sha256(lengths).hexdigest(),
        )
        fresh[shard.sha256] = made
        store.put_bytes(f"{url}/shards/{made.name}", data)
        store.put_bytes(f"{url}/shards/{made.lengths_name}", lengths)
    shards = tuple(fresh.get(each.sha256, each) for each in snapshot.shards)
    changed = snapshot.record.model_dump() | {
        "shards": [each.model_dump() for each in shards],
        "documents": sum(each.documents for each in shards),
        "total_bytes": sum(each.text_bytes for each in shards),
        "token_count": sum(each.tokens for each in shards),
    }
    return put_record(SnapshotRecord.model_validate(changed | fields), url, store)


def as_tokens(text: bytes) -> Any:
    return np.frombuffer(text, dtype=np.uint8)
