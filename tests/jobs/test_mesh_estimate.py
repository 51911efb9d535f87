"""`paceline estimate` and its face in Python: a model on meshes of described accelerators."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.config import MeshSettings, load_profile
from paceline.errors import InvalidInput, SourceMissing
from paceline.jobs import DescribedModel, accelerator_of, read_mesh
from paceline.models import ModelShape, config_for
from tests.support.command import paceline as command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/estimate-a-training.md").read_text()
OWN = """
[hardware.X9]
tflops = { bfloat16 = 100 }
achieved = 0.5
memory_gb = 40
memory_gb_s = 1000
copy_gb_s = 20
per_host = 4
inside = { latency_us = 1, gb_s = 100 }
between = { latency_us = 5, gb_s = 10 }

[prices]
per_hour = { X9 = 2.0 }
watts = { X9 = 500 }
"""


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return str(path)


SIZES: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "LlamaConfig"), ("qwen2", "Qwen2Config"), ("qwen3", "Qwen3Config"),
        ("mistral", "MistralConfig"), ("gemma", "GemmaConfig"), ("gemma2", "Gemma2Config"),
        ("gemma3_text", "Gemma3TextConfig"), ("gpt_neox", "GPTNeoXConfig"),
    ],
)  # fmt: skip
def test_parameters_are_those_that_transformers_builds(
    family: str, name: str, tmp_path: Path
) -> None:
    import transformers

    neox = {"num_key_value_heads", "head_dim"} if family == "gpt_neox" else set()
    config = getattr(transformers, name)(**{k: v for k, v in SIZES.items() if k not in neox})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(each.numel() for each in model.parameters())
    found = DescribedModel.read(tmp_path).shape
    assert found.parameters == pytest.approx(counted, rel=2e-3)
    if family == "llama":
        assert found.parameters == counted


def test_a_model_is_a_directory_a_config_or_a_number(tmp_path: Path) -> None:
    config = config_for(200_000, 64)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    for given in (tmp_path, tmp_path / "config.json"):
        assert DescribedModel.read(given).shape == ModelShape.of(config)
    assert DescribedModel.read("7B").shape.parameters == pytest.approx(7e9, rel=0.03)
    assert DescribedModel.read("1.3b", 50_304).shape.vocabulary == 50_304


def test_hours_energy_and_price_follow_from_the_step(profile: str) -> None:
    found = paceline.estimate(
        "100M", "X9", ranks=8, meshes=["shard4"], tokens=1e9, context=512, profile=profile
    )
    (row,) = found.rows
    assert (row.mesh, row.ranks, row.batch_sequences) == ("dp2xshard4", 8, 32)
    assert sum(row.seconds.values()) == pytest.approx(row.step_s)
    speed = 32 * 512 / row.step_s * (1 - row.checkpoint_share)
    assert row.tokens_per_second == pytest.approx(speed)
    assert row.hours == pytest.approx(1e9 / speed / 3600)
    assert row.price == pytest.approx(8 * 2.0 * row.hours)
    assert row.energy_kwh == pytest.approx(8 * 0.5 * row.hours)
    assert row.memory_bytes == pytest.approx(sum(row.memory.values()))
    assert "[hardware] of the profile" in found.based_on[0]


def test_usual_meshes_leave_out_what_the_model_does_not_allow(tmp_path: Path) -> None:
    ours = paceline.estimate("1B", "H100", rank_sequences=1)
    assert {each.ranks for each in ours.rows} == {8, 64, 512}
    assert any("pp" in each.mesh for each in ours.rows)
    assert all(each.efficiency <= 1 and each.price is None for each in ours.rows)
    config = {"model_type": "llama", "max_position_embeddings": 8192, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config | {"attention_dropout": 0.1}))
    others = paceline.estimate(tmp_path, "H100", ranks=8)
    assert others.context == 4096
    assert others.rows and not any("pp" in each.mesh for each in others.rows)
    with pytest.raises(InvalidInput, match=r"attention_dropout 0\.1, pp 2"):
        paceline.estimate(tmp_path, "H100", ranks=8, meshes=["pp2"])


def test_kinds_and_meshes_are_read_by_their_words() -> None:
    hardware = load_profile("embedded").hardware
    assert accelerator_of("NVIDIA H200", hardware).memory_gb == 141
    assert accelerator_of("nvidia a100-sxm4-80gb", hardware).tflops["bfloat16"] == 312
    base = MeshSettings(schedule="gpipe", shard=4)
    mesh = read_mesh("tp8×shard2", base)
    assert (mesh.tp, mesh.shard, mesh.dp, mesh.schedule) == (8, 2, 0, "gpipe")
    assert read_mesh("dp", base).shard == 1
    assert (read_mesh("cp4", base.model_copy(update={"cp": 2})).cp, read_mesh("dp", base).cp) == (
        4,
        1,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"accelerator": "X9"}, "accelerator is not known: got X9"),
        ({"ranks": 12, "meshes": ["tp8"]}, "wanted a multiple of 8 ranks"),
        ({"ranks": 8, "meshes": ["dp4xtp4"]}, "wanted 16 ranks"),
        ({"model": "70B", "ranks": 8}, "the model fits on no rank"),
        ({"meshes": ["tp8xtp2"]}, "not a mesh: got 'tp8xtp2'"),
        ({"ranks": 16, "meshes": ["cp16"]}, "context parallelism does not divide the heads"),
        ({"ranks": 8, "meshes": ["cp8"], "context": 4090}, "context 4090, cp 8"),
        ({"precision": "float64"}, "peak in this precision"),
        ({"context": 8192}, "context does not suit"),
        ({"model": "seven"}, "no model here: got 'seven'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises((InvalidInput, SourceMissing)) as refused:
        paceline.estimate(**({"model": "7B", "accelerator": "H100"} | given))
    assert said in refused.value.one_line()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        (SIZES | {"model_type": "llama", "hidden_size": "1024"}, "hidden_size"),
        ({"model_type": "llama"}, "lacks a size"),
    ],
)
def test_a_config_without_known_sizes_is_refused(
    raw: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InvalidInput, match=said):
        paceline.estimate(tmp_path, "H100")


def test_what_the_page_shows_runs_in_the_base_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def blocks(language: str) -> list[str]:
        return re.findall(rf"^```{language} \S+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model/config.json").write_text(config_for(10**8, 2048).model_dump_json())
    (tmp_path / "page.toml").write_text(blocks("toml")[0])
    assert load_profile(str(tmp_path / "page.toml")).hardware["MI300X"].per_host == 8
    lines = [line.split()[1:] for block in blocks("sh") for line in block.splitlines()]
    assert len(lines) == 3
    argv = [sys.executable, "-m", "tests.support.base_install", json.dumps(lines)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _, _ in answers] == [0, 0, 0], done.stderr + done.stdout
    assert json.loads(answers[2][1])["rows"]
    (program,) = blocks("python")
    exec(program, {})
    assert "shard64" in capsys.readouterr().out


def test_the_command_prints_a_table_or_json(profile: str) -> None:
    words = ("estimate", "100M", "--accelerator", "X9", "--ranks", "4", "--profile", profile)
    shown = command(*words, "--tokens", "1e9")
    assert shown.returncode == 0, shown.stderr
    for needle in ("shard4", "pp4", "efficiency", "price EUR"):
        assert needle in shown.stdout
    assert "not counted" in shown.stderr
    refused = command("estimate", "100M", "--accelerator", "X8")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    found = json.loads(command(*words, "--json").stdout)
    assert (found["status"], found["accelerator"], found["tokens"]) == ("complete", "X9", None)
    assert all(each["hours"] is None for each in found["rows"])
