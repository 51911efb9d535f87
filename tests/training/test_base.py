"""The base model: the recorded budget, the same bytes each time, in this process or its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import ModelSettings
from paceline.errors import InvalidSnapshot
from paceline.models import load_model, weights_digest
from paceline.training import BaseResult, BaseSpec, train_base
from tests.training.conftest import CONTEXT, PARAMETERS, SETTINGS, Camp

MODEL = ModelSettings(parameters=PARAMETERS, context=CONTEXT, base_steps=5, seed=3)


def spec_for(camp: Camp, directory: Path, purpose: str = "tests") -> BaseSpec:
    return BaseSpec(
        state_dir=str(camp.runtime.state_dir),
        directory=str(directory),
        snapshot_url=camp.snapshot.url,
        snapshot_digest=camp.snapshot.digest,
        purpose=purpose,
        model=MODEL,
        training=SETTINGS,
        threads=1,
    )


def test_the_same_spec_gives_the_same_bytes_here_and_in_another_process(
    camp: Camp, tmp_path: Path
) -> None:
    here = train_base(spec_for(camp, tmp_path / "here"), camp.store)
    done = subprocess.run(
        [sys.executable, "-m", "paceline.training.base"],
        input=spec_for(camp, tmp_path / "there").model_dump_json() + "\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    there = BaseResult.model_validate_json(done.stdout.splitlines()[-1])
    assert there == here
    assert here.weights_digest == weights_digest(tmp_path / "here")
    assert here.steps == 5
    assert here.first_loss is not None and here.final_loss is not None
    assert here.final_loss < here.first_loss
    _, config = load_model(tmp_path / "there")
    assert config.context == CONTEXT


def test_the_base_is_not_trained_on_data_of_another_purpose(camp: Camp, tmp_path: Path) -> None:
    with pytest.raises(InvalidSnapshot, match="another purpose"):
        train_base(spec_for(camp, tmp_path / "b", "elsewhere"), camp.store)
    assert not (tmp_path / "b").exists()
