"""How fast a model of transformers is judged on this machine, and in how much memory.

A random Llama in bfloat16 with a small tokenizer is written to disk, and ``score_transformer``
scores text with it, as an evaluation does: opened, measured as served, every token predicted once
in float32. ``same`` compares the bits with the CPU's, on the first documents.

    python benchmarks/judging.py [--parameters 1000000000] [--kilobytes 512] [--same]
    python benchmarks/judging.py --quick   # a tiny model
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from paceline.data import open_tokenizer
from paceline.evaluation import HeldOutDocument, score_transformer

ROOT = Path(__file__).resolve().parents[1]
LINES = [f"line {n} of file {n % 7} is {n * n}\n" for n in range(4000)]
VOCABULARY = 4096
CONTEXT = 2048


def write(directory: Path, parameters: int) -> Path:
    """Save a random Llama of about ``parameters`` and a tokenizer."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    width = max(64, round(math.sqrt(parameters / (12 * 24)) / 64) * 64)
    layers = max(1, round(parameters / (12 * width**2)))
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=round(8 * width / 3 / 64) * 64,
        num_hidden_layers=layers, num_attention_heads=width // 64, max_position_embeddings=CONTEXT,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(LINES, trainer)
    made.save(str(directory / "tokenizer.json"))
    open_tokenizer(str(directory / "tokenizer.json"))
    return directory


def documents(kilobytes: int) -> list[HeldOutDocument]:
    """Return text in documents of 8 kB."""
    text = "".join(LINES).encode()
    found = []
    for number in range(max(1, kilobytes // 8)):
        at = number * 1009 % (len(text) - 8192)
        found.append(HeldOutDocument(f"{number}.txt", text[at : at + 8192], 8192))
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print one line of JSON and return it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=int, default=1_000_000_000)
    parser.add_argument("--kilobytes", type=int, default=512)
    parser.add_argument("--same", action="store_true")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.parameters, asked.kilobytes = 100_000, 16
    with tempfile.TemporaryDirectory() as scratch:
        directory = write(Path(scratch), asked.parameters)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        texts = documents(asked.kilobytes)
        began = time.perf_counter()
        scored = score_transformer(directory, texts, lambda _: None)
        seconds = time.perf_counter() - began
        result: dict[str, Any] = {
            "benchmark": "judging",
            "device": scored.serving.gpu or scored.serving.cpu,
            "parameters": scored.parameters,
            "tokens": scored.tokens,
            "seconds": round(seconds, 2),
            "tokens_per_second": round(scored.tokens / seconds),
            "prefill_ms": scored.serving.prefill_ms,
            "decode_ms_per_token": scored.serving.decode_ms_per_token,
            "peak_memory_bytes": scored.serving.peak_memory_bytes,
            "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        if asked.same:
            there = "paceline.evaluation.text_model.device_for"
            with mock.patch(there, lambda _: torch.device("cpu")):
                theirs = score_transformer(directory, texts[:1], lambda _: None).bits
            apart = np.abs(scored.bits[:1] - theirs) / theirs
            result["apart_from_the_cpu"] = float(apart.max())
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
