"""What a second version moves that changes 2 % of its pieces. One JSON line.

    python benchmarks/reuse.py --bytes 256e6 --workers 4 --changed 0.02

A real relay over loopback sockets and disks, twice: the first version to empty disks, then a
second one in which that share of the pieces (by a seed, over all shards) has other bytes, the first
file is longer, and one file is new. Bytes are those of the workers' receipts: from the source, and
from peers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from paceline.manifest import build_manifest
from paceline.schemas import Distribution
from paceline.standalone import distribute

BLOCK = 1024 * 1024


def measure(
    total_bytes: int, *, workers: int, changed: float, files: int = 4, seed: int = 7
) -> dict[str, float | int | str]:
    """Return the bytes that both versions moved, and the seconds they took."""
    with tempfile.TemporaryDirectory(prefix="paceline-reuse-") as scratch:
        model, nodes = Path(scratch, "model"), Path(scratch, "nodes")
        model.mkdir()
        (model / "config.json").write_text('{"version": 1}')
        for number in range(files):
            _write(model / f"model-{number:05}.safetensors", total_bytes // files)
        first = distribute(model, nodes, workers, model_id="m", version="1")
        pieces, piece_bytes = _change(model, changed, seed)
        before = time.process_time()
        second = distribute(model, nodes, workers, model_id="m", version="2")
        cpu = time.process_time() - before
        taken = _taken(nodes)
    return {
        "bytes": second.total_bytes,
        "workers": workers,
        "piece_bytes": piece_bytes,
        "changed_share": round(pieces * piece_bytes / second.total_bytes, 5),
        "first_moved_share": round(_moved(first), 5),
        "second_moved_share": round(_moved(second), 5),
        "second_origin_share": round(second.origin_ratio, 5),
        "reused_bytes": second.reused_bytes,
        "first_seconds": round(first.seconds, 3),
        "second_seconds": round(second.seconds, 3),
        "second_cpu_seconds": round(cpu, 3),
        "disk_share": round(taken / (workers * (first.total_bytes + second.total_bytes)), 4),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "load": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count() or 1,
    }


def _moved(done: Distribution) -> float:
    """Return which share of the model each worker received, on average."""
    return (done.origin_bytes + done.received_bytes) / (done.total_bytes * done.workers)


def _change(model: Path, changed: float, seed: int) -> tuple[int, int]:
    """Give ``changed`` of the pieces other bytes; return how many, and a piece's size."""
    manifest = build_manifest(model, model_id="m", version="1", link_mbit=10_000)
    draw = Random(seed)
    count = max(1, round(manifest.piece_count * changed) - 2)  # two more are the small files
    for index in draw.sample(range(1, manifest.piece_count), count):
        piece = manifest.piece_of(index)
        with (model / manifest.files[piece.file_index].path).open("r+b") as file:
            file.seek(piece.file_offset + draw.randrange(piece.length))
            file.write(os.urandom(1))
    (model / "config.json").write_text('{"version": 2, "longer": true}')
    (model / "tokenizer.json").write_text("{}")
    return count, manifest.piece_bytes


def _taken(nodes: Path) -> int:
    seen = {(s.st_dev, s.st_ino): s.st_blocks * 512 for s in map(os.lstat, nodes.rglob("*"))}
    return sum(seen.values())


def _write(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for start in range(0, size, BLOCK):
            file.write(os.urandom(min(BLOCK, size - start)))


def main(argv: list[str] | None = None) -> int:
    """Measure and write one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=float, default=256e6)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--changed", type=float, default=0.02)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(argv)
    result = measure(
        int(options.bytes),
        workers=options.workers,
        changed=options.changed,
        files=options.files,
        seed=options.seed,
    )
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
