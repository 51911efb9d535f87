"""Everything a store does, in a process of its own that may be killed anywhere: ``ROOT MODELS``.

Two versions arrive piece by piece, the second one reusing the first; each is published and made
active, and an old one collected. Run again it goes on where it was.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.manifest import Manifest, parse_manifest
from paceline.relay.store import Staging, Store

VERSIONS = ("v1", "v2", "v3")


def fill(staging: Staging, source: Path) -> None:
    """Write the pieces that are missing, and commit now and then."""
    manifest = staging.manifest
    for piece in manifest.pieces:
        if not staging.claim(piece.index):
            continue
        data = (source / manifest.files[piece.file_index].path).read_bytes()
        part = memoryview(data)[piece.file_offset :][: piece.length]
        staging.write(staging.descriptor(piece.file_index), part, piece.file_offset)
        staging.hold(piece)
        if piece.index % 4 == 3:
            staging.commit()


def work(root: Path, models: Path) -> None:
    """Bring every version that is not there yet."""
    store = Store(root)
    try:
        for version in VERSIONS:
            if (store.active("m") or "") > version:
                continue  # a later one is there: this one was collected
            source = models / version
            manifest = manifest_in(source)
            staging = store.open(manifest)
            store.reuse(staging)
            if not staging.published:
                fill(staging, source)
            store.publish(staging)
            store.activate(manifest.model_id, version)
            staging.close()
        store.collect(keep=2)
    finally:
        store.close()


def manifest_in(source: Path) -> Manifest:
    return parse_manifest((source / "manifest.json").read_bytes())


if __name__ == "__main__":
    work(Path(sys.argv[1]), Path(sys.argv[2]))
