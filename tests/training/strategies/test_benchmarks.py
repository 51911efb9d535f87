"""The benchmarks of synchrony and of real learning run, tiny, and say what they should."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = pytest.mark.timeout(300)  # seconds alone; a busy machine made it two minutes


def said(name: str, *words: str) -> dict[str, Any]:
    """A process of its own: the one forks, the other changes thread counts."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.nightly
def test_synchrony_compares_every_method_on_the_same_tokens() -> None:
    rows = {each["method"]: each for each in said("synchrony", "--quick")["rows"]}
    assert len(rows) == 8
    plain, half = rows["every step"], rows["every step, fp16"]
    assert half["bytes_a_step"] < plain["bytes_a_step"]
    assert half["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], abs=0.01)
    often, seldom = rows["local SGD, 1 step"], rows["local SGD, 4 steps"]
    assert seldom["bytes_a_step"] == pytest.approx(often["bytes_a_step"] / 4)
    assert rows["parameter server"]["staleness"] <= 4
    assert all(0 < each["bits_per_byte"] < 9 for each in rows.values())


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    """The benchmark as a module, under the name that its records are found by."""
    spec = importlib.util.spec_from_file_location("real_learning", BENCHMARKS / "real_learning.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["real_learning"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["real_learning"]


@pytest.mark.nightly
def test_real_learning_resumes_and_scores_whole_files(module: Any, tmp_path: Path) -> None:
    words = [
        "--quick",
        "--dtype",  # else it is measured at each start, and the scores differ
        "float32",
        "--seconds",
        "0.3",
        "--directory",
        str(tmp_path),
        "--results",
        str(tmp_path),
    ]
    first = module.main(words)
    assert first["bits_per_byte"] < 8
    assert first["held_out_bytes"] > 0 and set(first["compressors"]) == {"gzip -9", "xz -9"}
    again = module.main(words)
    assert again["tokens"] == first["tokens"], "its budget was spent: it only scores"
    assert again["bits_per_byte"] == first["bits_per_byte"]


def test_real_learning_scores_every_byte_of_a_file_once(module: Any) -> None:
    shape = module.Shape(width=16, layers="lf", window=8, heads=1, hidden=16, buckets=8, context=32)

    class Uniform(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shape = shape

        def forward(self, tokens_BT: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens_BT.shape, 256)

    for sizes in ([1], [31, 32, 33], [100, 1, 65]):
        files = [bytes(size) for size in sizes]
        assert module.score(Uniform(), files) == pytest.approx(8.0), "each byte costs 8 bits"


def test_real_learning_sees_nothing_that_comes_later(module: Any) -> None:
    shape = module.Shape(
        width=16, layers="lf", window=8, heads=1, hidden=16, buckets=64, context=32
    )
    torch.manual_seed(0)
    net = module.Net(shape)
    for each in net.parameters():
        torch.nn.init.normal_(each, std=0.3)  # the projections begin as zeros
    rows = np.random.default_rng(0).integers(0, 256, (1, 33)).astype(np.uint8)
    changed = rows.copy()
    changed[0, 20:] ^= 1
    one, other = [net(*module.tensors(each, shape)[:2]) for each in (rows, changed)]
    assert torch.equal(one[:, :20], other[:, :20])
    assert not torch.equal(one[:, 20:], other[:, 20:])


@pytest.mark.nightly
def test_what_train_learns_is_scored_on_the_same_held_out_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = importlib.util.spec_from_file_location("by_train", BENCHMARKS / "learning_by_train.py")
    assert spec is not None and spec.loader is not None
    by_train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(by_train)
    found = by_train.main(["--quick"])
    assert json.loads(capsys.readouterr().out) == found
    assert found["held_out_files"] >= 1 and found["held_out_bytes"] > 0
    assert 2 < found["bits_per_byte"] < 8.5, "eight steps: little, but of bytes"
    assert 0 < found["productive_s"] <= found["wall_s"]
