"""Snapshots: how fast they are built and read, and what hides a store's latency. One JSON line.

    python benchmarks/snapshots.py [--quick] [--out benchmarks/results/snapshots.json]

Building: text as JSONL, Parquet and tar, with bytes as tokens, and features joined by key. Reading:
opening a shard that is on this disk (mapped and hashed), walking its samples. Latency: a store
whose every answer begins ``--latency`` seconds late, one shard after the other, then fetched ahead
while a consumer works ``--work`` seconds on each; and with one answer in twenty five seconds late.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.config import DataSettings
from paceline.data import ShardCache, Snapshot, build_snapshot
from paceline.storage import DiskStore

MIB = 1024 * 1024
STUCK_S = 5.0
WORDS = ["line", "closes", "up", "when", "a", "rider", "drops", "out", "nobody", "waits"]


class Late(DiskStore):
    """A disk that answers like a bucket far away; some answers hardly come at all."""

    def __init__(self, latency_s: float, stuck_share: float = 0.0) -> None:
        super().__init__()
        self.latency_s, self.stuck_share = latency_s, stuck_share
        self.freed = threading.Event()
        self._random = random.Random(0)

    def stream_range(self, *args: Any, **more: Any) -> Iterator[int]:
        """Wait, then read."""
        stuck = self._random.random() < self.stuck_share
        self.freed.wait(STUCK_S if stuck else self.latency_s)
        yield from super().stream_range(*args, **more)


def measure(total_bytes: int, latency_s: float, work_s: float) -> dict[str, Any]:
    """Return the figures for a source of ``total_bytes`` of text."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        root = Path(scratch)
        rows = _rows(total_bytes)
        keys = [each["key"] for each in rows]
        vectors = np.random.default_rng(0).standard_normal((len(rows), 64), dtype=np.float32)
        features = root / "features.parquet"
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 64)
        pq.write_table(pa.table({"key": keys, "vector": column}), features)
        built: dict[str, float] = {}
        snapshot: Snapshot | None = None
        for name, write in (("jsonl", _jsonl), ("parquet", _parquet), ("tar", _tar)):
            source = root / name
            source.mkdir()
            write(rows, source)
            snapshot, took_s = _build(source, root / "store", name, total_bytes)
            built[f"build_{name}_mb_s"] = round(total_bytes / took_s / 1e6, 1)
        _, took_s = _build(root / "jsonl", root / "store", "jsonl", total_bytes, str(features))
        assert snapshot is not None
        return {
            "bytes": total_bytes,
            "samples": len(rows),
            "shards": len(snapshot.shards),
            "shard_bytes": snapshot.shards[0].bytes,
            "cores": os.cpu_count() or 1,
            **built,
            "build_jsonl_with_features_mb_s": round(total_bytes / took_s / 1e6, 1),
            **_reading(snapshot, root / "cache"),
            **_latency(snapshot, root, latency_s, work_s),
        }


def _reading(snapshot: Snapshot, directory: Path) -> dict[str, float]:
    with ShardCache(snapshot, DiskStore(), directory) as cache:
        for shard in snapshot.shards:
            cache.samples(shard).close()
        cache.verify_s = 0.0
        began_s = time.perf_counter()
        tokens = samples = 0
        for shard in snapshot.shards:
            with cache.samples(shard) as opened:
                for i in range(len(opened)):
                    tokens += len(opened.tokens(i))
                    samples += 1
        took_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        for shard in snapshot.shards:
            cache.lengths(shard)
        size = sum(each.bytes for each in snapshot.shards)
        return {
            "read_samples_s": round(samples / took_s),
            "read_tokens_s": round(tokens / took_s),
            "verify_ms_a_mib": round(1e3 * cache.verify_s / (size / MIB), 3),
            "verify_share_of_reading": round(cache.verify_s / took_s, 3),
            "lengths_ms_a_shard": round(
                1e3 * (time.perf_counter() - began_s) / len(snapshot.shards), 3
            ),
        }


def _latency(snapshot: Snapshot, root: Path, latency_s: float, work_s: float) -> dict[str, float]:
    some = snapshot.shards[:40]

    def waited_s(name: str, ahead: int, stuck_share: float = 0.0) -> tuple[float, int]:
        store = Late(latency_s, stuck_share)
        wait_s = 0.0
        try:
            with ShardCache(snapshot, store, root / name) as cache:
                began_s = time.perf_counter()
                for number, _ in enumerate(cache.opened(some, ahead)):
                    if number >= 10:  # the first are waited for whatever is done
                        wait_s += time.perf_counter() - began_s
                    time.sleep(work_s)
                    began_s = time.perf_counter()
                return wait_s, cache.hedges
        finally:
            store.freed.set()

    measured = len(some) - 10
    one, _ = waited_s("one", 0)
    ahead, _ = waited_s("ahead", 4)
    stuck, hedges = waited_s("stuck", 4, 0.05)
    per = {"one_after_the_other": one, "ahead": ahead, "ahead_one_in_twenty_stuck": stuck}
    return {
        "latency_ms": 1e3 * latency_s,
        "work_ms": 1e3 * work_s,
        **{
            f"wait_ms_{name}": round(1e3 * each / max(measured, 1), 2) for name, each in per.items()
        },
        **{
            f"wait_share_{name}": round(each / (each + measured * work_s), 4)
            for name, each in per.items()
        },
        "hedges": hedges,
    }


def _build(
    source: Path, store: Path, format_: str, total_bytes: int, *features: str
) -> tuple[Snapshot, float]:
    settings = DataSettings(
        format=format_,  # type: ignore[arg-type]
        text_field="txt" if format_ == "tar" else "text",
        max_bytes=10 * total_bytes + MIB,
        shard_bytes=max(4096, min(MIB, total_bytes // 60)),
        features=features,
    )
    began_s = time.perf_counter()
    snapshot = build_snapshot(str(source), DiskStore.url_of(store), settings, DiskStore())
    return snapshot, time.perf_counter() - began_s


def _rows(total_bytes: int) -> list[dict[str, str]]:
    chance = random.Random(0)
    rows, size = [], 0
    while size < total_bytes:
        words = chance.choices(WORDS, k=max(8, int(chance.lognormvariate(5.5, 1))))
        rows.append({"key": f"{len(rows):08d}", "text": f"{len(rows)} {' '.join(words)}"})
        size += len(rows[-1]["text"])
    return rows


def _jsonl(rows: list[dict[str, str]], directory: Path) -> None:
    with (directory / "all.jsonl").open("w") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)


def _parquet(rows: list[dict[str, str]], directory: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows), directory / "all.parquet", row_group_size=10_000)


def _tar(rows: list[dict[str, str]], directory: Path) -> None:
    with tarfile.open(directory / "all.tar", "w") as archive:
        for each in rows:
            info = tarfile.TarInfo(f"{each['key']}.txt")
            body = each["text"].encode()
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))


def main(argv: list[str] | None = None) -> int:
    """Print the figures and keep them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bytes", type=float, default=64e6)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--work", type=float, default=0.05)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    size = 300_000 if args.quick else int(args.bytes)
    figures = measure(size, *((0.01, 0.01) if args.quick else (args.latency, args.work)))
    line = json.dumps(figures)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
