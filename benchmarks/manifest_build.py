"""How fast a manifest is built, beside a plain SHA-256 of the same files. One JSON line.

    python benchmarks/manifest_build.py --bytes 2e9 --files 4

``build_manifest`` hashes each byte three times (piece, chunk, file) in one read; the plain loop
hashes once, one file after the other. Both read warm files, so that the disk is not measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from paceline.manifest import build_manifest

BLOCK = 1024 * 1024


def measure(total_bytes: int, files: int, repeats: int = 3) -> dict[str, float | int]:
    """Return GB/s (best of ``repeats``) of both ways over a model of random bytes."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        directory = Path(scratch)
        for number in range(files):
            _write(directory / f"model-{number:05}.safetensors", total_bytes // files)
        size = total_bytes // files * files
        plain = min(_timed(lambda: _plain(directory)) for _ in range(repeats))
        built = min(
            _timed(lambda: build_manifest(directory, model_id="m", version="1", link_mbit=10_000))
            for _ in range(repeats)
        )
        manifest = build_manifest(directory, model_id="m", version="1", link_mbit=10_000)
    return {
        "bytes": size,
        "files": files,
        "cores": os.cpu_count() or 1,
        "pieces": manifest.piece_count,
        "chunks": len(manifest.chunks),
        "plain_sha256_gb_s": round(size / plain / 1e9, 3),
        "build_manifest_gb_s": round(size / built / 1e9, 3),
        "hashed_gb_s": round(3 * size / built / 1e9, 3),
    }


def _write(path: Path, size: int) -> None:
    block = os.urandom(BLOCK)
    with path.open("wb") as file:
        for start in range(0, size, BLOCK):
            file.write(block[: min(BLOCK, size - start)])


def _plain(directory: Path) -> None:
    buffer = memoryview(bytearray(BLOCK))
    for path in sorted(directory.iterdir()):
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                digest.update(buffer[:got])


def _timed(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    """Measure and write one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    result = measure(int(options.bytes), options.files, options.repeats)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
