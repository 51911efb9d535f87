"""One node in a process of its own, for tests that break system calls: ``ROOT MODEL``."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.errors import DeploymentFailed
from paceline.manifest import parse_manifest
from paceline.schemas import Lane, Source, WorkerLanes
from tests.support.local_fleet import LocalFleet


def main(root: Path, model: Path) -> int:
    manifest = parse_manifest((model / "manifest.json").read_bytes())
    lane = Lane(
        source=Source(kind="origin", url=str(model)),
        first_chunk=0,
        last_chunk=len(manifest.chunks) - 1,
    )
    lanes = WorkerLanes(
        deployment_id="d",
        epoch=1,
        manifest_digest=manifest.digest,
        worker_id="node-0",
        lanes=(lane,),
        origin_budget_bytes=manifest.total_size,
        piece_deadline_s=1.0,
    )
    with LocalFleet(root, ["node-0"]) as fleet:
        fleet.deploy(manifest, {"node-0": lanes})
        try:
            fleet.receipts("d", timeout_s=40)
        except DeploymentFailed as error:
            sys.stdout.write(str(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
