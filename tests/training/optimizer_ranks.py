"""Two ranks that save and resume with each optimiser; tests/training/test_optimizers.py asks.

``python -m tests.training.optimizer_ranks RANK PORT DIRECTORY`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.storage import DiskStore
from paceline.training.checkpoint import Generations, resume_newest_healthy
from paceline.training.loop import Group, join_group
from tests.training.checkpoint.ranks import DIGEST, SAVE_AT, STEPS, Run, saver_of

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "muon": ("dp2", {"optimizer": "muon"}),
    "muon, shards": ("shard2", {"optimizer": "muon"}),
    "muon, cut": ("tp2", {"optimizer": "muon"}),
    "sgd": ("shard2", {"optimizer": "sgd"}),
}


def resumed(run: Run, root: Path, case: str) -> dict[str, object]:
    """Restore ``case`` into ``run``, whose weights are none, and take the steps that are left."""
    run.spoil()
    generations = Generations(DiskStore(), DiskStore.url_of(root / case))
    work = root / f"work-{run.group.rank}"
    assert resume_newest_healthy(generations, run.state, config_digest=DIGEST, work_dir=work)
    restored = run.bits()
    run.take(SAVE_AT, STEPS)
    return {"restored": restored, "bits": run.bits(), "losses": run.losses}


def main() -> None:
    torch.set_num_threads(1)
    rank, port, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    said: dict[str, dict[str, object]] = {}
    with join_group(rank, 2, "127.0.0.1", port, 1, 60.0) as group:
        for case, (layout, changes) in CASES.items():
            run = Run(layout, group, **changes)
            run.take(0, SAVE_AT)
            generations = Generations(DiskStore(), DiskStore.url_of(root / case))
            saver_of(run, generations).save_last(SAVE_AT, {"batch": SAVE_AT}, {})
            said[case] = {"saved": run.bits()}
            run.take(SAVE_AT, STEPS)
            said[case] |= {"bits": run.bits(), "losses": run.losses[SAVE_AT:]}
            said[case]["again"] = resumed(Run(layout, group, **changes), root, case)
        dist.barrier()
    for case, (_, changes) in CASES.items() if rank == 0 else ():
        said[case]["alone"] = resumed(Run("single", Group(), **changes), root, case)
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
