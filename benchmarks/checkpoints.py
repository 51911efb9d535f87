"""What checkpoints cost and what damage they notice.

Stall: windows of training with our asynchronous save at their start, with a synchronous
``torch.save`` (+ fsync) and with neither, interleaved; the same model, optimiser and batch, on a
local disk. ``blocked`` is for how long a save kept training from stepping; ``extra`` is how much
longer the whole window took than one without a save, so that what the writing thread takes from
training counts too; both as shares of the time at one save every 30 s.

Damage: bit flips, truncations and missing files, each in a fresh copy of two generations. Every one
must be noticed, and training resume, bit for bit, from the generation before.

    python benchmarks/checkpoints.py [--ranks 1 2] [--parameters 30000000] [--windows 7] [--steps 8]
                                     [--damages 200] [--quick] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from paceline.config import CheckpointSettings, TrainingSettings
from paceline.models import config_for, new_model
from paceline.storage import DiskStore
from paceline.training.checkpoint import (
    Checkpointer,
    Generations,
    TrainState,
    resume_newest_healthy,
)
from paceline.training.loop import Group, Inputs, TransformerWorkload, join_group, new_optimizer
from paceline.training.parallel import MeshSpec, open_mesh, parallelise

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "checkpoints.json"
EVERY_S = 30.0
GOAL_STALL = 0.035
DIGEST = "b" * 64
WORK_S = 1800.0
CONTEXT, ROWS = 64, 2


class Training:
    """A model that takes steps on one and the same batch."""

    def __init__(self, parameters: int, group: Group, device: str = "cpu") -> None:
        self.device = device
        config = config_for(parameters, CONTEXT)
        settings = TrainingSettings(ranks=group.world_size)
        workload = TransformerWorkload(config)
        mesh = open_mesh(MeshSpec.of(settings.mesh, group.world_size), device)
        self.parallel = parallelise(new_model(config, 0), mesh, settings, workload)
        self.optimizer = new_optimizer(self.parallel.modules, settings)
        self.state = TrainState(self.parallel.modules, self.optimizer, group, mesh)
        self.group = group
        generator = torch.Generator().manual_seed(group.rank)
        tokens_BT = torch.randint(0, 256, (ROWS, CONTEXT), generator=generator)
        tokens_BT, weight = tokens_BT.to(device), float(ROWS * CONTEXT)
        ones_BT = torch.ones(ROWS, CONTEXT, device=device)
        self._inputs = [Inputs((tokens_BT,), (tokens_BT, ones_BT), weight)]
        self._scale = 1.0 / (weight * group.world_size)

    def step(self) -> None:
        self.parallel.accumulate(self._inputs, self._scale)
        self.optimizer.step()
        if self.device != "cpu":  # as the loop does: it reads the loss
            torch.cuda.synchronize()

    def bits(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.state.tensors().items()}

    def saver(self, generations: Generations, keep: int = 2) -> Checkpointer:
        return Checkpointer(
            generations,
            self.state,
            CheckpointSettings(keep=keep),
            job_id="benchmark",
            config_digest=DIGEST,
            code_version="benchmark",
        )


# ── stall ────────────────────────────────────────────────────────────────────────────────────────


def measure(options: argparse.Namespace, group: Group, root: Path) -> dict[str, Any]:
    """Return, on every rank, what each kind of window took."""
    training = Training(options.parameters, group, options.device)
    training.step()
    saver = training.saver(Generations(DiskStore(), DiskStore.url_of(root / "ours")))
    saver.save_last(0, {}, {})  # makes the buffers, as the first save of a job does
    windows: dict[str, list[float]] = {"none": [], "ours": [], "torch.save": []}
    blocked: dict[str, list[float]] = {"ours": [], "torch.save": []}
    order = Random(1)
    for number in range(1, options.windows + 1):
        kinds = list(windows)
        order.shuffle(kinds)
        for kind in kinds:
            group.all(True)
            began = time.perf_counter()
            if kind == "ours":
                saver.save(number, {}, {})
            elif kind == "torch.save":
                save_synchronously(training, root / "plain.pt")
            if kind in blocked:
                blocked[kind].append(time.perf_counter() - began)
            for _ in range(options.steps):
                training.step()
            saver.finish()
            group.all(True)
            windows[kind].append(time.perf_counter() - began)
    written = sum(each.bytes for each in saver.kept()) / len(saver.kept())
    saver.close()
    return {"windows": windows, "blocked": blocked, "bytes": written}


def save_synchronously(training: Training, path: Path) -> None:
    """Rank 0 writes everything and the others wait, as a loop with ``torch.save`` in it does."""
    if training.group.rank == 0:
        state = {
            "model": training.parallel.modules[0].state_dict(),
            "optimizer": training.optimizer.state_dict(),
        }
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    training.group.all(True)


def stall(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return what a save costs with so many ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        raw = launch(options, ranks, Path(scratch))
    plain = statistics.median(raw["windows"]["none"])
    found: dict[str, Any] = {
        "ranks": ranks,
        "parameters": options.parameters,
        "state_mb": round(raw["bytes"] / 1e6, 1),
        "steps_a_window": options.steps,
        "window_s": plain,
    }
    for kind, times in raw["blocked"].items():
        extra = [took - plain for took in raw["windows"][kind]]
        found[kind] = {
            "blocked_s": {"median": statistics.median(times), "worst": max(times)},
            "extra_s": {"median": statistics.median(extra), "worst": max(extra)},
            "blocked_share": {
                "median": statistics.median(times) / EVERY_S,
                "worst": max(times) / EVERY_S,
            },
            "extra_share": {
                "median": statistics.median(extra) / EVERY_S,
                "worst": max(extra) / EVERY_S,
            },
        }
    return found


def launch(options: argparse.Namespace, ranks: int, scratch: Path) -> dict[str, Any]:
    """Run the ranks as processes and return what rank 0 measured."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    out = scratch / "out.json"
    command = [sys.executable, str(Path(__file__)), "--out", str(out)]
    for name in ("parameters", "windows", "steps", "device"):
        command += [f"--{name}", str(getattr(options, name))]
    processes = [
        subprocess.Popen([*command, "--place", f"{rank}/{ranks}/{port}"]) for rank in range(ranks)
    ]
    try:
        codes = [process.wait(WORK_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit(f"a rank failed: {codes}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def be_rank(options: argparse.Namespace) -> None:
    """Measure as one rank of a launch."""
    rank, ranks, port = map(int, options.place.split("/"))
    torch.set_num_threads(1)
    with join_group(rank, ranks, "127.0.0.1", port, 1, 300) as group:
        found = measure(options, group, options.out.parent)
    if rank == 0:
        options.out.write_text(json.dumps(found))


# ── damage ───────────────────────────────────────────────────────────────────────────────────────


def damages(count: int, parameters: int) -> dict[str, Any]:
    """Damage fresh copies of the newest generation and return how many were noticed."""
    random = Random(7)
    tried: Counter[str] = Counter()
    noticed: Counter[str] = Counter()
    silent: list[str] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        before = two_generations(root / "good", parameters)
        for number in range(count):
            kind = ("flip", "flip", "flip", "truncate", "missing")[number % 5]
            shutil.rmtree(root / "copy", ignore_errors=True)
            shutil.copytree(root / "good", root / "copy")
            what = damage(root / "copy", kind, random)
            tried[kind] += 1
            if resumes_from_the_one_before(root / "copy", parameters, before):
                noticed[kind] += 1
            else:
                silent.append(what)
    return {
        "tried": dict(tried),
        "noticed_and_resumed_from_the_one_before": dict(noticed),
        "silent": silent,
        "seconds": time.perf_counter() - began,
    }


def two_generations(root: Path, parameters: int) -> dict[str, Tensor]:
    """Save steps 1 and 2 and return the state of step 1."""
    training = Training(parameters, Group())
    saver = training.saver(Generations(DiskStore(), DiskStore.url_of(root)))
    kept: dict[str, Tensor] = {}
    for step in (1, 2):
        training.step()
        saver.save_last(step, {"batch": step}, {})
        kept = kept or training.bits()
    saver.close()
    return kept


def damage(root: Path, kind: str, random: Random) -> str:
    """Damage one file of the newest generation, by its size or any, and say what was done."""
    newest = max(root.iterdir())
    files = sorted(newest.iterdir())
    file = random.choice(files)
    if kind == "missing":
        file.unlink()
        return f"missing {file.name}"
    data = bytearray(file.read_bytes())
    at = random.randrange(len(data))
    if kind == "truncate":
        file.write_bytes(data[:at])
    else:
        data[at] ^= 1 << random.randrange(8)
        file.write_bytes(data)
    return f"{kind} {file.name} at {at}"


def resumes_from_the_one_before(root: Path, parameters: int, before: dict[str, Tensor]) -> bool:
    training = Training(parameters, Group())
    restored = resume_newest_healthy(
        Generations(DiskStore(), DiskStore.url_of(root)),
        training.state,
        config_digest=DIGEST,
        work_dir=root.parent / "work",
    )
    if restored is None or restored.step != 1 or restored.position != {"batch": 1}:
        return False
    now = training.bits()
    same = now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)
    training.step()
    return same


# ── both ─────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Measure, print the result as JSON and return it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parameters", type=int, default=30_000_000)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--place", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    if options.place:
        be_rank(options)
        return None
    small = 50_000
    if options.quick:
        options.ranks, options.parameters = [1], small
        options.windows, options.steps, options.damages = 2, 2, 10
    found = {
        "every_s": EVERY_S,
        "goal_stall_share": GOAL_STALL,
        "load": os.getloadavg()[0],
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "stall": [stall(options, ranks) for ranks in options.ranks],
        "damage": damages(options.damages, small),
    }
    text = json.dumps(found, indent=2)
    if not options.quick:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    print(text)
    return found


if __name__ == "__main__":
    # Every damage is rejected with a warning, as it should be; the result says how many.
    logging.getLogger("paceline").setLevel(logging.ERROR)
    main()
