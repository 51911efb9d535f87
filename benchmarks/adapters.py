"""All weights, LoRA and DoRA on the same Llama: speed, memory, size of a checkpoint.

    python benchmarks/adapters.py [--repeats 3] [--width 512] [--layers 8] [--steps 12]

Writes a random model, trains it with `paceline train` on one rank, the ways interleaved, and prints
one JSON line a run and the medians: tokens a second, resident memory of the largest process at its
peak, and bytes of the newest checkpoint. Adapters of rank 8 are on all linear layers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WAYS: dict[str, tuple[str, ...]] = {
    "all weights": (),
    "LoRA": ("training.lora.target_modules=all-linear",),
    "DoRA": ("training.lora.target_modules=all-linear", "training.lora.use_dora=true"),
}


def write_model(directory: Path, width: int, layers: int) -> int:
    """Save a random Llama over bytes; return the number of its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=256,
        )
    )
    model.save_pretrained(directory)
    return sum(each.numel() for each in model.parameters())


def run(model: Path, way: str, root: Path, steps: int, threads: int) -> dict[str, Any]:
    """Train once; return the figures."""
    output = root / way.replace(" ", "-")
    settings = (
        *WAYS[way],
        f"training.steps={steps}",
        f"training.threads_per_rank={threads}",
        "training.batch_sequences=8",
        "model.context=128",
        "data.max_bytes=1_000_000",
    )
    words = [word for each in settings for word in ("--set", each)]
    with (root / "answer.json").open("w+") as answer:
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "paceline.cli.main", "train", "--json", "--ranks", "1"),
                *("--model", str(model), "--output", str(output), *words),
            ],
            stdout=answer,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(child.pid, 0)  # of the largest process below it
        child.returncode = os.waitstatus_to_exitcode(status)
        answer.seek(0)
        found = json.loads(answer.read())
    commit = max((output / "checkpoints" / found["job_id"]).glob("step-*/commit.json"))
    files = json.loads(commit.read_text())["files"].values()
    subprocess.run(["rm", "-rf", str(output)], check=True)
    return {
        "way": way,
        "tokens_per_second": found["tokens_per_second"],
        "peak_mib": usage.ru_maxrss / 1024,
        "checkpoint_mib": sum(each["bytes"] for each in files) / 2**20,
        "loss": found["final_loss"],
        "load": os.getloadavg()[0],
    }


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Run every way ``--repeats`` times, interleaved; print each run, print and return medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        weights = write_model(root / "model", asked.width, asked.layers)
        for _ in range(asked.repeats):
            for way in WAYS:
                rows.append(run(root / "model", way, root, asked.steps, asked.threads))
                sys.stdout.write(json.dumps(rows[-1]) + "\n")
                sys.stdout.flush()
    names = ("tokens_per_second", "peak_mib", "checkpoint_mib", "loss", "load")
    medians = {
        way: {name: statistics.median(row[name] for row in own) for name in names}
        for way, own in {way: [row for row in rows if row["way"] == way] for way in WAYS}.items()
    }
    found = {"weights": weights, "medians": medians}
    sys.stdout.write(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main()
