"""Memory of ranks that train on long rows: whole, recomputed, and cut over ranks.

    python benchmarks/long_rows.py [--tokens 1024 4096] [--width 256] [--layers 4] [--repeats 3]
    python benchmarks/long_rows.py --packed llama mistral [--tokens 8192 16384]

Each way trains one of our transformers on batches of two rows, of one document each, by two ranks
of one thread. A pass is of one row for each rank, or of half of one row and then of the other.
Prints one JSON line a run and the medians: anonymous memory that the largest rank takes at its peak
during two steps, beyond what it has before them. ``--packed``: models of these families of
transformers instead, and one pass of one row by one process, of one document or of eight.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.base_loading import MIB, AnonymousPeak
from benchmarks.layouts.ranks import Job, run_jobs

ROWS, RANKS, STEPS = 2, 2, 2
WAYS: dict[str, dict[str, Any]] = {
    "FSDP2": {"mesh": {"shard": 2}},
    "FSDP2, recomputed": {"mesh": {"shard": 2}, "activation_checkpointing": True},
    "CP": {"mesh": {"cp": 2}},
    "CP, recomputed": {"mesh": {"cp": 2}, "activation_checkpointing": True},
}


def train(given: dict[str, Any], tokens: int, width: int, layers: int) -> dict[str, float]:
    """Take ``STEPS`` steps as one of the ranks; return the peak of the largest rank."""
    import torch
    import torch.distributed as dist

    from paceline.config import TrainingSettings
    from paceline.models import ModelConfig
    from paceline.training.loop import (
        Inputs,
        TransformerWorkload,
        new_optimizer,
        return_freed_memory,
    )
    from paceline.training.parallel import MeshSpec, open_mesh, parallelise

    torch.set_num_threads(1)
    return_freed_memory()
    settings = TrainingSettings.model_validate({"ranks": RANKS, "batch_sequences": ROWS, **given})
    config = ModelConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=tokens,
    )
    workload = TransformerWorkload(config)
    mesh = open_mesh(MeshSpec.of(settings.mesh, RANKS))
    parallel = parallelise(workload.build(), mesh, settings, workload)
    optimizer = new_optimizer(parallel.modules, settings)
    rows = ROWS // parallel.data_world
    drawn = torch.randint(0, 256, (rows, tokens + 1), generator=torch.Generator().manual_seed(0))
    parts = [
        Inputs((row[:, :-1],), (row[:, 1:], torch.ones(1, tokens)), float(tokens))
        for row in drawn.split(1)
    ]
    with AnonymousPeak() as memory:
        for _ in range(STEPS):
            parallel.accumulate(parts, 1.0 / (ROWS * tokens))
            parallel.clip(1.0)
            optimizer.step()
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, (memory.peak - memory.before) / MIB)
    return {"peak_mib": max(every), "load": os.getloadavg()[0]}


def pass_packed(
    family: str, documents: int, tokens: int, width: int, layers: int
) -> dict[str, float]:
    """Return the peak, in MiB, of one pass of a row of ``documents`` of like length."""
    import tempfile

    import torch

    from paceline.models import Pretrained
    from paceline.training.loop import return_freed_memory
    from tests.support.hugging_face import write_model

    torch.set_num_threads(1)
    return_freed_memory()
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    if family == "mistral":
        sizes["sliding_window"] = 1024
    with tempfile.TemporaryDirectory() as made:
        opened = Pretrained.open(
            write_model(family, Path(made), max_position_embeddings=tokens, **sizes)
        )
        model = opened.load().train()
    drawn = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(0))
    at = torch.arange(tokens)[None]
    length = tokens // documents
    with AnonymousPeak() as memory:
        model(drawn, at % length, at // length).logsumexp(-1).mean().backward()
    return {"peak_mib": (memory.peak - memory.before) / MIB, "load": os.getloadavg()[0]}


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Train in each way ``--repeats`` times; print each run, print and return medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--packed", nargs="+", default=[], metavar="FAMILY")
    asked = parser.parse_args(words)
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(asked.repeats):
        for tokens in asked.tokens:
            size = tokens, asked.width, asked.layers
            jobs = {
                f"{name}, {tokens} tokens": Job(name, RANKS, partial(train, given, *size))
                for name, given in WAYS.items()
            }
            if asked.packed:
                jobs = {
                    f"{family}, documents: {documents}, {tokens} tokens": Job(
                        family, 1, partial(pass_packed, family, documents, *size)
                    )
                    for family, documents in itertools.product(asked.packed, (1, 8))
                }
            for way, job in jobs.items():
                (answer,) = run_jobs([job], deadline_s=600)
                rows.setdefault(way, []).append(answer["answer"])
                sys.stdout.write(json.dumps({"way": way, **answer["answer"]}) + "\n")
                sys.stdout.flush()
    found = {
        way: {key: statistics.median(row[key] for row in own) for key in own[0]}
        for way, own in rows.items()
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main()
