"""The base model: the recorded budget, the same bytes each time, in this process or its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import ModelSettings
from paceline.errors import InvalidSnapshot
from paceline.models import load_model, weights_digest
from paceline.training.base import BaseResult, BaseSpec, train_base
from tests.training.conftest import CONTEXT, PARAMETERS, SETTINGS, Camp

MODEL = ModelSettings(parameters=PARAMETERS, context=CONTEXT, base_steps=5, seed=3)


def test_the_same_spec_gives_the_same_bytes_here_and_in_a_process_of_its_own(
    camp: Camp, tmp_path: Path
) -> None:
    here = train_base(
        tmp_path / "here",
        MODEL,
        camp.snapshot,
        camp.store,
        tmp_path / "cache",
        training=SETTINGS,
        purpose="tests",
        threads=1,
    )
    spec = BaseSpec(
        state_dir=str(camp.runtime.state_dir),
        directory=str(tmp_path / "there"),
        snapshot_url=camp.snapshot.url,
        snapshot_digest=camp.snapshot.digest,
        purpose="tests",
        model=MODEL,
        training=SETTINGS,
        threads=1,
    )
    done = subprocess.run(
        [sys.executable, "-m", "paceline.training.base"],
        input=spec.model_dump_json() + "\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    there = BaseResult.model_validate_json(done.stdout.splitlines()[-1])
    assert there.weights_digest == here.weights_digest == weights_digest(tmp_path / "here")
    assert here.steps == 5
    assert here.first_loss is not None
    assert here.final_loss is not None
    assert here.final_loss < here.first_loss
    _, config = load_model(tmp_path / "there")
    assert config.context == CONTEXT


def test_the_base_is_not_trained_on_data_of_another_purpose(camp: Camp, tmp_path: Path) -> None:
    with pytest.raises(InvalidSnapshot, match="another purpose"):
        train_base(
            tmp_path / "b",
            MODEL,
            camp.snapshot,
            camp.store,
            tmp_path / "cache",
            training=SETTINGS,
            purpose="elsewhere",
        )
    assert not (tmp_path / "b").exists()
