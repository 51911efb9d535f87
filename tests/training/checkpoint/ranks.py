"""One rank of a launch that tries many layouts: ``ROOT PORT RANK WORLD`` → ``ROOT/rank-N.json``;
with a word behind them, the layouts of ``NIGHTLY``, too.

A tiny model takes a few steps under each layout and saves halfway; then checkpoints of this launch
and of others are resumed under other layouts and take the steps that are left. What each run
ended with is written down; the tests compare.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from paceline.config import (
    CheckpointSettings,
    EmaSettings,
    GroupSettings,
    MeshSettings,
    TrainingSettings,
)
from paceline.data import Batch
from paceline.errors import PacelineError, ServiceUnavailable
from paceline.models import ModelConfig, config_for, new_model
from paceline.storage import DiskStore
from paceline.training.checkpoint import (
    Checkpointer,
    Generations,
    TrainState,
    export,
    resume_newest_healthy,
)
from paceline.training.loop import (
    Group,
    TransformerWorkload,
    WeightAverage,
    join_group,
    new_optimizer,
)
from paceline.training.parallel import MeshSpec, open_mesh, parallelise

STEPS, SAVE_AT, ROWS, CONTEXT = 4, 2, 4, 8
DIGEST = "c" * 64
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    1: {"single": {}},
    2: {"dp2": {}, "shard2": {"shard": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}},
    4: {
        "shard2cp2": {"shard": 2, "cp": 2},
        "shard2pp2": {"shard": 2, "pp": 2},
        "shard2tp2": {"shard": 2, "tp": 2},
        "dp2shard2": {"shard": 2},
    },
}


NIGHTLY = ("shard2cp2", "dp2shard2")  # others have each of their axes
# Which checkpoint is resumed as what, beside each as itself: every kind meets every other.
OTHERS: dict[int, list[tuple[str, str]]] = {
    1: [(name, "single") for world in (2, 4) for name in LAYOUTS[world]],
    2: [("single", "tp2"), ("dp2", "shard2"), ("tp2", "pp2"), ("pp2", "dp2")],
    4: [
        ("single", "shard2tp2"),
        ("pp2", "shard2pp2"),
        ("shard2pp2", "shard2cp2"),
        ("shard2cp2", "dp2shard2"),
    ],
}


def layouts(world: int, every: bool) -> list[str]:
    """Return the layouts of a launch."""
    return [name for name in LAYOUTS[world] if every or name not in NIGHTLY]


@functools.cache
def config() -> ModelConfig:
    return config_for(30_000, CONTEXT)


def settings_for(mesh: dict[str, int]) -> TrainingSettings:
    return TrainingSettings(
        precision="float64",
        batch_sequences=ROWS,
        mesh=MeshSettings.model_validate(mesh),
        ema=EmaSettings(decay=0.75),
        groups=(GroupSettings(match=("*embed*",), learning_rate_factor=0.5, weight_decay=0.01),),
    )


def batch_of(step: int, first: int, count: int) -> Batch:
    """Return rows ``first`` to ``first + count`` of the global batch of ``step``."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, (ROWS, CONTEXT + 1), generator=generator).numpy()
    rows = tokens[first : first + count].astype("uint8")
    return Batch(
        step=step,
        inputs_BT=rows[:, :-1],
        targets_BT=rows[:, 1:],
        weights_BT=torch.ones(count, CONTEXT).numpy(),
        documents_BT=None,
        positions_BT=None,
        carries_B=None,
        features={},
        rows=range(first, first + count),
        global_tokens=float(ROWS * CONTEXT),
        skipped=(),
    )


class Run:
    """A model under one layout, from its first step or from a checkpoint."""

    def __init__(self, name: str, group: Group, **changes: object) -> None:
        settings = settings_for(LAYOUTS[group.world_size][name]).model_copy(update=changes)
        mesh = open_mesh(MeshSpec.of(settings.mesh, group.world_size))
        self.workload = TransformerWorkload(config(), seed=1)
        self.parallel = parallelise(new_model(config(), 1), mesh, settings, self.workload)
        self.optimizer = new_optimizer(self.parallel.modules, settings)
        self.average = WeightAverage(self.optimizer, settings.ema)
        averages = self.average.values
        self.state = TrainState(
            self.parallel.modules, self.optimizer, group, mesh, averages=averages
        )
        self.group = group
        self.losses: list[float] = []

    def spoil(self) -> None:
        """Make weights that nobody could mistake for restored ones."""
        with torch.no_grad():
            for module in self.parallel.modules:
                for parameter in module.parameters():
                    parameter.fill_(7.0)

    def take(self, first: int, last: int) -> None:
        share = ROWS // self.parallel.data_world
        for step in range(first, last):
            batch = batch_of(step, self.parallel.data_rank * share, share)
            parts = [self.workload.inputs(batch, torch.device("cpu"))]
            sums = self.parallel.accumulate(parts, 1.0 / batch.global_tokens)
            self.parallel.clip(1.0)
            self.optimizer.step()
            loss, weight = self.group.sums([float(sums.loss), sums.weight])
            self.losses.append(loss / weight)

    def averaged_loss(self) -> float:
        """Return the loss of the last step's batch under the average of the weights."""
        batch, share = batch_of(STEPS - 1, 0, ROWS), ROWS // self.parallel.data_world
        part = batch.split(self.parallel.data_world)[self.parallel.data_rank]
        assert len(part.rows) == share
        with self.average.applied():
            sums = self.parallel.evaluate(self.workload.inputs(part, torch.device("cpu")))
        loss, weight = self.group.sums([float(sums.loss), sums.weight])
        return loss / weight

    def bits(self) -> str:
        """Return a digest of every byte this rank holds."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state.tensors().items()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(name.encode() + local.contiguous().numpy().tobytes())
        return digest.hexdigest()


class DiesHere(DiskStore):
    """A disk in the midst of whose write this rank is killed."""

    def upload_file(self, path, url, sha256=""):
        self.put_bytes(f"{url}.half", b"half of a part")
        os.kill(os.getpid(), signal.SIGKILL)


class BrokenHere(DiskStore):
    """A disk that does not answer to this rank."""

    def upload_file(self, path, url, sha256=""):
        raise ServiceUnavailable("disk does not answer")


class Held(DiskStore):
    """A disk that holds what is written until it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def upload_file(self, path, url, sha256=""):
        assert self.go.wait(60)
        return super().upload_file(path, url, sha256)


def saver_of(run: Run, generations: Generations, **changes: object) -> Checkpointer:
    values = {"every_steps": 1, "max_stall_share": 0.99} | changes
    return Checkpointer(
        generations,
        run.state,
        CheckpointSettings.model_validate(values),
        job_id="job",
        config_digest=DIGEST,
        code_version="test",
        deadline_s=60,
    )


def work(root: Path, group: Group, every: bool) -> dict[str, object]:
    found: dict[str, object] = {"saved": {}, "resumed": {}, "cases": {}}
    names = layouts(group.world_size, every)
    for name in names:
        run = Run(name, group)
        run.take(0, SAVE_AT)
        generations = Generations(DiskStore(), DiskStore.url_of(root / "jobs" / name))
        saver = saver_of(run, generations)
        assert saver.save(SAVE_AT, {"batch": SAVE_AT}, {"loss": run.losses[-1]})
        run.take(SAVE_AT, STEPS)  # while it is being written
        saver.finish()
        saver.close()
        assert set(saver.saved) == {SAVE_AT}
        with run.average.applied():
            export(run.state, config(), root / "exports" / name)
        averaged = run.averaged_loss()
        found["saved"][name] = {"losses": run.losses, "averaged": averaged, "bits": run.bits()}
    group.all(True)
    for saved, name in [(name, name) for name in names] + OTHERS[group.world_size]:
        if name not in names or not (root / "jobs" / saved).exists():
            continue  # of a launch that is still to come
        generations = Generations(DiskStore(), DiskStore.url_of(root / "jobs" / saved))
        run = Run(name, group)
        run.spoil()
        restored = resume_newest_healthy(
            generations, run.state, config_digest=DIGEST, work_dir=root / f"w{group.rank}"
        )
        assert restored is not None
        assert restored.step == SAVE_AT
        assert restored.position == {"batch": SAVE_AT}
        run.take(SAVE_AT, STEPS - 1)
        run.averaged_loss()  # changes nothing
        run.take(STEPS - 1, STEPS)
        found["resumed"][f"{saved} as {name}"] = {
            "losses": run.losses,
            "averaged": run.averaged_loss(),
            "bits": run.bits(),
        }
    if group.world_size == 2:
        found["cases"] = cases(root / "cases", group)
    return found


def cases(root: Path, group: Group) -> dict[str, object]:
    """What two ranks do when only one of them has a trouble."""
    found: dict[str, object] = {}
    generations = Generations(DiskStore(), DiskStore.url_of(root / "trouble"))
    run = Run("shard2", group)
    run.take(0, 1)
    saver = saver_of(run, generations)
    saver.save_last(1, {"batch": 1}, {})
    run.take(1, 2)
    saver.save_last(2, {"batch": 2}, {})

    def refused(case: str, saver: Checkpointer, step: int) -> None:
        try:
            saver.save_last(step, {"batch": step}, {})
            found[case] = "saved"
        except PacelineError as error:
            found[case] = f"{error.code}: {error.one_line()}"
        found[f"steps after {case}"] = generations.steps()

    store = BrokenHere() if group.rank == 1 else DiskStore()
    refused("broken", saver_of(run, Generations(store, generations.url)), 3)
    with torch.no_grad():
        if group.rank == 1:
            next(iter(run.state.parameters()))[1].to_local().view(-1)[0] = float("nan")
    refused("nan", saver, 4)

    if group.rank == 0:  # the other rank's file rots
        newest = DiskStore.path_of(generations.url_of(generations.find().committed[0]))
        where = newest / "rank-00001-of-00002.safetensors"
        data = bytearray(where.read_bytes())
        data[-5] ^= 16
        where.write_bytes(data)
    group.all(True)
    rejected: list[int] = []
    again = Run("shard2", group)
    restored = resume_newest_healthy(
        generations,
        again.state,
        config_digest=DIGEST,
        work_dir=root / f"w{group.rank}",
        on_rejected=lambda step, why: rejected.append(step),
    )
    found["rotten"] = [restored.step if restored else None, rejected, generations.steps()]

    found["slow"] = slow_store(root, group)
    run.spoil()
    assert resume_newest_healthy(
        Generations(DiskStore(), DiskStore.url_of(root.parent / "jobs" / "shard2")),
        run.state,
        config_digest=DIGEST,
        work_dir=root / f"w{group.rank}",
    )
    dcp.save(plain_state(run), checkpoint_id=root.parent / "by-dcp")
    return found


def plain_state(run: Run) -> dict[str, object]:
    """Return the live tensors under the names that plain PyTorch gives them."""
    state: dict[str, object] = {}
    for name, tensor in run.state.tensors().items():
        kind, _, of = name.partition(".")
        state[name if kind == "model" else f"optimizer.state.{of}.{kind}"] = tensor
    return state


def slow_store(root: Path, group: Group) -> dict[str, object]:
    """Train past several saves that are due while rank 1's store takes its time over the first."""
    run = Run("dp2", group)
    store = Held() if group.rank == 1 else DiskStore()
    generations = Generations(store, DiskStore.url_of(root / "slow"))
    saver = saver_of(run, generations, every_steps=2, keep=5)
    begun: list[int] = []
    found: dict[str, object] = {}
    for step in range(1, 8):
        run.take(step - 1, step)
        if step == 7:
            found["while held"] = [begun.copy(), saver.postponed, generations.steps()]
            if isinstance(store, Held):
                store.go.set()
            saver.finish()
        (due,) = group.sums([float(saver.due(step, 100))])  # as the loop sends it to all
        if due and saver.save(step, {"batch": step}, {}):
            begun.append(step)
    saver.finish()
    found["steps"] = len(run.losses)
    found["begun"], found["committed"] = begun, generations.steps()
    found["alerts"] = [each.kind for each in saver.alerts]
    found["put off"] = saver.postponed
    return found


def die_midway(root: Path, group: Group) -> None:
    """Save; save again and lose rank 1 while it writes; rank 0 tells what it saw."""
    url = DiskStore.url_of(root / "killed")
    run = Run("shard2", group)
    run.take(0, 1)
    saver_of(run, Generations(DiskStore(), url)).save_last(1, {"batch": 1}, {})
    run.take(1, 2)
    saver = saver_of(run, Generations(DiesHere() if group.rank == 1 else DiskStore(), url))
    saver.save(2, {"batch": 2}, {})
    try:
        saver.finish()
        seen = "saved"
    except PacelineError as error:
        seen = error.code
    (root / "killed.json").write_text(json.dumps(seen))


def main() -> int:
    root, port, rank, world = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with join_group(rank, world, "127.0.0.1", port, 1, 60) as group:
        found = work(root, group, len(sys.argv) > 5)
        (root / f"rank-{rank}-of-{world}.json").write_text(json.dumps(found))
        if world == 2:
            die_midway(root, group)
            os._exit(0)  # leaving the group would wait for the dead
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:  # noqa: BLE001 - its last word
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
