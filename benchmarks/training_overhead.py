"""What our loop costs: tokens a second of ``paceline.training.loop`` against a plain PyTorch loop.

Same model, same batches, one rank, one thread, AdamW in both; the plain loop has no clipping, no
schedule, no stream, no checks. Pairs are interleaved, so that a busy machine slows both alike.

    python benchmarks/training_overhead.py [--parameters 1000000] [--context 256] [--batch 16]
                                           [--steps 8] [--pairs 5]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from paceline.data import PlannedStream, Shard
from paceline.data.samples import TextSamples
from paceline.data.stream import batching
from paceline.models import config_for, count_parameters, new_model
from paceline.profile import DataSettings, TrainingSettings
from paceline.training.group import Group
from paceline.training.loop import Progress, train_model
from paceline.training.recipe import new_optimizer


class InMemory:
    """A cache of one shard that is there already."""

    def __init__(self, text: bytes) -> None:
        self.quarantined: dict[str, str] = {}
        self._text = text

    def lengths(self, _: Shard) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.array([len(self._text)], dtype=np.int32)

    def samples(self, _: Shard) -> TextSamples:
        return TextSamples(["random"], [self._text])

    def prefetch(self, _: Sequence[Shard]) -> None:
        pass


def stream_of(context: int, batch: int) -> PlannedStream:
    """A stream of random bytes from memory: what it costs to slice and to hand over."""
    size = 4 * context * batch
    shard = Shard(
        split="train",
        sha256=hashlib.sha256(b"").hexdigest(),
        bytes=size,
        documents=1,
        text_bytes=size,
    )
    text = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8).tobytes()
    windows = batching(DataSettings(), context=context, global_batch=batch, seed=0)
    return PlannedStream(windows, [shard], InMemory(text))


def ours(parameters: int, context: int, batch: int, steps: int) -> float:
    """Tokens a second of our loop."""
    model = new_model(config_for(parameters, context), 0)
    settings = TrainingSettings(steps=steps, batch_sequences=batch)
    optimizer = new_optimizer(model, settings)
    with stream_of(context, batch) as stream:
        done = train_model(model, optimizer, stream, settings, Group(), progress=Progress())
    return done.tokens / done.seconds


def plain(parameters: int, context: int, batch: int, steps: int) -> float:
    """Tokens a second of the loop that everybody writes first."""
    model = new_model(config_for(parameters, context), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens_BT = torch.randint(0, 256, (batch, context + 1))
    started = time.perf_counter()
    for _ in range(steps):
        logits_BTV = model(tokens_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return batch * context * steps / (time.perf_counter() - started)


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Run the pairs and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    asked = parser.parse_args(arguments)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    shape = (asked.parameters, asked.context, asked.batch)
    try:
        plain(*shape, 1)  # warm the allocator and the kernels once, for both
        pairs = []
        for number in range(asked.pairs):
            order = (plain, ours) if number % 2 == 0 else (ours, plain)
            rates = {each.__name__: each(*shape, asked.steps) for each in order}
            pairs.append(rates)
    finally:
        torch.set_num_threads(before)
    result: dict[str, object] = {
        "benchmark": "training_overhead",
        "parameters": count_parameters(config_for(asked.parameters, asked.context)),
        "context": asked.context,
        "batch": asked.batch,
        "steps": asked.steps,
        "pairs": asked.pairs,
        "ours_tokens_per_second": statistics.median(each["ours"] for each in pairs),
        "plain_tokens_per_second": statistics.median(each["plain"] for each in pairs),
        "ratio": statistics.median(each["ours"] / each["plain"] for each in pairs),
        "ratios": [round(each["ours"] / each["plain"], 4) for each in pairs],
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
