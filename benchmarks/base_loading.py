"""Memory of ranks while they load a base: does it grow with the world size?

    python benchmarks/base_loading.py [--ours] [--ranks 1 2 4] [--repeats 3]

Writes a random Llama in float32 (``--width``, ``--layers``), or (``--ours``) our transformer of as
many parameters as the default, and for each mesh forks ranks that open it, spread it and fill
their parts from its files, and do nothing else. Prints one JSON line a run and the medians: bytes
read, and anonymous memory beyond what a rank has before it begins (pages of the files that are
mapped meanwhile are the kernel's to drop: they are not in it): the largest rank at its peak, all
ranks at theirs, and all ranks afterwards.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.adapters import write_model
from benchmarks.layouts.ranks import Job, run_jobs
from paceline.models import config_for, new_model, save_model

MIB = 2**20
OURS = 94_900_000  # parameters
MESHES: dict[int, dict[str, dict[str, int]]] = {
    1: {"one rank": {}},
    2: {"DDP": {"dp": 2}, "FSDP2": {"shard": 2}, "TP": {"tp": 2}},
    4: {"FSDP2": {"shard": 4}, "FSDP2 x TP": {"shard": 2, "tp": 2}},
}


class AnonymousPeak:
    """The most anonymous memory of this process while it is open, read every 2 ms."""

    def __enter__(self) -> AnonymousPeak:
        gc.collect()
        self.before = self.peak = anonymous_bytes()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self.after = anonymous_bytes()
        self.peak = max(self.peak, self.after)

    def _watch(self) -> None:
        while not self._closed.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def load(model: Path, ranks: int, mesh: dict[str, int]) -> dict[str, Any]:
    """Load ``model`` as the ranks of a training do; return this mesh's figures, in MiB."""
    import torch.distributed as dist

    from paceline.config import TrainingSettings
    from paceline.models import Pretrained, SavedTransformer, is_pretrained
    from paceline.training.loop import TransformerWorkload, load_weights
    from paceline.training.parallel import MeshSpec, open_mesh, parallelise

    settings = TrainingSettings.model_validate({"ranks": ranks, "mesh": mesh})
    opened = open_mesh(MeshSpec.of(settings.mesh, ranks))
    with AnonymousPeak() as memory:
        saved = (Pretrained if is_pretrained(model) else SavedTransformer).open(model)
        workload = TransformerWorkload(saved if isinstance(saved, Pretrained) else saved.config)
        parallel = parallelise(saved.build(), opened, settings, workload)
        read = load_weights(saved, parallel)
    mine = [read, memory.peak - memory.before, memory.after - memory.before]
    every: list[Any] = [mine]
    if ranks > 1:
        every = [None] * ranks
        dist.all_gather_object(every, mine)
    reads, peaks, afters = ([each / MIB for each in column] for column in zip(*every, strict=True))
    return {
        "read_mib": max(reads),
        "largest_peak_mib": max(peaks),
        "all_peaks_mib": sum(peaks),
        "all_after_mib": sum(afters),
        "load": os.getloadavg()[0],
    }


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Load with each mesh ``--repeats`` times; print each run, print and return medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(MESHES), choices=MESHES)
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        if asked.ours:
            config = config_for(OURS, 512)
            save_model(new_model(config, 0), config, model)
        else:
            write_model(model, asked.width, asked.layers)
        files = sum(each.stat().st_size for each in model.glob("*.safetensors")) / MIB
        ways = [(n, name, mesh) for n in asked.ranks for name, mesh in MESHES[n].items()]
        rows: dict[str, list[dict[str, Any]]] = {}
        for _ in range(asked.repeats):
            for ranks, name, mesh in ways:
                way = f"{name}, {ranks}"
                job = Job(way, ranks, lambda n=ranks, m=mesh: load(model, n, m))
                (answer,) = run_jobs([job], deadline_s=300)
                rows.setdefault(way, []).append(answer["answer"])
                sys.stdout.write(json.dumps({"way": way, **answer["answer"]}) + "\n")
                sys.stdout.flush()
    medians = {
        way: {key: statistics.median(row[key] for row in own) for key in own[0]}
        for way, own in rows.items()
    }
    found = {"files_mib": files, "medians": medians}
    sys.stdout.write(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main()
