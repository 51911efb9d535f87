"""A training's torch.export program: the model's logits, without Paceline and without pickle."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from paceline.config import TrainingSettings
from paceline.errors import InvalidInput
from paceline.models import (
    PROGRAM_FILE,
    Pretrained,
    config_for,
    count_parameters,
    exported,
    load_model,
    new_model,
    save_model,
    weight_files,
    write_program,
)
from paceline.schemas import TrainResult
from tests.journeys.guide import commands
from tests.support.hugging_face import FAMILIES, write_model
from tests.training.conftest import Camp, camp

__all__ = ["camp"]  # a fixture

pytestmark = [pytest.mark.timeout(500), pytest.mark.xdist_group("warm node")]
# A process that has torch alone: logits of two shapes that were never traced.
FRESH = """
import json, sys, torch
program = torch.export.load(sys.argv[1]).module()
shapes = [(1, 1), (5, 31)]
logits = [program(torch.arange(b * t).reshape(b, t) % 256).float() for b, t in shapes]
known = [each for each in sys.modules if each.split(".")[0] in ("paceline", "transformers")]
print(json.dumps([known, [each.sum(-1).flatten().tolist() for each in logits]]))
"""


def sums_of(model: nn.Module) -> list[list[float]]:
    with torch.no_grad():
        return [
            model(torch.arange(b * t).reshape(b, t) % 256).float().sum(-1).flatten().tolist()
            for b, t in ((1, 1), (5, 31))
        ]


def read_without_us(path: Path) -> list[list[float]]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", FRESH, str(path)],
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    known, sums = json.loads(done.stdout.splitlines()[-1])
    assert not known, "it runs without Paceline and transformers"
    return sums


def parts_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def no_pickles(path: Path) -> bool:
    """Return whether all parts are raw numbers, JSON or text; torch leaves sample_inputs empty."""
    return not any(
        data[:1] == b"\x80" or data[:2] == b"PK" or (data and name.endswith((".pkl", ".pt")))
        for name, data in parts_of(path).items()
        if "/data/weights/weight_" not in name and "/data/constants/tensor_" not in name
    )


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_a_program_of_each_family_has_the_models_logits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(family, tmp_path / "model")
    check = write_program(directory)
    assert check.max_difference < 1e-4
    assert (check.rows, check.tokens, check.file) == (3, 33, PROGRAM_FILE)
    path = directory / PROGRAM_FILE
    assert path.stat().st_size == check.bytes
    assert no_pickles(path)
    weight_files(directory)  # the safetensors beside it are still all that is loaded
    mine = sums_of(Pretrained.open(directory).load())
    for got, wanted in zip(read_without_us(path), mine, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-3)
    monkeypatch.chdir(directory)
    made: dict[str, Any] = {}
    exec(commands("how-to/decide-what-may-be-promoted.md", "python")["program"], made)
    assert made["logits"].shape == (1, 8, 256)


@pytest.mark.nightly
def test_a_model_in_halves_is_a_program_in_halves(tmp_path: Path) -> None:
    config = config_for(30_000, 32).model_copy(update={"torch_dtype": "bfloat16"})
    save_model(new_model(config, 1).bfloat16(), config, tmp_path)
    check = write_program(tmp_path)
    assert no_pickles(tmp_path / check.file)
    weights = [x for n, x in parts_of(tmp_path / check.file).items() if "/weights/weight_" in n]
    assert sum(map(len, weights)) < 3 * count_parameters(config)
    for got, wanted in zip(
        read_without_us(tmp_path / PROGRAM_FILE),
        sums_of(load_model(tmp_path)[0].eval()),
        strict=True,
    ):
        assert got == pytest.approx(wanted, rel=0.05, abs=0.5)


class Choosing(nn.Module):
    """A model whose graph depends on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256, 4))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        found = self.weight[tokens_BT]
        return found if found.sum() > 0 else -found


def test_a_model_without_one_graph_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"cannot be exported.*Choosing.*export_program"):
        exported(Choosing(), 32)
    with pytest.raises(ValidationError, match="module of your own"):
        TrainingSettings(code_ref="a:b", export_program=True)


def test_a_training_writes_and_records_it(camp: Camp) -> None:
    """One rank, in this process; its result is the training's."""
    code, listener = camp.run_alone(camp.job("program", steps=1, export_program=True))
    assert code == 0
    (result,) = (each.data for each in listener.of("result"))
    path = f"{result['export_url']}/{PROGRAM_FILE}"
    assert result["program"]["bytes"] == len(camp.store.get_bytes(path))
    assert result["program"]["max_difference"] < 1e-4
    assert "program" in TrainResult.model_fields
