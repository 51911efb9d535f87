"""Two ranks that hold a model in shards: save it as ours and as DCP's, and load each other's.

``ROOT PORT RANK WORLD`` → ``ROOT/dcp-N.json``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from paceline.storage import DiskStore
from paceline.training.checkpoint import Generations, resume_newest_healthy
from paceline.training.checkpoint.dcp_export import PacelineReader
from paceline.training.checkpoint.stateful import MODEL
from paceline.training.loop.group import Group, join_group
from tests.training.checkpoint.ranks import DIGEST, SAVE_AT, Run, saver_of

warnings.filterwarnings("ignore", module="torch.distributed")


def plain_state(run: Run, *, optimizer: bool = True) -> dict[str, object]:
    """Return the live tensors under the names that plain PyTorch gives them."""
    state: dict[str, object] = {}
    for name, tensor in run.state.tensors().items():
        kind, _, of = name.partition(".")
        if name.startswith(MODEL):
            state[f"model.{of}"] = tensor
        elif optimizer:
            state[f"optimizer.state.{of}.{kind}"] = tensor
    return state


def work(root: Path, group: Group) -> dict[str, object]:
    found: dict[str, object] = {}
    run = Run("shard2", group)
    run.take(0, SAVE_AT)
    generations = Generations(DiskStore(), DiskStore.url_of(root / "shard2"))
    saver = saver_of(run, generations)
    assert saver.save(SAVE_AT, {"batch": SAVE_AT}, {})
    saver.finish()
    saver.close()
    found["bits"] = run.bits()
    # Plain DCP writes the sharded state; plain DCP reads ours back, into shards and across.
    dcp.save(plain_state(run), checkpoint_id=root / "by-dcp")
    again = Run("shard2", group)
    again.take(0, 1)  # so that there are moments to fill
    again.spoil()
    dcp.load(plain_state(again), storage_reader=PacelineReader(root / "shard2"))
    found["again"] = again.bits()
    whole = Run("shard2", group)
    whole.take(0, 1)
    whole.spoil()
    dcp.load(plain_state(whole), storage_reader=PacelineReader(root / "single"))
    single = Run("shard2", group)
    single.spoil()
    assert resume_newest_healthy(
        Generations(DiskStore(), DiskStore.url_of(root / "single")),
        single.state,
        config_digest=DIGEST,
        work_dir=root / f"work-{group.rank}",
    )
    found["across"], found["resumed"] = whole.bits(), single.bits()
    try:
        dcp.load(plain_state(again), storage_reader=PacelineReader(root / "damaged"))
    except CheckpointException as error:
        found["damaged"] = [str(each[0]) for _, each in sorted(error.failures.items())]
    return found


def main() -> None:
    root, port, rank, world = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    with join_group(rank, world, "127.0.0.1", port, 1, 60.0) as group:
        found = work(root, group)
        group.all(True)
    (root / f"dcp-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
