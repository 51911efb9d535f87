"""Greedy decoding with keys and values kept, beside the whole row computed for each token.

    OMP_NUM_THREADS=1 python benchmarks/decoding.py [--tokens 192] [--prompt 64] [--repeats 3]

Random models over bytes: ours and transformers' Llama. Ways are interleaved. Prints one JSON line a
model: tokens/s of both ways (medians), their ratio, and whether the tokens are the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.evaluation import TextModel
from paceline.models import config_for, new_model, save_model

CONTEXT = 512


def write_ours(directory: Path) -> None:
    """Save a random model of ours of about 10 million parameters."""
    config = config_for(10_000_000, CONTEXT)
    save_model(new_model(config, 1), config, directory)


def write_llama(directory: Path) -> None:
    """Save a random Llama of about 10 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=320,
        intermediate_size=880,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def kept(model: TextModel) -> Callable[[list[int]], torch.Tensor]:
    """Return what `generate` decodes with."""
    return model.decoder()


def whole_row(model: TextModel) -> Callable[[list[int]], torch.Tensor]:
    """Return what `generate` decoded with before."""

    def next_logits(row: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model.forward(torch.tensor([row[-model.context :]]))[0, -1]

    return next_logits


def decode(next_logits: Callable[[list[int]], torch.Tensor], prompt: int, count: int) -> list[int]:
    """Return ``count`` greedy tokens after a prompt of ``prompt`` tokens."""
    row = [(7 * each * each) % 256 for each in range(prompt)]
    for _ in range(count):
        row.append(int(next_logits(row).argmax()))
    return row[prompt:]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run it; return the figures by model."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 192), ("prompt", 64), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    figures: dict[str, Any] = {}
    for name, write in (("ours", write_ours), ("llama", write_llama)):
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory))
            model = TextModel.open(Path(directory))
        seconds: dict[str, list[float]] = {"kept": [], "whole": []}
        made: dict[str, list[int]] = {}
        for _ in range(given.repeats):
            for way, open_way in (("whole", whole_row), ("kept", kept)):
                began = time.perf_counter()
                made[way] = decode(open_way(model), given.prompt, given.tokens)
                seconds[way].append(time.perf_counter() - began)
        rates = {way: given.tokens / statistics.median(each) for way, each in seconds.items()}
        figures[name] = {
            "parameters": model.parameters,
            "tokens_per_s": {way: round(rate, 1) for way, rate in rates.items()},
            "ratio": round(rates["kept"] / rates["whole"], 2),
            "same_tokens": made["kept"] == made["whole"],
        }
        print(json.dumps({"model": name, **figures[name]}))
    return figures


if __name__ == "__main__":
    main()
