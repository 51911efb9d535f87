"""Real learning through the public way in: `paceline train`, then bits per byte of held-out files.

The same texts, held-out files and scoring as ``real_learning.py``, but nothing of its net: the
engine's own decoder, AdamW, two ranks, bfloat16 products. How many steps fit into the budget is
what a short run before it shows (its productive time alone counts); the run itself then takes its
steps, however busy the machine is, and says how long it took.

    python benchmarks/learning_by_train.py --seconds 600
    python benchmarks/learning_by_train.py --score MODEL_DIRECTORY   # what was trained already
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.real_learning import (  # noqa: E402
    RESULTS,
    Shape,
    Text,
    compressors,
    read_text,
    score,
)
from paceline.models import count_parameters, load_model  # noqa: E402

TRIAL_STEPS = 60
CHECKPOINT_STEPS = 500


class Scored(nn.Module):
    """Our decoder as what ``score`` asks: bytes in, and hashed runs that it has no use for."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.model, self.config = load_model(directory)
        self.model.eval()
        self.shape = Shape(context=self.config.context, grams=1)

    def forward(self, tokens_BT: Tensor, _runs_NBT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.model(tokens_BT)
        return logits_BTV


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Train for the budget's steps and score what came out."""
    text = read_text(asked.limit_bytes)
    with tempfile.TemporaryDirectory(prefix="paceline-learning-") as scratch:
        files = _training_files(text, Path(scratch, "texts"))
        steps = asked.steps
        if not steps:
            trial = train(asked, files, Path(scratch, "trial"), TRIAL_STEPS)
            steps = round(asked.seconds / trial["ledger"]["productive_s"] * TRIAL_STEPS)
        result = train(asked, files, Path(scratch, "run"), steps)
        found = bits_per_byte(Path(urlsplit(result["export_url"]).path), text, asked.few)
    return {
        "benchmark": "learning_by_train",
        "budget_s": asked.seconds,
        "steps": steps,
        "tokens": steps * asked.batch * asked.context,
        "productive_s": result["ledger"]["productive_s"],
        "wall_s": result["ledger"]["wall_s"],
        "load": round(os.getloadavg()[0], 2),
        **found,
    }


def train(asked: argparse.Namespace, texts: Path, output: Path, steps: int) -> dict[str, Any]:
    """Run `paceline train` and return its JSON."""
    dials = {
        "model.parameters": asked.parameters,
        "model.context": asked.context,
        "training.batch_sequences": asked.batch,
        "training.precision": asked.precision,
        "training.learning_rate": asked.rate,
        "training.warmup_steps": min(100, steps // 10),
        "training.checkpoints.every_steps": CHECKPOINT_STEPS,
        "data.max_bytes": 1_000_000_000,
    }
    command = [sys.executable, "-m", "paceline.cli.main", "train", "--json"]
    command += ["--ranks", str(asked.ranks), "--steps", str(steps)]
    command += ["--text", str(texts), "--output", str(output)]
    command += [each for key, value in dials.items() for each in ("--set", f"{key}={value}")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bits_per_byte(directory: Path, text: Text, few: int = 0) -> dict[str, Any]:
    """Score a model directory on the held-out files (0: all of them), each by itself."""
    scored = Scored(directory)
    files = text.held_out[:few] if few else text.held_out
    return {
        "parameters": count_parameters(scored.config),
        "held_out_files": len(files),
        "held_out_bytes": sum(len(each) for each in files),
        "bits_per_byte": score(scored, files),  # type: ignore[arg-type]
        "compressors": compressors(files),
    }


def _training_files(text: Text, directory: Path) -> Path:
    """Write what is learned from as files, as a user would have them."""
    directory.mkdir()
    separator = bytes([0xFF])
    for number, part in enumerate(text.train.tobytes().strip(separator).split(separator)):
        (directory / f"{number:05}.py").write_bytes(part)
    return directory


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train and score (or score alone); print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of productive training")
    parser.add_argument("--steps", type=int, default=0, help="instead of what fits into it")
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--limit-bytes", type=int, default=0, help="of text; 0: all of it")
    parser.add_argument("--few", type=int, default=0, help="files scored; 0: all")
    parser.add_argument("--score", type=Path, metavar="MODEL", help="only score a model directory")
    parser.add_argument("--quick", action="store_true", help="seconds only, to see that it runs")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.parameters, asked.context, asked.batch = 20_000, 64, 4
        asked.steps, asked.ranks, asked.precision = 8, 1, "float32"
        asked.limit_bytes, asked.few = 200_000, 3
    if asked.score:
        found = bits_per_byte(asked.score, read_text(asked.limit_bytes), asked.few)
    else:
        found = measure(asked)
        if not asked.quick:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / "learning_by_train.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
