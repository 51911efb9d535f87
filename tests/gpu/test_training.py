"""`paceline train` on a GPU: losses of the CPU, exact resume, every precision, clear refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.hugging_face import write_model, write_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SMALL = {"model.parameters": 1_000_000, "model.context": 128, "training.warmup_steps": 2}
STEPS = 30
TRAIN_S = 120.0
STEP_TOLERANCE = 2e-5  # relative, of the first loss in float32; sums are added in another order


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    for number in range(60):
        body = "".join(f"line {n} of file {number} is {n * number}\n" for n in range(60))
        (directory / f"{number}.txt").write_text(body)
    return directory


def command(text: Path, output: Path, *words: str, **settings: Any) -> list[str]:
    dials = {**SMALL, "training.steps": STEPS, **settings}
    sets = [word for key, value in dials.items() for word in ("--set", f"{key}={_toml(value)}")]
    asked = ["train", "--ranks", "1", "--text", str(text), "--output", str(output), "--json"]
    return [sys.executable, "-m", "paceline.cli.main", *asked, *words, *sets]


def _toml(value: object) -> str:
    return json.dumps(value) if isinstance(value, (bool, list)) else str(value)


def run(words: list[str], gpus: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    return subprocess.run(
        words, check=False, env=environment, capture_output=True, text=True, timeout=TRAIN_S
    )


def train(text: Path, output: Path, *words: str, cpu: bool = False, **settings: Any) -> Any:
    """Train; return the command's JSON and the steps' figures."""
    done = run(command(text, output, *words, **settings), gpus="" if cpu else "0")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), figures(output)


def figures(output: Path) -> list[dict[str, Any]]:
    (path,) = output.glob("checkpoints/*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_gpu_has_the_losses_of_the_cpu(text: Path, tmp_path: Path) -> None:
    _, ours = train(text, tmp_path / "gpu")
    _, theirs = train(text, tmp_path / "cpu", cpu=True)
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=STEP_TOLERANCE)
    assert ours[-1]["loss"] == pytest.approx(theirs[-1]["loss"], rel=1e-3)
    assert ours[-1]["loss"] < 0.8 * ours[0]["loss"]


def test_a_killed_training_resumes_bit_for_bit(text: Path, tmp_path: Path) -> None:
    settings = {
        "training.deterministic": True,
        "training.checkpoints.every_steps": 10,
        "training.steps": 200,
    }
    whole, _ = train(text, tmp_path / "whole", **settings)
    output = tmp_path / "killed"
    child = subprocess.Popen(
        command(text, output, **settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and child.poll() is None:
        if any(output.glob("checkpoints/*/metrics.jsonl")) and len(figures(output)) > 40:
            break
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    killed_at = len(figures(output))
    assert 40 < killed_at < 200
    resumed, _ = train(text, output, **settings)
    assert resumed["weights_digest"] == whole["weights_digest"]


@pytest.mark.parametrize(
    "settings",
    [
        {"training.precision": "bfloat16"},
        {"training.precision": "float16"},
        {"training.precision": "bfloat16", "training.compile": True},
        {"training.precision": "bfloat16", "training.activation_checkpointing": True},
        {"training.accumulation": 4, "data.batching": "packed"},
        {"training.evaluate_every_steps": 10, "training.optimizer": "sgd"},
    ],
    ids=["bf16", "fp16", "compiled", "recomputed", "packed", "evaluated-sgd"],
)
def test_ways_to_train(text: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    _, steps = train(text, tmp_path / "out", **settings)
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_models_of_transformers_with_adapters_and_preferences(text: Path, tmp_path: Path) -> None:
    lines = [line for each in text.iterdir() for line in each.read_text().splitlines()]
    model = write_model("qwen3", tmp_path / "model", vocab_size=300, bos_token_id=0, eos_token_id=0)
    write_tokenizer(model, lines)
    settings: dict[str, Any] = {"model.context": 32}
    words = ("--model", str(model))
    _, whole = train(text, tmp_path / "whole", *words, **settings)
    _, on_cpu = train(text, tmp_path / "cpu", *words, cpu=True, **settings)
    assert whole[0]["loss"] == pytest.approx(on_cpu[0]["loss"], rel=STEP_TOLERANCE)
    _, adapters = train(text, tmp_path / "lora", *words, **settings, **{"training.lora.r": 4})
    assert adapters[0]["loss"] == pytest.approx(whole[0]["loss"], rel=STEP_TOLERANCE)


def test_a_trace_has_the_gpus_kernels(text: Path, tmp_path: Path) -> None:
    train(text, tmp_path / "out", **{"training.profile_steps": [5]})
    (trace,) = (tmp_path / "out").glob("checkpoints/*/traces/*")
    content = trace.read_bytes()
    if trace.suffix == ".gz":
        import gzip

        content = gzip.decompress(content)
    assert b'"cat": "kernel"' in content


def test_two_ranks_on_one_gpu_are_refused_by_name(text: Path, tmp_path: Path) -> None:
    done = run([*command(text, tmp_path / "out"), "--ranks", "2"])
    assert done.returncode not in (0, 75)
    assert "more ranks than GPUs" in done.stderr + done.stdout
    assert "CUDA_VISIBLE_DEVICES=" in done.stderr + done.stdout


def test_a_parameter_server_shares_the_gpu(text: Path, tmp_path: Path) -> None:
    settings = {"training.synchrony.kind": "parameter-server"}
    done, _ = train(text, tmp_path / "out", "--ranks", "3", **settings)
    assert done["final_loss"] < done["first_loss"]


def test_what_does_not_fit_the_gpu_is_named_and_not_tried_again(text: Path, tmp_path: Path) -> None:
    """256 rows of 16,384 tokens: their activations need terabytes."""
    huge = {
        "training.batch_sequences": 256,
        "model.context": 16_384,
        "model.parameters": 100_000_000,
    }
    began = time.monotonic()
    words = command(text, tmp_path / "out", **huge)
    del words[words.index("--text") : words.index("--text") + 2]  # the standard library: longer
    done = run(words)
    said = done.stdout + done.stderr
    assert done.returncode not in (0, 75), said
    assert "does not fit the GPU's memory" in said
    assert "training.batch_sequences" in said
    assert "attempt 2" not in said
    assert time.monotonic() - began < 200
